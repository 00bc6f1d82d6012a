"""What a reconcile comes to, as one value, and the one place that writes it to the object.

Only three writes to an object come earlier: its finalizer, which must be there before anything is
created, `Progressing`, which shows that its spec was seen, and `intent.record`: which topics are
about to be created, and by which naming scheme, which a crash must not lose.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from redrive.admin.errors import AdminError
from redrive.api.conditions import Condition
from redrive.errors import RedriveError, Requeue
from redrive.kube import status
from redrive.kube.errors import KubernetesError
from redrive.kube.resources import Body
from redrive.kube.status import ObjectEvent, Publisher
from redrive.provision import finalizer
from redrive.provision.errors import ContestedError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What is written to an object, and when it is reconciled again.

    Attributes:
        conditions: all that the object then has; without any its status stays as it is.
        fields: of the status, beside the conditions.
        events: what has happened, beside what the conditions tell.
        finalized: whether the finalizer goes.
        last_event: what is true only once the finalizer is gone.
        error: what keeps the object from being ready.
    """

    conditions: tuple[Condition, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[ObjectEvent, ...] = ()
    finalized: bool = False
    last_event: ObjectEvent | None = None
    requeue: Requeue = Requeue.ON_CHANGE
    error: RedriveError | None = None

    @classmethod
    def failed(cls, error: RedriveError) -> Outcome:
        """Show *error*, which keeps the object from being ready."""
        fields = {"blockedBy": str(error.rival)} if isinstance(error, ContestedError) else {}
        return cls(status.failed(error), fields, requeue=error.requeue, error=error)

    def of_gone(self) -> Outcome:
        """Return this for an object that is gone: Events are all that can be written."""
        last = () if self.last_event is None else (self.last_event,)
        return Outcome(events=(*self.events, *last))

    def unless_it_passes(self) -> Outcome:
        """Return this without an error of a server that may pass by itself within a second."""
        of_server = isinstance(self.error, (AdminError, KubernetesError))
        if self.requeue is not Requeue.BACKOFF or not of_server:
            return self
        logger.info("a look at what is settled failed, and is repeated: %s", self.error)
        return Outcome(requeue=self.requeue)


async def publish(body: Body, outcome: Outcome, out: Publisher) -> None:
    """Write *outcome* to *body*: its status, then Events, then the removal of its finalizer.

    A crash in between loses Events. What is true only without the finalizer is not said before: a
    conflict would repeat it with every attempt.

    Raises:
        NotFoundError: the object is gone.
        ConflictError: it was changed meanwhile, and keeps its finalizer for now.
        KubernetesError: another failure; what is not written is written by the next reconcile.
    """
    if outcome.conditions:
        body = await out.publish(body, outcome.conditions, outcome.fields)
    for event in outcome.events:
        await out.emit(body, event)
    if outcome.finalized:
        await finalizer.remove_finalizer(body, out)
        if outcome.last_event is not None:
            await out.emit(body, outcome.last_event)

"""Result of a reconcile, paused and observing policies, and the finalizer.

What a reconcile comes to, as one value, and the one place that writes it to the object.

Only three writes to an object come earlier: its finalizer, which must be there before anything is
created, `Progressing`, which shows that its spec was seen, and `intent.record`: which topics are
about to be created, and by which naming scheme, which a crash must not lose.

Conditions of a policy that is paused, or that only observes.

Pure; called by `reconcile`.

The finalizer by which the API server waits for the cleanup of a deleted policy.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from redrive.admin.errors import AdminError
from redrive.api import Body, conditions
from redrive.api.annotations import dead_letter_requests
from redrive.api.conditions import (
    Condition,
    ObjectEvent,
    StatusWarning,
    failed,
    is_new,
    moment_of,
    ready,
    unchanged,
    warning,
)
from redrive.api.policy_defaults import DeletionPolicy
from redrive.errors import RedriveError, Requeue
from redrive.kube import status
from redrive.kube.client import KubernetesError, NotFoundError
from redrive.kube.resources import DEAD_LETTER_NOW, IGNORE_OUTAGES_UNTIL, PAUSE, Key
from redrive.kube.status import Publisher, add_finalizer
from redrive.provision.actions import Action
from redrive.provision.request import ContestedError
from redrive.reasons import Reason

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
        fields = {"blockedBy": error.shown_rival} if isinstance(error, ContestedError) else {}
        return cls(failed(error), fields, requeue=error.requeue, error=error)

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
        await remove_cleanup_finalizer(body, out)
        if outcome.last_event is not None:
            await out.emit(body, outcome.last_event)


MAX_ACTIONS = 32
MAX_ACTION = 512
_SHOWN = 5


def is_paused(body: Body) -> bool:
    """Whether a RetryPolicy is paused."""
    return (body["metadata"].get("annotations") or {}).get(PAUSE) == "true"


def ignores_outages(body: Body, now: datetime) -> bool:
    """Return True if consumers of a RetryPolicy do not pause for outages; see the annotation."""
    end = moment_of((body["metadata"].get("annotations") or {}).get(IGNORE_OUTAGES_UNTIL))
    return end is not None and now < end


def dead_letters_now(body: Body, now: datetime) -> frozenset[str]:
    """Return the origins of messages that consumers dead-letter at their next failure."""
    text = (body["metadata"].get("annotations") or {}).get(DEAD_LETTER_NOW) or ""
    return frozenset(request.origin for request in dead_letter_requests(text, now))


def has_override(body: Body, now: datetime) -> bool:
    """Return True if an annotation changes what consumers do until a time."""
    return ignores_outages(body, now) or bool(dead_letters_now(body, now))


def paused_conditions(body: Body) -> tuple[Condition, ...]:
    """Say that a policy is paused; how it stood stays said, unless its spec is another by now."""
    told = (
        f"nothing is done for the policy while it has the annotation {PAUSE}=true, and "
        "drift is not repaired; remove the annotation to resume"
    )
    if is_new(body):
        return conditions.paused(Reason.PAUSED, told)
    return (*unchanged(body, without=Reason.PAUSED), warning(StatusWarning(Reason.PAUSED, told)))


def observed_conditions(
    planned_changes: Sequence[Action], warnings: Sequence[StatusWarning]
) -> tuple[Condition, ...]:
    """Say what redrive would have done for a policy that only observes."""
    found = list(warnings)
    if planned_changes:
        more = len(planned_changes) - _SHOWN
        actions = "; ".join(describe_changes(planned_changes)[:_SHOWN]) + (
            f"; and {more} more" if more > 0 else ""
        )
        message = (
            f"the policy only observes; with managementPolicy Manage redrive would have {actions}"
        )
        found.insert(0, StatusWarning(Reason.DRIFT_DETECTED, message))
    told = "the policy only observes, and nothing is changed for it"
    return ready(Reason.OBSERVED, told, found)


def describe_changes(planned_changes: Sequence[Action]) -> list[str]:
    """Return what of *planned_changes* has room in a status."""
    return [str(action)[:MAX_ACTION] for action in planned_changes[:MAX_ACTIONS]]


FINALIZER = "redrive.io/cleanup"


async def ensure_cleanup_finalizer(body: Body, policy: DeletionPolicy, out: Publisher) -> Body:
    """Have the finalizer on a RetryPolicy whose deletion has work to do, and on no other.

    Returns:
        The RetryPolicy as it is then.

    Raises:
        ConflictError: it was changed meanwhile.
        NotFoundError: it is gone, whatever the API server has answered; see `lost`.
    """
    change = status.remove_finalizer if policy is DeletionPolicy.RETAIN else add_finalizer
    after = await change(body, FINALIZER, out)
    if after is body:
        return body
    known = out.table.get(Key.of(body))
    if known is None or known["metadata"]["uid"] != body["metadata"]["uid"]:
        raise NotFoundError(
            f"RetryPolicy {Key.of(body)} was deleted while its finalizer was added",
            remedy="none is needed: nothing was created for it",
        )
    return after


async def remove_cleanup_finalizer(body: Body, out: Publisher) -> None:
    """Let the API server delete a RetryPolicy, which is being deleted.

    Raises:
        ConflictError: it was changed meanwhile, and has other finalizers.
    """
    await status.remove_finalizer(body, FINALIZER, out)


def has_cleanup_finalizer(body: Body) -> bool:
    """Whether the API server waits for the cleanup."""
    return status.has_finalizer(body, FINALIZER)

"""Result of a reconcile as one value, and its publication.

`publish` writes the result to the object, last. Three writes come earlier, because a crash must not
lose them:

- the finalizer, before anything is created;
- `Progressing`, which shows that the new spec was seen;
- the names of topics that are about to be created, see `reconciler.record_intent`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

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
from redrive.provision.request import ContestedError
from redrive.reasons import Reason, requeue_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """Result of a reconcile: the status to publish, and when to reconcile again.

    Attributes:
        conditions: complete conditions of the object; empty keeps the current status.
        fields: other fields of the status.
        events: Events, in addition to those that the conditions imply.
        finalized: True removes the finalizer.
        last_event: Event that holds only after the finalizer is removed.
        error: the error that keeps the object from being ready.
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
        """Return the result for *error*, which keeps the object from being ready."""
        fields = {"blockedBy": error.shown_rival} if isinstance(error, ContestedError) else {}
        return cls(failed(error), fields, requeue=requeue_of(error), error=error)

    def of_gone(self) -> Outcome:
        """Return this for a deleted object: only Events can be published."""
        last = () if self.last_event is None else (self.last_event,)
        return Outcome(events=(*self.events, *last))

    def unless_transient(self) -> Outcome:
        """Return this; without a server error that may be over within a second."""
        of_server = isinstance(self.error, (AdminError, KubernetesError))
        if self.requeue is not Requeue.BACKOFF or not of_server:
            return self
        logger.info("reconcile of a ready policy failed, retrying: %s", self.error)
        return Outcome(requeue=self.requeue)


async def publish(body: Body, outcome: Outcome, out: Publisher) -> None:
    """Write *outcome* to *body*: the status, then Events, then the removal of the finalizer.

    A crash in between loses Events. The last Event follows the removal of the finalizer, because a
    conflict there would repeat an earlier one with every attempt.

    Raises:
        NotFoundError: the object is gone.
        ConflictError: it was changed meanwhile, and keeps its finalizer for now.
        KubernetesError: a write failed; the next reconcile writes the rest.
    """
    if outcome.conditions:
        body = await out.publish(body, outcome.conditions, outcome.fields)
    for event in outcome.events:
        await out.emit(body, event)
    if outcome.finalized:
        await status.remove_finalizer(body, FINALIZER, out)  # the API server deletes it then
        if outcome.last_event is not None:
            await out.emit(body, outcome.last_event)


MAX_ACTIONS = 32
MAX_ACTION = 512
_SHOWN = 5


class Overrides(NamedTuple):
    """Changes that annotations make until a time to what consumers do.

    Attributes:
        ignores_outages: True if consumers do not pause for outages.
        dead_letters: origins of messages that consumers dead-letter at their next failure.
    """

    ignores_outages: bool
    dead_letters: frozenset[str]


def overrides(body: Body, now: datetime) -> Overrides:
    """Return the changes that the annotations of a RetryPolicy make."""
    annotations = body["metadata"].get("annotations") or {}
    end, text = moment_of(annotations.get(IGNORE_OUTAGES_UNTIL)), annotations.get(DEAD_LETTER_NOW)
    requests = dead_letter_requests(text, now) if text else ()
    return Overrides(end is not None and now < end, frozenset(r.origin for r in requests))


def paused_conditions(body: Body) -> tuple[Condition, ...]:
    """Set the Paused condition. Keep the last conditions if the generation is unchanged."""
    message = (
        f"the policy is not reconciled while it has the annotation {PAUSE}=true, and "
        "drift is not repaired; remove the annotation to resume"
    )
    if is_new(body):
        return conditions.paused(Reason.PAUSED, message)
    return (
        *unchanged(body, without=Reason.PAUSED),
        warning(StatusWarning(Reason.PAUSED, message)),
    )


def observed_conditions(
    planned_changes: Sequence[object], warnings: Sequence[StatusWarning]
) -> tuple[Condition, ...]:
    """Return the conditions of a policy that observes, with the changes that Manage would make."""
    shown = list(warnings)
    if planned_changes:
        more = len(planned_changes) - _SHOWN
        actions = "; ".join(describe_changes(planned_changes)[:_SHOWN]) + (
            f"; and {more} more" if more > 0 else ""
        )
        message = (
            f"the policy only observes; with managementPolicy Manage redrive would have {actions}"
        )
        shown.insert(0, StatusWarning(Reason.DRIFT_DETECTED, message))
    return ready(Reason.OBSERVED, "the policy only observes, and changes nothing", shown)


def describe_changes(planned_changes: Sequence[object]) -> list[str]:
    """Return as many texts of *planned_changes* as a status may have."""
    texts = [str(action)[:MAX_ACTION] for action in planned_changes]
    if len(texts) > MAX_ACTIONS:
        shown = MAX_ACTIONS - 1
        texts[shown:] = [f"{len(texts) - shown} more changes"]
    return texts


FINALIZER = "redrive.io/cleanup"


async def ensure_cleanup_finalizer(body: Body, policy: DeletionPolicy, out: Publisher) -> Body:
    """Ensure that a RetryPolicy has the finalizer exactly if its deletion has work to do.

    Returns:
        The RetryPolicy after the write.

    Raises:
        ConflictError: it was changed meanwhile.
        NotFoundError: it is gone, despite the answer of the API server; see `reconciler`.
    """
    change = status.remove_finalizer if policy is DeletionPolicy.RETAIN else add_finalizer
    after = await change(body, FINALIZER, out)
    if after is body:
        return body
    current = out.table.get(Key.of(body))
    if current is None or current["metadata"]["uid"] != body["metadata"]["uid"]:
        raise NotFoundError(
            f"RetryPolicy {Key.of(body)} was deleted while its finalizer was added",
            remedy="No action needed: nothing was created for it",
        )
    return after


def has_cleanup_finalizer(body: Body) -> bool:
    """Return True if the deletion of a policy waits for its cleanup."""
    return status.has_finalizer(body, FINALIZER)

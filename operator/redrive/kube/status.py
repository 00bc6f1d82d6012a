"""Conditions → the status of an object, written when they changed; what changed is an Event too.

Called at the end of every reconcile, so it has to be silent where nothing is new: a status patch
or an Event for each reconcile of an object would drown those that matter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from redrive.api.conditions import (
    MAX_MESSAGE,
    READY,
    RECONCILING,
    STALLED,
    Condition,
    ConditionStatus,
    Reason,
    merge,
)
from redrive.errors import RedriveError
from redrive.kube.cache import Cache
from redrive.kube.client import Kubernetes
from redrive.kube.resources import Body, Key, Resource

PROGRESSING = Reason("Progressing")
"""The reason of conditions while the first reconcile of a new spec is under way."""

_STATES = {READY, RECONCILING, STALLED}
_CUT = " …"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StatusWarning:
    """What should be fixed, although the object is ready.

    Attributes:
        reason: the type of the condition too, which is there only while true.
    """

    reason: str
    message: str


@dataclass(frozen=True)
class ObjectEvent:
    """A Kubernetes Event about an object: `Normal`, or a `Warning`."""

    reason: str
    message: str
    is_warning: bool = False


def progressing(message: str) -> tuple[Condition, ...]:
    """Say that the object is being worked on, and nothing is known about it yet."""
    return (
        _condition(READY, ConditionStatus.UNKNOWN, PROGRESSING, message),
        _condition(RECONCILING, ConditionStatus.TRUE, PROGRESSING, message),
    )


def ready(
    reason: str, message: str, warnings: Iterable[StatusWarning] = ()
) -> tuple[Condition, ...]:
    """Say that the object is as it should be, and what should be seen to all the same."""
    return (
        _condition(READY, ConditionStatus.TRUE, reason, message),
        *map(warning, warnings),
    )


def warning(found: StatusWarning) -> Condition:
    """Return the condition that shows a warning."""
    return _condition(found.reason, ConditionStatus.TRUE, found.reason, found.message)


def paused(reason: str, message: str) -> tuple[Condition, ...]:
    """Say that nothing is done for the object, and nothing is known about it as it is asked for."""
    return (
        _condition(READY, ConditionStatus.UNKNOWN, reason, message),
        _condition(reason, ConditionStatus.TRUE, reason, message),
    )


def unchanged(body: Body, without: str) -> tuple[Condition, ...]:
    """Return the conditions of *body*, without `Reconciling` and *without*."""
    return tuple(c for c in _conditions(body) if c.type not in {RECONCILING, without})


def waiting(error: RedriveError, message: str = "") -> tuple[Condition, ...]:
    """Say that *error* keeps the object from being ready, and that it may pass by itself.

    Args:
        error: its reason is that of the conditions.
        message: what they say where *error* alone does not say all.
    """
    return _not_ready(RECONCILING, error, message)


def failed(error: RedriveError) -> tuple[Condition, ...]:
    """Say that *error* keeps the object from being ready: until it is fixed, or for now."""
    return _not_ready(STALLED, error) if error.stalls else waiting(error)


def is_new(body: Body) -> bool:
    """Whether the status says nothing yet about the spec as it is."""
    status = body.get("status") or {}
    return bool(status.get("observedGeneration") != body["metadata"]["generation"])


def is_progressing(body: Body) -> bool:
    """Whether the first reconcile of a new spec is under way, or waits for its turn."""
    return reason(body) == PROGRESSING


def is_settled(body: Body) -> bool:
    """Whether the object was found as it should be, for the spec as it is, and is not going."""
    ready = find(body, READY)  # read whole: one that can't be is written again
    return ready is not None and is_ready(body) and not is_new(body)


def is_ready(body: Body) -> bool:
    """Whether the object was found as it should be, maybe for an older spec, and is not going.

    Cheap enough to ask it of every object again and again, as `reason` is.
    """
    ready = _written_ready(body).get("status") == ConditionStatus.TRUE
    return ready and "deletionTimestamp" not in body.get("metadata", {})


def find(body: Body, kind: str) -> Condition | None:
    """Return one condition from the status of *body*."""
    return next((c for c in _conditions(body) if c.type == kind), None)


def reason(body: Body) -> str:
    """Return the reason of the Ready condition; empty before the first reconcile."""
    return str(_written_ready(body).get("reason", ""))


@dataclass(frozen=True)
class Publisher:
    """Writes the status of objects of one kind, and Events about them.

    Attributes:
        table: what is known of these objects; learns of each write at once.
    """

    kubernetes: Kubernetes
    resource: Resource
    table: Cache
    clock: Callable[[], datetime]

    async def publish(
        self,
        body: Body,
        conditions: Sequence[Condition],
        fields: Mapping[str, Any] = MappingProxyType({}),
        version: str | None = None,
    ) -> Body:
        """Write *conditions*, and *fields* of the status beside them, if they differ from *body*.

        A changed Ready condition is an Event and a line in the log, unless it says `Progressing`;
        so is a warning that is new or says something new.

        Args:
            body: the object as last read.
            conditions: all of them.
            fields: None removes one.
            version: see `Kubernetes.patch_status`.

        Returns:
            The object as it is then: *body* itself if there was nothing to write.

        Raises:
            ConflictError: it has another *version*.
            KubernetesError: the status could not be written.
        """
        generation = body["metadata"]["generation"]
        observed = [c.model_copy(update={"observed_generation": generation}) for c in conditions]
        merged = [c.to_manifest() for c in merge(_conditions(body), observed, self.clock())]
        warnings = ", ".join(c.type for c in conditions if c.type not in _STATES) or None
        status = {
            "observedGeneration": generation,
            "conditions": merged,
            "warnings": warnings,
            **fields,
        }
        have = body.get("status") or {}
        if all(have.get(name) == value for name, value in status.items()):
            return body
        after = await self.kubernetes.patch_status(self.resource, Key.of(body), status, version)
        self.table.renew(after)
        await self._announce(find(body, READY), find(after, READY), after)
        for each in conditions:
            known = (_says(find(body, each.type)), _says(find(after, READY)))
            if each.type not in _STATES and _says(each) not in known:
                await self.emit(after, ObjectEvent(each.reason, each.message, is_warning=True))
        return after

    async def emit(self, body: Body, event: ObjectEvent) -> None:
        """Make an Event about *body*, and log it; `KubernetesError`s are logged only."""
        level = logging.WARNING if event.is_warning else logging.INFO
        who = (self.resource.kind, Key.of(body))
        logger.log(level, "%s %s: %s: %s", *who, event.reason, event.message)
        await self.kubernetes.emit(
            body,
            kind="Warning" if event.is_warning else "Normal",
            reason=event.reason,
            message=event.message,
            now=self.clock(),
        )

    async def _announce(self, old: Condition | None, new: Condition | None, body: Body) -> None:
        if new is None or new.reason == PROGRESSING or _says(old) == _says(new):
            return
        bad = new.status is not ConditionStatus.TRUE
        await self.emit(body, ObjectEvent(new.reason, new.message, is_warning=bad))


def _not_ready(kind: str, error: RedriveError, message: str = "") -> tuple[Condition, ...]:
    said = message or str(error)
    return (
        _condition(READY, ConditionStatus.FALSE, error.reason, said),
        _condition(kind, ConditionStatus.TRUE, error.reason, said),
    )


def _condition(kind: str, status: ConditionStatus, reason: str, message: str) -> Condition:
    """Make a condition; of a message that has no room in one, it shows as much as has."""
    shown = message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - len(_CUT)] + _CUT
    return Condition(type=kind, status=status, reason=reason, message=shown)


def _written_ready(body: Body) -> Mapping[str, Any]:
    written = (body.get("status") or {}).get("conditions") or ()
    return next((condition for condition in written if condition.get("type") == READY), {})


def _conditions(body: Body) -> list[Condition]:
    """Read the conditions of *body*, but those that hold what none of ours does.

    The API server lets more pass than can be read, such as times in the year 0. Whoever may write a
    status must not stop the operator with it: what is left out here is written again.
    """
    written = (body.get("status") or {}).get("conditions") or []
    return list(filter(None, map(_read, written)))


def _read(condition: Mapping[str, Any]) -> Condition | None:
    try:
        return Condition.model_validate(condition)
    except ValidationError:
        return None


def _says(condition: Condition | None) -> tuple[str, str] | None:
    return None if condition is None else (condition.reason, condition.message)

"""Conditions → the status of an object, written when they changed; what changed is an Event too.

Called at the end of every reconcile, so it has to be silent where nothing is new: a status patch
or an Event for each look at an object would drown those that matter.
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
    merge,
)
from redrive.errors import RedriveError
from redrive.kube.cache import Cache
from redrive.kube.client import Kubernetes
from redrive.kube.resources import Body, Key, Resource

PROGRESSING = "Progressing"
"""The reason of conditions while the first look at a new spec is under way."""

_STATES = {READY, RECONCILING, STALLED}
_CUT = " …"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StatusWarning:
    """What somebody should see to, although the object is ready.

    Attributes:
        reason: the type of the condition too, which is there only while true.
    """

    reason: str
    message: str


def progressing(message: str) -> tuple[Condition, ...]:
    """Say that the object is being worked on, and nothing is known about it yet."""
    return (
        _condition(READY, ConditionStatus.UNKNOWN, PROGRESSING, message),
        _condition(RECONCILING, ConditionStatus.TRUE, PROGRESSING, message),
    )


def ready(
    reason: str, message: str, cautions: Iterable[StatusWarning] = ()
) -> tuple[Condition, ...]:
    """Say that the object is as it should be, and what should be seen to all the same."""
    return (
        _condition(READY, ConditionStatus.TRUE, reason, message),
        *map(caution, cautions),
    )


def caution(found: StatusWarning) -> Condition:
    """Return the condition that tells of a caution."""
    return _condition(found.reason, ConditionStatus.TRUE, found.reason, found.message)


def paused(reason: str, message: str) -> tuple[Condition, ...]:
    """Say that nothing is done for the object, and nothing is known about it as it is asked for."""
    return (
        _condition(READY, ConditionStatus.UNKNOWN, reason, message),
        _condition(reason, ConditionStatus.TRUE, reason, message),
    )


def standing(body: Body, without: str) -> tuple[Condition, ...]:
    """Return what was last said of *body*, but what is no longer under way, and *without*."""
    return tuple(c for c in _conditions(body) if c.type not in {RECONCILING, without})


def waiting(error: RedriveError, message: str = "") -> tuple[Condition, ...]:
    """Say that *error* keeps the object from being ready, and that it may pass by itself.

    Args:
        error: its reason is that of the conditions.
        message: what they say where *error* alone does not tell all.
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
    """Whether the first look at a new spec is under way, or waits for its turn."""
    ready = find(body, READY)
    return ready is not None and ready.reason == PROGRESSING


def is_settled(body: Body) -> bool:
    """Whether the object was found as it should be, for the spec as it is, and is not going."""
    ready = find(body, READY)
    return (
        ready is not None
        and ready.status is ConditionStatus.TRUE
        and not is_new(body)
        and "deletionTimestamp" not in body["metadata"]
    )


def find(body: Body, kind: str) -> Condition | None:
    """Return one condition from the status of *body*."""
    return next((c for c in _conditions(body) if c.type == kind), None)


def reason(body: Body) -> str:
    """Return the reason of the Ready condition; empty before the first look.

    Cheap enough to ask it of every object again and again.
    """
    written = (body.get("status") or {}).get("conditions") or []
    return next((str(c["reason"]) for c in written if c["type"] == READY), "")


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
    ) -> Body:
        """Write *conditions*, and *fields* of the status beside them, if they differ from *body*.

        A changed Ready condition is an Event and a line in the log, unless it says `Progressing`;
        so is a caution that is new or says something new.

        Returns:
            The object as it is then: *body* itself if there was nothing to write.

        Raises:
            KubernetesError: the status could not be written.
        """
        generation = body["metadata"]["generation"]
        observed = [c.model_copy(update={"observed_generation": generation}) for c in conditions]
        merged = [c.to_manifest() for c in merge(_conditions(body), observed, self.clock())]
        status = {"observedGeneration": generation, "conditions": merged, **fields}
        have = body.get("status") or {}
        if all(have.get(name) == value for name, value in status.items()):
            return body
        after = await self.kubernetes.patch_status(self.resource, Key.of(body), status)
        self.table.renew(after)
        await self._announce(find(body, READY), find(after, READY), after)
        for each in conditions:
            told = (_says(find(body, each.type)), _says(find(after, READY)))
            if each.type not in _STATES and _says(each) not in told:
                await self.warn(after, each.reason, each.message)
        return after

    async def warn(self, body: Body, reason: str, message: str) -> None:
        """Make a Warning event about *body*; `KubernetesError`s are logged only."""
        logger.warning("%s %s: %s: %s", self.resource.kind, Key.of(body), reason, message)
        await self._emit(body, "Warning", reason, message)

    async def tell(self, body: Body, reason: str, message: str) -> None:
        """Make a Normal event about *body*; `KubernetesError`s are logged only."""
        logger.info("%s %s: %s: %s", self.resource.kind, Key.of(body), reason, message)
        await self._emit(body, "Normal", reason, message)

    async def _announce(self, old: Condition | None, new: Condition | None, body: Body) -> None:
        if new is None or new.reason == PROGRESSING or _says(old) == _says(new):
            return
        say = self.tell if new.status is ConditionStatus.TRUE else self.warn
        await say(body, new.reason, new.message)

    async def _emit(self, body: Body, kind: str, reason: str, message: str) -> None:
        await self.kubernetes.emit(
            body, kind=kind, reason=reason, message=message, now=self.clock()
        )


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


def _conditions(body: Body) -> list[Condition]:
    """Read the conditions of *body*, but those that hold what none of ours does.

    The API server lets more pass than can be read, such as times in the year 0. Whoever may write a
    status must not stop the operator with it: what is left out here is written anew.
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

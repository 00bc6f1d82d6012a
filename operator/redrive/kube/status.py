"""Status, Events and finalizers of an object.

A status is written only if it changed, and the change is an Event, too. Otherwise the patches and
Events of unchanged objects would hide the relevant ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any

from redrive.admin.errors import without_words
from redrive.api import Body
from redrive.api.conditions import (
    COMPLETE,
    FAILED,
    READY,
    RECONCILING,
    STALLED,
    Condition,
    ConditionStatus,
    ObjectEvent,
    find,
    merge,
    read_conditions,
)
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.client import COMPONENT, Kubernetes, KubernetesError
from redrive.kube.resources import MAX_FINALIZERS, Key, Resource
from redrive.reasons import Reason

STATES = frozenset({READY, RECONCILING, STALLED, COMPLETE, FAILED, Reason.SUSPENDED})
"""Types of conditions that are not warnings."""

MAX_EVENT_MESSAGE = 1024
"""Maximum characters of the message of an Event."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Publisher:
    """Writes the status of objects of one kind, and Events about them.

    Attributes:
        table: cache of these objects; stores each write at once.
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
        """Write *conditions* and *fields* to the status of *body* if they differ.

        A changed Ready condition causes an Event and a log entry, except `Progressing`. So does a
        new warning, or one with a new message. A message that differs only in the answer of a
        broker is no change: a broker that answers differently each time must cause no writes.

        Args:
            body: the object as last read.
            conditions: all of its conditions.
            fields: other fields of the status; None removes one.
            version: see `Kubernetes.patch_status`.

        Returns:
            The object after the write; *body* itself if nothing was written.

        Raises:
            ConflictError: it has another *version*.
            KubernetesError: the status could not be written.
        """
        conditions = _with_known_answers(conditions, body)
        status = {**status_of(body, conditions, self.clock()), **fields}
        have = body.get("status") or {}
        if _holds(have, status):
            return body
        after = await self.kubernetes.patch_status(self.resource, Key.of(body), status, version)
        self.table.renew(after)
        await self._announce(find(body, READY), find(after, READY), after)
        for condition in conditions:
            earlier = (_text(find(body, condition.type)), _text(find(after, READY)))
            if condition.type not in STATES and _text(condition) not in earlier:
                event = ObjectEvent(condition.reason, condition.message, is_warning=True)
                await self.emit(after, event)
        return after

    async def emit(self, body: Body, event: ObjectEvent) -> None:
        """Emit an Event about *body*, and log it; failures are only logged.

        Events cannot be created in a namespace that is being deleted, and work must continue there.
        An object has a budget of Events; those beyond it are only logged.
        """
        level = logging.WARNING if event.is_warning else logging.INFO
        who = (self.resource.kind, Key.of(body))
        logger.log(level, "%s %s: %s: %s", *who, event.reason, event.message)
        if not self.kubernetes.event_budget.take(body["metadata"]["uid"]):
            return
        try:
            await self.kubernetes.create(resources.EVENTS, _event(body, event, self.clock()))
        except KubernetesError as error:
            logger.warning("Event %s about %s was not created: %s", event.reason, who[1], error)

    async def _announce(self, old: Condition | None, new: Condition | None, body: Body) -> None:
        if new is None or new.reason == Reason.PROGRESSING or _text(old) == _text(new):
            return
        bad = new.status is not ConditionStatus.TRUE
        await self.emit(body, ObjectEvent(new.reason, new.message, is_warning=bad))


def _event(about: Body, event: ObjectEvent, now: datetime) -> Body:
    metadata = about["metadata"]
    moment = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            # A name may have a dot only between letters or digits.
            "generateName": f"{metadata['name'][:50].rstrip('.-')}-",
            "namespace": metadata["namespace"],
        },
        "involvedObject": {
            "apiVersion": about["apiVersion"],
            "kind": about["kind"],
            "namespace": metadata["namespace"],
            "name": metadata["name"],
            "uid": metadata["uid"],
        },
        "type": "Warning" if event.is_warning else "Normal",
        "reason": event.reason,
        "message": event.message[:MAX_EVENT_MESSAGE],
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "firstTimestamp": moment,
        "lastTimestamp": moment,
        "count": 1,
    }


def status_of(body: Body, conditions: Sequence[Condition], now: datetime) -> dict[str, Any]:
    """Return the status fields for the *conditions* of *body*.

    Args:
        body: the object as last read.
        conditions: all of its conditions.
        now: transition time of conditions whose status changed.
    """
    generation = body["metadata"]["generation"]
    observed = [c.model_copy(update={"observed_generation": generation}) for c in conditions]
    merged = [c.to_manifest() for c in merge(read_conditions(body), observed, now)]
    warnings = [c["type"] for c in merged if c["type"] not in STATES] or None
    return {"observedGeneration": generation, "conditions": merged, "warnings": warnings}


def _holds(fields: Any, patch: Any) -> bool:  # noqa: ANN401  JSON
    """Return True if the merge patch changes nothing in *fields*."""
    if isinstance(fields, Mapping) and isinstance(patch, Mapping):
        return all(_holds(fields.get(name), value) for name, value in patch.items())
    return bool(fields == patch)


def _with_known_answers(conditions: Sequence[Condition], body: Body) -> list[Condition]:
    """Return *conditions*, with the message in *body* where only the answer of a broker differs."""
    generation = body["metadata"]["generation"]
    messages = {
        (condition.type, condition.status, condition.reason): condition.message
        for condition in read_conditions(body)
        if condition.observed_generation == generation
    }

    def message(condition: Condition) -> str:
        new, reason = condition.message, condition.reason
        earlier = messages.get((condition.type, condition.status, reason), new)
        is_same = earlier != new and without_words(reason, earlier) == without_words(reason, new)
        return earlier if is_same else new

    return [c.model_copy(update={"message": message(c)}) for c in conditions]


def _text(condition: Condition | None) -> tuple[str, str] | None:
    return None if condition is None else (condition.reason, condition.message)


def has_finalizer(body: Body, name: str) -> bool:
    """Return True if an object has this finalizer."""
    return name in _finalizers_of(body)


async def add_finalizer(body: Body, name: str, out: Publisher) -> Body:
    """Ensure that an object has a finalizer; return the object after the write.

    Raises:
        ConflictError: it was changed meanwhile.
        NotFoundError: it is gone.
    """
    if _finalizers_of(body).count(name) == 1:
        return body
    body = await _with_all_finalizers(body, out)
    return await _set_finalizers(body, [*_other_finalizers(body, name), name], out)


async def remove_finalizer(body: Body, name: str, out: Publisher) -> Body:
    """Ensure that an object has no such finalizer; return the object after the write.

    An object that is being deleted accepts no new finalizers. So if it has no others, a change
    meanwhile, such as of its status, does not matter.

    Raises:
        ConflictError: it was changed meanwhile, and has other finalizers or is not being deleted.
        NotFoundError: it is gone.
    """
    if not has_finalizer(body, name):
        return body
    body = await _with_all_finalizers(body, out)
    others = _other_finalizers(body, name)
    goes = not others and "deletionTimestamp" in body["metadata"]
    return await _set_finalizers(body, others, out, only="uid" if goes else "resourceVersion")


def _finalizers_of(body: Body) -> Sequence[str]:
    names: Sequence[str] = body["metadata"].get("finalizers", [])
    return names


def _other_finalizers(body: Body, name: str) -> list[str]:
    return [other for other in _finalizers_of(body) if other != name]


async def _with_all_finalizers(body: Body, out: Publisher) -> Body:
    """Read an object again if the cache does not retain all of its finalizers."""
    if len(_finalizers_of(body)) <= MAX_FINALIZERS:
        return body
    return await out.kubernetes.get(out.resource, Key.of(body))


async def _set_finalizers(
    body: Body, names: list[str], out: Publisher, only: str = "resourceVersion"
) -> Body:
    # The list is replaced as a whole: only if the object is unchanged, or at least the same.
    patch = {"metadata": {"finalizers": names, only: body["metadata"][only]}}
    after = await out.kubernetes.patch(out.resource, Key.of(body), patch)
    out.table.renew(after)
    return after

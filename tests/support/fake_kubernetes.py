"""An API server in memory, for unit tests: objects, versions, merge patches, deletion, Events.

It replaces the client itself, so HTTP is not tested. `tests/contract/kube` proves that it and the
real API server give the same answers. It has no schemas, selectors or watches. An operator can
crash at one of its writes there, before or after its execution.
"""

from __future__ import annotations

import asyncio
import copy
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from redrive.api import Body
from redrive.kube import resources
from redrive.kube.client import ConflictError, EventBudget, Kubernetes, NotFoundError, Versions
from redrive.kube.resources import Key, Resource, keep_of

Hook = Callable[[str, Resource, Key], None]
"""Called with verb, kind and object; it may raise, or change objects as another client does.

Of a list, the name is empty, and so is the namespace if it is a list of all.
"""


class Write(NamedTuple):
    """A successful write, and the object after it."""

    verb: str
    resource: Resource
    body: Body


class FakeKubernetes(Kubernetes):
    """An API server with the operations that redrive uses.

    Attributes:
        objects: the stored objects by kind and key, which a test may change.
        writes: the successful calls that wrote, oldest first.
        events: the recorded Events, oldest first.
        dry_runs: the objects of dry runs that were admitted, oldest first.
        version: the `resourceVersion` of the last write.
        before: called before each call, except those that record Events.
        denied: the plurals of kinds to which no ServiceAccount has rights.
    """

    def __init__(self) -> None:
        self.objects = defaultdict[Resource, dict[Key, dict[str, Any]]](dict)
        self.writes: list[Write] = []
        self.events: list[Body] = []
        self.dry_runs: list[Body] = []
        self.before: Hook = lambda *_: None
        self.denied: set[str] = set()
        self._unseen = asyncio.Queue[Write]()
        self._applied: dict[tuple[Resource, Key, str], Body] = {}
        self.version = 1000
        self.event_budget = EventBudget()

    def add(self, resource: Resource, *bodies: Body) -> None:
        """Store objects as they are, with the versions that they have."""
        for body in bodies:
            self.objects[resource][Key.of(body)] = copy.deepcopy(dict(body))

    def announced(self) -> Sequence[tuple[str, str, str]]:
        """Return type, reason and message of all Events."""
        return [(event["type"], event["reason"], event["message"]) for event in self.events]

    async def written(self) -> Write:
        """Wait for the next write that this has not returned yet."""
        return await self._unseen.get()

    async def list(self, resource: Resource, namespace: str | None = None) -> list[Body]:
        """Return the objects at the beginning of the list, if they are kept."""
        stored, keep = copy.deepcopy(self.objects[resource]), keep_of(resource)
        self.before("list", resource, Key(namespace or "", ""))
        return [keep(body) for key, body in stored.items() if namespace in {None, key.namespace}]

    async def versions(self, resource: Resource, namespace: str | None = None) -> Versions:
        """Return the versions of the objects of `list`; the list has the last version."""
        bodies = await self.list(resource, namespace)
        versions = {b["metadata"]["uid"]: int(b["metadata"]["resourceVersion"]) for b in bodies}
        return Versions(self.version, versions)

    async def get(self, resource: Resource, key: Key) -> Body:
        """Return one object."""
        self.before("get", resource, key)
        return copy.deepcopy(self._stored(resource, key))

    async def account_may(self, account: Key, attributes: Mapping[str, str]) -> bool:
        """Return True unless all rights of the kind are denied."""
        self.before("review", resources.ACCOUNT_REVIEWS, account)
        return attributes["resource"] not in self.denied

    async def annotations(self, resource: Resource, key: Key) -> Mapping[str, str]:
        """Return the annotations of one object."""
        self.before("annotations", resource, key)
        return dict(self._stored(resource, key)["metadata"].get("annotations") or {})

    async def create(self, resource: Resource, body: Body) -> Body:
        """Store a new object, or record an Event."""
        if resource == resources.EVENTS:
            self.events.append(body)
            return body
        key = Key.of(body)
        self.before("create", resource, key)
        if key in self.objects[resource]:
            raise ConflictError(f"{resource.kind} {key} already exists", remedy="read it")
        made = {"uid": f"uid-{self.version}", "creationTimestamp": "2026-11-22T00:00:00Z"}
        metadata = {**made, **body["metadata"]}
        return self._write("create", resource, {**body, "metadata": metadata})

    async def dry_run(self, resource: Resource, body: Body) -> None:
        """Note a creation that stores nothing."""
        self.before("dry_run", resource, Key(body["metadata"]["namespace"], ""))
        self.dry_runs.append(body)

    async def patch(self, resource: Resource, key: Key, patch: Body) -> Body:
        """Merge *patch*, unless it names another version or uid of the object."""
        self.before("patch", resource, key)
        stored = self._stored(resource, key)
        version = patch.get("metadata", {}).get("resourceVersion")
        same = patch.get("metadata", {}).get("uid") in {None, stored["metadata"].get("uid")}
        if not same or version not in {None, stored["metadata"]["resourceVersion"]}:
            raise ConflictError(f"{resource.kind} {key} has been modified", remedy="read it")
        patched = merge_patch(stored, patch)
        if patched.get("spec") != stored.get("spec") and "generation" in patched["metadata"]:
            patched["metadata"]["generation"] += 1
        return self._write("patch", resource, patched)

    async def delete(self, resource: Resource, body: Body) -> None:
        """Delete an object if it is unchanged since it was read."""
        self.before("delete", resource, Key.of(body))
        stored = self._stored(resource, Key.of(body))
        for name in ("uid", "resourceVersion"):
            if stored["metadata"][name] != body["metadata"][name]:
                raise ConflictError(f"{name} differs", remedy="read it again")
        del self.objects[resource][Key.of(body)]

    async def patch_status(
        self, resource: Resource, key: Key, status: Body, version: str | None = None
    ) -> Body:
        """Merge *status* into the status, unless the object has another *version*."""
        self.before("patch_status", resource, key)
        stored = self._stored(resource, key)
        if version not in {None, stored["metadata"].get("resourceVersion")}:
            raise ConflictError(f"{resource.kind} {key} has been modified", remedy="read it")
        patched = merge_patch(stored, {"status": status})
        return self._write("patch_status", resource, patched)

    async def apply_status(
        self, resource: Resource, body: Body, status: Body, manager: str
    ) -> Body:
        """Apply *status*, unless the object has another version or uid than *body*.

        A manager owns whole fields of the status, and no parts of them.
        """
        key = Key.of(body)
        self.before("apply_status", resource, key)
        stored = self._stored(resource, key)
        for name in ("uid", "resourceVersion"):
            if stored["metadata"].get(name) != body["metadata"].get(name):
                raise ConflictError(f"{name} of {resource.kind} {key} differs", remedy="read it")
        before = self._applied.get((resource, key, manager), {})
        self._applied[resource, key, manager] = copy.deepcopy(dict(status))
        others = {n: value for n, value in stored.get("status", {}).items() if n not in before}
        applied = {**stored, "status": {**others, **copy.deepcopy(dict(status))}}
        return self._write("apply_status", resource, applied)

    def _stored(self, resource: Resource, key: Key) -> dict[str, Any]:
        if key not in self.objects[resource]:
            raise NotFoundError(f"no {resource.kind} {key}", remedy="create it")
        return self.objects[resource][key]

    def _write(self, verb: str, resource: Resource, body: Body) -> Body:
        """Store a new version, or delete an object without its last finalizer."""
        self.version += 1
        metadata = {**body["metadata"], "resourceVersion": str(self.version)}
        written = {**body, "metadata": metadata}
        self.add(resource, written)
        if "deletionTimestamp" in metadata and not metadata.get("finalizers"):
            del self.objects[resource][Key.of(body)]
        self.writes.append(Write(verb, resource, copy.deepcopy(written)))
        self._unseen.put_nowait(self.writes[-1])
        return copy.deepcopy(written)


def edit(body: dict[str, Any], **spec: object) -> dict[str, Any]:
    """Change the spec of *body* in place, with a new generation as from the API server."""
    body["spec"].update(spec)
    body["metadata"]["generation"] += 1
    return body


def merge_patch(body: Body, patch: Body) -> dict[str, Any]:
    """Return *body* after a JSON merge patch (RFC 7386)."""
    merged = dict(body)
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, dict):
            inner = merged.get(name)
            merged[name] = merge_patch(inner if isinstance(inner, dict) else {}, value)
        else:
            merged[name] = value
    return merged


class Crash(BaseException):
    """The end of a crashed operator."""


class Fault:
    """Makes an operator crash at one of its writes, and counts the writes.

    Args:
        at: the number of the write, counted from 1; 0 for none.
        done: execute that write, and lose only its answer.
    """

    def __init__(self, at: int, *, done: bool) -> None:
        self.at, self.done, self.count = at, done, 0

    async def befall(self, write: Callable[[], Awaitable[Any]]) -> Any:  # noqa: ANN401
        self.count += 1
        if self.count != self.at:
            return await write()
        if self.done:
            await write()
        raise Crash


class Faulty(FakeKubernetes):
    """An API server, and an operator that crashes at one of its writes there."""

    fault = Fault(0, done=False)

    async def patch(self, resource: Resource, key: Key, patch: Body) -> Body:
        body: Body = await self.fault.befall(
            lambda: super(Faulty, self).patch(resource, key, patch)
        )
        return body

    async def patch_status(
        self, resource: Resource, key: Key, status: Body, version: str | None = None
    ) -> Body:
        stored: Body = await self.fault.befall(
            lambda: super(Faulty, self).patch_status(resource, key, status, version)
        )
        return stored

    async def apply_status(
        self, resource: Resource, body: Body, status: Body, manager: str
    ) -> Body:
        stored: Body = await self.fault.befall(
            lambda: super(Faulty, self).apply_status(resource, body, status, manager)
        )
        return stored

    async def create(self, resource: Resource, body: Body) -> Body:
        if resource == resources.EVENTS:  # a lost Event changes nothing
            return await super().create(resource, body)
        stored: Body = await self.fault.befall(lambda: super(Faulty, self).create(resource, body))
        return stored

    async def delete(self, resource: Resource, body: Body) -> None:
        await self.fault.befall(lambda: super(Faulty, self).delete(resource, body))

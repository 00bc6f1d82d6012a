"""Cache of one kind of object, as the informer has last seen it, with listeners for changes.

Listeners enqueue what a change affects. They are attached here and not to the watch, because what
redrive's own writes return goes into the cache too, before a watch shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from redrive.api import GROUP
from redrive.kube.resources import Body, Key

Listener = Callable[[Key, Body | None, Body | None], None]
"""Called with an object's key, its body before and after; None before it came, after it went."""
L = TypeVar("L", bound=Listener)


class Cache:
    """The last known body of each object of one kind; calls its listeners with each change."""

    def __init__(self, bodies: Iterable[Body] = ()) -> None:
        self._bodies = {Key.of(body): body for body in bodies}
        self._listeners: list[Listener] = []

    def __iter__(self) -> Iterator[Body]:
        """Go through the bodies as they are now; the cache may change meanwhile."""
        return iter(tuple(self._bodies.values()))

    def get(self, key: Key) -> Body | None:
        """Return the body last seen, or None if there is no such object."""
        return self._bodies.get(key)

    def put(self, body: Body) -> None:
        """Store an object as it is now, unless a later state of it is known."""
        key = Key.of(body)
        before = self._bodies.get(key)
        if before is None or _version(before) <= _version(body):
            self._bodies[key] = body
            self._notify(key, before, body)

    def renew(self, body: Body) -> None:
        """Store what our own write has made of an object, before a watch shows it.

        Without this the next reconcile could start from the state before the write, and skip a
        status that is not there any more. An object that is gone meanwhile stays gone.
        """
        known = self._bodies.get(Key.of(body))
        if known is not None and _uid(known) == _uid(body):
            self.put(body)

    def drop(self, body: Body) -> None:
        """Remove an object: this very one, not a new one of the same name."""
        key = Key.of(body)
        before = self._bodies.get(key)
        if before is not None and _uid(before) == _uid(body):
            del self._bodies[key]
            self._notify(key, before, None)

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Store what a watch shows; events have a `type`, such as `DELETED`, and an `object`."""
        if event["type"] == "DELETED":
            self.drop(event["object"])
        else:
            self.put(event["object"])

    def listen(self, listener: L) -> L:
        """Call *listener* with every later change; usable as a decorator."""
        self._listeners.append(listener)
        return listener

    def _notify(self, key: Key, before: Body | None, after: Body | None) -> None:
        for listener in self._listeners:
            listener(key, before, after)


def needs_reconcile(before: Body | None, after: Body | None) -> bool:
    """Whether a change of an object asks for a reconcile.

    It was created or deleted, is being deleted, has a new generation, or other annotations of
    redrive's. A changed status or label asks for none: otherwise an operator would answer each of
    its own status patches with another reconcile.
    """
    return _intent(before) != _intent(after)


def _uid(body: Body) -> str:
    uid: str = body["metadata"]["uid"]
    return uid


def _version(body: Body) -> int:
    """Return what orders the states of the objects of one kind.

    Kubernetes defines `resourceVersion` to be compared so since 1.35; before, it was the same
    number, the revision of etcd, and custom resources never had another.
    """
    return int(body["metadata"]["resourceVersion"])


def _intent(body: Body | None) -> tuple[object, ...] | None:
    if body is None:
        return None
    metadata = body["metadata"]
    annotations = metadata.get("annotations") or {}
    ours = {name: value for name, value in annotations.items() if name.startswith(f"{GROUP}/")}
    return _uid(body), metadata.get("generation"), metadata.get("deletionTimestamp"), ours

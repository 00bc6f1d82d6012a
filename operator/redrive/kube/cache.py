"""What the watches have shown of one kind of object, and who wants to know of changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from redrive.api import GROUP
from redrive.kube.resources import Body, Key

Listener = Callable[[Key, Body | None, Body | None], None]
"""Called with an object's key, its body before and after; None before it came, after it went."""


class Cache:
    """The last known body of each object of one kind; tells its listeners of each change."""

    def __init__(self, bodies: Iterable[Body] = ()) -> None:
        self._bodies = {Key.of(body): body for body in bodies}
        self._listeners: list[Listener] = []

    def __iter__(self) -> Iterator[Body]:
        """Go through the bodies as they are now; the table may change meanwhile."""
        return iter(tuple(self._bodies.values()))

    def get(self, key: Key) -> Body | None:
        """Return the body last seen, or None if there is no such object."""
        return self._bodies.get(key)

    def put(self, body: Body) -> None:
        """Take note of an object as it is now, unless it is known as it was later."""
        key = Key.of(body)
        before = self._bodies.get(key)
        if before is None or _version(before) <= _version(body):
            self._bodies[key] = body
            self._tell(key, before, body)

    def renew(self, body: Body) -> None:
        """Take note of what our own write has made of an object, before a watch tells of it.

        Without this the next look could start from what was there before the write, and take for
        said what is said no more. An object that is gone meanwhile stays gone.
        """
        known = self._bodies.get(Key.of(body))
        if known is not None and _uid(known) == _uid(body):
            self.put(body)

    def drop(self, body: Body) -> None:
        """Take note that an object is gone: this very one, not one made anew under its name."""
        key = Key.of(body)
        before = self._bodies.get(key)
        if before is not None and _uid(before) == _uid(body):
            del self._bodies[key]
            self._tell(key, before, None)

    async def seen(self, event: Any, **_: Any) -> None:  # noqa: ANN401  as kopf calls it
        """Take note of an event of a watch; a handler for kopf."""
        if event["type"] == "DELETED":
            self.drop(event["object"])
        else:
            self.put(event["object"])

    def listen(self, listener: Listener) -> None:
        """Call *listener* with every later change."""
        self._listeners.append(listener)

    def _tell(self, key: Key, before: Body | None, after: Body | None) -> None:
        for listener in self._listeners:
            listener(key, before, after)


def is_asked_anew(before: Body | None, after: Body | None) -> bool:
    """Whether the wish behind an object has changed.

    It came, went, is going, has a new spec, or other annotations of redrive's. A changed status or
    label is no new wish: without this distinction an operator would answer each of its own status
    patches with another reconcile.
    """
    return _wish(before) != _wish(after)


def _uid(body: Body) -> str:
    uid: str = body["metadata"]["uid"]
    return uid


def _version(body: Body) -> int:
    """Return what orders the states of the objects of one kind.

    Kubernetes defines `resourceVersion` to be compared so since 1.35; before, it was the same
    number, the revision of etcd, and custom resources never had another.
    """
    return int(body["metadata"]["resourceVersion"])


def _wish(body: Body | None) -> tuple[object, ...] | None:
    if body is None:
        return None
    metadata = body["metadata"]
    annotations = metadata.get("annotations") or {}
    ours = {name: value for name, value in annotations.items() if name.startswith(f"{GROUP}/")}
    return _uid(body), metadata.get("generation"), metadata.get("deletionTimestamp"), ours

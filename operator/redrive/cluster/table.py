"""What the watches have shown of one kind of object, and who wants to know of changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from redrive.cluster.resources import Body, Key

Listener = Callable[[Key, Body | None, Body | None], None]
"""Called with an object's key, its body before and after; None before it came, after it went."""


class Table:
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
        """Take note of an object as it is now."""
        key = Key.of(body)
        before = self._bodies.get(key)
        self._bodies[key] = body
        self._tell(key, before, body)

    def drop(self, key: Key) -> None:
        """Take note that an object is gone."""
        before = self._bodies.pop(key, None)
        if before is not None:
            self._tell(key, before, None)

    def listen(self, listener: Listener) -> None:
        """Call *listener* with every later change."""
        self._listeners.append(listener)

    def _tell(self, key: Key, before: Body | None, after: Body | None) -> None:
        for listener in self._listeners:
            listener(key, before, after)


def is_asked_anew(before: Body | None, after: Body | None) -> bool:
    """Whether the wish behind an object has changed: it came, went, is going, or has a new spec.

    A changed status or label is no new wish: without this distinction an operator would answer
    each of its own status patches with another reconcile.
    """
    return _wish(before) != _wish(after)


def _wish(body: Body | None) -> tuple[object, ...] | None:
    if body is None:
        return None
    metadata = body["metadata"]
    return metadata["uid"], metadata.get("generation"), metadata.get("deletionTimestamp")

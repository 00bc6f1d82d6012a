"""Cache of one kind of object, as the informer has last seen it, with listeners and indexes.

Listeners enqueue what a change affects. They are attached here and not to the watch, because what
redrive's own writes return goes into the cache too, before a watch shows it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from redrive.admin.fair_slots import FairSlots
from redrive.api import GROUP, Body
from redrive.errors import RedriveError
from redrive.kube.resources import Keep, Key, of_redrive

Listener = Callable[[Key, Body | None, Body | None], None]
"""Called with an object's key, its body before and after; None before it came, after it went."""
L = TypeVar("L", bound=Listener)
T = TypeVar("T")


class _Derived(NamedTuple):
    """What was computed from one generation of an object: a value, or what kept it from being."""

    generation: tuple[str, int | None]
    others: tuple[object, ...]
    value: Any
    error: RedriveError | None

    def is_of(self, generation: tuple[str, int | None], others: tuple[object, ...]) -> bool:
        """Whether it was computed from these."""
        # Different lengths are different functions.
        same = all(one is other for one, other in zip(self.others, others, strict=True))
        return same and self.generation == generation


class Cache:
    """The last known body of each object of one kind; calls its listeners with each change.

    Args:
        bodies: what is known at first.
        keep: what is kept of each.
    """

    def __init__(self, bodies: Iterable[Body] = (), keep: Keep = of_redrive) -> None:
        self._keep = keep
        self._bodies = {Key.of(body): keep(body) for body in bodies}
        self._listeners: list[Listener] = []
        self._indexes: dict[Callable[[Body], Hashable], Index] = {}
        self._derived: dict[Key, dict[Callable[..., Any], _Derived]] = {}
        self._threads = FairSlots(1)

    def __iter__(self) -> Iterator[Body]:
        """Go through the bodies as they are now; the cache may change meanwhile."""
        return iter(tuple(self._bodies.values()))

    def __len__(self) -> int:
        """Return how many objects there are."""
        return len(self._bodies)

    def get(self, key: Key) -> Body | None:
        """Return the body last seen, or None if there is no such object."""
        return self._bodies.get(key)

    def put(self, body: Body) -> None:
        """Store an object as it is now, unless a later state of it is known."""
        key = Key.of(body)
        before = self._bodies.get(key)
        if before is None or version(before) <= version(body):
            after = self._bodies[key] = self._keep(body)
            self._notify(key, before, after)

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
            self._derived.pop(key, None)
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

    def index(self, value_of: Callable[[Body], Hashable]) -> Index:
        """Return the index of the objects by what *value_of* returns; one for each function."""
        if value_of not in self._indexes:
            self._indexes[value_of] = Index(self, value_of)
        return self._indexes[value_of]

    def derive(self, make: Callable[..., T], body: Body, *others: object) -> T:
        """Return what *make* makes of *body* and *others*, computed once for each generation.

        The last value is kept, for each function and for as long as the object is in the cache.

        Args:
            make: a pure function at the top of a module; it reads of an object its spec, and what
                never changes of its metadata.
            body: an object of this kind, in any state of it.
            others: what else it reads; each is another one as soon as it is not the same object.

        Raises:
            RedriveError: as *make* does; the same one each time.
        """
        key, generation = Key.of(body), _generation(body)
        known = self._derived.get(key, {}).get(make)
        if known is None or not known.is_of(generation, others):
            known = _computed(make, body, others)
            if key in self._bodies:
                self._derived.setdefault(key, {})[make] = known
        if known.error is not None:
            # Its traceback would grow with every caller that it is raised to.
            raise known.error.with_traceback(None)
        value: T = known.value
        return value

    async def derive_aside(self, make: Callable[..., T], body: Body, *others: object) -> T:
        """Return the same as `derive`, computed in a thread where it is not known yet.

        For what takes more than milliseconds, in which the event loop continues. One is computed at
        a time, and namespaces come round robin.

        Raises:
            RedriveError: as *make* does; the same one each time.
        """
        key = Key.of(body)
        if not self._has_derived(make, body, others):
            async with self._threads.slot(key.namespace):
                if not self._has_derived(make, body, others):
                    computed = await asyncio.to_thread(_computed, make, body, others)
                    if key in self._bodies:
                        self._derived.setdefault(key, {})[make] = computed
        return self.derive(make, body, *others)

    def _has_derived(
        self, make: Callable[..., Any], body: Body, others: tuple[object, ...]
    ) -> bool:
        derived = self._derived.get(Key.of(body), {}).get(make)
        return derived is not None and derived.is_of(_generation(body), others)

    def _notify(self, key: Key, before: Body | None, after: Body | None) -> None:
        for index in self._indexes.values():  # first: listeners read them
            index.note(key, before, after)
        for listener in self._listeners:
            listener(key, before, after)


class Index:
    """The objects of a cache by a value of each, so that finding some does not visit all.

    Args:
        bodies: the objects.
        value_of: what an object is found by.
    """

    def __init__(self, bodies: Iterable[Body], value_of: Callable[[Body], Hashable]) -> None:
        self._value_of = value_of
        self._found: dict[Hashable, dict[Key, Body]] = defaultdict(dict)
        for body in bodies:
            self.note(Key.of(body), None, body)

    def get(self, value: Hashable) -> tuple[Body, ...]:
        """Return the objects that have *value*, as they are now."""
        return tuple(self._found.get(value, {}).values())

    def keys(self, value: Hashable) -> tuple[Key, ...]:
        """Return the keys of the objects that have *value* now."""
        return tuple(self._found.get(value, ()))

    def count(self, value: Hashable) -> int:
        """Return how many objects have *value* now."""
        return len(self._found.get(value, ()))

    def note(self, key: Key, before: Body | None, after: Body | None) -> None:
        """Follow a change."""
        if before is not None:
            value = self._value_of(before)
            self._found[value].pop(key, None)
            if not self._found[value]:
                del self._found[value]
        if after is not None:
            self._found[self._value_of(after)][key] = after


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


def _generation(body: Body) -> tuple[str, int | None]:
    """Return what is another one when the spec is."""
    return _uid(body), body["metadata"].get("generation")


def _computed(make: Callable[..., object], body: Body, others: tuple[object, ...]) -> _Derived:
    try:
        return _Derived(_generation(body), others, make(body, *others), None)
    except RedriveError as error:
        return _Derived(_generation(body), others, None, error)


def version(body: Body) -> int:
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

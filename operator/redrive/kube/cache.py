"""Cache of the objects of one kind, filled by the informer, with listeners and indexes.

Listeners enqueue the objects that a change affects. They belong to the cache, not to the watch: the
results of redrive's own writes enter the cache before a watch reports them.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from redrive.admin.fair_slots import FairSlots
from redrive.api import GROUP, Body
from redrive.errors import RedriveError
from redrive.kube.resources import Keep, Key, malformed, of_redrive

Listener = Callable[[Key, Body | None, Body | None], None]
"""Called with the key of an object, and its body before and after; None if it did not exist."""
L = TypeVar("L", bound=Listener)
T = TypeVar("T")

logger = logging.getLogger(__name__)


class _Derived(NamedTuple):
    """Result computed from one generation of an object: a value or an error."""

    generation: tuple[str, int | None]
    others: tuple[object, ...]
    value: Any
    error: RedriveError | None

    def is_of(self, generation: tuple[str, int | None], others: tuple[object, ...]) -> bool:
        """Return True if it was computed from these."""
        # Different lengths are different functions.
        same = all(one is other for one, other in zip(self.others, others, strict=True))
        return same and self.generation == generation


class Cache:
    """Latest known body of each object of one kind; calls listeners with each change.

    Args:
        bodies: initial objects.
        keep: reduces each object to the retained fields.
    """

    def __init__(self, bodies: Iterable[Body] = (), keep: Keep = of_redrive) -> None:
        self._keep = keep
        self._bodies = {Key.of(body): keep(body) for body in bodies}
        self._listeners: list[Listener] = []
        self._indexes: dict[Callable[[Body], Hashable], Index] = {}
        self._turns: dict[Callable[[Body], Turn | None], Turns] = {}
        self._derived: dict[Key, dict[Callable[..., Any], _Derived]] = {}
        self._threads = FairSlots(1)

    def __iter__(self) -> Iterator[Body]:
        """Iterate over the current bodies; the cache may change meanwhile."""
        return iter(tuple(self._bodies.values()))

    def __len__(self) -> int:
        """Return the number of objects."""
        return len(self._bodies)

    def get(self, key: Key) -> Body | None:
        """Return the latest body; None if the object does not exist."""
        return self._bodies.get(key)

    def put(self, body: Body) -> None:
        """Store an object, unless a later version is known."""
        key = Key.of(body)
        before = self._bodies.get(key)
        if before is None or version(before) <= version(body):
            after = self._keep(body)
            # Before any change: an object that lacks a field changes no index, and no queue.
            for read in (*self._indexes, *self._turns):
                read(after)
            self._bodies[key] = after
            self._notify(key, before, after)

    def renew(self, body: Body) -> None:
        """Store the result of redrive's own write before a watch reports it.

        Otherwise the next reconcile could start from the state before the write. An object that was
        deleted meanwhile is not stored again.
        """
        current = self._bodies.get(Key.of(body))
        if current is not None and _uid(current) == _uid(body):
            self.put(body)

    def drop(self, body: Body) -> None:
        """Remove an object, but not a new object of the same name."""
        key = Key.of(body)
        before = self._bodies.get(key)
        if before is not None and _uid(before) == _uid(body):
            del self._bodies[key]
            self._derived.pop(key, None)
            self._notify(key, before, None)

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Apply a watch event, with a `type` such as `DELETED` and an `object`.

        A malformed object is ignored: it would fail in each listener, and at each relist.
        """
        if problem := malformed(event["object"]):
            logger.warning("an event of a watch is ignored: %s", problem)
        elif event["type"] == "DELETED":
            self.drop(event["object"])
        else:
            self.put(event["object"])

    def listen(self, listener: L) -> L:
        """Call *listener* with every later change; usable as a decorator."""
        self._listeners.append(listener)
        return listener

    def index(self, value_of: Callable[[Body], Hashable]) -> Index:
        """Return the index of the objects by *value_of*; one for each function."""
        if value_of not in self._indexes:
            self._indexes[value_of] = Index(self, value_of)
        return self._indexes[value_of]

    def turns(self, turn_of: Callable[[Body], Turn | None]) -> Turns:
        """Return the queues of the objects by *turn_of*; one instance for each function."""
        if turn_of not in self._turns:
            self._turns[turn_of] = Turns(self, turn_of)
        return self._turns[turn_of]

    def derive(self, make: Callable[..., T], body: Body, *others: object) -> T:
        """Return *make* of *body* and *others*, computed once for each generation.

        The latest value of each function is kept while the object is in the cache.

        Args:
            make: a pure module-level function. Of an object it reads the spec and immutable
                metadata only.
            body: any version of an object of this kind.
            others: further arguments, compared by identity.

        Raises:
            RedriveError: as *make* does; the same instance each time.
        """
        key, generation = Key.of(body), _generation(body)
        derived = self._derived.get(key, {}).get(make)
        if derived is None or not derived.is_of(generation, others):
            derived = _computed(make, body, others)
            if key in self._bodies:
                self._derived.setdefault(key, {})[make] = derived
        if derived.error is not None:
            # The traceback of a shared instance would grow with every raise.
            raise derived.error.with_traceback(None)
        value: T = derived.value
        return value

    async def derive_aside(self, make: Callable[..., T], body: Body, *others: object) -> T:
        """Return the result of `derive`, computed in a thread if it is not cached.

        For functions that take more than milliseconds, which would block the event loop. One is
        computed at a time, and namespaces take turns.

        Raises:
            RedriveError: as *make* does; the same instance each time.
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
        for index in self._indexes.values():  # first, because listeners read them
            index.note(key, before, after)
        for turns in self._turns.values():
            turns.note(key, after)
        for listener in self._listeners:
            listener(key, before, after)


class Index:
    """Objects of a cache by a value of each, so that a lookup does not visit all.

    Args:
        bodies: the objects.
        value_of: returns the value of an object.
    """

    def __init__(self, bodies: Iterable[Body], value_of: Callable[[Body], Hashable]) -> None:
        self._value_of = value_of
        self._by_value: dict[Hashable, dict[Key, Body]] = defaultdict(dict)
        for body in bodies:
            self.note(Key.of(body), None, body)

    def get(self, value: Hashable) -> tuple[Body, ...]:
        """Return the objects that have *value* now."""
        return tuple(self._by_value.get(value, {}).values())

    def keys(self, value: Hashable) -> tuple[Key, ...]:
        """Return the keys of the objects that have *value* now."""
        return tuple(self._by_value.get(value, ()))

    def first(self, value: Hashable, count: int) -> tuple[Key, ...]:
        """Return the keys of at most *count* objects that have *value*, the oldest change first."""
        return tuple(islice(self._by_value.get(value, ()), count))

    def count(self, value: Hashable) -> int:
        """Return the number of objects that have *value* now."""
        return len(self._by_value.get(value, ()))

    def note(self, key: Key, before: Body | None, after: Body | None) -> None:
        """Apply a change."""
        if before is not None:
            value = self._value_of(before)
            self._by_value[value].pop(key, None)
            if not self._by_value[value]:
                del self._by_value[value]
        if after is not None:
            self._by_value[self._value_of(after)][key] = after


class Turn(NamedTuple):
    """Turn of an object in a queue, in which the lowest rank is first."""

    queue: Hashable
    rank: tuple[Any, ...]


class Turns:
    """Objects of a cache in queues by rank, so that the first is found without a visit of all.

    Args:
        bodies: the objects.
        turn_of: returns the turn of an object; None if it waits in no queue.
    """

    def __init__(self, bodies: Iterable[Body], turn_of: Callable[[Body], Turn | None]) -> None:
        self._turn_of = turn_of
        self._turn: dict[Key, Turn] = {}
        self._queues: dict[Hashable, list[tuple[tuple[Any, ...], Key]]] = defaultdict(list)
        for body in bodies:
            self.note(Key.of(body), body)

    def first(self, queue: Hashable, count: int) -> tuple[tuple[tuple[Any, ...], Key], ...]:
        """Return the ranks and keys of at most *count* objects, the lowest rank first."""
        return tuple(self._queues.get(queue, ())[:count])

    def count(self, queue: Hashable) -> int:
        """Return the number of objects in a queue."""
        return len(self._queues.get(queue, ()))

    def before(self, turn: Turn) -> int:
        """Return the number of objects in the queue of *turn* whose rank is lower."""
        return bisect_left(self._queues.get(turn.queue, []), (turn.rank,))

    def note(self, key: Key, after: Body | None) -> None:
        """Apply a change."""
        turn = None if after is None else self._turn_of(after)
        before = self._turn.pop(key, None)
        if before is not None and before != turn:
            entries = self._queues[before.queue]
            del entries[bisect_left(entries, (before.rank, key))]
            if not entries:
                del self._queues[before.queue]
        if turn is not None:
            self._turn[key] = turn
            if turn != before:
                insort(self._queues[turn.queue], (turn.rank, key))


def needs_reconcile(before: Body | None, after: Body | None) -> bool:
    """Return True if a change of an object requires a reconcile.

    Such changes are creation, deletion, a new generation and changed annotations of redrive. A
    changed status or label requires none: otherwise each status patch would cause another
    reconcile.
    """
    return _intent(before) != _intent(after)


def _uid(body: Body) -> str:
    uid: str = body["metadata"]["uid"]
    return uid


def _generation(body: Body) -> tuple[str, int | None]:
    """Return the uid and the generation, which change whenever the spec changes."""
    return _uid(body), body["metadata"].get("generation")


def _computed(make: Callable[..., object], body: Body, others: tuple[object, ...]) -> _Derived:
    try:
        return _Derived(_generation(body), others, make(body, *others), None)
    except RedriveError as error:
        return _Derived(_generation(body), others, None, error)


def version(body: Body) -> int:
    """Return the sort key of the versions of an object.

    Since 1.35 Kubernetes defines this comparison of `resourceVersion`. Before, it was the same
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

"""Controller: a work queue with one task for each object that must be reconciled.

kopf provides the watches, but not the work queue. kopf's timers and daemons put a finalizer on each
object. redrive must reconcile objects again within seconds, with back-off, if they wait for
something without a watch, such as a Secret or a broker. And a burst of changes must cost one
reconcile.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from weakref import WeakValueDictionary

from redrive.admin.fair_slots import FairSlots, namespace_of_object
from redrive.errors import RedriveError, Requeue
from redrive.kube import logs
from redrive.kube.observability import QUEUE_DEPTH, QUEUE_SECONDS, RECONCILE_SECONDS, RECONCILES
from redrive.kube.resources import Key
from redrive.reasons import requeue_of

MAX_CONCURRENT_RECONCILES = 150
"""Maximum concurrent reconciles of each partition."""
OF_NAMESPACE = 120
"""Maximum concurrent reconciles of one namespace in a partition: others find a free slot.

The number of connections limits the load on a broker. But objects that are reconciled together
share the call for their grants, after which each loaded topic of their Pulsar namespace reads all
grants again. With 50, a thousand policies took a third more processor time of their broker.
"""
OF_ALL_PARTITIONS, FEWEST = 1_500, 60
"""The more partitions are in use, the fewer concurrent reconciles a new one has: an equal part, but
not fewer than the second number. Each takes about 20 kB, and there may be a hundred partitions."""
MARKS = 2
"""Maximum concurrent writes of `Progressing`."""
FIRST_BACK_OFF_SECONDS = 1.0
LAST_BACK_OFF_SECONDS = 15.0
SLOWEST_BACK_OFF_SECONDS = 300.0
"""For errors that a user or a new version must end: many such objects must not load a broker."""
RETRIES_PER_SECOND = 20.0
"""Maximum for the failing objects of one namespace: thousands must not fill the event loop."""

logger = logging.getLogger(__name__)


class Controller:
    """Work queue of one kind: reconciles each object in one task, never twice at a time.

    Objects with one partition key wait for each other, but not for other partitions: a slow broker
    delays only its own. Within a partition all namespaces have equal shares, see `FairSlots`.

    An unexpected exception from *reconcile* is logged with the object's identity, and counts as
    `SLOW_BACKOFF`. A `RedriveError` has its own requeue.

    Args:
        kind: for logs.
        reconcile: brings one object to its desired state.
        mark_progressing: called before that, because the object may wait in the queue.
        partition_key: returns the partition of an object; by default all share one.
        longest_back_off: maximum back-off in seconds for transient errors.
    """

    def __init__(
        self,
        kind: str,
        reconcile: Callable[[Key], Awaitable[Requeue]],
        *,
        mark_progressing: Callable[[Key], Awaitable[None]] | None = None,
        partition_key: Callable[[Key], Hashable] = lambda _: None,
        longest_back_off: float = LAST_BACK_OFF_SECONDS,
    ) -> None:
        self._kind = kind
        self._reconcile = reconcile
        self._mark_progressing = mark_progressing
        self._partition_key = partition_key
        # An entry exists while a task holds it or waits for it.
        self._slots = WeakValueDictionary[Hashable, FairSlots]()
        self._marking = FairSlots(MARKS)
        # One begins in each iteration of the event loop: many that never wait would delay it.
        self._starts = FairSlots(1)
        self._longest_back_off = longest_back_off
        self._changes: dict[Key, asyncio.Event] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._failures: dict[Key, int] = {}
        self._failing = Counter[str]()

    def failures(self, key: Key) -> int:
        """Return the number of consecutive requeues of an object with back-off."""
        return self._failures.get(key, 0)

    def enqueue(self, key: Key) -> None:
        """Reconcile an object now; if it is being reconciled, once more after that."""
        if key not in self._tasks:
            self._changes[key] = asyncio.Event()
            self._tasks[key] = asyncio.create_task(self._work(key), name=f"{self._kind} {key}")
        self._changes[key].set()

    async def stop(self) -> None:
        """Cancel all tasks, and wait for their end."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, key: Key) -> None:
        logs.about(self._kind, key)
        namespace_of_object.set(key.namespace)
        changed = self._changes[key]
        self._failures[key], pause = 0, None
        while True:
            if await _is_set(changed, within=pause):
                self._record(key, 0)
            changed.clear()
            requeue = await self._attempt(key)
            if requeue is Requeue.ON_CHANGE:
                self._record(key, 0)
                if not changed.is_set():
                    del self._changes[key], self._tasks[key], self._failures[key]
                    return
                pause = None
            else:
                self._record(key, self._failures[key] + 1)
                pause = self._pause(key, slow=requeue is Requeue.SLOW_BACKOFF)

    def _record(self, key: Key, failures: int) -> None:
        """Record the consecutive failures of an object."""
        self._failing[key.namespace] += (failures > 0) - (self._failures[key] > 0)
        if not self._failing[key.namespace]:
            del self._failing[key.namespace]
        self._failures[key] = failures

    def _pause(self, key: Key, *, slow: bool) -> float:
        """Return the seconds until an object that failed is reconciled again."""
        longest = SLOWEST_BACK_OFF_SECONDS if slow else self._longest_back_off
        pause = back_off(self._failures[key], longest)
        share = (self._failing[key.namespace] - 1) / RETRIES_PER_SECOND
        return max(pause, spread(min(share, SLOWEST_BACK_OFF_SECONDS)))

    async def _attempt(self, key: Key) -> Requeue:
        try:
            requeue = await self._reconcile_in_slot(key)
        except RedriveError as error:
            logger.warning("%s %s: %s", self._kind, key, error)
            self._count("error")
            requeue = requeue_of(error)
            return Requeue.BACKOFF if requeue is Requeue.ON_CHANGE else requeue
        except Exception:
            logger.exception("%s %s: reconciling failed, will be retried", self._kind, key)
            self._count("error")
            return Requeue.SLOW_BACKOFF
        self._count(requeue.result)
        logger.debug("%s %s: reconciled: %s", self._kind, key, requeue.result)
        return requeue

    async def _reconcile_in_slot(self, key: Key) -> Requeue:
        depth, waiting = QUEUE_DEPTH.labels(self._kind), QUEUE_SECONDS.labels(self._kind)
        with depth.track_inprogress(), waiting.time():
            if self._mark_progressing is not None:
                async with self._marking.slot(key.namespace):
                    await self._mark_progressing(key)
            slots = self._slots.setdefault(self._partition_key(key), self._new_slots())
            await slots.acquire(key.namespace)
        try:
            async with self._starts.slot(key.namespace):
                await asyncio.sleep(0)
            with RECONCILE_SECONDS.labels(self._kind).time():
                return await self._reconcile(key)
        finally:
            slots.release(key.namespace)

    def _new_slots(self) -> FairSlots:
        part = OF_ALL_PARTITIONS // (len(self._slots) + 1)
        count = min(MAX_CONCURRENT_RECONCILES, max(FEWEST, part))
        return FairSlots(count, count * OF_NAMESPACE // MAX_CONCURRENT_RECONCILES)

    def _count(self, result: str) -> None:
        RECONCILES.labels(self._kind, result).inc()


async def _is_set(changed: asyncio.Event, *, within: float | None) -> bool:
    try:
        async with asyncio.timeout(within):
            return await changed.wait()
    except TimeoutError:
        return False


def back_off(failures: int, longest: float) -> float:
    """Return the seconds to wait, at most *longest*, after consecutive failures."""
    return spread(min(FIRST_BACK_OFF_SECONDS * 2.0 ** min(failures - 1, 10), longest))


def spread(seconds: float) -> float:
    """Return a random part of a pause, at least half, so that objects do not wait together."""
    return seconds * random.uniform(0.5, 1.0)  # noqa: S311  spreads load, is not a secret

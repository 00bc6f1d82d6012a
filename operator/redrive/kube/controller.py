"""One endless task for each object: woken by changes, it reconciles, and again until it is done.

Watches come through kopf; the loop is ours, because an object that waits for something which
cannot be watched (a Secret, a broker) must be looked at again within seconds, and a burst of
changes must cost one reconcile.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Hashable
from weakref import WeakValueDictionary

from redrive.errors import RedriveError, Requeue
from redrive.kube import logs, metrics
from redrive.kube.resources import Key

AT_ONCE = 200
"""So many objects of one lane are reconciled at the same time, and so many of all greeted.

What limits the load on a broker are the connections to it; but those that are reconciled together
share a call for their grants, which is dear whatever their number.
"""
FIRST_BACK_OFF_SECONDS = 1.0
LAST_BACK_OFF_SECONDS = 15.0

logger = logging.getLogger(__name__)


def _one_partition(_: Key) -> None:
    """Have all objects wait for the same."""


class Controller:
    """Keeps the objects of one kind reconciled, each by one task, never twice at a time.

    Objects of one lane wait for one another where there are many, and for nobody else: what is slow
    holds up its own lane alone.

    An exception from *reconcile* is logged with the object's identity, and counts as `SOON`.

    Args:
        kind: for logs.
        reconcile: brings one object to what it should be.
        greet: called before that, while the object may have to wait for others to be reconciled.
        lane: which lane an object is in; by default all are in the same.
        longest_back_off: how many seconds lie at most between two looks at what is unsettled.
    """

    def __init__(
        self,
        kind: str,
        reconcile: Callable[[Key], Awaitable[Requeue]],
        *,
        mark_progressing: Callable[[Key], Awaitable[None]] | None = None,
        partition_key: Callable[[Key], Hashable] = _one_partition,
        longest_back_off: float = LAST_BACK_OFF_SECONDS,
    ) -> None:
        self._kind = kind
        self._reconcile = reconcile
        self._mark_progressing = mark_progressing
        self._partition_key = partition_key
        # Each is there for as long as somebody waits for it or works with it.
        self._slots = WeakValueDictionary[Hashable, asyncio.Semaphore]()
        self._greetings = asyncio.Semaphore(AT_ONCE)
        self._longest_back_off = longest_back_off
        self._wishes: dict[Key, asyncio.Event] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}

    def enqueue(self, key: Key) -> None:
        """Have an object looked at now; during its reconcile: once more right after it."""
        if key not in self._tasks:
            self._wishes[key] = asyncio.Event()
            self._tasks[key] = asyncio.create_task(self._keep(key), name=f"{self._kind} {key}")
        self._wishes[key].set()

    async def stop(self) -> None:
        """End all tasks, in the midst of a reconcile too, and wait for them."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, key: Key) -> None:
        logs.about(self._kind, key)
        wish = self._wishes[key]
        failures = 0
        while True:
            pause = back_off(failures, self._longest_back_off) if failures else None
            if await _comes(wish, within=pause):
                failures = 0
            wish.clear()
            again = await self._look(key)
            if again is Requeue.NEVER and not wish.is_set():
                del self._wishes[key], self._tasks[key]
                return
            failures = failures + 1 if again is Requeue.BACKOFF else 0

    async def _look(self, key: Key) -> Requeue:
        try:
            again = await self._attend_to(key)
        except RedriveError as error:
            logger.warning("%s %s: %s", self._kind, key, error)
            self._count("error")
            return Requeue.BACKOFF
        except Exception:
            logger.exception("%s %s: reconciling failed, will be tried again", self._kind, key)
            self._count("error")
            return Requeue.BACKOFF
        self._count(again.result)
        return again

    async def _attend_to(self, key: Key) -> Requeue:
        with metrics.QUEUE_DEPTH.labels(self._kind).track_inprogress():
            if self._mark_progressing is not None:
                async with self._greetings:
                    await self._mark_progressing(key)
            slots = self._slots.setdefault(self._partition_key(key), asyncio.Semaphore(AT_ONCE))
            await slots.acquire()
        try:
            with metrics.RECONCILE_SECONDS.labels(self._kind).time():
                return await self._reconcile(key)
        finally:
            slots.release()

    def _count(self, result: str) -> None:
        metrics.RECONCILES.labels(self._kind, result).inc()


async def _comes(wish: asyncio.Event, *, within: float | None) -> bool:
    try:
        async with asyncio.timeout(within):
            return await wish.wait()
    except TimeoutError:
        return False


def back_off(failures: int, longest: float) -> float:
    """Return the seconds to wait, at most *longest*, after so many failures in a row from 1 on."""
    pause = min(FIRST_BACK_OFF_SECONDS * 2.0 ** min(failures - 1, 10), longest)
    return pause * random.uniform(0.5, 1.0)  # noqa: S311  spreads load, keeps no secret

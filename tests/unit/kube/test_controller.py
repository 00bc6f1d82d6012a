from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

import pytest
from prometheus_client import REGISTRY

from redrive.admin.errors import AuthenticationFailedError
from redrive.errors import InvalidSpecError, Requeue
from redrive.kube import controller
from redrive.kube.controller import LAST_BACK_OFF_SECONDS, RETRIES_PER_SECOND, Controller
from redrive.kube.resources import Key

ORDERS = Key("shop", "orders")
HOUR = 3600.0
"""Longer than any back-off."""
pytestmark = pytest.mark.usefixtures("virtual_time")

REFUSED = AuthenticationFailedError("the token is refused", remedy="give another")


class Looks:
    """Counts looks, and gives the answers in order; the last one repeats."""

    def __init__(self, *answers: Requeue | Exception) -> None:
        self._answers = list(answers)
        self.count = 0
        self.changed = asyncio.Condition()

    async def __call__(self, _: Key) -> Requeue:
        """Look at an object."""
        async with self.changed:
            self.count += 1
            self.changed.notify_all()
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def reach(self, count: int) -> None:
        """Return after that many looks."""
        async with asyncio.timeout(HOUR), self.changed:
            await self.changed.wait_for(lambda: self.count >= count)


async def until(holds: Callable[[], bool]) -> None:
    """Return once it *holds*."""
    async with asyncio.timeout(HOUR):
        while not holds():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(1)


async def test_settled_object_is_reconciled_once_per_change() -> None:
    looks = Looks(Requeue.ON_CHANGE)
    kept = Controller("Kind", looks)
    kept.enqueue(ORDERS)
    await looks.reach(1)
    await asyncio.sleep(HOUR)
    assert looks.count == 1
    kept.enqueue(ORDERS)
    await looks.reach(2)
    await kept.stop()


async def test_unsettled_object_is_reconciled_until_it_settles() -> None:
    looks = Looks(Requeue.BACKOFF, Requeue.BACKOFF, Requeue.ON_CHANGE)
    kept = Controller("Kind", looks)
    kept.enqueue(ORDERS)
    await looks.reach(3)
    await asyncio.sleep(HOUR)
    assert looks.count == 3
    await kept.stop()


async def test_exception_is_logged_and_does_not_end_the_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours = InvalidSpecError("a thing is wrong", remedy="fix it")
    looks = Looks(KeyError("surprise"), ours, Requeue.ON_CHANGE)
    kept = Controller("Kind", looks)
    with caplog.at_level(logging.WARNING):
        kept.enqueue(ORDERS)
        await looks.reach(3)
    await kept.stop()
    surprise, expected = caplog.records
    assert "Kind shop/orders" in surprise.getMessage()
    assert surprise.exc_info is not None
    assert expected.getMessage() == "Kind shop/orders: a thing is wrong; fix it"
    assert expected.exc_info is None


async def test_change_during_reconcile_causes_one_more() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()
    count = 0

    async def look(_: Key) -> Requeue:
        nonlocal count
        count += 1
        begun.set()
        await go_on.wait()
        return Requeue.ON_CHANGE

    kept = Controller("Kind", look)
    kept.enqueue(ORDERS)
    await begun.wait()
    for _ in range(5):
        kept.enqueue(ORDERS)
    go_on.set()
    await until(lambda: count >= 2)
    await asyncio.sleep(HOUR)
    assert count == 2
    await kept.stop()


async def test_task_ends_with_its_object_and_may_come_again() -> None:
    looks = Looks(Requeue.ON_CHANGE)
    kept = Controller("Kind", looks)
    kept.enqueue(ORDERS)
    await looks.reach(1)
    await until(
        lambda: not [task for task in asyncio.all_tasks() if "shop/orders" in task.get_name()]
    )
    kept.enqueue(ORDERS)
    await looks.reach(2)
    await kept.stop()


def measured(name: str, **labels: str) -> float:
    """Return a metric; 0 without one."""
    return REGISTRY.get_sample_value(name, labels) or 0.0


async def test_reconciles_are_counted_by_result_and_timed() -> None:
    looks = Looks(Requeue.BACKOFF, KeyError("surprise"), Requeue.ON_CHANGE)
    kept = Controller("Counted", looks)
    kept.enqueue(ORDERS)
    await looks.reach(3)
    await until(lambda: measured("redrive_reconcile_duration_seconds_count", kind="Counted") == 3)
    await kept.stop()
    outcomes = {
        result: measured("redrive_reconciles_total", kind="Counted", result=result)
        for result in ("success", "requeue", "error")
    }
    assert outcomes == {"success": 1, "requeue": 1, "error": 1}
    assert measured("redrive_reconcile_duration_seconds_count", kind="Counted") == 3


async def test_queue_depth_counts_waiting_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(controller, "MAX_CONCURRENT_RECONCILES", 1)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def look(_: Key) -> Requeue:
        begun.set()
        await go_on.wait()
        return Requeue.ON_CHANGE

    kept = Controller("Queued", look)
    for name in "abc":
        kept.enqueue(Key("shop", name))
    await begun.wait()
    await until(lambda: measured("redrive_reconcile_queue_depth", kind="Queued") == 2)
    go_on.set()
    await until(lambda: measured("redrive_reconcile_queue_depth", kind="Queued") == 0)
    assert measured("redrive_reconcile_queue_duration_seconds_count", kind="Queued") == 3
    assert measured("redrive_reconcile_queue_duration_seconds_sum", kind="Queued") > 0
    await kept.stop()


async def test_waiting_objects_are_marked_progressing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(controller, "MAX_CONCURRENT_RECONCILES", 1)
    marked: list[str] = []
    go_on = asyncio.Event()

    async def mark_progressing(key: Key) -> None:
        marked.append(key.name)

    async def look(_: Key) -> Requeue:
        await go_on.wait()
        return Requeue.ON_CHANGE

    kept = Controller("Kind", look, mark_progressing=mark_progressing)
    for name in "abc":
        kept.enqueue(Key("shop", name))
    await until(lambda: len(marked) == 3)
    assert marked == ["a", "b", "c"]
    await kept.stop()


async def test_failed_progress_mark_is_retried_before_reconcile() -> None:
    attempts = 0
    looks = Looks(Requeue.ON_CHANGE)

    async def mark_progressing(_: Key) -> None:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise InvalidSpecError("it can't be written", remedy="wait")

    kept = Controller("Kind", looks, mark_progressing=mark_progressing)
    kept.enqueue(ORDERS)
    await looks.reach(1)
    assert attempts == 3
    await kept.stop()


async def test_back_off_may_be_bounded_further() -> None:
    looks = Looks(Requeue.BACKOFF)
    kept = Controller("Kind", looks, longest_back_off=0.0)
    kept.enqueue(ORDERS)
    began = asyncio.get_running_loop().time()
    await looks.reach(20)
    assert asyncio.get_running_loop().time() == began
    await kept.stop()


async def test_failing_objects_of_a_namespace_share_retries() -> None:
    """Thousands of connections to an address without a broker were probed every five seconds."""
    counts = Counter[str]()

    async def fail(key: Key) -> Requeue:
        counts[key.namespace] += 1
        return Requeue.BACKOFF

    kept = Controller("Kind", fail)
    for number in range(600):
        kept.enqueue(Key("crowded", str(number)))
    kept.enqueue(ORDERS)
    await asyncio.sleep(300)
    assert counts["shop"] >= 300 / LAST_BACK_OFF_SECONDS
    assert RETRIES_PER_SECOND <= counts["crowded"] / 300 <= 2 * RETRIES_PER_SECOND
    await kept.stop()


async def test_lasting_failures_back_off_to_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, float]] = []

    def at_once(failures: int, longest: float) -> float:
        asked.append((failures, longest))
        return 0.0

    monkeypatch.setattr(controller, "back_off", at_once)
    looks = Looks(
        Requeue.SLOW_BACKOFF, Requeue.BACKOFF, KeyError("surprise"), REFUSED, Requeue.ON_CHANGE
    )
    kept = Controller("Kind", looks, longest_back_off=5.0)
    kept.enqueue(ORDERS)
    await looks.reach(4)
    assert kept.failures(ORDERS) == 4
    await looks.reach(5)
    await until(lambda: kept.failures(ORDERS) == 0)
    assert asked == [(1, 300.0), (2, 5.0), (3, 300.0), (4, 300.0)]
    await kept.stop()


async def test_concurrent_reconciles_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(controller, "MAX_CONCURRENT_RECONCILES", 3)
    now = most = done = 0

    async def look(_: Key) -> Requeue:
        nonlocal now, most, done
        now += 1
        most = max(most, now)
        await asyncio.sleep(1)
        now -= 1
        done += 1
        return Requeue.ON_CHANGE

    kept = Controller("Kind", look)
    for number in range(20):
        kept.enqueue(Key("shop", f"policy-{number}"))
    await until(lambda: done == 20)
    assert most == 3
    await kept.stop()


async def test_hanging_objects_block_only_their_partition() -> None:
    looked: asyncio.Queue[Key] = asyncio.Queue()

    async def look(key: Key) -> Requeue:
        looked.put_nowait(key)
        if key.namespace == "hangs":
            await asyncio.Event().wait()
        return Requeue.ON_CHANGE

    kept = Controller("Kind", look, partition_key=lambda key: key.namespace)
    for number in range(controller.OF_NAMESPACE + 10):
        kept.enqueue(Key("hangs", f"policy-{number}"))
    async with asyncio.timeout(5):
        for _ in range(controller.OF_NAMESPACE):
            assert (await looked.get()).namespace == "hangs"
        kept.enqueue(ORDERS)
        assert await looked.get() == ORDERS
    await kept.stop()


async def test_partitions_share_all_concurrent_reconciles() -> None:
    at_work = Counter[str]()

    async def look(key: Key) -> Requeue:
        at_work[key.namespace] += 1
        await asyncio.Event().wait()
        return Requeue.ON_CHANGE

    kept = Controller("Kind", look, partition_key=lambda key: key.namespace)
    for partition in range(100):
        for number in range(100):
            kept.enqueue(Key(f"partition-{partition}", f"policy-{number}"))
    await until(lambda: len(at_work) == 100 and min(at_work.values()) == 48)
    await asyncio.sleep(0.1)
    assert max(at_work.values()) == 100
    assert sum(at_work.values()) < 6_000
    await kept.stop()


@pytest.mark.parametrize("marks", [False, True])
async def test_crowd_of_a_namespace_delays_no_other(*, marks: bool) -> None:
    begun: list[Key] = []

    async def work(key: Key) -> Requeue:
        begun.append(key)
        await asyncio.sleep(1)
        return Requeue.ON_CHANGE

    async def mark(key: Key) -> None:
        await work(key)

    kept = Controller("Kind", work, mark_progressing=mark if marks else None)
    for number in range(2_000):
        kept.enqueue(Key("crowd", str(number)))
    await asyncio.sleep(1.5)
    began = asyncio.get_running_loop().time()
    kept.enqueue(ORDERS)
    await until(lambda: begun.count(ORDERS) == 1 + marks)
    assert asyncio.get_running_loop().time() - began <= 3
    await kept.stop()


async def test_raising_partition_key_is_a_failed_reconcile(
    caplog: pytest.LogCaptureFixture,
) -> None:
    looks, asked = Looks(Requeue.ON_CHANGE), 0

    def partition_key(_: Key) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise KeyError("connectionRef")

    kept = Controller("Kind", looks, partition_key=partition_key)
    kept.enqueue(ORDERS)
    await looks.reach(1)
    assert asked == 2
    assert "Kind shop/orders: reconciling failed" in caplog.text
    await kept.stop()


def test_back_off_doubles_from_1_s_to_15_s_with_jitter() -> None:
    for failures, longest in [(1, 1), (2, 2), (3, 4), (4, 8), (5, 15), (6, 15), (10_000, 15)]:
        for _ in range(20):
            assert longest / 2 <= controller.back_off(failures, 15.0) <= longest

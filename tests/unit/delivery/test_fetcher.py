"""Who waits, and is woken: races that no broker can be made to repeat."""

from __future__ import annotations

import queue
import threading
from datetime import timedelta
from typing import Any

import pytest

from redrive import Policy, RetryConsumer
from redrive.delivery.concurrency import Deadline, Timer
from redrive.delivery.fetcher import Fetcher
from redrive.delivery.middleware.ack_timeouts import AckTimeouts
from redrive.delivery.parts import SystemClock
from redrive.policy.naming import TopicName
from tests.support.fake_client import FakeClient

POLICY = Policy(TopicName("shop", "prod", "orders"), "billing")


class Counting(queue.SimpleQueue[None]):
    """A queue that tells how many have come to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = threading.Semaphore(0)

    def get(self, block: bool = True, timeout: float | None = None) -> None:  # noqa: FBT001, FBT002
        self.waiting.release()
        super().get(block, timeout)


@pytest.fixture
def fetcher() -> Any:  # noqa: ANN401 - an inbox that takes anything for a message
    fetcher = Fetcher([])
    yield fetcher
    fetcher.close(Deadline(10))


def test_all_who_wait_get_what_is_handed_out_again_at_the_same_time(fetcher: Any) -> None:  # noqa: ANN401
    wakings = fetcher._wakings = Counting()  # noqa: SLF001
    got: queue.SimpleQueue[str] = queue.SimpleQueue()
    takers = [
        threading.Thread(target=lambda: got.put(fetcher.take()), daemon=True) for _ in range(3)
    ]
    for taker in takers:
        taker.start()
    for _ in takers:
        assert wakings.waiting.acquire(timeout=30)
    for message in "abc":
        fetcher.again(message, 0)
    assert sorted(got.get(timeout=30) for _ in takers) == ["a", "b", "c"]


def test_who_gives_up_waiting_wakes_another_for_what_is_still_to_come(fetcher: Any) -> None:  # noqa: ANN401
    fetcher.again("a", 60)
    assert fetcher.take(0) is None
    assert not fetcher._wakings.empty()  # noqa: SLF001


def test_one_can_wait_for_ever() -> None:
    client = FakeClient()
    with RetryConsumer(client.as_pulsar(), POLICY, ack_timeout=timedelta.max) as consumer:
        threading.Timer(0.1, client.deliver, (POLICY.topic, b"x")).start()
        message = consumer.receive(timedelta.max)
        assert message is not None
        assert message.data() == b"x"
        assert [m.data() for m in consumer.receive_batch(0, timedelta.max)] == []
        assert consumer.receive(timedelta.min) is None


def test_an_alarm_can_be_set_for_ever_and_earlier_again() -> None:
    ack_timeouts = AckTimeouts(timedelta.max, SystemClock())
    ack_timeouts.begin(object())
    asked = threading.Semaphore(0)

    def next_due() -> float | None:
        asked.release()
        return ack_timeouts.next_end()

    timer = Timer(next_due, lambda: None)
    for _ in range(3):
        assert asked.acquire(timeout=30)
        timer.look()
    timer.close()

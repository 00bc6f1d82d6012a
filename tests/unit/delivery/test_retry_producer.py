from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from typing import Any, cast

import pulsar
import pytest

from redrive import AsyncRetryProducer, RetryProducer
from redrive.errors import InvalidSpecError

CLIENT = cast("pulsar.Client", None)  # no test gets as far as to use it


@pytest.mark.parametrize(
    ("choice", "wrong"),
    [
        ({"send_retries": -1}, "send_retries"),
        ({"timeout": timedelta()}, "time-out"),
        ({"in_flight": 0}, "at a time"),
    ],
)
async def test_what_no_producer_could_do_is_refused(choice: dict[str, Any], wrong: str) -> None:
    with pytest.raises(InvalidSpecError, match=wrong):
        RetryProducer(CLIENT, "orders", **choice)
    with pytest.raises(InvalidSpecError, match=wrong):
        async with AsyncRetryProducer(CLIENT, "orders", **choice):
            raise AssertionError


async def test_an_asynchronous_producer_sends_only_while_it_is_open() -> None:
    with pytest.raises(InvalidSpecError, match="async with"):
        await AsyncRetryProducer(CLIENT, "orders").send(b"x")


class Stuck:
    """A client whose first producer never answers, as while it reconnects for ever."""

    def __init__(self) -> None:
        self.made: list[StuckProducer] = []

    def get_topic_partitions(self, topic: str) -> list[str]:
        return [topic]

    def create_producer(self, _topic: str, *, producer_name: str, **_options: object) -> object:
        self.made.append(StuckProducer(producer_name, answers=bool(self.made)))
        return self.made[-1]


class StuckProducer:
    """What it makes. It can't but send in the caller's thread: other ways leak in the client."""

    def __init__(self, name: str, *, answers: bool) -> None:
        self.name = name
        self.sent: list[int] = []
        self._answers = answers
        self._closed = threading.Event()

    def last_sequence_id(self) -> int:
        return -1

    def send(self, _content: bytes, *, sequence_id: int, **_fields: object) -> pulsar.MessageId:
        self.sent.append(sequence_id)
        if not self._answers:
            assert self._closed.wait(10)
            raise pulsar.AlreadyClosed
        return pulsar.MessageId(-1, 5, sequence_id)

    def close(self) -> None:
        if self._closed.is_set():
            raise pulsar.AlreadyClosed
        self._closed.set()


def test_a_send_that_never_ends_is_given_up_and_made_again_as_the_same() -> None:
    client = Stuck()
    with RetryProducer(
        cast("pulsar.Client", client), "orders", timeout=timedelta(milliseconds=10)
    ) as producer:
        assert producer.send(b"1") == pulsar.MessageId(-1, 5, 1)
        assert producer.send(b"2") == pulsar.MessageId(-1, 5, 2)
    given_up, used = client.made
    assert given_up.name == used.name
    assert (given_up.sent, used.sent) == ([1], [1, 2])
    assert not [t for t in threading.enumerate() if t.name == "redrive-send-watchdog"]


async def test_entering_that_is_cancelled_leaves_no_producer_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entering, go_on, closed = threading.Event(), threading.Event(), threading.Event()
    opened = RetryProducer(cast("pulsar.Client", Stuck()), "orders")
    close = opened.close

    def close_and_tell() -> None:
        close()
        closed.set()

    monkeypatch.setattr(opened, "close", close_and_tell)

    def open_slowly() -> RetryProducer:
        entering.set()
        go_on.wait(30)
        return opened

    producer = AsyncRetryProducer(CLIENT, "orders")
    monkeypatch.setattr(producer, "_open", open_slowly)
    task = asyncio.create_task(producer.__aenter__())
    await asyncio.to_thread(entering.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    assert await asyncio.to_thread(closed.wait, 30)

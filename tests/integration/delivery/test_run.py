from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

from redrive.delivery.inbox import ConsumerStoppedError

SetStage = Callable[..., Any]
SOON = timedelta(seconds=15)


def test_run_acknowledges_what_returns_and_retries_what_raises(
    set_stage: SetStage, caplog: pytest.LogCaptureFixture
) -> None:
    stage = set_stage(max_retries=1)
    stage.send(b"good", b"once", b"never")
    consumer = stage.consumer()
    handled: list[tuple[bytes, str | None]] = []

    def handle(message: Any) -> None:  # noqa: ANN401 - the client publishes no types
        count = message.properties().get("RECONSUMETIMES")
        handled.append((message.data(), count))
        if len(handled) == 5:
            consumer.stop()
        if message.data() == b"never" or (message.data() == b"once" and count is None):
            text = "out of order"
            raise LookupError(text)

    consumer.run(handle)
    consumer.close()

    assert sorted(handled, key=str) == [
        (b"good", None), (b"never", "1"), (b"never", None), (b"once", "1"), (b"once", None),
    ]  # fmt: skip
    (dead,) = stage.dead_letters(1)
    assert dead.data() == b"never"
    assert dead.properties()["REDRIVE_CAUSE_TYPE"] == "LookupError"
    assert dead.properties()["REDRIVE_CAUSE_MESSAGE"] == "out of order"
    assert stage.backlog(stage.policy.topic) == stage.backlog(stage.policy.retry_topic) == 0
    assert "Traceback" in caplog.text


def test_close_waits_for_the_message_that_run_has_in_hand(set_stage: SetStage) -> None:
    stage = set_stage()
    stage.send(b"1", b"2")
    consumer = stage.consumer()
    began = threading.Event()
    finished = []

    def handle(message: Any) -> None:  # noqa: ANN401 - the client publishes no types
        began.set()
        time.sleep(1)
        finished.append(message.data())

    running = threading.Thread(target=consumer.run, args=(handle,))
    running.start()
    assert began.wait(15)
    consumer.close()

    assert finished == [b"1"]
    running.join(5)
    assert not running.is_alive()
    assert stage.backlog(stage.policy.topic) == 1


def test_stop_wakes_whoever_waits_for_a_message(set_stage: SetStage) -> None:
    consumer = set_stage().consumer()
    ended = []

    def wait() -> None:
        with pytest.raises(ConsumerStoppedError):
            consumer.receive()
        ended.append(True)

    waiting = [threading.Thread(target=wait) for _ in range(3)]
    for thread in waiting:
        thread.start()
    consumer.stop()
    for thread in waiting:
        thread.join(5)
    assert len(ended) == 3


def test_no_message_within_the_time_out_is_none(set_stage: SetStage) -> None:
    assert set_stage().consumer().receive(timedelta(milliseconds=100)) is None


def test_source_and_retry_topic_take_turns_while_both_have_messages(set_stage: SetStage) -> None:
    stage = set_stage()
    stage.send(*[b"new"] * 200)
    stage.send(*[b"retried"] * 50, topic=stage.policy.retry_topic)
    consumer = stage.consumer()
    time.sleep(2)  # until both have arrived

    served = [consumer.receive(SOON).topic_name() for _ in range(40)]

    assert all(former != latter for former, latter in pairwise(served))

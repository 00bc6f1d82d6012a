from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pulsar
import pytest

from redrive import Policy
from redrive.delivery.run import stopping_at_sigterm
from redrive.policy.naming import TopicName
from redrive.testing.consumers import AsyncInMemoryConsumer

POLICY = Policy(TopicName("shop", "prod", "orders"), "billing")


def terminate() -> None:
    """Send SIGTERM to this process, whose handlers have run on return: it is the main thread."""
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(autouse=True)
def heedless() -> Iterator[None]:
    """Restore the default at SIGTERM, as in a program that does nothing of its own."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    signal.signal(signal.SIGTERM, before)


async def test_every_consumer_of_a_loop_finishes_what_it_has_in_hand_and_takes_no_more() -> None:
    consumers = [AsyncInMemoryConsumer(POLICY, name=name) for name in ("a", "b", "c")]
    in_hand = threading.Barrier(len(consumers) + 1)
    go_on = asyncio.Event()
    handled = []

    async def handle(message: pulsar.Message) -> None:
        await asyncio.to_thread(in_hand.wait, 10)
        await go_on.wait()
        handled.append(message.data())

    for consumer in consumers:
        consumer.send(b"first")
        consumer.send(b"second")
    runs = asyncio.gather(*[consumer.run(handle) for consumer in consumers])
    await asyncio.to_thread(in_hand.wait, 10)
    terminate()
    go_on.set()
    await runs
    assert handled == [b"first"] * len(consumers)
    assert [len(consumer.broker.unsettled()) for consumer in consumers] == [1, 1, 1]


def test_a_run_that_ends_leaves_the_others_their_signal() -> None:
    stopped = []
    first = stopping_at_sigterm(lambda: stopped.append("first"))
    second = stopping_at_sigterm(lambda: stopped.append("second"))
    first.__enter__()
    with second:
        first.__exit__(None, None, None)
        terminate()
    assert stopped == ["second"]


def test_what_the_program_does_at_sigterm_by_itself_is_left_to_it() -> None:
    heard = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append("program"))
    with stopping_at_sigterm(lambda: heard.append("redrive")):
        terminate()
    terminate()
    assert heard == ["program"] * 2
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_handler_that_the_program_sets_meanwhile_stays() -> None:
    heard = []
    with stopping_at_sigterm(lambda: heard.append("redrive")):
        signal.signal(signal.SIGTERM, lambda *_: heard.append("program"))
    terminate()
    assert heard == ["program"]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_signal_that_comes_as_soon_as_it_is_heeded_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    heed, stopped = signal.signal, []

    def heed_and_hear(number: int, handler: Any) -> object:  # noqa: ANN401 - as signal.signal
        before = heed(number, handler)
        terminate()
        return before

    with monkeypatch.context() as patch:
        patch.setattr(signal, "signal", heed_and_hear)
        context = stopping_at_sigterm(lambda: stopped.append("begin"))
        context.__enter__()
    assert stopped == ["begin"]
    context.__exit__(None, None, None)


def test_a_signal_that_comes_while_it_is_still_heeded_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heed, stopped = signal.signal, []

    def hear_and_heed(number: int, handler: Any) -> object:  # noqa: ANN401 - as signal.signal
        terminate()
        return heed(number, handler)

    with stopping_at_sigterm(lambda: stopped.append("end")):
        monkeypatch.setattr(signal, "signal", hear_and_heed)
    assert stopped == ["end"]
    monkeypatch.undo()

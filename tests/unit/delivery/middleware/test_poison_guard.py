"""What waits for what when a message is suspected of having killed a process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from redrive import CrashLog, Policy
from redrive.delivery.middleware.chain import DONE, Settlement
from redrive.delivery.middleware.poison_guard import CrashLogFile, PoisonGuard
from redrive.delivery.parts import Incoming, Parts, Subscribing
from redrive.messages import id_text
from redrive.policy.naming import TopicName
from redrive.testing.broker import InMemoryBroker
from redrive.testing.connection import InMemoryConnection
from redrive.testing.consumers import InMemoryConsumer

POLICY = Policy(TopicName("shop", "prod", "orders"), "billing")
SLICE = 0.25
"""In such slices an asynchronous consumer waits."""


SUBSCRIBING = Subscribing("in-memory", timedelta(), 1_000)


class Guarded:
    """Messages as they come through a guard, and go."""

    def __init__(self, guard: PoisonGuard, parts: Parts) -> None:
        self.take = guard.receive(parts.incoming.take)
        self._settle = guard.settle(lambda _: None)

    def end(self, message: object) -> None:
        """Settle *message* as handled."""
        self._settle(Settlement(message, DONE))


class Harness:
    """Messages 0, 1, 2 …, some of which were in hand when a process was killed."""

    def __init__(self, notes: Path) -> None:
        self.broker = InMemoryBroker(POLICY)
        self.clock = self.broker.clock
        self.ending = ExitStack()
        self._notes = notes
        self._producer = InMemoryConsumer(POLICY, broker=self.broker)
        self.ids = [id_text(self._producer.send(f"{n}".encode())) for n in range(4)]

    def poison_guard(self, *numbers: int, parts: Parts | None = None) -> Guarded:
        """Return what hands them out, *numbers* being suspects."""
        log_file = CrashLogFile(self._notes, POLICY)
        for number in numbers:
            log_file.begin(self.ids[number])
        (file,) = self._notes.glob("*.notes")
        left_behind = file.read_text()
        log_file.close()
        file.write_text(left_behind)  # as a kill leaves it
        parts = parts or InMemoryConnection(self.broker).open(POLICY, SUBSCRIBING)
        guard = PoisonGuard(parts, CrashLog(self._notes), POLICY, self.bury)
        self.ending.callback(guard.close)
        return Guarded(guard, parts)

    def bury(self, message: object, error: Exception) -> bool:
        pytest.fail(f"{message} {error}")

    def seconds_until(self, poison_guard: Guarded, content: bytes) -> float:
        """Ask in slices until something comes, which is *content*."""
        began = self.clock.monotonic()
        while (message := poison_guard.take(SLICE)) is None:
            assert self.clock.monotonic() - began < 600
        assert message.data() == content
        return self.clock.monotonic() - began


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tmp_path)
    with harness.ending:
        yield harness


def take(poison_guard: Guarded) -> Any:  # noqa: ANN401 - the client publishes no types
    message = poison_guard.take(SLICE)
    assert message is not None
    return message


def test_a_suspect_is_in_hand_alone(harness: Harness) -> None:
    poison_guard = harness.poison_guard(1)
    first = take(poison_guard)
    assert poison_guard.take(SLICE) is None  # the suspect waits for it
    poison_guard.end(first)
    suspect = take(poison_guard)
    assert suspect.data() == b"1"
    assert poison_guard.take(SLICE) is None
    poison_guard.end(suspect)
    assert [take(poison_guard).data() for _ in range(2)] == [b"2", b"3"]


def test_no_taker_that_asks_in_slices_waits_for_ever_while_a_suspect_is_in_hand(
    harness: Harness,
) -> None:
    poison_guard = harness.poison_guard(0)
    take(poison_guard)
    assert 60 <= harness.seconds_until(poison_guard, b"1") < 61
    assert harness.seconds_until(poison_guard, b"2") == 0  # nothing was settled: it has been tried


def test_a_suspect_waits_for_others_in_hand_no_longer_than_a_minute_whatever_the_slices(
    harness: Harness,
) -> None:
    poison_guard = harness.poison_guard(1)
    take(poison_guard)
    assert 60 <= harness.seconds_until(poison_guard, b"1") < 61


def test_what_is_settled_meanwhile_restarts_the_wait(harness: Harness) -> None:
    poison_guard = harness.poison_guard(2)
    first = take(poison_guard)
    take(poison_guard)
    assert poison_guard.take(50) is None
    poison_guard.end(first)
    assert 60 <= harness.seconds_until(poison_guard, b"2") < 61


class Held:
    """An incoming whose `sleep` lasts until a test lets it go on."""

    def __init__(self, incoming: Incoming) -> None:
        self._incoming = incoming
        self.sleeps = threading.Event()
        self.goes_on = threading.Event()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as the real one has it
        return getattr(self._incoming, name)

    def sleep(self, seconds: float) -> None:
        self.sleeps.set()
        assert self.goes_on.wait(30)
        self._incoming.sleep(seconds)


def test_nothing_is_handed_out_to_other_workers_while_a_suspect_waits(harness: Harness) -> None:
    parts = InMemoryConnection(harness.broker).open(POLICY, SUBSCRIBING)
    incoming: Any = Held(parts.incoming)
    poison_guard = harness.poison_guard(1, parts=replace(parts, incoming=incoming))
    first = take(poison_guard)
    worker = ThreadPoolExecutor(1)
    taken = worker.submit(poison_guard.take, 30)
    assert incoming.sleeps.wait(30)
    assert poison_guard.take(SLICE) is None  # others wait in the topic
    poison_guard.end(first)
    incoming.goes_on.set()
    suspect = taken.result(30)
    worker.shutdown()
    assert suspect is not None
    assert suspect.data() == b"1"
    assert poison_guard.take(SLICE) is None
    poison_guard.end(suspect)
    assert take(poison_guard).data() == b"2"

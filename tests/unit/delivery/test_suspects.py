"""Who waits for whom when a message is suspected of having killed a process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from redrive import CrashNotes, Policy
from redrive.delivery.notebook import Notebook
from redrive.delivery.parts import Incoming, Parts
from redrive.delivery.settle import id_text
from redrive.delivery.suspects import Suspects
from redrive.policy.naming import TopicName
from redrive.testing import InMemoryBroker, InMemoryConsumer
from redrive.testing.parts import parts_of

POLICY = Policy(TopicName("shop", "prod", "orders"), "billing")
SLICE = 0.25
"""In such slices an asynchronous consumer waits."""


class Scene:
    """Messages 0, 1, 2 …, some of which were in hand when a process was killed."""

    def __init__(self, notes: Path) -> None:
        self.broker = InMemoryBroker(POLICY)
        self.clock = self.broker.clock
        self._notes = notes
        self._producer = InMemoryConsumer(POLICY, broker=self.broker)
        self.ids = [id_text(self._producer.send(f"{n}".encode())) for n in range(4)]

    def suspects(self, *numbers: int, parts: Parts | None = None) -> Suspects:
        """Return what hands them out, *numbers* being suspects."""
        notebook = Notebook(self._notes, POLICY)
        for number in numbers:
            notebook.begin(self.ids[number])
        (file,) = self._notes.glob("*.notes")
        left_behind = file.read_text()
        notebook.close()
        file.write_text(left_behind)  # as a kill leaves it
        parts = parts or parts_of(self.broker, POLICY, timedelta())
        return Suspects(parts.incoming.take, parts, CrashNotes(self._notes), POLICY, self.bury)

    def bury(self, message: object, error: Exception) -> bool:
        pytest.fail(f"{message} {error}")

    def seconds_until(self, suspects: Suspects, content: bytes) -> float:
        """Ask in slices until something comes, which is *content*."""
        began = self.clock.monotonic()
        while (message := suspects.take(SLICE)) is None:
            assert self.clock.monotonic() - began < 600
        assert message.data() == content
        return self.clock.monotonic() - began


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def take(suspects: Suspects) -> Any:  # noqa: ANN401 - the client publishes no types
    message = suspects.take(SLICE)
    assert message is not None
    return message


def test_a_suspect_is_in_hand_alone(scene: Scene) -> None:
    suspects = scene.suspects(1)
    first = take(suspects)
    assert suspects.take(SLICE) is None  # the suspect waits for it
    suspects.end(first)
    suspect = take(suspects)
    assert suspect.data() == b"1"
    assert suspects.take(SLICE) is None
    suspects.end(suspect)
    assert [take(suspects).data() for _ in range(2)] == [b"2", b"3"]


def test_nobody_who_asks_in_slices_waits_for_ever_while_a_suspect_is_in_hand(scene: Scene) -> None:
    suspects = scene.suspects(0)
    take(suspects)
    assert 60 <= scene.seconds_until(suspects, b"1") < 61
    assert scene.seconds_until(suspects, b"2") == 0  # nothing was settled: it has been tried


def test_a_suspect_waits_for_others_in_hand_no_longer_than_a_minute_whatever_the_slices(
    scene: Scene,
) -> None:
    suspects = scene.suspects(1)
    take(suspects)
    assert 60 <= scene.seconds_until(suspects, b"1") < 61


def test_what_is_settled_meanwhile_renews_the_patience(scene: Scene) -> None:
    suspects = scene.suspects(2)
    first = take(suspects)
    take(suspects)
    assert suspects.take(50) is None
    suspects.end(first)
    assert 60 <= scene.seconds_until(suspects, b"2") < 61


class Held:
    """An incoming whose `sleep` lasts until somebody lets it go on."""

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


def test_nothing_is_handed_out_to_other_workers_while_a_suspect_waits(scene: Scene) -> None:
    parts = parts_of(scene.broker, POLICY, timedelta())
    incoming: Any = Held(parts.incoming)
    suspects = scene.suspects(1, parts=replace(parts, incoming=incoming))
    first = take(suspects)
    worker = ThreadPoolExecutor(1)
    taken = worker.submit(suspects.take, 30)
    assert incoming.sleeps.wait(30)
    assert suspects.take(SLICE) is None  # others wait in the topic
    suspects.end(first)
    incoming.goes_on.set()
    suspect = taken.result(30)
    worker.shutdown()
    assert suspect is not None
    assert suspect.data() == b"1"
    assert suspects.take(SLICE) is None
    suspects.end(suspect)
    assert take(suspects).data() == b"2"

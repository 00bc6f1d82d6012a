"""What is on its way is settled in time, not only when there is too much of it."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from typing import cast

import pulsar
import pytest

from redrive.replay.ledger.permit import Permit
from redrive.replay.moving import window as windows
from redrive.replay.moving.outcome import RangeOutcome
from redrive.replay.moving.sending import Receipt, Sender
from redrive.replay.moving.window import Window
from redrive.replay.topic.position import Position
from redrive.replay.topic.rows import DeadLetterRow


def letter(entry: int) -> DeadLetterRow:
    return DeadLetterRow(
        -1, Position(7, entry, 0), 1, pulsar.MessageId(-1, 7, entry, -1), None,
        encrypted=False, unreadable=False, schema_version=None, key=None, ordering_key=None,
        value=b"order", properties={}, publish_time=0, event_time=None,
    )  # fmt: skip


class AtOnce:
    """A sender whose broker stores each message at once."""

    def __init__(self) -> None:
        self.receipts: queue.SimpleQueue[Receipt] = queue.SimpleQueue()

    def send(self, sent: DeadLetterRow, _properties: Mapping[str, str]) -> None:
        self.receipts.put(Receipt(sent, pulsar.Result.Ok, stored=True))

    def partition(self, _letter: DeadLetterRow) -> int:
        return 0

    def must_be_idle(self, _letter: DeadLetterRow) -> bool:
        return False

    def prove(self, _letter: DeadLetterRow) -> None:
        pass


def test_receipts_are_taken_in_with_each_look_at_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "LEASE_SECONDS", -1.0)
    acknowledged: list[int] = []
    window = Window(
        cast("Sender", AtOnce()),
        RangeOutcome({}, "uid"),
        Permit,
        lambda done: acknowledged.append(done.position.entry),
        first=0,
    )
    for entry in range(5):
        window.send(letter(entry), {})
    assert acknowledged == [0, 1, 2, 3]
    window.drain()
    assert acknowledged == [0, 1, 2, 3, 4]

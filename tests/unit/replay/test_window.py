"""What is on its way is settled in time, not only when there is too much of it."""

from __future__ import annotations

from typing import cast

import pulsar
import pytest

from redrive.reading.positions import Position
from redrive.reading.rows import DeadLetterRow
from redrive.replay import sending as windows
from redrive.replay.outcome import Key, RangeOutcome
from redrive.replay.records import Permit
from redrive.replay.sending import Sender, UnsubscribedError, Window
from redrive.replay.transport import OutgoingLetter, Receipt, StalledError


def letter(entry: int) -> DeadLetterRow:
    return DeadLetterRow(
        -1, Position(7, entry, 0), 1, pulsar.MessageId(-1, 7, entry, -1), None,
        encrypted=False, unreadable=False, schema_version=None, key=None, ordering_key=None,
        value=b"order", properties={}, publish_time=0, event_time=None,
    )  # fmt: skip


class AtOnce:
    """A sender whose broker stores each message at once."""

    def __init__(self) -> None:
        self.receipts: list[Receipt] = []

    def send(
        self, key: Key, sent: DeadLetterRow, partition: int, _properties: dict[str, str]
    ) -> None:
        outgoing = OutgoingLetter(key, sent, partition)
        self.receipts.append(Receipt(outgoing, pulsar.Result.Ok, stored=True))

    def receive(self, _seconds: float) -> list[Receipt]:
        received, self.receipts = self.receipts, []
        return received

    def partition(self, _letter: DeadLetterRow) -> int:
        return 0

    def holds(self, _partition: int, _version: int | None) -> bool:
        return True

    def prove(self, _letter: DeadLetterRow) -> None:
        pass


def test_receipts_are_taken_in_with_each_look_at_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "LEASE_SECONDS", -1.0)
    monkeypatch.setattr(windows, "CONFIRM_SECONDS", -1.0)
    acknowledged: list[int] = []
    window = Window(
        cast("Sender", AtOnce()),
        RangeOutcome({}, "uid"),
        Permit,
        lambda done: acknowledged.append(done.position.entry),
        first=0,
        is_subscribed=lambda: True,
    )
    for entry in range(5):
        window.send((entry, 0), letter(entry), {})
    assert acknowledged == [0, 1, 2, 3]
    window.drain()
    window.confirm()
    assert acknowledged == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("deleted", [0, 2, 4])
def test_message_is_acknowledged_only_while_target_is_subscribed(
    deleted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The subscription is deleted after so many messages: what came since reaches no consumer."""
    monkeypatch.setattr(windows, "LEASE_SECONDS", -1.0)
    monkeypatch.setattr(windows, "CONFIRM_SECONDS", -1.0)
    acknowledged: list[int] = []
    sent: list[int] = []
    outcome = RangeOutcome({}, "uid", proven=True)
    window = Window(
        cast("Sender", AtOnce()),
        outcome,
        Permit,
        lambda done: acknowledged.append(done.position.entry),
        first=0,
        is_subscribed=lambda: len(sent) <= deleted,
    )

    def send_all() -> None:
        for entry in range(6):
            window.send((entry, 0), letter(entry), {})
            sent.append(entry)
        window.drain()
        window.confirm()

    with pytest.raises(UnsubscribedError):
        send_all()
    assert acknowledged == list(range(deleted))
    assert {offset for offset, _ in window.unconfirmed} == {deleted}
    assert outcome.settled == 2**deleted - 1


class Breaking(AtOnce):
    """A sender whose connection breaks with each message."""

    def send(self, *_: object, **__: object) -> None:
        raise StalledError

    def close(self) -> None:
        pass


def test_what_a_connection_broke_at_may_be_stored() -> None:
    outcome = RangeOutcome({}, "uid", proven=True)
    window = Window(
        cast("Sender", Breaking()),
        outcome,
        Permit,
        lambda _: None,
        first=0,
        is_subscribed=lambda: True,
    )
    with pytest.raises(StalledError):
        window.send((3, 0), letter(3), {})
    window.give_up()
    assert outcome.doubts == {(3, 0)}


class Clock:
    """In the place of the module `time`: what sleeps does not wait."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("rate", [0.5, 40.0, 400.0, 5_000.0])
def test_a_task_is_as_fast_as_it_may_be_and_no_faster(
    rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a tenth, though a look at the lease, and each message, take their time."""
    clock, messages = Clock(), 2_000
    monkeypatch.setattr(windows, "time", clock)

    def look() -> Permit:
        clock.sleep(0.02)
        return Permit(rate)

    class Slow(AtOnce):
        def send(
            self, key: Key, sent: DeadLetterRow, partition: int, properties: dict[str, str]
        ) -> None:
            clock.sleep(0.5 / rate)
            super().send(key, sent, partition, properties)

    outcome = RangeOutcome({}, "uid", proven=True)
    window = Window(
        cast("Sender", Slow()), outcome, look, lambda _: None, first=0, is_subscribed=lambda: True
    )
    window.send((0, 0), letter(0), {})
    begin = clock.now
    for entry in range(1, messages):
        window.send((entry, 0), letter(entry), {})
    assert (messages - 1) / (clock.now - begin) == pytest.approx(rate, rel=0.1)


class Refusing(AtOnce):
    """A sender of which one message is too big for the client; notes what it is to prove."""

    def __init__(self, too_big: int) -> None:
        super().__init__()
        self._too_big = too_big
        self.proved: list[int] = []

    def send(
        self, key: Key, sent: DeadLetterRow, partition: int, _properties: dict[str, str]
    ) -> None:
        stored = key[0] != self._too_big
        result = pulsar.Result.Ok if stored else pulsar.Result.MessageTooBig
        self.receipts.append(Receipt(OutgoingLetter(key, sent, partition), result, stored))

    def prove(self, letter: DeadLetterRow) -> None:
        self.proved.append(letter.position.entry)


@pytest.mark.parametrize(("alone", "too_big", "proved"), [([0], 1, [0]), ([], 0, [1])])
def test_deduplication_is_proved_by_a_message_that_was_stored(
    alone: list[int], too_big: int, proved: list[int]
) -> None:
    """Also by one that was sent alone; never by one that was refused."""
    sender, outcome = Refusing(too_big), RangeOutcome({}, "uid")
    outcome.alone = {(entry, 0): 0 for entry in alone}
    window = Window(
        cast("Sender", sender), outcome, Permit, lambda _: None, first=0, is_subscribed=lambda: True
    )
    for entry in range(3):
        window.send((entry, 0), letter(entry), {})
    assert sender.proved == proved

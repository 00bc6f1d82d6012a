"""Sends of a task, and messages of a Replay in its target."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from contextlib import nullcontext as does_not_raise
from typing import Any, cast

import pulsar
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.admin.errors import AdminError, AdminForbiddenError, BrokerFailedError
from redrive.policy.envelope import REPLAYS
from redrive.policy.naming import TopicName
from redrive.reading import broker, reader
from redrive.reading.positions import (
    EntryId,
    Position,
    SendAttempt,
    Source,
    Tail,
    TargetPartition,
    sequence_id,
)
from redrive.reading.ranges import Partition, Range, Span
from redrive.reading.rows import DeadLetterRow
from redrive.reading.stored import MessagePlace
from redrive.replay import lookup
from redrive.replay import sending as windows
from redrive.replay.evidence import LedgerKey
from redrive.replay.outcome import Key, RangeOutcome, StoredMessages
from redrive.replay.records import Permit
from redrive.replay.sending import Sender, SentBeforeError, UnsubscribedError, Window
from redrive.replay.transport import (
    CATCH_UP_SECONDS,
    ClientTransport,
    NameTakenError,
    OutgoingDeadLetter,
    Pace,
    Receipt,
    StalledError,
)
from tests.support.dead_letter_rows import dead_letter
from tests.support.reasons import raises


def row_at(entry: int, index: int = 0, batch_size: int = 1) -> DeadLetterRow:
    return DeadLetterRow(
        -1, Position(7, entry, index), batch_size, MessagePlace(-1, ((7, entry),)), None,
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
        outgoing = OutgoingDeadLetter(key, sent, partition)
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


def window_of(  # noqa: PLR0913, PLR0917  one each
    sender: object,
    outcome: RangeOutcome,
    look: Callable[[], Permit] = Permit,
    acknowledge: Callable[[DeadLetterRow], None] = lambda _: None,
    is_subscribed: Callable[[], bool] = lambda: True,
    is_acknowledged: Callable[[int], bool] = lambda _: False,
    checked: float = -math.inf,
) -> Window:
    """Return a window of the first partition."""
    return Window(
        cast("Sender", sender),
        outcome,
        look,
        (Permit(), checked),
        acknowledge,
        first=0,
        is_subscribed=is_subscribed,
        is_acknowledged=is_acknowledged,
        pace=Pace(),
    )


def test_receipts_are_settled_with_each_lease_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "LEASE_CHECK_SECONDS", -1.0)
    monkeypatch.setattr(windows, "CONFIRM_SECONDS", -1.0)
    acknowledged: list[int] = []
    window = window_of(
        AtOnce(),
        RangeOutcome({}, "uid"),
        acknowledge=lambda done: acknowledged.append(done.position.entry),
    )
    for entry in range(5):
        window.send((entry, 0), row_at(entry), {})
    assert acknowledged == [0, 1, 2, 3]
    window.drain()
    window.confirm()
    assert acknowledged == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("age", "checks"), [(0.0, 0), (2 * windows.LEASE_CHECK_SECONDS, 1)])
def test_first_send_long_after_a_check_checks_the_lease(age: float, checks: int) -> None:
    """The first message is read meanwhile, and another run may have taken over."""
    looked, checked = list[Permit](), time.monotonic() - age

    def look() -> Permit:
        looked.append(Permit())
        return looked[-1]

    window = window_of(AtOnce(), RangeOutcome({}, "uid", proven=True), look, checked=checked)
    window.send((0, 0), row_at(0), {})
    window.send((1, 0), row_at(1), {})
    assert len(looked) == checks


@pytest.mark.parametrize("deleted", [0, 2, 4])
def test_message_is_acknowledged_only_while_target_is_subscribed(
    deleted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The subscription is deleted after so many messages: later ones reach no consumer."""
    monkeypatch.setattr(windows, "LEASE_CHECK_SECONDS", -1.0)
    monkeypatch.setattr(windows, "CONFIRM_SECONDS", -1.0)
    acknowledged: list[int] = []
    sent: list[int] = []
    outcome = RangeOutcome({}, "uid", proven=True)
    window = window_of(
        AtOnce(),
        outcome,
        acknowledge=lambda done: acknowledged.append(done.position.entry),
        is_subscribed=lambda: len(sent) <= deleted,
    )

    def send_all() -> None:
        for entry in range(6):
            window.send((entry, 0), row_at(entry), {})
            sent.append(entry)
        window.drain()
        window.confirm()

    with pytest.raises(UnsubscribedError):
        send_all()
    assert acknowledged == list(range(deleted))
    assert {offset for offset, _ in window.unconfirmed} == {deleted}
    assert outcome.settled == 2**deleted - 1


@pytest.mark.parametrize(
    ("attempts", "is_sent"), [(windows.ALONE_ATTEMPTS - 1, True), (windows.ALONE_ATTEMPTS, False)]
)
def test_message_is_refused_after_attempts_alone(attempts: int, *, is_sent: bool) -> None:
    outcome = RangeOutcome({}, "uid", proven=True)
    outcome.alone = {(0, 0): attempts}
    window = window_of(AtOnce(), outcome)
    window.send((0, 0), row_at(0), {})
    assert ((0, 0) in window.unconfirmed) is is_sent
    assert outcome.settled == (0 if is_sent else 1)


class OverQuota(AtOnce):
    """A sender whose broker has no room for more messages."""

    def send(
        self, key: Key, sent: DeadLetterRow, partition: int, _properties: dict[str, str]
    ) -> None:
        outgoing = OutgoingDeadLetter(key, sent, partition)
        result = pulsar.Result.ProducerBlockedQuotaExceededException
        self.receipts.append(Receipt(outgoing, result, stored=False))


def test_full_target_stops_later_sends_of_a_range() -> None:
    outcome = RangeOutcome({}, "uid", proven=True)
    window = window_of(OverQuota(), outcome)
    window.send((0, 0), row_at(0), {})
    with pytest.raises(StalledError):
        window.drain()
    assert outcome.doubts == {(0, 0)}


def test_batch_is_acknowledged_once_it_is_stored_whole() -> None:
    acknowledged: list[DeadLetterRow] = []
    window = window_of(
        AtOnce(), RangeOutcome({}, "uid", proven=True), acknowledge=acknowledged.append
    )
    first, second = (row_at(3, index, batch_size=2) for index in range(2))
    for letter, expected in ((first, []), (second, [second])):
        window.send(window.key(letter), letter, {})
        window.drain()
        window.confirm()
        assert acknowledged == expected


class Breaking(AtOnce):
    """A sender whose connection breaks with each message."""

    def send(self, *_: object, **__: object) -> None:
        raise StalledError

    def close(self) -> None:
        pass


def test_message_of_broken_connection_may_be_stored() -> None:
    outcome = RangeOutcome({}, "uid", proven=True)
    window = window_of(Breaking(), outcome)
    with pytest.raises(StalledError):
        window.send((3, 0), row_at(3), {})
    window.give_up()
    assert outcome.doubts == {(3, 0)}


class Clock:
    """Replaces the module `time`: a sleep moves the clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("rate", [0.5, 40.0, 400.0, 5_000.0])
def test_window_keeps_to_its_rate(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deviation is below a tenth, though checks of the lease and sends take time."""
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
    window = window_of(Slow(), outcome, look=look)
    window.send((0, 0), row_at(0), {})
    begin = clock.now
    for entry in range(1, messages):
        window.send((entry, 0), row_at(entry), {})
    assert (messages - 1) / (clock.now - begin) == pytest.approx(rate, rel=0.1)


class Refusing(AtOnce):
    """A sender of which one message is too big for the client; records the proved messages."""

    def __init__(self, too_big: int) -> None:
        super().__init__()
        self._too_big = too_big
        self.proved: list[int] = []

    def send(
        self, key: Key, sent: DeadLetterRow, partition: int, _properties: dict[str, str]
    ) -> None:
        stored = key[0] != self._too_big
        result = pulsar.Result.Ok if stored else pulsar.Result.MessageTooBig
        self.receipts.append(Receipt(OutgoingDeadLetter(key, sent, partition), result, stored))

    def prove(self, row: DeadLetterRow) -> None:
        self.proved.append(row.position.entry)


@pytest.mark.parametrize(("alone", "too_big", "proved"), [([0], 1, [0]), ([], 0, [1])])
def test_deduplication_is_proved_by_a_stored_message(
    alone: list[int], too_big: int, proved: list[int]
) -> None:
    """Also by one that was sent alone; never by one that was refused."""
    sender, outcome = Refusing(too_big), RangeOutcome({}, "uid")
    outcome.alone = {(entry, 0): 0 for entry in alone}
    window = window_of(sender, outcome)
    for entry in range(3):
        window.send((entry, 0), row_at(entry), {})
    assert sender.proved == proved


@pytest.mark.parametrize("alone", [False, True])
def test_message_acknowledged_by_others_proves_nothing(*, alone: bool) -> None:
    """The first message that is sent proves that the target deduplicates."""
    sender, outcome = Refusing(-1), RangeOutcome({}, "uid")
    outcome.alone = {(0, 0): 0} if alone else {}
    window = window_of(sender, outcome, is_acknowledged=lambda offset: offset == 0)
    for entry in range(3):
        window.send((entry, 0), row_at(entry), {})
    assert sender.proved == [1]


TARGET, SOURCE = TopicName("shop", "prod", "retry"), TopicName("shop", "prod", "dead")


class Producers:
    """A client that notes how its producers are opened.

    Args:
        last: the last sequence ids that one after the other is opened with.
    """

    def __init__(self, *last: int) -> None:
        self.opened: dict[str, Any] = {}
        self._last = iter(last or [-1])

    def create_producer(self, _topic: str, **options: object) -> Producers:
        self.opened = options
        return self

    def last_sequence_id(self) -> int:
        return next(self._last)

    def close(self) -> None:
        pass


def test_send_timeout_is_below_producer_name_expiry() -> None:
    client = Producers()
    transport = ClientTransport(cast("pulsar.Client", client))
    sender = Sender(transport, (TARGET, 0), SOURCE, Range(-1, 7, 0, 9_999), SendAttempt(1, 0), str)
    sender.hold(-1, None)
    # keepAliveIntervalSeconds of a broker is 30: it drops a connection that is silent for two.
    assert 0 < client.opened["send_timeout_millis"] <= 30_000


ATTEMPT = SendAttempt(2, 1)


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        pytest.param(-1, does_not_raise(), id="none"),
        pytest.param(sequence_id(SendAttempt(1, 5), 9, 0), does_not_raise(), id="earlier lease"),
        pytest.param(sequence_id(SendAttempt(2, 0), 9, 0), does_not_raise(), id="earlier attempt"),
        pytest.param(sequence_id(ATTEMPT, 0, 0), pytest.raises(SentBeforeError), id="same attempt"),
        pytest.param(
            sequence_id(SendAttempt(2, 9), 0, 0), pytest.raises(SentBeforeError), id="later attempt"
        ),
        pytest.param(
            sequence_id(SendAttempt(2, 199), 0, 0), pytest.raises(NameTakenError), id="last attempt"
        ),
        pytest.param(
            sequence_id(SendAttempt(3, 0), 0, 0), pytest.raises(NameTakenError), id="no lease"
        ),
        pytest.param(2**63 - 1, pytest.raises(NameTakenError), id="highest"),
    ],
)
def test_producer_of_a_later_attempt_is_refused(
    last: int, expected: AbstractContextManager[None]
) -> None:
    transport = ClientTransport(cast("pulsar.Client", Producers(last)))
    sender = Sender(transport, (TARGET, 0), SOURCE, Range(-1, 7, 0, 9_999), ATTEMPT, str)
    with expected:
        assert sender.hold(-1, None) == last
    assert sender.holds(-1, None) == isinstance(expected, does_not_raise)


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        pytest.param(sequence_id(ATTEMPT, 0, 0), does_not_raise(), id="its own"),
        pytest.param(-1, raises("DeduplicationOff"), id="not kept"),
        pytest.param(sequence_id(ATTEMPT, 10, 0), pytest.raises(SentBeforeError), id="another's"),
        pytest.param(2**63 - 1, pytest.raises(NameTakenError), id="highest"),
    ],
)
def test_reopened_producer_proves_last_sender(
    last: int, expected: AbstractContextManager[None]
) -> None:
    transport = ClientTransport(cast("pulsar.Client", Producers(-1, last)))
    sender = Sender(transport, (TARGET, 0), SOURCE, Range(-1, 7, 0, 9_999), ATTEMPT, str)
    sender.hold(-1, None)
    with expected:
        sender.prove(row_at(0))


rates = st.floats(0.1, 20_000)
lateness = st.lists(st.floats(0, 3 * CATCH_UP_SECONDS), min_size=2, max_size=200)


def sent_at(rate: float, late: Iterable[float]) -> list[float]:
    """Return the times of sends, each late by so many seconds beside the wait of the pace."""
    pace, now, sent = Pace(), 0.0, []
    for delay in late:
        now += delay
        while wait := pace.due_in(now, rate):
            now += wait
        pace.sent(now, rate)
        sent.append(now)
    return sent


@given(rates, lateness)
def test_pace_keeps_its_rate_from_first_message(rate: float, late: list[float]) -> None:
    sent = sent_at(rate, late)
    for count, at in enumerate(sent):
        assert count <= (at - sent[0]) * rate + 1e-3


@pytest.mark.parametrize("rate", [1.0, 700.0, 5_000.0])
def test_pace_makes_up_for_short_delays(rate: float) -> None:
    sent = sent_at(rate, [0.9 / rate] * 1_000)
    assert len(sent) / (sent[-1] - sent[0]) == pytest.approx(rate, rel=0.01)


def test_pace_without_limit_never_waits() -> None:
    pace = Pace()
    pace.sent(0, None)
    assert pace.due_in(0, None) == 0


def test_pace_follows_a_raised_rate_at_once() -> None:
    pace = Pace()
    pace.sent(0, 0.001)
    assert pace.due_in(0, 100.0) == pytest.approx(0.01)
    assert pace.due_in(0.011, 100.0) == 0


def test_pace_keeps_count_of_all_that_was_sent_together() -> None:
    pace = Pace()
    for _ in range(100):
        pace.sent(0, 10.0)
    assert pace.due_in(0, 10.0) == pytest.approx(10)
    assert pace.due_in(5, 100.0) == pytest.approx(0.5)
    assert pace.due_in(5.4, 50.0) == pytest.approx(0.1)


AWAY = BrokerFailedError("503", remedy="wait")
PARTITION = TargetPartition(TopicName("shop", "prod", "orders-RETRY"), 0)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int] | AdminError]:
    """Answers of the broker in order: entries written and pending, or an error."""
    answers: list[tuple[int, int] | AdminError] = []

    def look_at(*_: object) -> Partition:
        answer = answers.pop(0)
        if isinstance(answer, AdminError):
            raise answer
        written, pending = answer
        return Partition(0, (), written=written, pending=pending)

    monkeypatch.setattr(broker, "read_partition", look_at)
    monkeypatch.setattr(lookup, "POLL_SECONDS", 0.0)
    return answers


@pytest.mark.parametrize(
    ("answers", "remaining"),
    [
        pytest.param([(7, 0), (7, 9)], 1, id="nothing is pending"),
        pytest.param([(7, 3), (7, 3), (10, 0), (10, 9)], 1, id="it is done"),
        # Others continue to write: the first pending ones are done once as many are written.
        pytest.param([(7, 3), (8, 4), (9, 5), (10, 6), (11, 4), (12, 4)], 1, id="others write"),
        pytest.param(
            [(7, 3), (7, 3), (0, 2), (1, 2), (2, 2), (3, 2), (9, 9)], 1, id="it is loaded again"
        ),
        pytest.param([(7, 3), AWAY, (7, 2), AWAY, (0, 0), (9, 9)], 1, id="it is restarted"),
    ],
)
def test_pending_writes_are_waited_for(
    looks: list[tuple[int, int] | AdminError],
    answers: list[tuple[int, int] | AdminError],
    remaining: int,
) -> None:
    looks.extend(answers)
    lookup.wait_for_writes("http://broker", PARTITION)
    assert len(looks) == remaining


def test_pending_writes_past_deadline_are_an_error(
    looks: list[tuple[int, int] | AdminError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "WRITE_SECONDS", 0.0)
    looks.extend([(7, 3)] * 3)
    with raises("WritesPending", match="3 entries pending after 0 s"):
        lookup.wait_for_writes("http://broker", PARTITION)


def test_forbidden_read_of_writes_is_not_repeated(
    looks: list[tuple[int, int] | AdminError],
) -> None:
    looks.extend([AdminForbiddenError("403", remedy="grant"), (7, 0)])
    with pytest.raises(AdminForbiddenError):
        lookup.wait_for_writes("http://broker", PARTITION)


@pytest.mark.parametrize(
    ("remaining", "lost", "trimmed"),
    [
        ({5, 6}, [Span(5, 4, 9)], set()),
        ({6}, [Span(5, 4, 9)], {PARTITION}),
        pytest.param({6}, [], set(), id="all of it was read before"),
    ],
)
def test_ledger_trimmed_during_read_may_have_had_entries(
    monkeypatch: pytest.MonkeyPatch,
    remaining: set[int],
    lost: list[Span],
    trimmed: set[TargetPartition],
) -> None:
    """A reader passes over it, and says nothing."""

    def read(*arguments: object) -> Iterator[pulsar.Message]:
        cast("list[Span]", arguments[-1]).extend(lost)
        return iter(())

    def partition_of(ledgers: set[int]) -> Partition:
        held = tuple((ledger, 10) for ledger in sorted(ledgers))
        return Partition(0, held, held=frozenset(ledgers))

    monkeypatch.setattr(lookup, "wait_for_writes", lambda *_: None)
    monkeypatch.setattr(reader, "read_messages", read)
    monkeypatch.setattr(broker, "read_partitions", lambda *_: [partition_of({5, 6})])
    monkeypatch.setattr(broker, "read_partition", lambda *_: partition_of(remaining))
    stored = StoredMessages()
    topic = reader.ReadableTopic(cast("broker.ReadingClient", None), "http://p", PARTITION.topic)
    tails, within = {PARTITION: Tail(EntryId(5, 3))}, Range(0, 7, 0, 9)
    lookup.find_in_target(stored, topic, tails, within, LedgerKey(b"key"))
    assert stored.trimmed == trimmed


OF = Range(0, 7, 0, 9_999)


def found(*positions: tuple[int, int]) -> StoredMessages:
    """Return the messages stored by Replay `first`: entries, and indexes in them."""
    result = StoredMessages()
    for entry, index in positions:
        result.add(OF, Source("first", 0, Position(7, entry, index)))
    return result


def test_entries_stored_by_another_replay_stay_its_own() -> None:
    second = RangeOutcome({}, "second")
    second.resolve_doubts(found((3, 0), (5, 0)))
    second.store((4, 0), 1)
    second.store((5, 0), 1)
    result = second.result(OF, {}, frozenset())
    assert result.moved == {"second": 1 << 4, "first": 1 << 5}
    assert result.partly == {"first": {3: 0b1}}

    third = RangeOutcome(result.partly, "third")
    assert third.is_stored((3, 0))
    assert third.store((3, 0), 1)
    assert third.result(OF, {}, frozenset()).moved == {"first": 1 << 3}


def test_entry_may_be_moved_by_several_replays() -> None:
    second = RangeOutcome({"first": {3: 0b001}}, "second")
    assert not second.store((3, 1), 3)
    assert second.result(OF, {}, frozenset()).partly == {"first": {3: 0b001}, "second": {3: 0b010}}


def test_entries_of_foreign_replay_in_replica_are_ignored() -> None:
    own, any_of_them = StoredMessages(frozenset({"first"})), StoredMessages()
    for entries in (own, any_of_them):
        for uid, entry in (("first", 3), ("of another cluster", 4)):
            entries.add(OF, Source(uid, 0, Position(7, entry, 0)))
    assert own.by == {3: {0: "first"}}
    assert any_of_them.by.keys() == {3, 4}


@pytest.mark.parametrize(
    ("replays", "cause"), [(1, ""), (2, "ReplayedTooOften"), (3, "ReplayedTooOften")]
)
def test_message_is_refused_at_its_limit_of_replays(replays: int, cause: str) -> None:
    row = dead_letter(0, properties={REPLAYS: str(replays)})
    assert lookup.refusal([row], 1, 2) == cause


@pytest.mark.parametrize(
    ("present", "selected", "cause"), [(3, 3, ""), (3, 2, "PartOfBatch"), (2, 2, "PartOfBatch")]
)
def test_part_of_a_batch_is_refused(present: int, selected: int, cause: str) -> None:
    entry = [dead_letter(0)._replace(batch_size=3)] * present
    assert lookup.refusal(entry, selected, None) == cause

"""Messages of a Replay in its target: stored tails, and outcomes of ranges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pulsar
import pytest

from redrive.admin.errors import AdminError, AdminForbiddenError, BrokerFailedError
from redrive.policy.envelope import REPLAYS
from redrive.policy.naming import TopicName
from redrive.reading import broker, reader
from redrive.reading.positions import EntryId, Position, Source, Tail, TargetPartition
from redrive.reading.ranges import Partition, Range, Span
from redrive.replay import lookup
from redrive.replay.evidence import LedgerKey
from redrive.replay.outcome import RangeOutcome, StoredMessages
from tests.support.dead_letter_rows import dead_letter
from tests.support.reasons import raises

AWAY = BrokerFailedError("503", remedy="wait")
TARGET = TargetPartition(TopicName("shop", "prod", "orders-RETRY"), 0)


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
    lookup.wait_for_writes("http://broker", TARGET)
    assert len(looks) == remaining


def test_pending_writes_past_deadline_are_an_error(
    looks: list[tuple[int, int] | AdminError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "WRITE_SECONDS", 0.0)
    looks.extend([(7, 3)] * 3)
    with raises("WritesPending", match="3 entries pending after 0 s"):
        lookup.wait_for_writes("http://broker", TARGET)


def test_forbidden_read_of_writes_is_not_repeated(
    looks: list[tuple[int, int] | AdminError],
) -> None:
    looks.extend([AdminForbiddenError("403", remedy="grant"), (7, 0)])
    with pytest.raises(AdminForbiddenError):
        lookup.wait_for_writes("http://broker", TARGET)


@pytest.mark.parametrize(
    ("remaining", "lost", "trimmed"),
    [
        ({5, 6}, [Span(5, 4, 9)], set()),
        ({6}, [Span(5, 4, 9)], {TARGET}),
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
    topic = reader.ReadableTopic(cast("broker.ReadingClient", None), "http://p", TARGET.topic)
    tails, within = {TARGET: Tail(EntryId(5, 3))}, Range(0, 7, 0, 9)
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
    result = second.result(OF, {})
    assert result.moved == {"second": 1 << 4, "first": 1 << 5}
    assert result.partly == {"first": {3: 0b1}}

    third = RangeOutcome(result.partly, "third")
    assert third.is_stored((3, 0))
    assert third.store((3, 0), 1)
    assert third.result(OF, {}).moved == {"first": 1 << 3}


def test_entry_may_be_moved_by_several_replays() -> None:
    second = RangeOutcome({"first": {3: 0b001}}, "second")
    assert not second.store((3, 1), 3)
    assert second.result(OF, {}).partly == {"first": {3: 0b001}, "second": {3: 0b010}}


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

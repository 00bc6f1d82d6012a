"""Summaries, newest messages, entries of a reading, and readings of RocketMQ by offset.

`tests/contract` has a real broker of RocketMQ.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from redrive.admin.errors import AdminForbiddenError, AuthenticationFailedError
from redrive.api.rocketmq import RocketMQMessages
from redrive.errors import RedriveError
from redrive.inspection import reader, summary
from redrive.inspection.payloads import MAX_DECODED, NONE_RECORDED, OTHERS, KeyHasher, ShownFields
from redrive.inspection.reader import InspectedTopic
from redrive.inspection.record import Recorder, newest_of
from redrive.inspection.rocketmq import DeadLetterQueues
from redrive.inspection.summary import Summary
from redrive.policy.envelope import (
    CAUSE_FINGERPRINT,
    CAUSE_MESSAGE,
    CAUSE_TRACE,
    CAUSE_TYPE,
    CONSUMER,
    DEAD_REASON,
    DELAY_TIME,
    ORIGIN_MESSAGE_ID,
    REPLAY,
    REPLAYS,
)
from redrive.policy.naming import TopicName
from redrive.policy.values import time_text
from redrive.reading import bitmap, broker, queues
from redrive.reading.positions import EntryId
from redrive.reading.ranges import Acknowledged, Partition
from redrive.reasons import Reason
from redrive.replay.spec import Choice
from tests.support.dead_letter_rows import SENT, dead_letter
from tests.support.fake_rocketmq import FakeCluster
from tests.support.reasons import raises
from tests.unit.kube.test_cache import size_of

TOPIC = TopicName.parse("persistent://shop/prod/orders-DLQ")


def summarized(*rows: Any) -> Summary:  # noqa: ANN401  rows of dead letters
    result = Summary(Recorder(lambda _: None))
    for row in rows:
        result.add(row)
    return result


def test_messages_are_counted_by_cause_and_fingerprint() -> None:
    replayed = {REPLAYS: "2", REPLAY: "shop/fix"}
    result = summarized(
        dead_letter(0, "WarehouseDown", key="ann@example.com"),
        dead_letter(1, "JSONDecodeError"),
        dead_letter(2),
        dead_letter(3, "WarehouseDown", key="b", properties=replayed),
    )
    first, *others = result.ordered
    assert (first.name, first.messages, first.replayed) == ("WarehouseDown", 2, 1)
    assert (first.first, first.last) == (SENT, SENT + 3_000)
    assert (first.example, first.consumers) == ("no ?", {"fulfilment-a": 2})
    assert [group.name for group in others] == ["JSONDecodeError", NONE_RECORDED]
    assert (result.replays, result.died_again) == ({0: 3, 2: 1}, {"shop/fix": 1})
    assert (result.keys, result.without_key) == ({"ann@example.com": 1, "b": 1}, 2)


def test_followers_are_counted_with_the_cause_of_their_key() -> None:
    follows = {DEAD_REASON: "AfterDeadLetter"}
    result = summarized(
        dead_letter(0, "PaymentRejected", key="a"),
        dead_letter(1, key="a", properties=follows),
        dead_letter(2, key="unknown", properties=follows),
        dead_letter(3, "Down", key="x")._replace(ordering_key="b"),
        dead_letter(4, key="a", properties=follows)._replace(ordering_key="b"),
    )
    assert [(g.name, g.messages, g.following) for g in result.ordered] == [
        ("Down", 2, 1),
        ("PaymentRejected", 2, 1),
        ("AfterDeadLetter", 1, 1),
    ]


def test_number_of_groups_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "MAX_GROUPS", 2)
    result = summarized(*(dead_letter(n, "x" * (n + 1)) for n in range(5)))
    assert [(g.name, g.messages) for g in result.ordered] == [(OTHERS, 3), ("x", 1), ("xx", 1)]


def test_memory_does_not_grow_with_the_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them has a time, a size, a key and a number of replays of its own."""
    monkeypatch.setattr(summary, "MAX_INTERVALS", 1_000)
    monkeypatch.setattr(summary, "MAX_KEY_BYTES", 2**19)

    def held(count: int) -> int:
        result = Summary()
        for number in range(count):
            properties = {REPLAYS: str(number)}
            row = dead_letter(0, "E", key=f"{number}{'k' * 9_000}", properties=properties)
            result.add(row._replace(publish_time=number * 10**9, value=bytes(number % 999)))
        assert (result.messages, sum(result.sizes.values())) == (count, count)
        (group,) = result.ordered
        assert (group.first, group.last) == (0, (count - 1) * 10**9)
        assert sum(group.times.values()) == count
        return size_of(result)

    of_few = held(4_000)
    assert held(12_000) < 1.2 * of_few


def test_newest_messages_are_bounded_in_number_and_bytes() -> None:
    rows = [dead_letter(n, value=bytes(100)) for n in (3, 1, 4, 2)]
    assert [row.position.entry for row in newest_of(rows, 2, 1_000)] == [4, 3]
    assert [row.position.entry for row in newest_of(rows, 9, 350)] == [4, 3, 2]
    large = dead_letter(9, properties={"x": "y" * 400})
    assert [row.position.entry for row in newest_of([*rows, large], 9, 450)] == [9]
    assert [row.position.entry for row in newest_of(rows, 9, 50)] == [4]


def test_times_of_any_producer_are_shown() -> None:
    assert time_text(0) == "1970-01-01T00:00:00Z"
    assert time_text(2**64) is None


def test_masked_record_hides_keys_and_properties() -> None:
    row = dead_letter(
        5, "E", key="ann", properties={DELAY_TIME: "9000", "mail": "a@b.c", "a@b.c": "x"}
    )
    record = Recorder(lambda _: None, waiting=True, hash_key=KeyHasher(b"secret"))(row)
    assert record["id"] == "7:5:0:0"
    assert (record["key"], len(record["keyHash"] or "")) == (None, 12)
    assert record["properties"] == [
        {"name": "mail", "value": "string(5)"},
        {"name": "string(5)", "value": "string(1)"},
    ]
    assert (record["time"], record["dueTime"]) == ("2026-11-26T13:33:25Z", "2026-11-26T13:33:34Z")
    clear = Recorder(lambda _: None, reveals=True)(row)
    assert (clear["key"], clear["keyHash"], clear["payload"]) == ("ann", None, "{}")
    assert clear["dueTime"] is None


def test_masked_record_shows_what_the_connection_permits() -> None:
    row = dead_letter(5, "E", key="ann", value=b'{"needs": "crane", "who": "Ann"}')
    shown = ShownFields.of(["$.needs"])
    record = Recorder(lambda _: None, shown=shown, shows_keys=True)(row)
    assert (record["key"], record["keyHash"]) == ("ann", None)
    assert record["payload"] == '{"needs": "crane", "who": string(3)}'


def test_cause_of_an_encrypted_message_is_hidden() -> None:
    row = dead_letter(0, "E", properties={CAUSE_MESSAGE: "no customer Schmidt"})
    row = row._replace(encrypted=True)
    assert Recorder(lambda _: None)(row)["causeMessage"] == "?"


def test_unknown_dead_reason_is_masked() -> None:
    row = dead_letter(0, "E", properties={DEAD_REASON: "no Schmidt", ORIGIN_MESSAGE_ID: "Meyer"})
    record = Recorder(lambda _: None)(row)
    assert (record["deadReason"], record["origin"]) == ("string(10)", "string(5)")
    record = Recorder(lambda _: None, reveals=True)(row)
    assert (record["deadReason"], record["origin"]) == ("no Schmidt", "Meyer")


def partition(index: int, entries: int, **more: Any) -> Partition:  # noqa: ANN401  fields
    return Partition(index, ((7 + index, entries),), entry_bytes=100.0, **more)


@pytest.mark.parametrize(
    ("choice", "newest", "planned", "total"),
    [
        (Choice(), 10, {0: [18, 19], 1: [*range(92, 100)]}, 102),
        (Choice(), None, {0: [18, 19], 1: [*range(100)]}, 102),
        (Choice(ids=("7:18", "8:3:1:0")), 1, {0: [18], 1: [3]}, 102),
    ],
)
def test_reading_takes_the_newest_entries_not_acknowledged(
    choice: Choice,
    newest: int | None,
    planned: dict[int, list[int]],
    total: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = Acknowledged(through=EntryId(7, 17))
    partitions = partition(0, 20, acknowledged=done), partition(1, 100)
    monkeypatch.setattr(broker, "read_partitions", lambda *_: partitions)
    topic = InspectedTopic(TOPIC, "redrive", "", "", credentials=None)  # type: ignore[arg-type]
    reading = topic.plan(choice, newest)
    entries: dict[int, list[int]] = {}
    for source, piece in reading.pieces:
        offsets = bitmap.members(piece.pending)
        entries.setdefault(source.index, []).extend(piece.range.first + n for n in offsets)
    assert (entries, reading.total) == (planned, total)
    assert reading.is_truncated is (newest == 10)


def test_reading_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    large = Partition(-1, ((7, 50_000),), entry_bytes=1_000_000.0)
    monkeypatch.setattr(broker, "read_partitions", lambda *_: (large,))
    topic = InspectedTopic(TOPIC, "redrive", "", "", credentials=None)  # type: ignore[arg-type]
    assert topic.plan(Choice()).planned == reader.MAX_BYTES // 1_000_000


@pytest.mark.parametrize("refusal", [AuthenticationFailedError, AdminForbiddenError])
def test_refusal_shows_the_answer_of_the_broker(
    refusal: type[RedriveError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise refusal("the broker refused to read it", got="401 expired", remedy="use another")

    monkeypatch.setattr(broker, "read_partitions", refuse)
    topic = InspectedTopic(TOPIC, "redrive", "", "", credentials=None)  # type: ignore[arg-type]
    answer = r"can't be read; got .*refused to read it; got '401 expired'.*; check the service URL"
    with raises("TopicUnreadable", match=answer):
        topic.plan(Choice())


def test_schemas_are_asked_for_once_and_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    versions: list[int] = []
    monkeypatch.setattr(InspectedTopic, "schema", lambda _, version: versions.append(version))
    topic = InspectedTopic(TOPIC, "redrive", "", "", credentials=None)  # type: ignore[arg-type]
    reading = reader.TopicReading(topic, 0, 0)
    assert [reading.schema(version) for version in (None, 1, 1, *range(500))] == [None] * 503
    assert versions == [1, 0, *range(2, reader.MAX_SCHEMAS)]


def test_texts_of_any_producer_are_bounded() -> None:
    properties = dict.fromkeys((CAUSE_MESSAGE, CAUSE_TRACE, DEAD_REASON, CONSUMER), "x" * 10_000)
    properties |= {CAUSE_TYPE: "y" * 10_000, CAUSE_FINGERPRINT: "ann@example.com"}
    record = Recorder(lambda _: None, reveals=True)(dead_letter(0, properties=properties))
    assert record["fingerprint"] == ""
    texts = record["cause"], record["causeMessage"], record["deadReason"], record["consumer"]
    assert [len(text) for text in (*texts, *record["trace"])] == [256, 1_024, 256, 256, 4_096]
    large = dead_letter(0, "E", value=bytes(MAX_DECODED + 1))
    assert Recorder(lambda _: None)(large)["causeMessage"] == "?"


DEAD_LETTERS = "%DLQ%g"


@pytest.fixture
def cluster() -> FakeCluster:
    """A topic with two queues; two messages of the first one were deleted."""
    fake = FakeCluster(**{DEAD_LETTERS: 2})
    for number in range(16):
        fake.add(DEAD_LETTERS, int(number > 6), KEYS="order-1", TAGS="A")
    fake.first[DEAD_LETTERS, 0] = 2
    return fake


@pytest.fixture
def source(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> DeadLetterQueues:
    monkeypatch.setattr(queues, "RocketMQSession", lambda _: cluster)
    messages = RocketMQMessages(DEAD_LETTERS, "g", ["rocketmq:9876"], None, [])
    credentials: Any = SimpleNamespace(access=lambda: None)
    return DeadLetterQueues(messages, credentials)


def test_reading_has_the_newest_offsets_of_each_queue(source: DeadLetterQueues) -> None:
    reading = source.plan(Choice(), 8, None)
    assert (reading.total, reading.planned, reading.is_truncated) == (14, 8, True)
    rows = list(reading.selected(lambda: None))
    assert [row.id for row in rows] == [
        f"broker-a:{queue}:{n}" for queue in (0, 1) for n in (*range(3 + 2 * queue, 7 + 2 * queue),)
    ]
    assert (reading.entries, reading.messages, reading.matched) == (8, 8, 8)
    record = Recorder(lambda _: None, reveals=True)(rows[0])
    assert (record["id"], record["attempts"], record["payload"]) == ("broker-a:0:3", 16, "message")
    assert record["properties"] == [{"name": "TAGS", "value": "A"}]


def test_selection_applies_to_each_message(source: DeadLetterQueues) -> None:
    reading = source.plan(Choice(keys=("order-2",)), None, None)
    assert not list(reading.selected(lambda: None))
    assert (reading.messages, reading.matched) == (14, 0)


def test_messages_are_selected_by_id(source: DeadLetterQueues, cluster: FakeCluster) -> None:
    ids = "broker-a:1:8", "broker-a:0:3", "broker-a:0:1", "other:0:3", "broker-a:9:0"
    reading = source.plan(Choice(ids=ids), 1, None)
    cluster.first[DEAD_LETTERS, 1] = 9
    assert [row.id for row in reading.selected(lambda: None)] == ["broker-a:0:3"]
    assert (reading.is_truncated, reading.entries, reading.messages) == (False, 2, 1)


def test_deleted_messages_are_skipped(source: DeadLetterQueues, cluster: FakeCluster) -> None:
    reading = source.plan(Choice(), None, None)
    cluster.first[DEAD_LETTERS, 0] = 5
    assert sum(1 for _ in reading.selected(lambda: None)) == 2 + 9
    assert reading.entries == 14


def test_reading_fails_without_a_recorded_master(source: DeadLetterQueues) -> None:
    messages = replace(source.messages, masters=("broker-a", "broker-b"))
    with raises(Reason.BROKER_UNREACHABLE, match="got 'broker-b'"):
        replace(source, messages=messages).plan(Choice(), None, None)


def test_silent_master_ends_the_reading(
    source: DeadLetterQueues, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = source.plan(Choice(), None, None)

    async def silent(*_: object) -> tuple[bytes, int]:
        return b"", 0

    monkeypatch.setattr(cluster, "pull", silent)
    monkeypatch.setattr(queues, "SILENCE_SECONDS", -1)
    with pytest.raises(RedriveError, match="does not deliver messages of %DLQ%g"):
        list(reading.selected(lambda: None))

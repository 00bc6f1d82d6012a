"""Readings of RocketMQ by offset; `tests/contract` has a real broker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from redrive.api.rocketmq import RocketMQMessages
from redrive.errors import RedriveError
from redrive.inspection.record import Recorder
from redrive.inspection.rocketmq import DeadLetterQueues
from redrive.reading import queues
from redrive.replay.spec import Choice
from tests.support.fake_rocketmq import FakeCluster

TOPIC = "%DLQ%g"


@pytest.fixture
def cluster() -> FakeCluster:
    """A topic with two queues; two messages of the first one were deleted."""
    fake = FakeCluster(**{TOPIC: 2})
    for number in range(16):
        fake.add(TOPIC, int(number > 6), KEYS="order-1", TAGS="A")
    fake.first[TOPIC, 0] = 2
    return fake


@pytest.fixture
def source(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> DeadLetterQueues:
    monkeypatch.setattr(queues, "RocketMQSession", lambda _: cluster)
    messages = RocketMQMessages(TOPIC, "g", ["rocketmq:9876"], None, [])
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
    cluster.first[TOPIC, 1] = 9
    assert [row.id for row in reading.selected(lambda: None)] == ["broker-a:0:3"]
    assert (reading.is_truncated, reading.entries, reading.messages) == (False, 2, 1)


def test_deleted_messages_are_skipped(source: DeadLetterQueues, cluster: FakeCluster) -> None:
    reading = source.plan(Choice(), None, None)
    cluster.first[TOPIC, 0] = 5
    assert sum(1 for _ in reading.selected(lambda: None)) == 2 + 9
    assert reading.entries == 14


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

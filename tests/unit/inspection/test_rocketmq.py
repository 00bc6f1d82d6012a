"""Stored messages of RocketMQ, and readings by offset; `tests/contract` has a real broker."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import pytest

from redrive.admin.rocketmq import Master, QueueCounts
from redrive.errors import RedriveError
from redrive.inspection import rocketmq
from redrive.inspection.job import RocketMQMessages
from redrive.inspection.record import Recorder
from redrive.inspection.rocketmq import DeadLetterQueues, parse_stored
from redrive.replay.spec import Choice

MASTER = Master("broker-a", "127.0.0.1:10911")
COMPRESSED, IPV6 = 1, 1 << 4 | 1 << 5
LZ4 = b"\x04\x22M\x18@@\xc0\x05\x00\x00\x80hello\x00\x00\x00\x00"


def stored(  # noqa: PLR0913  fields of a message
    offset: int,
    body: bytes = b"message",
    properties: bytes = b"",
    *,
    flags: int = 0,
    kind: int = 0xDAA320A7,
    retries: int = 16,
) -> bytes:
    host, width = bytes(20 if flags & IPV6 else 8), "H" if kind == 0xDAA320AB else "B"
    frame = struct.pack(">I3iqqiq", kind, 0, 0, 0, offset, 0, flags, 1_000) + host
    frame += struct.pack(">q", 2_000) + host + struct.pack(">iqi", retries, 0, len(body)) + body
    frame += struct.pack(f">{width}", 3) + b"abc"
    frame += struct.pack(">H", len(properties)) + properties
    return struct.pack(">I", len(frame) + 4) + frame


@pytest.mark.parametrize("kind", [0xDAA320A7, 0xDAA320AB])
@pytest.mark.parametrize("flags", [0, IPV6])
def test_stored_message_becomes_a_row(kind: int, flags: int) -> None:
    properties = b"KEYS\x01order-1\x02TAGS\x01A\x02"
    (message,) = parse_stored(stored(7, b"hello", properties, flags=flags, kind=kind))
    row = message.row(MASTER, 3)
    assert (row.id, row.key, row.value) == ("broker-a:3:7", "order-1", b"hello")
    assert (row.publish_time, row.event_time) == (2_000, 1_000)
    record = Recorder(lambda _: None, reveals=True)(row)
    assert (record["id"], record["attempts"], record["payload"]) == ("broker-a:3:7", 16, "hello")
    assert record["properties"] == [{"name": "TAGS", "value": "A"}]


@pytest.mark.parametrize(
    ("body", "flags", "value"),
    [
        (zlib.compress(b"hello"), COMPRESSED, b"hello"),
        (zlib.compress(b"hello"), COMPRESSED | 3 << 8, b"hello"),
        (b"no zlib", COMPRESSED, None),
        (b"no frame", COMPRESSED | 1 << 8, None),
        (b"no frame", COMPRESSED | 2 << 8, None),
    ],
)
def test_compressed_content_is_decompressed(body: bytes, flags: int, value: bytes | None) -> None:
    (message,) = parse_stored(stored(0, body, flags=flags))
    row = message.row(MASTER, 0)
    assert (row.value, row.oversized) == (value, value is None)


@pytest.mark.parametrize(
    "content",
    [
        b"\0\0\0\1",
        struct.pack(">I", 2**31),
        stored(0)[:-1],
        stored(0, kind=1),
        struct.pack(">I", 60) + stored(0)[4:60],
        stored(0).replace(struct.pack(">i", 7) + b"message", struct.pack(">i", -7) + b"message"),
    ],
)
def test_malformed_answer_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"message|properties"):
        list(parse_stored(content))


class Session:
    """A cluster of one master, with two queues; an offset below the first one was deleted."""

    kept = (range(2, 7), range(9))

    async def masters(self) -> tuple[Master, ...]:
        return (MASTER,)

    async def topic(self, _master: Master, _name: str) -> QueueCounts:
        return QueueCounts(2, 2, 6)

    async def offsets(self, _master: Master, _name: str, queue: int) -> range:
        return self.kept[queue]

    async def pull(
        self, _master: Master, _topic: str, queue: int, offset: int, _group: str
    ) -> tuple[bytes, int]:
        if offset not in self.kept[queue]:
            return b"", max(offset, self.kept[queue].start)
        return stored(offset) + stored(offset + 1), offset + 2

    def close(self) -> None:
        """Close nothing."""


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> DeadLetterQueues:
    monkeypatch.setattr(DeadLetterQueues, "session", lambda _: Session())
    messages = RocketMQMessages("%DLQ%g", "g", ["rocketmq:9876"], None, [])
    credentials: Any = None
    return DeadLetterQueues(messages, credentials)


def test_reading_has_the_newest_offsets_of_each_queue(source: DeadLetterQueues) -> None:
    reading = source.plan(Choice(), 8, None)
    assert (reading.total, reading.planned, reading.is_truncated) == (14, 8, True)
    ids = [row.id for row in reading.selected(lambda: None)]
    assert ids == [
        f"broker-a:{queue}:{n}" for queue in (0, 1) for n in (*range(3 + 2 * queue, 7 + 2 * queue),)
    ]
    assert (reading.entries, reading.messages, reading.matched) == (8, 8, 8)


def test_selection_applies_to_each_message(source: DeadLetterQueues) -> None:
    reading = source.plan(Choice(keys=("order-1",)), None, None)
    assert not list(reading.selected(lambda: None))
    assert (reading.messages, reading.matched) == (14, 0)
    with pytest.raises(RedriveError, match="can't be selected by id"):
        source.plan(Choice(ids=("1:2",)), None, None)


def test_deleted_messages_are_skipped(
    source: DeadLetterQueues, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = source.plan(Choice(), None, None)
    monkeypatch.setattr(Session, "kept", (range(5, 7), range(9)))
    assert sum(1 for _ in reading.selected(lambda: None)) == 2 + 9
    assert reading.entries == 14


def test_silent_master_ends_the_reading(
    source: DeadLetterQueues, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = source.plan(Choice(), None, None)
    monkeypatch.setattr(Session, "kept", (range(0), range(0)))
    monkeypatch.setattr(rocketmq, "SILENCE_SECONDS", -1)
    with pytest.raises(RedriveError, match="does not deliver messages of %DLQ%g"):
        list(reading.selected(lambda: None))

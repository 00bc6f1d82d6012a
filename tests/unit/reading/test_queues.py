"""Stored messages of RocketMQ; `tests/contract` has a real broker."""

from __future__ import annotations

import struct
import zlib

import pytest

from redrive.reading.queues import MessageQueue, parse_stored
from tests.support.fake_rocketmq import IPV6, MASTER, stored

COMPRESSED = 1


@pytest.mark.parametrize("kind", [0xDAA320A7, 0xDAA320AB])
@pytest.mark.parametrize("flags", [0, IPV6])
def test_stored_message_becomes_a_row(kind: int, flags: int) -> None:
    properties = b"KEYS\x01order-1\x02TAGS\x01A\x02"
    (message,) = parse_stored(stored(7, b"hello", properties, flags=flags, kind=kind))
    row = message.row(MessageQueue(MASTER, "%DLQ%g", 3, range(9)))
    assert (row.id, row.key, row.value) == ("broker-a:3:7", "order-1", b"hello")
    assert (row.publish_time, row.event_time) == (2_000, 1_000)
    assert row.properties == {"TAGS": "A", "RECONSUMETIMES": "16"}


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
    row = message.row(MessageQueue(MASTER, "%DLQ%g", 0, range(9)))
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

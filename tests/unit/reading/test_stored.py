"""Messages as brokers of Pulsar and RocketMQ store them, and malformed ones.

`tests/contract` has a real broker of RocketMQ.
"""

from __future__ import annotations

import struct
import subprocess
import sys
import tracemalloc
import zlib

import psutil
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.messages import id_text, partition_key, read_properties, schema_version
from redrive.reading import frames, stored
from redrive.reading.entries import _CHUNK_BYTES, ChunksRead
from redrive.reading.frames import OutgoingMessage
from redrive.reading.positions import encode_nested
from redrive.reading.queues import MessageQueue, parse_stored
from redrive.reading.stored import MalformedEntryError, MessagePlace, ReadMessage, StoredEntry
from tests.support.fake_rocketmq import IPV6, MASTER
from tests.support.fake_rocketmq import stored as rocketmq_message
from tests.support.raw_entries import (
    HARMFUL,
    RawEntry,
    bytes_of,
    chunk,
    in_batch,
    numbers,
    read_alone,
)

PLACE = (7, 3)
text = st.text(max_size=20) | st.sampled_from(["x" * 127, "x" * 128])
outgoing = st.builds(
    OutgoingMessage,
    sequence_id=st.integers(1, 2**62),
    value=st.none() | st.binary(max_size=50) | st.just(b"long " * 1_000),
    properties=st.dictionaries(text, text, max_size=3),
    key=st.none() | text.filter(bool),
    ordering_key=st.none() | text.filter(bool),
    event_time=st.none() | st.integers(1, 2**64 - 1),
)


def read(*entries: RawEntry, partition: int = -1) -> list[ReadMessage]:
    """Read entries as a reader does, each at the place behind the one before."""
    chunks, messages = ChunksRead(), list[ReadMessage]()
    for index, raw in enumerate(entries):
        entry, place = StoredEntry.read(bytes_of(raw)), (PLACE[0], PLACE[1] + index)
        part = entry.chunk
        if part is None:
            messages += entry.of(entry.content, (place,), partition)
        elif (whole := chunks.add(part, place, entry.content)) is not None:
            assert whole.content is not None
            messages += entry.of(whole.content, whole.entries, partition)
    return messages


def shown(message: ReadMessage) -> OutgoingMessage:
    """Return all that a message shows, as it was sent, but for its sequence id."""
    return OutgoingMessage(
        0,
        None if message.has_null_value() else message.data(),
        message.properties(),
        message.partition_key() or None,
        message.ordering_key() or None,
        message.event_timestamp() or None,
    )


@given(outgoing)
def test_message_sent_alone_is_read_with_all_it_has(sent: OutgoingMessage) -> None:
    content, compression = frames.compressed(sent.value or b"")
    (message,) = read(RawEntry(frames.alone(sent) + compression, content), partition=2)
    assert shown(message) == sent._replace(sequence_id=0)
    assert message.publish_timestamp() == 1_700
    assert str(message.message_id()) == "(7,3,2,-1)"
    assert schema_version(message) is None
    assert message.encryption_context() is None


@given(st.lists(outgoing, min_size=1, max_size=5))
def test_messages_of_a_batch_are_read_with_all_they_have(sent: list[OutgoingMessage]) -> None:
    content, compression = frames.compressed(b"".join(map(frames.in_batch, sent)))
    version = encode_nested(16, (5).to_bytes(8))
    metadata = frames.batch(sent[-1].sequence_id, len(sent)) + compression + version
    messages = read(RawEntry(metadata, content))
    assert [shown(message) for message in messages] == [
        message._replace(sequence_id=0) for message in sent
    ]
    assert [message.message_id().batch_index() for message in messages] == list(range(len(sent)))
    assert {schema_version(message) for message in messages} == {5}


def test_message_in_chunks_is_read_with_its_last_one() -> None:
    other = chunk("other", 0, 2, 4, b"ab")
    contents = b"xyz", b"xyz", b"x"
    first, second, third = (chunk("one", part, 3, 7, contents[part]) for part in range(3))
    (message,) = read(first, other, second, second, third, other)
    assert message.data() == b"xyzxyzx"
    assert message.place.entries == ((7, 3), (7, 5), (7, 7))
    assert id_text(message.message_id()) == "7:7:-1"


def test_message_ids_have_fields_of_other_clients() -> None:
    """The size of a batch, and the first chunk: as protobuf writes them."""
    batched = MessagePlace(-1, ((300, 7),), 2, 5).message_id().serialize()
    assert batched.endswith(bytes.fromhex("3005"))
    chunked = MessagePlace(-1, ((3, 2), (3, 4))).message_id().serialize()
    assert chunked.endswith(encode_nested(7, bytes.fromhex("08031002")))


@pytest.mark.parametrize("codec", ["lz4_raw", "zstd", "snappy", "zlib"])
@pytest.mark.parametrize("content", [b"", b"x", bytes(100_000)])
def test_compressed_content_must_match_its_size(codec: str, content: bytes) -> None:
    kind = {"lz4_raw": 1, "zlib": 2, "zstd": 3, "snappy": 4}[codec]
    compress = zlib.compress if codec == "zlib" else pa.Codec(codec).compress
    small = bytes(compress(content))
    size = len(content)
    (message,) = read(RawEntry(numbers(compression=kind, uncompressed=size), small))
    assert message.data() == content
    for wrong in {size - 1, size + 1, 2 * size + 7} - {-1}:
        with pytest.raises(MalformedEntryError):
            read(RawEntry(numbers(compression=kind, uncompressed=wrong), small))


@pytest.mark.parametrize("key", [b"", b"aGk=", b"aGk", b"aA==", b"aA", b"aGkh"])
def test_key_in_base64_is_read(key: bytes) -> None:
    (message,) = read(RawEntry(encode_nested(6, key) + numbers(key_in_base64=1)))
    assert message.partition_key() == key.decode()


@pytest.mark.parametrize("key", [b"a", b"aGk==", b"aA=", b"aGkha", b"a-k_", b"\xff\xff"])
def test_key_in_base64_that_is_none_is_malformed(key: bytes) -> None:
    with pytest.raises(MalformedEntryError, match="base64"):
        read(RawEntry(encode_nested(6, key) + numbers(key_in_base64=1)))


def test_encrypted_content_stays_as_it_is_stored() -> None:
    encrypted = encode_nested(13, b"key") + numbers(compression=1, uncompressed=9, in_batch=2)
    (message,) = read(RawEntry(encrypted, b"secret"))
    assert message.data() == b"secret"
    assert message.encryption_context() is not None
    key = encode_nested(13, b"key")
    parts = [chunk("e", part, 2, 4, b"xyz...") for part in range(2)]
    (message,) = read(*(RawEntry(part.metadata + key, part.content) for part in parts))
    assert message.data() == b"xyz...xyz..."


@pytest.mark.parametrize("size", [stored.MAX_CONTENT + 1, 2**32 - 1])
def test_encrypted_batch_of_unlimited_size_is_malformed(size: int) -> None:
    batch = numbers(compression=1, uncompressed=size, in_batch=2)
    with pytest.raises(MalformedEntryError, match=f"{size} bytes, more than"):
        read(RawEntry(encode_nested(13, b"key") + batch, b"secret"))


@pytest.mark.parametrize("name", HARMFUL)
def test_harmful_entry_shows_no_message(name: str) -> None:
    try:
        assert read(HARMFUL[name]) == []
    except MalformedEntryError:
        return
    assert HARMFUL[name].metadata.count(b"\xd8\x01")  # a first chunk alone


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(bytes_of(RawEntry(b""))[:-1], id="cut off"),
        pytest.param(b"\x0e\x01\0\0\0\0" + b"\0" * 9, id="a wrong checksum"),
        pytest.param(b"\x7f\xff\xff\xffabc", id="more metadata than there is"),
        pytest.param(bytes_of(RawEntry(b"\xff" * 12)), id="a number without end"),
        pytest.param(bytes_of(RawEntry(b"\x22\x05a")), id="a property longer than its metadata"),
        pytest.param(bytes_of(RawEntry(b"\x22\x02\x0a\x09")), id="a name longer than its property"),
        pytest.param(bytes_of(RawEntry(b"\x0b")), id="a group"),
    ],
)
def test_broken_entry_is_malformed(broken: bytes) -> None:
    with pytest.raises(MalformedEntryError):
        StoredEntry.read(broken)


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(bytes(4 * 2_048), id="messages of four bytes"),
        pytest.param(b"".join(in_batch(b"", b"\x0a\0" * 100) for _ in range(64)), id="properties"),
    ],
)
def test_batch_takes_bounded_memory(batch: bytes) -> None:
    count = len(batch) // 4 if not batch.strip(b"\0") else 64
    entry = StoredEntry.read(bytes_of(RawEntry(numbers(in_batch=count), batch)))
    limit = 128 * 2**10
    tracemalloc.start()
    try:
        (message,) = entry.of(entry.content, (PLACE,), -1, limit)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (message.is_oversized, message.place.entries) == (True, (PLACE,))
    assert peak < limit
    assert len(entry.of(entry.content, (PLACE,), -1)) == count


def test_long_metadata_in_a_batch_is_not_decoded() -> None:
    batch = in_batch(b"", b"\x0a\0" * 10_000)
    entry = StoredEntry.read(bytes_of(RawEntry(numbers(in_batch=1), batch)))
    tracemalloc.start()
    try:
        (message,) = entry.of(entry.content, (PLACE,), -1, 100_000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert message.is_oversized
    assert peak < 10_000


def test_messages_of_a_batch_keep_only_what_is_read() -> None:
    batch = in_batch(b"", encode_nested(2, b"k") * 13_000) * 500
    entry = StoredEntry.read(bytes_of(RawEntry(numbers(in_batch=500), batch)))
    before = psutil.Process().memory_info().rss  # protobuf's memory is not Python's
    messages = entry.of(entry.content, (PLACE,), -1)
    assert {message.partition_key() for message in messages} == {"k"}
    assert psutil.Process().memory_info().rss - before < 50 * 2**20


_WITHOUT_MEMORY = """
import resource
from redrive.reading.metadata import decode_entry
written = b"\\x22\\0" * 20_000_000
limit = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + 100 * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    decode_entry(written)
except MemoryError as error:
    print(error)
"""


def test_lack_of_memory_makes_no_message_malformed() -> None:
    command = [sys.executable, "-c", _WITHOUT_MEMORY]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Arena alloc failed" in child.stdout


def test_few_short_properties_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = stored.KeptProperties()
    monkeypatch.setattr(stored, "_KEPT_PROPERTIES", kept)
    long = bytes_of(RawEntry(encode_nested(4, encode_nested(2, b"v" * 10_000))))
    for entry in (long, long):
        assert StoredEntry.read(entry).properties == [("", "v" * 10_000)]
    assert not kept
    for number in range(3_000):
        pair = encode_nested(1, b"id") + encode_nested(2, str(number).encode())
        entry = bytes_of(RawEntry(encode_nested(4, pair)))
        assert StoredEntry.read(entry).properties == [("id", str(number))]
    assert 0 < len(kept) <= 1_024


def test_chunks_above_the_limit_are_not_kept() -> None:
    chunks, content = ChunksRead(10), bytes(8)
    assert chunks.add(stored.Chunk(b"a", 0, 2, 16), (1, 0), content) is None
    assert chunks.add(stored.Chunk(b"b", 0, 2, 9), (1, 1), content) is None
    whole = chunks.add(stored.Chunk(b"a", 1, 2, 16), (1, 2), content)
    assert whole == (((1, 0), (1, 2)), None)
    assert chunks.add(stored.Chunk(b"b", 1, 2, 9), (1, 3), b"x") == (
        ((1, 1), (1, 3)), content + b"x",
    )  # fmt: skip
    assert chunks.add(stored.Chunk(b"c", 0, 1, None), (1, 4), bytes(11)) == (((1, 4),), None)


def test_broker_metadata_is_skipped() -> None:
    plain = bytes_of(RawEntry(b""), with_checksum=False)
    for entry in (plain, b"\x0e\x02\0\0\0\3abc" + plain):
        assert StoredEntry.read(entry).content == b"raw"


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_random_bytes_are_read_or_malformed(metadata: bytes, content: bytes) -> None:
    for entry in (metadata + content, bytes_of(RawEntry(metadata, content))):
        try:
            read_one = StoredEntry.read(entry)
            part = read_one.chunk
            messages = [] if part else read_one.of(read_one.content, (PLACE,), -1)
        except MalformedEntryError:
            continue
        for message in messages:
            assert read_properties(message) is None or partition_key(message) is not None
            assert 0 <= (schema_version(message) or 0) < 2**63


def test_mismatched_chunks_make_no_message() -> None:
    wrong = [
        [chunk("a", 1, 2, 4, b"ab")],
        [chunk("a", 0, 3, 6, b"ab"), chunk("a", 2, 3, 6, b"ab")],
        [chunk("a", 0, 2, 4, b"ab"), chunk("a", 1, 3, 4, b"ab")],
        [chunk("a", 0, 2, 4, b"ab"), chunk("a", 1, 2, 5, b"ab")],
        [chunk("a", 0, 2, 4, b"ab"), chunk("a", 1, 2, 4, b"abc")],
        [chunk("a", 0, 2, 4, b"ab"), chunk("a", 1, 2, 4, b"a")],
        [chunk("a", 0, 2, 1, b"ab")],
    ]
    for parts in wrong:
        with pytest.raises(MalformedEntryError):
            read(*parts)


def test_unfinished_messages_are_dropped_above_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redrive.reading.entries.MAX_CONTENT", 10 + 2 * (1 + _CHUNK_BYTES))
    chunks = ChunksRead()
    for index, uuid in enumerate("abcd"):
        part = stored.Chunk(uuid.encode(), 0, 2, 8)
        assert chunks.add(part, (1, index), b"1234") is None
    with pytest.raises(MalformedEntryError, match="without the one before it"):
        chunks.add(stored.Chunk(b"b", 1, 2, 8), (1, 4), b"5678")
    assert chunks.add(stored.Chunk(b"c", 1, 2, 8), (1, 5), b"5678") is not None


@pytest.mark.parametrize(
    ("length", "parts", "sets"), [(8, 1, 10_000), (2**16, 1, 200), (8, 1_000, 100)]
)
def test_unfinished_messages_without_content_are_bounded(
    monkeypatch: pytest.MonkeyPatch, length: int, parts: int, sets: int
) -> None:
    """Any role that may produce can store their entries, with uuids of mebibytes."""
    limit = 2**20
    monkeypatch.setattr("redrive.reading.entries.MAX_CONTENT", limit)
    tracemalloc.start()
    try:
        chunks = ChunksRead()
        for number in range(sets):
            for part in range(parts):
                uuid = b"%08d" % number + bytes(length - 8)
                chunk = stored.Chunk(uuid, part, parts + 1, parts + 1)
                assert chunks.add(chunk, (2**40 + number, 2**40 + part), b"") is None
        memory, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert memory < 2 * limit


def test_single_unfinished_message_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of the largest size has to be readable, whatever its chunks count as."""
    monkeypatch.setattr("redrive.reading.entries.MAX_CONTENT", 8)
    chunks = ChunksRead()
    assert chunks.add(stored.Chunk(b"a", 0, 2, 8), (1, 0), b"1234") is None
    whole = chunks.add(stored.Chunk(b"a", 1, 2, 8), (1, 1), b"5678")
    assert whole == (((1, 0), (1, 1)), b"12345678")


COMPRESSED = 1


@pytest.mark.parametrize("kind", [0xDAA320A7, 0xDAA320AB])
@pytest.mark.parametrize("flags", [0, IPV6])
def test_stored_message_becomes_a_row(kind: int, flags: int) -> None:
    properties = b"KEYS\x01order-1\x02TAGS\x01A\x02"
    (message,) = parse_stored(rocketmq_message(7, b"hello", properties, flags=flags, kind=kind))
    row = message.row(MessageQueue(MASTER, "%DLQ%g", 3, range(9)))
    assert (row.id, row.key, row.value) == ("broker-a:3:7", "order-1", b"hello")
    assert (row.publish_time, row.event_time) == (2_000, 1_000)
    assert row.properties == {"TAGS": "A", "RECONSUMETIMES": "16"}


def test_decompressed_content_leaves_nothing_in_a_pool() -> None:
    """A pool of Arrow keeps memory that is free."""
    content, pool = bytes(2**26), pa.default_memory_pool()
    fields = numbers(compression=1, uncompressed=len(content))
    before = pool.max_memory()
    message = read_alone(fields, pa.Codec("lz4_raw").compress(content, asbytes=True))
    assert len(message.data()) == len(content)
    assert pool.max_memory() == before


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
    (message,) = parse_stored(rocketmq_message(0, body, flags=flags))
    row = message.row(MessageQueue(MASTER, "%DLQ%g", 0, range(9)))
    assert (row.value, row.oversized) == (value, value is None)


@pytest.mark.parametrize(
    "content",
    [
        b"\0\0\0\1",
        struct.pack(">I", 2**31),
        rocketmq_message(0)[:-1],
        rocketmq_message(0, kind=1),
        struct.pack(">I", 60) + rocketmq_message(0)[4:60],
        rocketmq_message(0).replace(
            struct.pack(">i", 7) + b"message", struct.pack(">i", -7) + b"message"
        ),
    ],
)
def test_malformed_answer_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"message|properties"):
        list(parse_stored(content))

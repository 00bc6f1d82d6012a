from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.policy.envelope import CAUSE_FINGERPRINT, CAUSE_TYPE, DEAD_REASON, REPLAYS
from redrive.reading.positions import encode_nested, encode_number
from redrive.reading.rows import DeadLetterRow
from redrive.reading.stored import ReadMessage, StoredEntry
from redrive.replay.account import Leaders
from redrive.replay.job.scanned import ScannedMessage, row_of
from redrive.replay.spec import Choice, Chooser
from tests.support.raw_entries import RawEntry, bytes_of, in_batch, numbers

KEYS = (b"", b"k", "größe".encode(), b"\xff")
PAIRS = st.tuples(
    st.sampled_from([CAUSE_TYPE, CAUSE_FINGERPRINT, DEAD_REASON, REPLAYS, "id"]),
    st.sampled_from(["", "Down", "D" * 300, "9f31c2e07b1d02aa", "AfterDeadLetter", "7", "\N{BOM}"]),
)
CHOICES = (
    Choice(),
    Choice(keys=("k",)),
    Choice(causes=("Down", "D" * 300)),
    Choice(fingerprints=("9f31c2e07b1d02aa",)),
    Choice(since=1_700, until=1_701),
    Choice(ids=("7:3:-1:1",)),
)


def property_of(name: str, value: str, *, text: bool) -> bytes:
    return encode_nested(1, name.encode()) + encode_nested(2, value.encode() + b"\xff" * (not text))


@st.composite
def messages(draw: st.DrawFn) -> ReadMessage:
    """Draw a message, alone or the last of a batch, as the reader returns it."""
    batched = draw(st.booleans())
    single = {"properties": 1, "key": 2, "ordering_key": 7, "null": 9} if batched else {}
    fields = {"properties": 4, "key": 6, "ordering_key": 18, "null": 25} | single
    text = draw(st.integers(0, 9)) > 0
    own = b"".join(
        encode_nested(fields["properties"], property_of(name, value, text=text))
        for name, value in draw(st.lists(PAIRS, max_size=4))
    )
    own += encode_nested(fields["key"], draw(st.sampled_from(KEYS)))
    own += encode_nested(fields["ordering_key"], draw(st.sampled_from(KEYS)))
    own += encode_number(fields["null"], draw(st.integers(0, 1)))
    metadata = encode_nested(16, draw(st.sampled_from([b"", b"\0\0\0\7", b"\xff" * 9])))
    if draw(st.booleans()) and not batched:
        metadata += encode_nested(13, b"")
    content = draw(st.binary(max_size=8))
    raw = RawEntry(metadata + own, content)
    if batched:
        raw = RawEntry(metadata + numbers(in_batch=2), in_batch(b"") + in_batch(content, own))
    places = draw(st.sampled_from([((7, 3),), ((6, 9), (7, 3))]))
    entry = StoredEntry.read(bytes_of(raw))
    return entry.of(entry.content, places, -1)[-1]


@pytest.mark.parametrize("choice", CHOICES)
@given(messages(), st.sampled_from([0, 10]))
def test_message_and_its_row_are_planned_alike(
    choice: Choice, message: ReadMessage, limit: int
) -> None:
    def scanned(one: ReadMessage | DeadLetterRow) -> tuple[Any, ...]:
        leaders = Leaders(limit)
        return ScannedMessage.read(one, Chooser(choice), leaders), leaders.causes

    assert scanned(message) == scanned(row_of(message, -1))


@pytest.mark.parametrize(
    "name", ["unreadable", "encrypted", "oversized", "follows", "schema_version", "replays", "size"]
)
def test_drawn_messages_differ_in_each_field(name: str) -> None:
    plain = StoredEntry.read(bytes_of(RawEntry(b"", b"")))
    other = {
        "unreadable": RawEntry(encode_nested(4, property_of("id", "", text=False)), b""),
        "encrypted": RawEntry(encode_nested(13, b""), b""),
        "oversized": RawEntry(numbers(compression=2, uncompressed=2_000), b""),
        "follows": RawEntry(
            encode_nested(4, property_of(DEAD_REASON, "AfterDeadLetter", text=True)), b""
        ),
        "schema_version": RawEntry(encode_nested(16, b"\7"), b""),
        "replays": RawEntry(encode_nested(4, property_of(REPLAYS, "2", text=True)), b""),
        "size": RawEntry(b"", b"x"),
    }[name]
    entries = (plain, StoredEntry.read(bytes_of(other)))
    one, two = (
        getattr(
            ScannedMessage.read(
                entry.of(entry.content, ((7, 3),), -1, 1_000)[0], Chooser(Choice()), Leaders(0)
            ),
            name,
        )
        for entry in entries
    )
    assert one != two

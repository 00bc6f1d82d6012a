"""Frames, whole and in parts."""

from __future__ import annotations

import pytest
from google_crc32c import value as crc32c
from hypothesis import given
from hypothesis import strategies as st

from redrive.reading import frames as reading_frames
from redrive.reading.frames import Command
from redrive.reading.positions import encode_nested, encode_number


@given(st.lists(st.integers(1, 60), max_size=5), st.data())
def test_frames_are_taken_as_soon_as_they_are_whole(kinds: list[int], data: st.DataObject) -> None:
    frames = [
        reading_frames.frame(kind, encode_number(2, kind) + encode_nested(3, b"x" * kind))
        for kind in kinds
    ]
    written = b"".join(frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(written)), max_size=6)))
    received, taken = bytearray(), list[Command]()
    for begin, end in zip([0, *cuts], [*cuts, len(written)], strict=True):
        received += written[begin:end]
        taken += reading_frames.take_frames(received)
        assert sum(map(len, frames[: len(taken)])) + len(received) == end
    assert taken == [Command(kind, {2: kind}, {3: b"x" * kind}) for kind in kinds]


def test_command_with_entry_in_its_frame_keeps_its_bytes() -> None:
    entry = reading_frames.payload(encode_number(2, 7), b"metadata", b"content")
    received = bytearray(entry + reading_frames.frame(reading_frames.PING))
    stored = b"\x00\x00\x00\x08metadatacontent"
    checksum = crc32c(stored).to_bytes(4)
    assert reading_frames.take_frames(received) == [
        Command(reading_frames.SEND, {2: 7}, {}, b"\x0e\x01" + checksum + stored),
        Command(reading_frames.PING, {}, {}),
    ]


@pytest.mark.parametrize("sizes", ["0000000000000004", "7fffffff7ffffff0", "485454502f312e31"])
def test_what_is_no_frame_is_refused(sizes: str) -> None:
    """Such as the answer of a web server."""
    with pytest.raises(ValueError, match="a frame"):
        reading_frames.take_frames(bytearray(bytes.fromhex(sizes)))


def test_no_credentials_are_shown_without_a_method() -> None:
    assert b"secret" in reading_frames.connect("token", b"secret")
    assert b"secret" not in reading_frames.connect("", b"secret")

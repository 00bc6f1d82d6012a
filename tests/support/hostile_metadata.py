"""Metadata of entries and of messages in batches, as a hostile producer may write them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from redrive.policy import envelope
from redrive.reading.positions import encode_nested, encode_number

NAMES = [
    value.encode()
    for name, value in vars(envelope).items()
    if name.isupper() and isinstance(value, str)
]
texts = (st.text(max_size=20) | st.integers().map(str)).map(str.encode)
values = st.binary(max_size=20) | texts
moments = st.integers(0, 2**64 - 1)
property_pairs = st.tuples(st.sampled_from(NAMES) | texts, texts)
versions = st.binary(max_size=20) | st.sampled_from([b"0123456789abcdef", b"\xff" * 8, bytes(8)])


def written(field: int, drawn: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    """Draw a field, or nothing in its place."""

    def write(value: object) -> bytes:
        return (
            encode_nested(field, value)
            if isinstance(value, bytes)
            else encode_number(field, int(str(value)))
        )

    return st.just(b"") | drawn.map(write)


def with_pairs(field: int) -> st.SearchStrategy[bytes]:
    pairs = st.lists(property_pairs, max_size=3)
    return pairs.map(
        lambda drawn: b"".join(
            encode_nested(field, encode_nested(1, k) + encode_nested(2, v)) for k, v in drawn
        )
    )


# Fields of MessageMetadata, but for those by which brokers keep a message back: transactions,
# markers, delays, and keys in base64 that are none: malformed entries, at which a broker dispatches
# nothing more to Key_Shared subscriptions; and those that describe how content is encoded.
metadata = st.tuples(
    with_pairs(4),
    written(1, values),
    written(3, moments),
    written(5, values),
    written(6, values),
    written(7, values),
    written(12, moments),
    written(16, versions),
    written(18, values),
    written(24, moments),
    written(25, st.integers(0, 1)),
    written(26, values),
    written(30, st.integers(0, 1)),
    written(32, values),
    written(99, values),
).map(b"".join)
single = st.tuples(
    with_pairs(1),
    written(2, values),
    written(4, st.integers(0, 1)),
    written(5, moments),
    written(7, values),
    written(8, moments),
    written(9, st.integers(0, 1)),
    written(10, st.integers(0, 1)),
    written(99, values),
).map(b"".join)

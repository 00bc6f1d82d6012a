"""The encoding of commands."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.reading.positions import decode_fields, encode_nested, encode_number, to_signed

NUMBERS = st.integers(0, 2**64 - 1)
FIELDS = st.integers(1, 2**29 - 1)


def test_numbers_are_written_as_the_encoding_has_them() -> None:
    # 150 and "testing" are the examples of its documentation.
    assert encode_number(1, 150) == bytes.fromhex("089601")
    assert encode_nested(2, b"testing") == bytes.fromhex("120774657374696e67")


@given(st.dictionaries(FIELDS, NUMBERS | st.binary(max_size=300)))
def test_what_is_written_is_read_again(values: dict[int, int | bytes]) -> None:
    written = b"".join(
        encode_number(field, value) if isinstance(value, int) else encode_nested(field, value)
        for field, value in values.items()
    )
    numbers, nested = decode_fields(written)
    assert {**numbers, **nested} == values


@given(st.integers(-(2**63), 2**63 - 1))
def test_numbers_keep_their_sign(value: int) -> None:
    numbers, _ = decode_fields(encode_number(1, value % 2**64))
    assert to_signed(numbers[1]) == value


@pytest.mark.parametrize("broken", ["08", "08ff", "0d00000000", "1203abcd", "12ffffff7f"])
def test_what_is_no_message_is_refused(broken: str) -> None:
    with pytest.raises(ValueError, match="no message"):
        decode_fields(bytes.fromhex(broken))


@given(st.binary(max_size=64))
def test_whatever_comes_is_read_or_refused(data: bytes) -> None:
    try:
        numbers, nested = decode_fields(data)
    except ValueError:
        return
    assert all(value >= 0 for value in numbers.values())
    assert sum(map(len, nested.values())) <= len(data)

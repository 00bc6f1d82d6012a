"""Positions of messages: entry ids, sources, serialized message ids.

The encoding of Protocol Buffers, as far as Pulsar's commands and ids need it. Pure.

A message is a sequence of fields. Each is a tag, of a number and a type, and a value: a number, or
bytes, which may be a text or another message.

Where a dead letter lies → the number and the partition it is sent with. Pure.

A broker that deduplicates keeps the highest sequence id of each producer and drops what is not
above it. Producers are named after ranges, so the first message that a later try stores shuts out
all that an earlier one, of a process that was stopped and goes on, has yet to send.

The entry that a serialized message id names. Pure.

The form is part of Pulsar's protocol: a protobuf message of numbers.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

from redrive.policy.naming import TopicName, partition_of_key

_VARINT, _BYTES = 0, 2
_READ = {_VARINT, _BYTES}
_FIXED = {1: 8, 5: 4}
"""Types of a fixed width, in bytes."""
ONE_BYTE = 128
"""Smaller numbers take one byte."""
_LOW_BITS, _MORE = ONE_BYTE - 1, ONE_BYTE
_MAX, _LAST_SHIFT = 2**64 - 1, 63
_SMALL = tuple(bytes([value]) for value in range(ONE_BYTE))


def encode_varint(value: int) -> bytes:
    """Write a number from 0 to below 2**64."""
    if value < ONE_BYTE:
        return _SMALL[value]
    written = bytearray()
    while value >= _MORE:
        written.append(value & _LOW_BITS | _MORE)
        value >>= 7
    written.append(value)
    return bytes(written)


def encode_number(field: int, value: int) -> bytes:
    """Write a field that is a number from 0, or true as 1."""
    return encode_varint(field << 3 | _VARINT) + encode_varint(value)


def encode_nested(field: int, value: bytes) -> bytes:
    """Write a field that is bytes, a text in UTF-8, or a message."""
    return b"%b%b%b" % (encode_varint(field << 3 | _BYTES), encode_varint(len(value)), value)


def decode_fields(message: bytes) -> tuple[dict[int, int], dict[int, bytes]]:
    """Read a message: its fields that are numbers, without sign, and its others, by their numbers.

    Of a repeated one it is the last.

    Raises:
        ValueError: it is none, or has a field of another type.
    """
    numbers: dict[int, int] = {}
    nested: dict[int, bytes] = {}
    at, end = 0, len(message)
    try:
        while at < end:
            tag, at = _decode_varint(message, at)
            value, at = _decode_varint(message, at)
            if tag & 7 == _VARINT:
                numbers[tag >> 3] = value
                continue
            at += value
            if tag & 7 != _BYTES or at > end:
                break
            nested[tag >> 3] = message[at - value : at]
        else:
            return numbers, nested
    except IndexError:  # it ends in the midst of a number, or of one without end
        pass
    msg = f"no message of Protocol Buffers: {message[:64].hex()}"
    raise ValueError(msg)


def with_repeated(
    message: bytes, repeated: int
) -> tuple[dict[int, int], dict[int, bytes], list[bytes]]:
    """Read a message that others wrote, as `fields`, with all values of one repeated field.

    Fields of fixed width, which Pulsar has none of, are passed over, as by each reader of the
    encoding.

    Args:
        message: the bytes.
        repeated: the number of a field that is bytes.

    Raises:
        ValueError: as for `fields`.
    """
    numbers: dict[int, int] = {}
    nested: dict[int, bytes] = {}
    values: list[bytes] = []
    at, end = 0, len(message)
    try:
        while at < end:
            tag = message[at]
            at += 1
            if tag >= _MORE:
                tag, at = _decode_varint(message, at - 1)
            kind = tag & 7
            if kind not in _READ:
                at += _FIXED[kind]
                continue
            value = message[at]
            at += 1
            if value >= _MORE:
                value, at = _decode_varint(message, at - 1)
            if kind == _VARINT:
                numbers[tag >> 3] = value
                continue
            begin, at = at, at + value
            if tag >> 3 == repeated:
                values.append(message[begin:at])
            else:
                nested[tag >> 3] = message[begin:at]
    except (IndexError, KeyError):  # it ends in the midst of a number, or has another type
        at = -1
    if at != end:
        msg = f"no message of Protocol Buffers: {message[:64].hex()}"
        raise ValueError(msg)
    return numbers, nested, values


def signed_32(value: int) -> int:
    """Return the number of 32 bits with a sign that was written as *value*."""
    value %= 2**32
    return value - 2**32 if value >= 2**31 else value


def to_signed(value: int) -> int:
    """Return the number with a sign that was written as *value*."""
    return value - 2**64 if value >= 2**63 else value


def _decode_varint(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    at += 1
    if byte < _MORE:  # as most
        return byte, at
    value, shift = byte & _LOW_BITS, 7
    while True:
        byte = data[at]
        at += 1
        value |= (byte & _LOW_BITS) << shift
        if byte < _MORE:
            return value & _MAX, at
        shift += 7
        if shift > _LAST_SHIFT:
            raise IndexError("a number of more than 10 bytes")


class EntryId(NamedTuple):
    """An entry of a partition: a message, or a batch of them. Ordered as they were written."""

    ledger: int
    entry: int

    @classmethod
    def parse(cls, text: str) -> EntryId:
        """Read `ledger:entry`, as brokers and `str` write it."""
        ledger, _, entry = text.partition(":")
        return cls(int(ledger), int(entry))

    def __str__(self) -> str:
        return f"{self.ledger}:{self.entry}"


NOWHERE = EntryId(-1, -1)
"""Before every entry: the end of an empty partition."""
LATEST = EntryId(2**63 - 1, 2**63 - 1)
"""Behind every entry."""


class TargetPartition(NamedTuple):
    """A partition of a topic that messages are moved to; one of -1 is all of the topic."""

    topic: TopicName
    partition: int

    def __str__(self) -> str:
        return f"{self.topic} {self.partition}"

    @classmethod
    def parse(cls, text: str) -> TargetPartition:
        """Read what `str` writes."""
        topic, _, partition = text.partition(" ")
        return cls(TopicName.parse(topic), int(partition))


class Tail(NamedTuple):
    """The end of a partition of a target, behind which leases may have stored what no record says.

    Attributes:
        entry: the last one, when the first of these leases was given.
        generation: of that lease; 0 if it is not known.
        partitions: how many the topic had for them, 0 for none; None if that is not known.
        through: the last offset of what they had to send; None if that is not known.
    """

    entry: EntryId
    generation: int = 0
    partitions: int | None = None
    through: int | None = None

    def joined(self, later: Tail | None) -> Tail:
        """Return it as the tail of later leases, too, if there are any."""
        if later is None:
            return self
        same = self.partitions == later.partitions
        bounds = self.through, later.through
        return self._replace(
            partitions=self.partitions if same else None,
            through=None if None in bounds else max(bounds),  # type: ignore[type-var]
        )

    def stored_through(self, last: int, only: Try | None, size: int) -> int:
        """Return the last offset of what may be stored behind it, of a range of so many entries.

        Args:
            last: the sequence id of the last message that the broker knows of.
            only: the one try of which anything may be stored, if there is no other; of it nothing
                above *last* is.
            size: of the range.
        """
        if only and self.generation == only.generation and Try.of(last) == only:
            return offset_of(last)
        return self.last_offset(size)

    def last_offset(self, size: int) -> int:
        """Return the last offset of what was to be sent, of a range of so many entries."""
        return size - 1 if self.through is None else self.through


class Position(NamedTuple):
    """A message of a partition. Ordered as they were written.

    Attributes:
        batch_index: its place within the entry; 0 for one that is not part of a batch.
    """

    ledger: int
    entry: int
    batch_index: int

    @property
    def entry_id(self) -> EntryId:
        """Return the entry it is part of."""
        return EntryId(self.ledger, self.entry)


class Source(NamedTuple):
    """From where a message was moved, and by which Replay: a property that it carries."""

    uid: str
    partition: int
    position: Position

    def __str__(self) -> str:
        ledger, entry, index = self.position
        return f"{self.uid}@{self.partition}:{ledger}:{entry}:{index}"

    @classmethod
    def parse(cls, text: str) -> Source | None:
        """Read what `str` writes; None for anything else, which anybody may have written."""
        match = _SOURCE.fullmatch(text)
        if match is None:
            return None
        uid, *numbers = match.groups()
        partition, *position = map(int, numbers)
        return cls(uid, partition, Position(*position))


_SOURCE = re.compile(r"([\w-]{1,64})@(-?\d{1,9}):(\d{1,19}):(\d{1,19}):(\d{1,9})", re.ASCII)

_ATTEMPT_BITS, _OFFSET_BITS, _INDEX_BITS = 8, 14, 11
MAX_BATCH = 2**_INDEX_BITS
"""Entries that hold more messages than this can't be replayed."""


class Try(NamedTuple):
    """One try at sending the messages of a range. Later ones are greater.

    Attributes:
        generation: counts the leases of the range.
        attempt: counts the tries within one lease, from 0.
    """

    generation: int
    attempt: int

    @classmethod
    def of(cls, sequence_id: int) -> Try:
        """Return the try in which a message with this id was sent; all zero for -1, none."""
        number = max(0, sequence_id - 1) >> (_OFFSET_BITS + _INDEX_BITS)
        return cls(number >> _ATTEMPT_BITS, number % 2**_ATTEMPT_BITS)


def sequence_id(sent_in: Try, offset: int, batch_index: int) -> int:
    """Return the id to send a message with: it rises with the try, then with the position.

    So once a broker has stored one message of a try, it drops all that an earlier one still sends.

    Args:
        sent_in: generations from 1, attempts below 256.
        offset: of its entry within its range.
        batch_index: its place within the entry, below `MAX_BATCH`.
    """
    number = sent_in.generation << _ATTEMPT_BITS | sent_in.attempt
    return ((number << _OFFSET_BITS | offset) << _INDEX_BITS | batch_index) + 1


def offset_of(number: int) -> int:
    """Return the offset, within its range, of what was sent with this sequence id."""
    return (number - 1 >> _INDEX_BITS) & (1 << _OFFSET_BITS) - 1


def target_partition(key: str | None, position: Position, partitions: int) -> int:
    """Return the partition of the target to send to, from 0 to one less than *partitions*.

    Messages with one key go to the partition that producers choose; those without spread by their
    position. A repeated run decides the same, as long as *partitions* is the same.
    """
    if key:
        return partition_of_key(key, partitions)
    digest = hashlib.blake2b(f"position:{tuple(position)}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) % partitions


_LEDGER, _ENTRY, _BATCH_INDEX = 1, 2, 4


def place_of(serialized: bytes) -> tuple[EntryId, int]:
    """Return the entry that `MessageId.serialize` names, and the index in it; -1 without one.

    Raises:
        ValueError: it is something else.
    """
    numbers, _ = decode_fields(serialized)
    if not {_LEDGER, _ENTRY} <= numbers.keys():
        msg = f"no message id: {serialized.hex()}"
        raise ValueError(msg)
    ledger, entry = (to_signed(numbers[field]) for field in (_LEDGER, _ENTRY))
    return EntryId(ledger, entry), to_signed(numbers.get(_BATCH_INDEX, 2**64 - 1))

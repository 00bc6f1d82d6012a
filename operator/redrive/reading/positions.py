"""Positions of messages: entry ids, sources, sequence ids, serialized message ids. Pure.

Encoding: the part of Protocol Buffers that Pulsar's commands and ids use. A message is a sequence
of fields. Each is a tag, of a number and a type, and a value: a number, or bytes, which may be a
text or another message.

Sequence ids: a broker that deduplicates keeps the highest sequence id of each producer and drops
messages that are not above it. Producers are named after ranges, so the first message that a later
attempt stores excludes all messages that an earlier one, of a stopped process, may still send.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

from redrive.policy.naming import TopicName, partition_of_key
from redrive.reading import bitmap

_VARINT, _BYTES = 0, 2
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
    """Decode a message: its numeric fields, unsigned, and its other fields, by their numbers.

    The last value of a repeated field counts.

    Raises:
        ValueError: it is no message, or has a field of another type.
    """
    numbers: dict[int, int] = {}
    nested: dict[int, bytes] = {}
    at, end = 0, len(message)
    try:
        while at < end:
            tag = message[at]
            at += 1
            if tag >= _MORE:
                tag, at = _decode_varint(message, at - 1)
            value = message[at]
            at += 1
            if value >= _MORE:
                value, at = _decode_varint(message, at - 1)
            kind = tag & 7
            if kind == _VARINT:
                numbers[tag >> 3] = value
                continue
            at += value
            if kind != _BYTES or at > end:
                break
            nested[tag >> 3] = message[at - value : at]
        else:
            return numbers, nested
    except IndexError:  # it ends within a number, or a number has no end
        pass
    msg = f"no message of Protocol Buffers: {message[:64].hex()}"
    raise ValueError(msg)


def signed_32(value: int) -> int:
    """Return the signed number of 32 bits that was encoded as *value*."""
    if value < 2**31:  # as most
        return value
    value %= 2**32
    return value - 2**32 if value >= 2**31 else value


def to_signed(value: int) -> int:
    """Return the signed number that was encoded as *value*."""
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
"""After every entry."""


class TargetPartition(NamedTuple):
    """A partition of a target topic; the partition -1 is the whole topic."""

    topic: TopicName
    partition: int

    def __str__(self) -> str:
        return f"{self.topic} {self.partition}"

    @classmethod
    def parse(cls, text: str) -> TargetPartition:
        """Parse the result of `str`."""
        topic, _, partition = text.partition(" ")
        return cls(TopicName.parse(topic), int(partition))


class Tail(NamedTuple):
    """End of a partition of a target, after which leases may have stored unrecorded messages.

    Attributes:
        entry: last entry when the first of these leases was granted.
        generation: of that lease; 0 if unknown.
        partitions: number of partitions of the topic for them, 0 for none; None if unknown.
        entries: offsets of the entries that they had to send, as a bitmap; None if unknown.
    """

    entry: EntryId
    generation: int = 0
    partitions: int | None = None
    entries: int | None = None

    def joined(self, later: Tail | None) -> Tail:
        """Return the common tail of these and of *later* leases, if there are any."""
        if later is None:
            return self
        same = self.partitions == later.partitions
        unknown = self.entries is None or later.entries is None
        return self._replace(
            partitions=self.partitions if same else None,
            entries=None if unknown else self.entries | later.entries,  # type: ignore[operator]
        )

    def stored(self, last: int, only: SendAttempt | None, size: int) -> int:
        """Return the entries that may be stored after it, as a bitmap.

        Args:
            last: sequence id of the last message that the broker has stored.
            only: the only attempt of which messages may be stored, none above *last*; None if
                there may be others.
            size: number of entries of the range.
        """
        if only and self.generation == only.generation and SendAttempt.of(last) == only:
            return self.to_send(size) & bitmap.span(0, offset_of(last))
        return self.to_send(size)

    def to_send(self, size: int) -> int:
        """Return the entries to send, in a range of so many entries."""
        return bitmap.span(0, size - 1) if self.entries is None else self.entries


class Position(NamedTuple):
    """A message of a partition. Ordered as they were written.

    Attributes:
        batch_index: its index in the entry; 0 outside of a batch.
    """

    ledger: int
    entry: int
    batch_index: int

    @property
    def entry_id(self) -> EntryId:
        """Return its entry."""
        return EntryId(self.ledger, self.entry)


class Source(NamedTuple):
    """Position from which a Replay moved a message; a property of the message."""

    uid: str
    partition: int
    position: Position

    def __str__(self) -> str:
        ledger, entry, index = self.position
        return f"{self.uid}@{self.partition}:{ledger}:{entry}:{index}"

    @classmethod
    def parse(cls, text: str) -> Source | None:
        """Parse the result of `str`; None for other texts, which any producer may write."""
        match = _SOURCE.fullmatch(text)
        if match is None:
            return None
        uid, *numbers = match.groups()
        partition, *position = map(int, numbers)
        return cls(uid, partition, Position(*position))


_SOURCE = re.compile(r"([\w-]{1,64})@(-?\d{1,9}):(\d{1,19}):(\d{1,19}):(\d{1,9})", re.ASCII)

_ATTEMPT_BITS, _OFFSET_BITS, _INDEX_BITS = 8, 14, 11
MAX_BATCH = 2**_INDEX_BITS
"""Entries with more messages cannot be replayed."""


class SendAttempt(NamedTuple):
    """One attempt to send the messages of a range. Later attempts are greater.

    Attributes:
        generation: number of the lease of the range.
        attempt: number of the attempt within the lease, from 0.
    """

    generation: int
    attempt: int

    @classmethod
    def of(cls, sequence_id: int) -> SendAttempt:
        """Return the attempt that sent a message with this id; zeros for -1, no message."""
        number = max(0, sequence_id - 1) >> (_OFFSET_BITS + _INDEX_BITS)
        return cls(number >> _ATTEMPT_BITS, number % 2**_ATTEMPT_BITS)


def sequence_id(sent_in: SendAttempt, offset: int, batch_index: int) -> int:
    """Return the sequence id of a message: it rises with the attempt, then with the position.

    So a broker that has stored a message of an attempt drops all messages of earlier attempts.

    Args:
        sent_in: generations from 1, attempts below 256.
        offset: of its entry within its range.
        batch_index: its index in the entry, below `MAX_BATCH`.
    """
    number = sent_in.generation << _ATTEMPT_BITS | sent_in.attempt
    return ((number << _OFFSET_BITS | offset) << _INDEX_BITS | batch_index) + 1


def offset_of(number: int) -> int:
    """Return the offset in its range of the message with this sequence id."""
    return (number - 1 >> _INDEX_BITS) & (1 << _OFFSET_BITS) - 1


def target_partition(key: str | None, position: Position, partitions: int) -> int:
    """Return the partition of the target for a message, from 0 to below *partitions*.

    Messages of a key go to the partition that producers choose; others are spread by their
    position. A repeated run chooses the same partitions if *partitions* is the same.
    """
    if key:
        return partition_of_key(key, partitions)
    digest = hashlib.blake2b(f"position:{tuple(position)}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) % partitions


_LEDGER, _ENTRY, _BATCH_INDEX = 1, 2, 4


def place_of(serialized: bytes) -> tuple[EntryId, int]:
    """Return the entry of a serialized message id, and the index in it; -1 without an index.

    Raises:
        ValueError: it is something else.
    """
    numbers, _ = decode_fields(serialized)
    if not {_LEDGER, _ENTRY} <= numbers.keys():
        msg = f"no message id: {serialized.hex()}"
        raise ValueError(msg)
    ledger, entry = (to_signed(numbers[field]) for field in (_LEDGER, _ENTRY))
    return EntryId(ledger, entry), to_signed(numbers.get(_BATCH_INDEX, 2**64 - 1))

"""What a message id says about the entry it is in, beyond what Pulsar's Python client shows. Pure.

The client offers a message's index within its batch, but neither the size of the batch nor
whether the message was cut into chunks. Both stand in the id's serialized form, which is part of
Pulsar's protocol: a protobuf message of numbers, and one nested message.
"""

from __future__ import annotations

from typing import NamedTuple

from redrive.replay.protocol import protobuf
from redrive.replay.topic.position import EntryId

_BATCH_INDEX = 4
_BATCH_SIZE = 6
_FIRST_CHUNK = 7
_LEDGER, _ENTRY = 1, 2


class Entry(NamedTuple):
    """The entry of a message.

    Attributes:
        size: how many messages it holds.
        first: of a message that was sent in chunks, the entry of the first one. The message has
            the id of the last one.
    """

    size: int
    first: EntryId | None = None


_UNBATCHED = Entry(1)
_BATCH_TAG = protobuf.varint(_BATCH_SIZE << 3)
_CHUNK_TAG = protobuf.nested(_FIRST_CHUNK, b"")[:1]


def entry_of(serialized: bytes) -> Entry:
    """Read what `MessageId.serialize` wrote.

    Raises:
        ValueError: it says something of a batch, or of chunks, and can't be read.
    """
    if _BATCH_TAG not in serialized and _CHUNK_TAG not in serialized:  # as with most
        return _UNBATCHED
    numbers, nested = protobuf.fields(serialized)
    first = protobuf.fields(nested[_FIRST_CHUNK])[0] if _FIRST_CHUNK in nested else None
    return Entry(
        max(1, numbers.get(_BATCH_SIZE, 1)),
        None if first is None else EntryId(first[_LEDGER], first[_ENTRY]),
    )


def place_of(serialized: bytes) -> tuple[EntryId, int]:
    """Return the entry that `MessageId.serialize` names, and the index in it; -1 without one.

    Raises:
        ValueError: it is something else.
    """
    numbers, _ = protobuf.fields(serialized)
    if not {_LEDGER, _ENTRY} <= numbers.keys():
        msg = f"no message id: {serialized.hex()}"
        raise ValueError(msg)
    ledger, entry = (protobuf.signed(numbers[field]) for field in (_LEDGER, _ENTRY))
    return EntryId(ledger, entry), protobuf.signed(numbers.get(_BATCH_INDEX, 2**64 - 1))

"""The entry that a serialized message id names. Pure.

The form is part of Pulsar's protocol: a protobuf message of numbers.
"""

from __future__ import annotations

from redrive.replay.protocol import protobuf
from redrive.replay.topic.position import EntryId

_LEDGER, _ENTRY, _BATCH_INDEX = 1, 2, 4


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

"""Messages of a dead-letter topic as a plan reads them, without their contents. Pure."""

from __future__ import annotations

from typing import NamedTuple

from redrive.messages import ordering_key, partition_key, read_properties, schema_version
from redrive.policy import envelope
from redrive.policy.envelope import DEAD_REASON, REPLAYS
from redrive.policy.verdict import DeadReason
from redrive.reading.positions import EntryId, Position
from redrive.reading.rows import DeadLetterRow
from redrive.reading.stored import ReadMessage
from redrive.replay.account import Leaders
from redrive.replay.spec import Chooser, FailureCause

StoredMessage = ReadMessage | DeadLetterRow
"""A message, or the row of an entry that no client can show."""


def row_of(message: StoredMessage, partition: int) -> DeadLetterRow:
    """Return the row of a message of a scan."""
    if isinstance(message, DeadLetterRow):
        return message
    return DeadLetterRow.of(message, partition)


class ScannedMessage(NamedTuple):
    """Fields of a message that a plan needs."""

    position: Position
    batch_size: int
    first_chunk: EntryId | None
    encrypted: bool
    unreadable: bool
    schema_version: int | None
    failure: FailureCause
    published: int
    size: int
    replays: int
    selected: bool
    evaluated: bool = True
    """False if the condition could not be computed, and other criteria select the message."""
    delivered: bool = True
    oversized: bool = False
    follows: bool = False

    @classmethod
    def undelivered(cls, position: Position, *, selected: bool | None) -> ScannedMessage:
        """Return a placeholder for an entry that no client can show.

        Args:
            position: its position.
            selected: None if the selection depends on its content.
        """
        return cls(
            position, 1, None, encrypted=False, unreadable=False, schema_version=None,
            failure=FailureCause(), published=0, size=0, replays=0, selected=bool(selected),
            evaluated=selected is not None, delivered=False,
        )  # fmt: skip

    @classmethod
    def read(cls, message: StoredMessage, chooser: Chooser, leaders: Leaders) -> ScannedMessage:
        """Return the fields of *message* without a row of it, which would take as long again."""
        if isinstance(message, DeadLetterRow):
            return cls.of(message, chooser, leaders)
        place = message.place
        entries = place.entries
        ledger, entry = entries[-1]
        position = Position(ledger, entry, max(0, place.batch_index))
        properties = read_properties(message)
        readable = properties or {}
        failure = FailureCause.of(readable)
        follows = readable.get(DEAD_REASON) == DeadReason.FOLLOWS
        metadata = message.entry
        published = metadata.publish_time
        keys: tuple[str | None, str | None] = None, None
        counted = failure
        if chooser.reads_keys or leaders.limit:
            keys = ordering_key(message) or None, partition_key(message) or None
            counted = leaders.counted(failure, keys[0] or keys[1], follows=follows)
        # Names of arguments would take a third of the time.
        return cls(
            position,
            place.batch_size,
            EntryId(*entries[0]) if len(entries) > 1 else None,
            metadata.HasField("encryption_keys"),
            properties is None,
            schema_version(message) if metadata.schema_version else None,
            counted,
            published,
            0 if message.fields.null_value else len(message.data()),
            envelope.replays(readable) if REPLAYS in readable else 0,
            chooser.takes(position, keys, published, failure),
            True,  # noqa: FBT003
            True,  # noqa: FBT003
            message.is_oversized,
            follows,
        )

    @classmethod
    def of(cls, row: DeadLetterRow, chooser: Chooser, leaders: Leaders) -> ScannedMessage:
        """Return the fields of *row*, and whether *chooser* selects it."""
        if not row.delivered:
            taken = chooser.takes_undelivered(row.position)
            return cls.undelivered(row.position, selected=taken)
        failure = FailureCause.of(row.properties)
        follows = row.follows
        return cls(
            row.position,
            row.batch_size,
            row.first_chunk,
            encrypted=row.encrypted,
            unreadable=row.unreadable,
            schema_version=row.schema_version,
            failure=leaders.counted(failure, row.sequence_key, follows=follows),
            published=row.publish_time,
            size=row.size,
            replays=row.replays,
            selected=chooser.takes(row.position, row.keys, row.publish_time, failure),
            oversized=row.oversized,
            follows=follows,
        )

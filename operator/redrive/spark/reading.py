"""What one task does: a slice of a partition → batches of columns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import pyarrow as pa

from redrive.errors import RedriveError
from redrive.replay.topic import reading, rows
from redrive.replay.topic.broker import UNPARTITIONED, ReplayRoleRefusedError
from redrive.replay.topic.reading import ReadableTopic
from redrive.replay.topic.rows import DeadLetterRow
from redrive.spark import columns
from redrive.spark.filters import Filters
from redrive.spark.options import ReadOptions
from redrive.spark.slices import DataLossError, Slice
from redrive.spark.topics import TopicReader, failures


class EncryptedMessageError(RedriveError):
    """A message is encrypted, and the query does not ask whether messages are."""

    reason: ClassVar[str] = "EncryptedMessage"


def read(piece: Slice, options: ReadOptions, filters: Filters) -> Iterator[pa.RecordBatch]:
    """Read a slice, in batches of bounded size.

    Raises:
        DataLossError: the broker has deleted part of it since the query was planned.
        EncryptedMessageError: see there.
        PulsarFailedError: the broker does not let it be read.
        SourceSilentError: it stops delivering before the end.
    """
    messages = _messages(piece, options)
    kept = (row for row in messages if filters.keep_times(row.publish_time, row.event_time))
    for batch in rows.in_batches(kept):
        yield columns.to_batch(batch, options.columns, piece.topic)


def _messages(piece: Slice, options: ReadOptions) -> Iterator[DeadLetterRow]:
    broker = TopicReader(options.connection)
    entries, last = 0, None
    with broker.client() as client:
        # Spark tries a task again by itself.
        read_through = None if options.connection.admin_url is None else broker.read_through
        topic = ReadableTopic(client, "", piece.topic, read_through, open_seconds=0)
        ahead = reading.prefetch(piece.entry_bytes)
        with _refusals(piece):
            for message in reading.messages(topic, UNPARTITIONED, piece.begin, piece.spans, ahead):
                row = DeadLetterRow.of(message, piece.partition)
                if piece.holds(row.position):
                    entries += row.position.entry_id != last
                    last = row.position.entry_id
                    yield _readable(row, piece, options)
    there = sum(span.size for span in piece.spans)
    if read_through and options.fail_on_data_loss and entries < there:
        # Entries without a message of their own are usual: chunks, and markers of transactions.
        gone = {span.ledger for span in piece.spans} - broker.held(piece.topic)
        if gone:
            raise DataLossError(
                f"the broker has deleted a part of {piece.topic} while it was read",
                got=f"{entries} of {there} entries, and no ledgers {sorted(gone)} any more",
                remedy="keep messages longer, by a subscription or by retention; to do without "
                "them, set failOnDataLoss to false",
            )


def _readable(row: DeadLetterRow, piece: Slice, options: ReadOptions) -> DeadLetterRow:
    if row.encrypted and "__encrypted" not in options.columns:
        raise EncryptedMessageError(
            f"a message of {piece.topic} is encrypted, and its value would be what is stored",
            got=":".join(map(str, row.position)),
            remedy="name __encrypted among the columns to get such messages as they are stored",
        )
    return row


@contextmanager
def _refusals(piece: Slice) -> Iterator[None]:
    try:
        yield
    except ReplayRoleRefusedError as error:
        with failures(f"let {piece.topic} be read", "consume"):
            raise error.__cause__ or error from None

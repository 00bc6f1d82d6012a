"""Messages of a topic between two entries, in the order they were written.

Reading takes nothing away: it goes around the subscription, which the messages stay in. What the
broker holds and a client can't show, such as the parts of an unfinished chunked message, does not
come.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import ClassVar

import pulsar

from redrive.errors import RedriveError
from redrive.policy.naming import TopicName
from redrive.replay.topic import bitmap, broker, messageid
from redrive.replay.topic.position import EntryId
from redrive.replay.topic.ranges import Range
from redrive.replay.topic.rows import DeadLetterRow

POLL_MILLISECONDS = 2_000
SILENCE_SECONDS = 300.0
"""So long a broker may deliver nothing of what it holds, as while it is restarted."""
PREFETCH_BYTES = 16 * 2**20
MAX_PREFETCH = 1_000


class SourceSilentError(RedriveError):
    """The broker holds messages of the run and does not deliver them."""

    reason: ClassVar[str] = "SourceSilent"


def prefetch(average_bytes: float) -> int:
    """Return how many messages of this size to have the broker send ahead."""
    return max(1, min(MAX_PREFETCH, int(PREFETCH_BYTES / max(1.0, average_bytes))))


def messages(
    client: pulsar.Client,
    topic: TopicName,
    partition: int,
    bounds: tuple[EntryId, EntryId],
    ahead: int,
) -> Iterator[pulsar.Message]:
    """Read messages of one partition.

    Args:
        client: stays open meanwhile.
        topic: the partitioned topic, or one without partitions.
        partition: its index, `broker.UNPARTITIONED` where there is none.
        bounds: the entry behind which the reading begins, and the last one to read.
        ahead: how many messages are prefetched, see `prefetch`.

    Raises:
        ReplayRoleRefusedError: the broker does not let the role read.
        SourceSilentError: it stops delivering before the end.
    """
    after, last = bounds
    name = str(broker.partition_of(topic, partition))
    with broker.refusals(f"open a reader on {name}", "consume"):
        reader = client.create_reader(
            name,
            pulsar.MessageId(partition, after.ledger, after.entry, -1),
            receiver_queue_size=ahead,
            # Else what is encrypted would be passed over in silence.
            crypto_failure_action=pulsar.ConsumerCryptoFailureAction.CONSUME,
        )
    try:
        while (message := _next(reader, last)) is not None:
            message_id = message.message_id()
            at = EntryId(message_id.ledger_id(), message_id.entry_id())
            if at > last:
                return
            yield message
            if at == last and _is_end_of_entry(message_id):
                return
    finally:
        reader.close()


def of_entries(
    client: pulsar.Client, topic: TopicName, of: Range, entries: int, ahead: int
) -> Iterator[DeadLetterRow]:
    """Read all messages of some entries of a range, a bitmap; errors are those of `messages`."""
    if not entries:
        return
    # A reader begins behind the entry it is given.
    first = (entries & -entries).bit_length() - 1
    bounds = of.entry_id(first - 1), of.entry_id(entries.bit_length() - 1)
    for message in messages(client, topic, of.partition, bounds, ahead):
        letter = DeadLetterRow.of(message, of.partition)
        if bitmap.contains(entries, letter.position.entry - of.first):
            yield letter


def _is_end_of_entry(message_id: pulsar.MessageId) -> bool:
    index: int = message_id.batch_index()
    return index < 0 or index + 1 == messageid.entry_of(message_id.serialize()).size


def _next(reader: pulsar.Reader, last: EntryId) -> pulsar.Message | None:
    """Return the next message, None where nothing is left to come."""
    deadline = time.monotonic() + SILENCE_SECONDS
    while True:
        try:
            return reader.read_next(POLL_MILLISECONDS)
        except pulsar.Timeout:
            pass
        try:
            if not reader.has_message_available():
                return None
        except pulsar.PulsarException as error:  # the broker is away
            if time.monotonic() > deadline:
                raise _silent(last) from error
            time.sleep(1)
        if time.monotonic() > deadline:
            raise _silent(last)


def _silent(last: EntryId) -> SourceSilentError:
    return SourceSilentError(
        f"the broker has delivered nothing for {SILENCE_SECONDS:g} s, "
        f"although there is more up to {last}",
        remedy="the job is started again by itself; look into the broker's log if it stays",
    )

"""Search for entries of a subscription that end each consumer, and their quarantine.

`python -m redrive.replay.harmful SERVICE_URL ADMIN_URL TOPIC SUBSCRIPTION [--dead-letter TOPIC]`,
with credentials as in docs/howto/audit.md, of a role that may consume the topic, and produce to the
dead-letter topic. Without `--dead-letter` it changes nothing. Each line has the id of an entry and
its defect. An entry is harmful if its content does not match its metadata. The client for Python
and C++ ends its process at many of these, before any handler receives a message.

An entry is acknowledged after the dead-letter topic has stored its bytes, as the content of a
message with the properties topic, subscription, id and cause. A crash in between stores it twice.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pulsar

from redrive.delivery.inspection import MALFORMED_ENTRY, dead_letter_properties
from redrive.errors import RedriveError
from redrive.policy.envelope import CAUSE_MESSAGE, CAUSE_TYPE
from redrive.policy.naming import TopicName
from redrive.reading import bitmap, broker, ranges, reader
from redrive.reading.positions import EntryId, Position
from redrive.reading.ranges import Partition, Range
from redrive.reading.reader import ReadableTopic
from redrive.reading.rows import entry_acknowledgement
from redrive.reading.stored import MAX_CONTENT

_KINDS = pulsar.ConsumerType.Shared, pulsar.ConsumerType.KeyShared, pulsar.ConsumerType.Failover


class HarmfulEntry(NamedTuple):
    """An entry that is not acknowledged.

    Attributes:
        partition: partition of the topic; -1 if it is not partitioned.
        entry: its id.
        stored: its bytes, including metadata.
        cause: its defect.
    """

    partition: int
    entry: EntryId
    stored: bytes
    cause: str

    def __str__(self) -> str:
        return f"{self.entry}:{self.partition}"


def find(
    client: broker.ReadingClient, admin_url: str, topic: TopicName, subscription: str
) -> Iterator[HarmfulEntry]:
    """Yield the harmful entries that a subscription has not acknowledged.

    Raises:
        RedriveError: the topic cannot be read.
    """
    # Content that is not decompressed could not be compared with its metadata.
    readable = ReadableTopic(client, admin_url, topic, max_content=MAX_CONTENT)
    for partition in broker.waited(lambda: broker.read_partitions(admin_url, topic, subscription)):
        yield from _of_partition(readable, partition)


def quarantine(
    client: broker.ReadingClient,
    topic: TopicName,
    subscription: str,
    entry: HarmfulEntry,
    dead_letter_topic: TopicName,
) -> None:
    """Store an entry in a dead-letter topic, and acknowledge it.

    Raises:
        RedriveError: it was not stored.
        ReplayRoleRefusedError: the role may not, or the broker does not answer.
    """
    properties = {
        **dead_letter_properties(topic, subscription, str(entry)),
        CAUSE_TYPE: MALFORMED_ENTRY,
        CAUSE_MESSAGE: entry.cause,
    }
    producer = broker.opened(
        f"open a producer on {dead_letter_topic}",
        "produce",
        lambda: client.create_producer(
            str(dead_letter_topic), batching_enabled=False, chunking_enabled=True
        ),
    )
    try:
        receipt = producer.send(entry.stored, properties=properties)
    except pulsar.PulsarException as error:
        raise _not_quarantined(entry, str(error)) from error
    finally:
        broker.close(producer)
    if receipt.ledger_id() < 0:
        raise _not_quarantined(entry, "a receipt without an entry")
    consumer = _acknowledger(client, broker.partition_of(topic, entry.partition), subscription)
    consumer.acknowledge(entry_acknowledgement(entry.partition, entry.entry))
    broker.close(consumer)


def _of_partition(topic: ReadableTopic, partition: Partition) -> Iterator[HarmfulEntry]:
    backlog = {piece.range: piece.pending for piece in ranges.cut(partition, partition.end)}
    if not backlog:
        return
    first = min(entry_range.entry_id(bitmap.lowest(bits)) for entry_range, bits in backlog.items())
    after = EntryId(first.ledger, first.entry - 1)
    malformed: dict[EntryId, tuple[bytes, str]] = {}

    def take_in(place: tuple[int, int], stored: bytes, cause: str) -> None:
        malformed[EntryId(*place)] = stored, cause

    topic.client.on_malformed = take_in
    behind = partition.behind(after)
    ahead = reader.prefetch(partition.entry_bytes)
    for _ in reader.read_messages(topic, partition.index, after, behind, ahead):
        pass  # consumers handle it
    for entry, (stored, cause) in sorted(malformed.items()):
        entry_range = Range.of(partition.index, Position(*entry, 0))
        if bitmap.contains(backlog.get(entry_range, bitmap.EMPTY), entry.entry - entry_range.first):
            yield HarmfulEntry(partition.index, entry, stored, cause)


def _acknowledger(client: pulsar.Client, topic: TopicName, subscription: str) -> pulsar.Consumer:
    """Open a consumer that only acknowledges, with the current type of the subscription."""
    busy: RedriveError | None = None
    for kind in _KINDS:
        try:
            with broker.refusals(f"open the subscription {subscription} of {topic}", "consume"):
                return client.subscribe(
                    str(topic), subscription, consumer_type=kind, receiver_queue_size=0
                )
        except broker.ReplayRoleRefusedError as error:
            if not isinstance(error.__cause__, pulsar.ConsumerBusy):
                raise
            busy = error
    raise busy or AssertionError


def _not_quarantined(entry: HarmfulEntry, got: str) -> RedriveError:
    return RedriveError(
        f"the harmful entry {entry} was not stored, and is not acknowledged",
        got=got,
        remedy="check that the role may produce to the dead-letter topic, and run this again",
        reason="NotQuarantined",
    )


def main(arguments: list[str]) -> int:
    """Print the harmful entries, and quarantine them; return 1 if any are left."""
    parser = argparse.ArgumentParser(prog="python -m redrive.replay.harmful", description=__doc__)
    parser.add_argument("service_url")
    parser.add_argument("admin_url")
    parser.add_argument("topic", type=TopicName.parse_whole)
    parser.add_argument("subscription")
    parser.add_argument("--dead-letter", type=TopicName.parse_whole, metavar="TOPIC")
    options = parser.parse_args(arguments)
    count = 0
    with broker.connect(options.service_url) as client:
        for entry in find(client, options.admin_url, options.topic, options.subscription):
            count += 1
            if options.dead_letter is not None:
                topic, subscription = options.topic, options.subscription
                quarantine(client, topic, subscription, entry, options.dead_letter)
            sys.stdout.write(f"{entry} {entry.cause}\n")
    return int(count > 0 and options.dead_letter is None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

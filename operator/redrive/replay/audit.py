"""Comparison of dead-letter topic, ledger and targets, message by message, without changes.

`python -m redrive.replay.audit SERVICE_URL ADMIN_URL DEAD_LETTER_TOPIC TARGET…`, in an environment
with the credentials of the replay role, as in a job. Targets are the topics to which Replays moved
messages, usually the retry topic. Messages that were consumed and deleted cannot be compared.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields

from redrive.messages import read_properties
from redrive.policy import naming
from redrive.policy.envelope import reconsume_times
from redrive.policy.naming import DEAD_LETTER_SUBSCRIPTION, TopicName
from redrive.reading import bitmap, broker, ranges, reader
from redrive.reading.positions import NOWHERE, EntryId, Source
from redrive.reading.ranges import Partition, Range
from redrive.reading.reader import ReadableTopic
from redrive.replay import ledger
from redrive.replay.evidence import LedgerKey
from redrive.replay.lookup import proven_source
from redrive.replay.records import Records

Place = tuple[int, EntryId]
"""Partition and id of an entry of the dead-letter topic."""


@dataclass(frozen=True)
class AuditFindings:
    """Differences between the topics, sorted.

    Attributes:
        doubled: messages that the targets contain more than once in total.
        missing: entries that are recorded as moved, and in no target: lost, or deleted there.
        unrecorded: entries in a target that are not recorded and have no open lease, although the
            dead-letter topic has them. The next Replay would send them again.
        returned: entries that are recorded as moved, and are not acknowledged. The next Replay
            acknowledges them.
        open: ranges with an open lease, for which the next Replay searches the target.
    """

    doubled: tuple[Source, ...] = ()
    missing: tuple[Place, ...] = ()
    unrecorded: tuple[Place, ...] = ()
    returned: tuple[Place, ...] = ()
    open: tuple[Range, ...] = ()


def compare(
    records: Records,
    sources: Counter[Source],
    backlog: Mapping[Range, int],
    held: AbstractSet[tuple[int, int]],
) -> AuditFindings:
    """Return the differences.

    Args:
        records: records of the ledger.
        sources: sources of the messages in the targets.
        backlog: bitmaps of unacknowledged entries by range.
        held: partition and id of each ledger that the dead-letter topic has.
    """
    stored = {(source.partition, source.position.entry_id) for source in sources}
    moved: set[Place] = set()
    partly: set[Place] = set()
    leased = set()
    for source_range, record in records.ranges.items():
        moved |= {
            (source_range.partition, source_range.entry_id(at))
            for at in bitmap.members(record.moved_by_any)
        }
        partly |= {
            (source_range.partition, source_range.entry_id(at))
            for parts in record.partly.values()
            for at in parts
        }
        if record.leased:
            leased.add(source_range)
    strange = {
        (partition, entry)
        for partition, entry in stored - moved - partly
        if (partition, entry.ledger) in held
        and not any(_holds(source_range, (partition, entry)) for source_range in leased)
    }
    returned = (
        (source_range.partition, source_range.entry_id(offset))
        for source_range, bits in backlog.items()
        for offset in bitmap.members(bits & records.range(source_range).moved_by_any)
    )
    return AuditFindings(
        doubled=tuple(sorted(source for source, count in sources.items() if count > 1)),
        missing=tuple(sorted(moved - stored)),
        unrecorded=tuple(sorted(strange)),
        returned=tuple(sorted(returned)),
        open=tuple(sorted(leased)),
    )


def audit(
    urls: tuple[str, str], dead_letter: TopicName, subscription: str, *targets: TopicName
) -> AuditFindings:
    """Read all topics, and compare them.

    Args:
        urls: URLs of the broker and of its admin API.
        dead_letter: dead-letter topic.
        subscription: subscription that retains dead letters.
        targets: topics to which Replays moved messages.

    Raises:
        RedriveError: a topic cannot be read.
    """
    service_url, admin_url = urls
    key = ledger.mounted_key()
    with broker.connect(service_url) as client:
        records = ledger.read(client, naming.ledger_topic(dead_letter), key, admin_url)
        sources: Counter[Source] = Counter()
        for target in targets:
            topic = ReadableTopic(client, admin_url, target)
            sources.update(_sources(topic, broker.read_partitions(admin_url, target), key))
    dead = broker.read_partitions(admin_url, dead_letter, subscription)
    backlog = {piece.range: piece.pending for piece in ranges.all_pieces(dead)}
    held = {(partition.index, ledger_id) for partition in dead for ledger_id in partition.held}
    return compare(records, sources, backlog, held)


def _sources(
    target: ReadableTopic, partitions: tuple[Partition, ...], key: LedgerKey
) -> Iterator[Source]:
    """Yield the sources of replayed messages in *target*, without their retries."""
    for partition in partitions:
        held = partition.behind(NOWHERE)
        ahead = reader.prefetch(partition.entry_bytes)
        for message in reader.read_messages(target, partition.index, NOWHERE, held, ahead):
            carried = read_properties(message) or {}
            source = proven_source(carried, target.topic, key)
            if source is not None and reconsume_times(carried) == 0:
                yield source


def _holds(source_range: Range, place: Place) -> bool:
    partition, entry = place
    return (source_range.partition, source_range.ledger) == (partition, entry.ledger) and (
        source_range.first <= entry.entry <= source_range.last
    )


def main(arguments: list[str]) -> int:
    """Print the differences; return 1 if messages are lost or doubled, or will be."""
    parser = argparse.ArgumentParser(prog="python -m redrive.replay.audit", description=__doc__)
    parser.add_argument("service_url")
    parser.add_argument("admin_url")
    parser.add_argument("dead_letter_topic", type=TopicName.parse_whole)
    parser.add_argument("target", type=TopicName.parse_whole, nargs="+")
    parser.add_argument(
        "--subscription",
        default=DEAD_LETTER_SUBSCRIPTION,
        help="subscription that retains dead letters (default: %(default)s)",
    )
    parser.add_argument(
        "--complete",
        action="store_true",
        help="targets contain all messages that were ever moved, so missing ones are lost",
    )
    options = parser.parse_args(arguments)
    urls = options.service_url, options.admin_url
    findings = audit(urls, options.dead_letter_topic, options.subscription, *options.target)
    for field in fields(findings):
        items = getattr(findings, field.name)
        lines = [f"{field.name}: {len(items)}", *(f"  {_shown(item)}" for item in items)]
        sys.stdout.write("\n".join(lines) + "\n")
    lost = options.complete and findings.missing
    return int(bool(findings.doubled or findings.unrecorded or lost))


def _shown(item: Source | Range | Place) -> str:
    return str(item) if isinstance(item, Source | Range) else f"{item[0]}:{item[1]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

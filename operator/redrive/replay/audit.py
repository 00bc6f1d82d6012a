"""Compare dead-letter topic, ledger and targets, message by message; changes nothing.

`python -m redrive.replay.audit SERVICE_URL ADMIN_URL DEAD_LETTER_TOPIC TARGET…` where the
environment leads to the replay role's credentials, as that of a job does. Targets are the topics
that Replays have moved messages to: the retry topic, for most. What a target has trimmed, because
it was consumed, can't be compared any more.
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
"""An entry of the dead-letter topic: its partition, and its id."""


@dataclass(frozen=True)
class AuditFindings:
    """What does not agree; each is sorted.

    Attributes:
        doubled: messages that are in the targets more than once, all together.
        missing: entries that are on record as moved, and in no target: lost, or trimmed there.
        unrecorded: entries in a target that are not on record, and under no open lease, though the
            dead-letter topic has them: the next replay would send them again.
        returned: entries that are on record as moved, and are not acknowledged: the next replay
            acknowledges them.
        open: ranges under a lease that was not ended: the next replay looks for what was sent.
    """

    doubled: tuple[Source, ...] = ()
    missing: tuple[Place, ...] = ()
    unrecorded: tuple[Place, ...] = ()
    returned: tuple[Place, ...] = ()
    open: tuple[Range, ...] = ()


def compare(
    records: Records,
    sources: Counter[Source],
    resting: Mapping[Range, int],
    held: AbstractSet[tuple[int, int]],
) -> AuditFindings:
    """Return what does not agree; pure.

    Args:
        records: of the ledger.
        sources: where each message of the targets was moved from.
        resting: which entries of each range are not acknowledged.
        held: partition and id of each ledger that the dead-letter topic has.
    """
    stored = {(source.partition, source.position.entry_id) for source in sources}
    moved: set[Place] = set()
    partly: set[Place] = set()
    leased = set()
    for of, record in records.ranges.items():
        moved |= {(of.partition, of.entry_id(at)) for at in bitmap.members(record.moved_by_any)}
        partly |= {
            (of.partition, of.entry_id(at)) for parts in record.partly.values() for at in parts
        }
        if record.leased:
            leased.add(of)
    strange = {
        (partition, entry)
        for partition, entry in stored - moved - partly
        if (partition, entry.ledger) in held
        and not any(_holds(of, (partition, entry)) for of in leased)
    }
    returned = (
        (of.partition, of.entry_id(offset))
        for of, bits in resting.items()
        for offset in bitmap.members(bits & records.range(of).moved_by_any)
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
    """Read all these topics, and compare them.

    Args:
        urls: of the broker, and of its admin interface.
        dead_letter: the dead-letter topic.
        subscription: the one that keeps dead letters.
        targets: what Replays have moved messages to.

    Raises:
        RedriveError: one can't be read.
    """
    service_url, admin_url = urls
    key = ledger.mounted_key()
    with broker.connect(service_url) as client:
        records = ledger.read(client, naming.ledger_topic(dead_letter), key)
        sources: Counter[Source] = Counter()
        for target in targets:
            there = ReadableTopic(client, admin_url, target)
            sources.update(_sources(there, broker.read_partitions(admin_url, target), key))
    dead = broker.read_partitions(admin_url, dead_letter, subscription)
    resting = {piece.range: piece.resting for piece in ranges.all_pieces(dead)}
    held = {(partition.index, each) for partition in dead for each in partition.held}
    return compare(records, sources, resting, held)


def _sources(
    target: ReadableTopic, partitions: tuple[Partition, ...], key: LedgerKey
) -> Iterator[Source]:
    """Go through what replays have put into *target*; a retry of that is another message."""
    for partition in partitions:
        held = partition.behind(NOWHERE)
        ahead = reader.prefetch(partition.entry_bytes)
        for message in reader.read_messages(target, partition.index, NOWHERE, held, ahead):
            carried = read_properties(message) or {}
            source = proven_source(carried, target.topic, key)
            if source is not None and reconsume_times(carried) == 0:
                yield source


def _holds(of: Range, place: Place) -> bool:
    partition, entry = place
    return (of.partition, of.ledger) == (partition, entry.ledger) and (
        of.first <= entry.entry <= of.last
    )


def main(arguments: list[str]) -> int:
    """Print what does not agree; return 1 if messages are lost or doubled, or will be."""
    parser = argparse.ArgumentParser(prog="python -m redrive.replay.audit", description=__doc__)
    parser.add_argument("service_url")
    parser.add_argument("admin_url")
    parser.add_argument("dead_letter_topic", type=TopicName.parse_whole)
    parser.add_argument("target", type=TopicName.parse_whole, nargs="+")
    parser.add_argument(
        "--subscription",
        default=DEAD_LETTER_SUBSCRIPTION,
        help="what keeps the dead letters (default: %(default)s)",
    )
    parser.add_argument(
        "--complete",
        action="store_true",
        help="the targets still have all that was ever moved: what is missing is lost",
    )
    given = parser.parse_args(arguments)
    urls = given.service_url, given.admin_url
    found = audit(urls, given.dead_letter_topic, given.subscription, *given.target)
    for field in fields(found):
        about = getattr(found, field.name)
        lines = [f"{field.name}: {len(about)}", *(f"  {_shown(each)}" for each in about)]
        sys.stdout.write("\n".join(lines) + "\n")
    lost = given.complete and found.missing
    return int(bool(found.doubled or found.unrecorded or lost))


def _shown(found: Source | Range | Place) -> str:
    return str(found) if isinstance(found, Source | Range) else f"{found[0]}:{found[1]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

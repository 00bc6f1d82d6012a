"""The plan of a whole run: what to scan of what rests, and where a limit ends it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from redrive.replay.job.choosing import Chooser
from redrive.replay.job.engine import Engine
from redrive.replay.job.plan import PlannedRange, Scan
from redrive.replay.ledger.records import RangePlan, Records
from redrive.replay.spec import EVERYTHING, ReplayJob
from redrive.replay.topic import ranges, reading
from redrive.replay.topic.partition import Partition
from redrive.replay.topic.ranges import Piece, Range


def takes_all(job: ReplayJob) -> bool:
    """Whether all that rests is to be moved, and how much that is need not be known before."""
    choice = replace(job.choice, max_replays=None, discards=False)
    return job.where is None and choice == EVERYTHING and job.approval_above is None


def unread(records: Records, resting: Sequence[Partition]) -> Iterator[tuple[Range, RangePlan]]:
    """Plan to move all that rests and is not moved, without reading it.

    What can't be moved turns out when a task reads it, and so does how many messages there are.
    """
    for _, piece in _pieces(resting):
        entries = piece.resting & ~records.range(piece.range).moved_by_any
        if entries:
            yield piece.range, RangePlan.of_unread(entries)


def plans(
    job: ReplayJob, engine: Engine, records: Records, resting: Sequence[Partition]
) -> Iterator[tuple[Range, RangePlan]]:
    """Plan a run: of the dead letters, if it has to know more of them than that they rest.

    Arguments and errors are those of `planned`.
    """
    if takes_all(job):
        yield from unread(records, resting)
    else:
        for each in planned(job, engine, records, resting):
            yield each.range, each.plan


def planned(
    job: ReplayJob, engine: Engine, records: Records, resting: Sequence[Partition]
) -> Iterator[PlannedRange]:
    """Plan a run, range by range; one without a plan has nothing that is selected.

    With a limit, ever more ranges are scanned at a time until it is reached: a small one does not
    read all there is.

    Args:
        job: the run.
        engine: what scans.
        records: of the ledger. What is moved is left out.
        resting: what there is.

    Raises:
        Exception: a scan failed.
    """
    scans = sorted(_scans(job, records, resting), key=lambda scan: scan.piece.range)
    room = job.choice.limit
    if room is None:
        yield from engine.scan(scans)
        return
    at, width = 0, engine.slots
    while room and at < len(scans):
        wave = scans[at : at + width]
        at, width = at + width, width * 2
        found = {each.range: each for each in engine.scan(wave)}
        for scan in wave:
            whole = found.get(scan.piece.range)
            if whole is None or not room:
                continue
            if whole.plan.matched > room:
                yield from engine.scan([replace(scan, choice=replace(scan.choice, limit=room))])
                return
            yield whole
            room -= whole.plan.matched


def _scans(job: ReplayJob, records: Records, resting: Sequence[Partition]) -> Iterator[Scan]:
    choice = replace(job.choice, limit=None)
    chooser = Chooser(choice)
    for partition, piece in _pieces(resting):
        narrowed = ranges.narrowed(piece, partition, chooser.entries(piece.range))
        if narrowed is not None:
            yield Scan(
                job.service_url,
                job.admin_url,
                job.policy.dead_letter_topic,
                narrowed,
                records.range(piece.range).moved_by_any,
                reading.prefetch(partition.entry_bytes),
                choice,
            )


def _pieces(resting: Sequence[Partition]) -> Iterator[tuple[Partition, Piece]]:
    for partition in resting:
        for piece in ranges.cut(partition, partition.end):
            yield partition, piece

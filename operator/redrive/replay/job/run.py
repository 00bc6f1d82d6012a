"""Run of a replay job: the spine.

A run plans, dispatches and accounts, and an engine runs its tasks. It may be killed at any point.
The next run, of the same Replay or another one, resumes from the ledger, which records the moved
messages and the places to search for others.

While the broker is down, calls are repeated for `broker.WAIT_SECONDS`, five minutes. A longer
outage ends the run, with its cause in the status, and the controller of the job starts it again, up
to three times. So a Replay continues after an outage of ten minutes. It fails after about twenty
minutes without a broker, and the next Replay continues from its ledger. The deadline of the Replay
is not extended.
"""

from __future__ import annotations

import functools
import logging
import math
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pulsar

from redrive.errors import RedriveError
from redrive.reading import bitmap, broker, ranges, reader, rows
from redrive.reading.positions import LATEST, EntryId, TargetPartition
from redrive.reading.ranges import Partition, Piece, Range
from redrive.reading.reader import ReadableTopic
from redrive.replay import ledger as ledger_topic
from redrive.replay import lookup
from redrive.replay.account import Account
from redrive.replay.job import outcomes
from redrive.replay.job.dispatch import Dispatch
from redrive.replay.job.plan import (
    Engine,
    PlannedRange,
    ReplayGoneError,
    Reporter,
    RunEndedError,
    RunPreview,
    Scan,
    Scanned,
)
from redrive.replay.ledger import Ledger
from redrive.replay.records import Header, RangePlan, Records, header_key, plan_key
from redrive.replay.spec import EVERYTHING, Chooser, ReplayJob
from redrive.replay.task import Route

ACKNOWLEDGE_TRIES = 5

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Review:
    """Plan that was shown before the run.

    Attributes:
        ends: last entry of each partition in the plan. Later entries are not part of the run.
        planned: plans of all ranges; None if another run of the same Replay has shown them.
    """

    ends: Mapping[int, EntryId]
    planned: Sequence[PlannedRange] | None = None

    def narrow(
        self, job: ReplayJob, backlog: Sequence[Partition]
    ) -> tuple[ReplayJob, tuple[Partition, ...]]:
        """Return the job and the partitions, narrowed to the entries that were shown.

        The selection is evaluated again without its limit, which `ends` replace. Otherwise later
        entries would take the place of entries that others acknowledged meanwhile.
        """
        bounded = tuple(
            partition.until(self.ends[partition.index])
            for partition in backlog
            if partition.index in self.ends
        )
        return replace(job, choice=replace(job.choice, limit=None)), bounded


def run(
    job: ReplayJob,
    engine: Engine,
    reporter: Reporter,
    *,
    was_planned: bool = False,
    review: Review | None = None,
) -> Account:
    """Move the selected dead letters to their target, report progress, and return the account.

    Args:
        job: the run.
        engine: engine of the tasks.
        reporter: reporter of the progress.
        was_planned: True if a plan was reported before, so no other plan may be made.
        review: plan that was shown and confirmed.

    Raises:
        RedriveError: the ledger has lost the reported plan.
        FencedError: another run has taken over.
        Exception: the run did not end; another run, also of the next Replay, can resume it.
    """
    owner = f"{job.uid}/{secrets.token_hex(8)}"
    _read_source(job)  # reports refused credentials, where the client only reports a time-out
    _check_producers(job)
    with Ledger.open(job.service_url, job.policy.ledger_topic, owner) as ledger:
        reporter.take_over(ledger.fencing_token)
        # Decisions are based on reads after the takeover, because no other run changes them now.
        backlog = _read_source(job)
        _forget(job, ledger, backlog)
        if job.uid not in ledger.records.headers:
            if was_planned:
                raise ledger_topic.lost(job.uid)
            with reporting_progress(engine, reporter):
                _plan(job, engine, ledger, backlog, review)
        _acknowledge_again(job, ledger, backlog)
        route = _route(job, ledger, owner)
        _check_rights(route)
        Dispatch(job, route, engine, ledger, backlog, reporter).run()
        ledger.repair()
        _ensure_acknowledged(job, ledger)
        account = Account.of(job.uid, ledger.records)
        reporter.report(account)
    if account.left:
        raise RedriveError(
            "the run ended before all selected dead letters were moved",
            got=account.left,
            remedy="start another run, which moves them",
            reason="CutOff",
        )
    return account


def preview(job: ReplayJob, engine: Engine, reporter: Reporter) -> RunPreview:
    """Plan the run, report progress, and return the preview.

    It moves no messages and does not affect other runs.

    Raises:
        Exception: it could not be planned.
    """
    return plan_review(job, engine, reporter, None)[0]


def plan_review(
    job: ReplayJob, engine: Engine, reporter: Reporter, shown: Review | None
) -> tuple[RunPreview, Review]:
    """Plan the run, report progress, and return the preview with its review.

    It moves no messages and does not affect other runs.

    Args:
        job: the run.
        engine: engine of the scans.
        reporter: reporter of the progress.
        shown: review that another run of this Replay has shown, to which the plan is limited.

    Raises:
        Exception: it could not be planned.
    """
    backlog = _read_source(job)  # first, as in `run`
    key, topic = ledger_topic.mounted_key(), job.policy.ledger_topic
    with broker.connect(job.service_url) as client:
        records = broker.waited(lambda: ledger_topic.read(client, topic, key, job.admin_url))
    ends = None if shown is None else shown.ends
    if shown is not None:
        job, backlog = shown.narrow(job, backlog)
    with reporting_progress(engine, reporter):
        planned = list(plan_ranges(job, engine, records, backlog))
    if ends is None:
        ends = _last_planned(planned) if job.choice.limit is not None else _last_of(backlog)
    records.plans[job.uid] = {piece.range: piece.plan for piece in planned}
    preview = RunPreview.of(Account.of(job.uid, records), planned, job, engine.slots)
    return preview, Review(ends, planned)


def _last_of(backlog: Sequence[Partition]) -> dict[int, EntryId]:
    return {partition.index: partition.end for partition in backlog if partition.ledgers}


def _last_planned(planned: Sequence[PlannedRange]) -> dict[int, EntryId]:
    """Return the last entry of each partition that is selected or refused."""
    ends: dict[int, EntryId] = {}
    for piece, plan, *_ in planned:
        entries = [refused.entry for refused in plan.refused]
        if plan.selected:
            entries.append(piece.entry_id(bitmap.highest(plan.selected)))
        for entry in entries:
            ends[piece.partition] = max(entry, ends.get(piece.partition, entry))
    return ends


def _read_source(job: ReplayJob) -> tuple[Partition, ...]:
    topic, subscription = job.policy.dead_letter_topic, job.policy.dead_letter_subscription
    return broker.waited(lambda: broker.read_partitions(job.admin_url, topic, subscription))


def _check_producers(job: ReplayJob) -> None:
    """Check that the settings of the broker allow producers on the ledger and the target.

    Raises:
        AdminError: see `broker.check_producer`.
    """
    broker.check_producer(job.service_url, job.policy.ledger_topic)
    for partition in broker.waited(lambda: broker.read_partitions(job.admin_url, job.destination)):
        topic = broker.partition_of(job.destination, partition.index)
        broker.check_producer(job.service_url, topic)


def _forget(job: ReplayJob, ledger: Ledger, backlog: Sequence[Partition]) -> None:
    held = [(partition.index, held) for partition in backlog for held in partition.held]
    outdated = list(ledger.records.outdated(job.uid, held))
    headers = ledger.records.header_keys
    ledger.write_all((key, None) for key in outdated if key in headers)  # before their plans
    ledger.write_all((key, None) for key in outdated if key not in headers)


def _plan(
    job: ReplayJob,
    engine: Engine,
    ledger: Ledger,
    backlog: Sequence[Partition],
    review: Review | None,
) -> None:
    """Write the plan of the run into the ledger. The header marks it as complete."""
    # The backlog has changed since an interrupted run wrote a part of its plan.
    former = list(ledger.records.plans.get(job.uid, {}))
    ledger.write_all((plan_key(job.uid, source_range), None) for source_range in former)
    plans: Iterable[tuple[Range, RangePlan]]
    if review is None:
        plans = all_plans(job, engine, ledger.records, backlog)
    elif review.planned is None:
        bounded, before = review.narrow(job, backlog)
        plans = all_plans(bounded, engine, ledger.records, before)
    else:
        plans = [(planned.range, planned.plan) for planned in review.planned]
    ledger.write_all(
        (plan_key(job.uid, source_range), plan.to_json()) for source_range, plan in plans
    )
    target = broker.waited(lambda: broker.read_partitions(job.admin_url, job.destination))
    partitions = sum(partition.index != broker.UNPARTITIONED for partition in target)
    began = {} if job.follow_for is None else _tails(job, backlog)
    held = {partition.index: partition.held for partition in backlog}
    header = Header(f"{job.namespace}/{job.name}", partitions, job.reason, job.ticket, began, held)
    ledger.write(header_key(job.uid), header.to_json())


def _tails(job: ReplayJob, backlog: Sequence[Partition]) -> dict[TargetPartition, EntryId]:
    """Return the ends of the topics in which replayed messages may arrive."""
    dead = job.policy.dead_letter_topic
    tails = {TargetPartition(dead, partition.index): partition.tail for partition in backlog}
    for topic in outcomes.live_topics(job):
        tails |= broker.waited(functools.partial(lookup.target_ends, job.admin_url, topic))
    return tails


def _route(job: ReplayJob, ledger: Ledger, owner: str) -> Route:
    return Route(
        service_url=job.service_url,
        admin_url=job.admin_url,
        source=job.policy.dead_letter_topic,
        subscription=job.policy.dead_letter_subscription,
        target=job.destination,
        target_partitions=ledger.records.headers[job.uid].target_partitions,
        exactly_once=job.exactly_once,
        batch=job.batch,
        ledger=job.policy.ledger_topic,
        replay=f"{job.namespace}/{job.name}",
        uid=job.uid,
        owner=owner,
        receiver=job.receiver,
    )


def _check_rights(route: Route) -> None:
    """Check that the role may send to the target and read it, before any range is leased.

    Later runs need these rights to search the target for messages of an open lease.

    Raises:
        ReplayRoleRefusedError: the role lacks a right.
    """
    index = 0 if route.target_partitions else broker.UNPARTITIONED
    topic = str(broker.partition_of(route.target, index))
    try:
        with broker.connect(route.service_url) as client:
            with broker.refusals(f"read {topic}", "consume"):
                name = f"redrive-{secrets.token_hex(8)}"
                client.open_entry_reader(route.target, index, LATEST, name=name, ahead=1).close()
            # Second, because a topic over its backlog quota refuses all producers.
            with broker.refusals(f"open a producer on {topic}", "produce"):
                client.create_producer(topic).close()
    except broker.ReplayRoleRefusedError as error:
        # Tasks handle other errors, such as a schema or an unavailable broker.
        if isinstance(error.__cause__, pulsar.AuthorizationError):
            raise


def _ensure_acknowledged(job: ReplayJob, ledger: Ledger) -> None:
    """Acknowledge moved messages again, until a broker that unloaded the topic retains that."""
    for _ in range(ACKNOWLEDGE_TRIES):
        if not _acknowledge_again(job, ledger, _read_source(job)):
            return
        time.sleep(1)
    logger.warning("broker lost acknowledgements; the next Replay repeats them")


def _acknowledge_again(job: ReplayJob, ledger: Ledger, backlog: Sequence[Partition]) -> int:
    """Acknowledge entries that are moved but in the backlog; return their number."""
    count = 0
    with broker.connect(job.service_url) as client:
        for partition in backlog:
            topic = ReadableTopic(client, job.admin_url, job.policy.dead_letter_topic)
            returned = list(_returned(ledger, partition, topic))
            if not returned:
                continue
            name = broker.partition_of(job.policy.dead_letter_topic, partition.index)
            consumer = broker.acknowledger(client, name, job.policy.dead_letter_subscription)
            for message_id in returned:
                consumer.acknowledge(message_id)
            broker.close(consumer)
            count += len(returned)
    return count


def _returned(
    ledger: Ledger, partition: Partition, topic: ReadableTopic
) -> Iterator[pulsar.MessageId]:
    """Yield the ids to acknowledge in *partition*."""
    for source_range, record in ledger.records.ranges.items():
        if source_range.partition == partition.index and source_range.ledger in partition.held:
            returned = record.moved_by_any & ~ranges.settled(source_range, partition)
            chunked = returned & bitmap.of(record.chunks, source_range.size)
            for offset in bitmap.members(returned & ~chunked):
                entry = source_range.entry_id(offset)
                yield rows.entry_acknowledgement(source_range.partition, entry)
            if chunked:  # the record contains only the first and last entry of a message
                after = reader.first_entry(source_range, chunked, record.chunks)
                ahead = reader.prefetch(partition.entry_bytes)
                for message in reader.read_entries(topic, source_range, chunked, after, ahead):
                    yield from rows.DeadLetterRow.of(message, partition.index).acknowledgements


def takes_all(job: ReplayJob) -> bool:
    """Return True if the run moves all dead letters, without knowing their number before."""
    choice = replace(job.choice, max_replays=None, discards=False, settles_unproven=False)
    return job.where is None and choice == EVERYTHING and job.approval_above is None


def unread_ranges(
    records: Records, backlog: Sequence[Partition]
) -> Iterator[tuple[Range, RangePlan]]:
    """Plan to move all unacknowledged entries that are not moved, without reading them.

    Tasks read them, and determine the refused entries and the numbers of messages.
    """
    for _, piece in _pieces(backlog):
        entries = piece.pending & ~records.range(piece.range).moved_by_any
        if entries:
            yield piece.range, RangePlan.of_unread(entries)


def all_plans(
    job: ReplayJob, engine: Engine, records: Records, backlog: Sequence[Partition]
) -> Iterator[tuple[Range, RangePlan]]:
    """Plan a run; read dead letters only if the selection depends on them.

    See `plan_ranges` for arguments and errors.
    """
    if takes_all(job):
        yield from unread_ranges(records, backlog)
    else:
        for planned in plan_ranges(job, engine, records, backlog):
            yield planned.range, planned.plan


def plan_ranges(
    job: ReplayJob, engine: Engine, records: Records, backlog: Sequence[Partition]
) -> Iterator[PlannedRange]:
    """Yield the plan of each range with selected messages.

    With a limit, the number of concurrent scans doubles until the limit is reached, so a small
    limit does not read the whole topic. The first entry is selected even if it exceeds the limit.

    Args:
        job: the run.
        engine: engine of the scans.
        records: records of the ledger. Moved messages are left out.
        backlog: unacknowledged entries of each partition.

    Raises:
        Exception: a scan failed.
    """
    scans = sorted(_scans(job, records, backlog), key=lambda scan: scan.piece.range)
    room = job.choice.limit
    if room is None:
        yield from engine.scan(scans)
        return
    at, width = 0, engine.slots
    while room and at < len(scans):
        wave = scans[at : at + width]
        at, width = at + width, width * 2
        plans = {planned.range: planned for planned in engine.scan(wave)}
        for scan in wave:
            whole = plans.get(scan.piece.range)
            if whole is None or not room:
                continue
            if whole.plan.matched > room:
                is_first = room == job.choice.limit
                limit = max(room, whole.plan.first_messages(whole.range)) if is_first else room
                yield from engine.scan([replace(scan, choice=replace(scan.choice, limit=limit))])
                return
            yield whole
            room -= whole.plan.matched


def _scans(job: ReplayJob, records: Records, backlog: Sequence[Partition]) -> Iterator[Scan]:
    choice = replace(job.choice, limit=None)
    chooser = Chooser(choice)
    for partition, piece in _pieces(backlog):
        narrowed = ranges.narrowed(piece, partition, chooser.entries(piece.range))
        if narrowed is not None:
            yield Scan(
                job.service_url,
                job.admin_url,
                job.policy.dead_letter_topic,
                narrowed,
                records.range(piece.range).moved_by_any,
                reader.prefetch(partition.entry_bytes),
                choice,
                sequenced=job.policy.sequenced,
            )


def _pieces(backlog: Sequence[Partition]) -> Iterator[tuple[Partition, Piece]]:
    for partition in backlog:
        for piece in ranges.cut(partition, partition.end):
            yield partition, piece


REPORT_SECONDS = 1.0
IDLE_SECONDS = 3.0
"""Interval of reports without new results, which read if the run has to end."""
POLL_SECONDS = 0.1
"""Interval of polls of the results, so that the first one is reported at once."""


@contextmanager
def reporting_progress(engine: Engine, reporter: Reporter) -> Iterator[None]:
    """Report results of scans at once, and then every `REPORT_SECONDS` if they have changed.

    Raises:
        ReplayGoneError, RunEndedError: the run has to end. Its scans are canceled.
    """
    planned, ends = threading.Event(), list[RedriveError]()

    def report() -> None:
        shown, due, idle_due = Scanned(), -math.inf, time.monotonic() + IDLE_SECONDS
        while not planned.wait(POLL_SECONDS):
            if ends:
                engine.cancel(ends[0])  # repeated, because another scan may have begun
                continue
            scanned, now = engine.scanned, time.monotonic()
            if now < (idle_due if scanned == shown else due):
                continue
            due, idle_due = now + REPORT_SECONDS, now + IDLE_SECONDS
            try:
                reporter.report_scan(scanned)
                shown = scanned
            except (ReplayGoneError, RunEndedError) as error:
                ends.append(error)
            except Exception as error:  # noqa: BLE001 - a plan must not fail by its report
                logger.warning("status update failed, scan continues: %s", error)

    thread = threading.Thread(target=report)
    thread.start()
    try:
        yield
    except Exception:
        if not ends:
            raise
    finally:
        planned.set()
        thread.join()
    if ends:
        raise ends[0]

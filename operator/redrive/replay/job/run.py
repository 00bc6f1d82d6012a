"""A run of a replay job: the spine.

A replay, from its first to its last message. Free of Spark: an engine runs the tasks.

It may be killed at any point and started again, as the same Replay or as the next one: the ledger
says what is moved, and where to look for what may be.

The plan of a whole run: what to scan of what rests, and where a limit ends it.

What a run shows while it is planned, which takes minutes where millions of messages rest.
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
from redrive.replay.job import aftermath
from redrive.replay.job.dispatch import Dispatch
from redrive.replay.job.plan import Engine, PlannedRange, Reporter, RunPreview, Scan, Scanned
from redrive.replay.ledger import Ledger
from redrive.replay.records import Account, Header, RangePlan, Records, header_key, plan_key
from redrive.replay.spec import EVERYTHING, Chooser, ReplayJob
from redrive.replay.task import Route

ACKNOWLEDGE_TRIES = 5

logger = logging.getLogger(__name__)


class CutOffError(RedriveError):
    """A run has come to its end, and messages are left."""

    reason = "CutOff"


@dataclass(frozen=True)
class Review:
    """A plan that was shown before the run.

    Attributes:
        ends: last entry of each partition that it has read. What lies behind them came later.
        planned: all ranges; None if another run of the same Replay has shown them.
    """

    ends: Mapping[int, EntryId]
    planned: Sequence[PlannedRange] | None = None

    def narrow(
        self, job: ReplayJob, resting: Sequence[Partition]
    ) -> tuple[ReplayJob, tuple[Partition, ...]]:
        """Return the job, and what rests, of which another plan selects nothing else.

        The selection is evaluated again without its limit, which `ends` stand for: of entries that
        others acknowledged meanwhile, later ones must not take the place.
        """
        bounded = tuple(
            partition.until(self.ends[partition.index])
            for partition in resting
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
    """Move the selected dead letters to their target, report on the way, return the account.

    Args:
        job: the run.
        engine: what runs the tasks.
        reporter: what shows how far it is.
        was_planned: whether a plan was reported before: what came later is none of this Replay's.
        review: what was shown before, and is to be moved.

    Raises:
        LedgerLostError: the plan that was reported is not there any more.
        FencedError: another run has taken over.
        Exception: the run did not come to its end; another of the same job, or the next Replay,
            goes on with it.
    """
    owner = f"{job.uid}/{secrets.token_hex(8)}"
    _look(job)  # of credentials that are refused the client says that it has timed out
    _check_producers(job)
    with Ledger.open(job.service_url, job.policy.ledger_topic, owner) as ledger:
        reporter.take_over(ledger.fencing_token)
        # All that a decision is made on is read after the takeover: no other run changes it now.
        resting = _look(job)
        _forget(job, ledger, resting)
        if job.uid not in ledger.records.headers:
            if was_planned:
                raise ledger_topic.lost(job.uid)
            with reporting_progress(engine, reporter):
                _plan(job, engine, ledger, resting, review)
        _acknowledge_again(job, ledger, resting)
        route = _route(job, ledger, owner)
        _check_rights(route)
        Dispatch(job, route, engine, ledger, resting, reporter).run()
        ledger.repair()
        _see_acknowledged(job, ledger)
        account = Account.of(job.uid, ledger.records)
        reporter.report(account)
    if account.left:
        raise CutOffError(
            "the run has come to its end, and dead letters are left",
            got=account.left,
            remedy="another run goes on with them",
        )
    return account


def preview(job: ReplayJob, engine: Engine, reporter: Reporter) -> RunPreview:
    """Plan the run, report on the way, and return what it would do.

    It moves nothing and disturbs no other run.

    Raises:
        Exception: it could not be planned.
    """
    return plan_review(job, engine, reporter, None)[0]


def plan_review(
    job: ReplayJob, engine: Engine, reporter: Reporter, shown: Review | None
) -> tuple[RunPreview, Review]:
    """Plan the run, report on the way, and return what it would do.

    It moves nothing and disturbs no other run.

    Args:
        job: the run.
        engine: what scans.
        reporter: what shows how far it is.
        shown: what another run of this Replay has shown: nothing else is planned.

    Raises:
        Exception: it could not be planned.
    """
    resting = _look(job)  # first, as by a run
    key, topic = ledger_topic.mounted_key(), job.policy.ledger_topic
    with broker.connect(job.service_url) as client:
        records = broker.waited(lambda: ledger_topic.read(client, topic, key))
    ends = None if shown is None else shown.ends
    if shown is not None:
        job, resting = shown.narrow(job, resting)
    with reporting_progress(engine, reporter):
        planned = list(plan_ranges(job, engine, records, resting))
    if ends is None:
        ends = _last_planned(planned) if job.choice.limit is not None else _last_of(resting)
    records.plans[job.uid] = {each.range: each.plan for each in planned}
    preview = RunPreview.of(Account.of(job.uid, records), planned, job, engine.slots)
    return preview, Review(ends, planned)


def _last_of(resting: Sequence[Partition]) -> dict[int, EntryId]:
    return {partition.index: partition.end for partition in resting if partition.ledgers}


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


def _look(job: ReplayJob) -> tuple[Partition, ...]:
    topic, subscription = job.policy.dead_letter_topic, job.policy.dead_letter_subscription
    return broker.waited(lambda: broker.read_partitions(job.admin_url, topic, subscription))


def _check_producers(job: ReplayJob) -> None:
    """Check that settings let the run send to the ledger and to the target.

    Raises:
        AdminError: see `broker.check_producer`.
    """
    broker.check_producer(job.service_url, job.policy.ledger_topic)
    for partition in broker.waited(lambda: broker.read_partitions(job.admin_url, job.destination)):
        topic = broker.partition_of(job.destination, partition.index)
        broker.check_producer(job.service_url, topic)


def _forget(job: ReplayJob, ledger: Ledger, resting: Sequence[Partition]) -> None:
    held = [(partition.index, each) for partition in resting for each in partition.held]
    for key in list(ledger.records.outdated(job.uid, held)):
        ledger.write(key, None)


def _plan(
    job: ReplayJob,
    engine: Engine,
    ledger: Ledger,
    resting: Sequence[Partition],
    review: Review | None,
) -> None:
    """Plan the run, in the ledger: its end, too, which later dead letters lie behind."""
    for of in list(ledger.records.plans.get(job.uid, {})):  # cut off: now there is other to plan
        ledger.write(plan_key(job.uid, of), None)
    plans: Iterable[tuple[Range, RangePlan]]
    if review is None:
        plans = all_plans(job, engine, ledger.records, resting)
    elif review.planned is None:
        bounded, before = review.narrow(job, resting)
        plans = all_plans(bounded, engine, ledger.records, before)
    else:
        plans = [(planned.range, planned.plan) for planned in review.planned]
    for of, plan in plans:
        ledger.write(plan_key(job.uid, of), plan.to_json())
    target = broker.waited(lambda: broker.read_partitions(job.admin_url, job.destination))
    partitions = sum(partition.index != broker.UNPARTITIONED for partition in target)
    began = {} if job.follow_for is None else _tails(job, resting)
    header = Header(f"{job.namespace}/{job.name}", partitions, job.reason, job.ticket, began)
    ledger.write(header_key(job.uid), header.to_json())


def _tails(job: ReplayJob, resting: Sequence[Partition]) -> dict[TargetPartition, EntryId]:
    """Return behind which entries all lies that the run is going to cause."""
    dead = job.policy.dead_letter_topic
    tails = {TargetPartition(dead, each.index): each.tail for each in resting}
    for topic in aftermath.live_topics(job):
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
        receiver="" if job.target else job.policy.subscription,
    )


def _check_rights(route: Route) -> None:
    """Check that the role may send to the target, and look for it there, before anything is leased.

    A range under a lease is looked for in its target by each later run, which takes these rights.

    Raises:
        ReplayRoleRefusedError: it may not.
    """
    index = 0 if route.target_partitions else broker.UNPARTITIONED
    topic = str(broker.partition_of(route.target, index))
    try:
        with broker.connect(route.service_url) as client:
            with broker.refusals(f"read {topic}", "consume"):
                name = f"redrive-{secrets.token_hex(8)}"
                client.open_entry_reader(route.target, index, LATEST, name=name, ahead=1).close()
            # Second: a topic over its backlog quota refuses it to whoever may.
            with broker.refusals(f"open a producer on {topic}", "produce"):
                client.create_producer(topic).close()
    except broker.ReplayRoleRefusedError as error:
        # Tasks deal with all else, such as a schema, or a broker that is away.
        if isinstance(error.__cause__, pulsar.AuthorizationError):
            raise


def _see_acknowledged(job: ReplayJob, ledger: Ledger) -> None:
    """Have what was moved acknowledged; a broker that unloads the topic may forget it."""
    for _ in range(ACKNOWLEDGE_TRIES):
        if not _acknowledge_again(job, ledger, _look(job)):
            return
        time.sleep(1)
    logger.warning("the broker does not keep acknowledgements; the next Replay repeats them")


def _acknowledge_again(job: ReplayJob, ledger: Ledger, resting: Sequence[Partition]) -> int:
    """Acknowledge what is on record as moved and rests all the same; return how many entries."""
    count = 0
    with broker.connect(job.service_url) as client:
        for partition in resting:
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
    """Yield what to acknowledge of *partition*."""
    for of, record in ledger.records.ranges.items():
        if of.partition == partition.index and of.ledger in partition.held:
            returned = record.moved_by_any & ~ranges.settled(of, partition)
            chunked = returned & bitmap.of(record.chunks, of.size)
            for offset in bitmap.members(returned & ~chunked):
                yield rows.entry_acknowledgement(of.partition, of.entry_id(offset))
            if chunked:  # only its first and last entry are on record
                after = reader.first_entry(of, chunked, record.chunks)
                ahead = reader.prefetch(partition.entry_bytes)
                for letter in reader.read_entries(topic, of, chunked, after, ahead):
                    yield from letter.acknowledgements


def takes_all(job: ReplayJob) -> bool:
    """Whether all that rests is to be moved, and how much that is need not be known before."""
    choice = replace(job.choice, max_replays=None, discards=False, settles_unproven=False)
    return job.where is None and choice == EVERYTHING and job.approval_above is None


def unread_ranges(
    records: Records, resting: Sequence[Partition]
) -> Iterator[tuple[Range, RangePlan]]:
    """Plan to move all that rests and is not moved, without reading it.

    What can't be moved turns out when a task reads it, and so does how many messages there are.
    """
    for _, piece in _pieces(resting):
        entries = piece.resting & ~records.range(piece.range).moved_by_any
        if entries:
            yield piece.range, RangePlan.of_unread(entries)


def all_plans(
    job: ReplayJob, engine: Engine, records: Records, resting: Sequence[Partition]
) -> Iterator[tuple[Range, RangePlan]]:
    """Plan a run: of the dead letters, if it has to know more of them than that they rest.

    Arguments and errors are those of `planned`.
    """
    if takes_all(job):
        yield from unread_ranges(records, resting)
    else:
        for each in plan_ranges(job, engine, records, resting):
            yield each.range, each.plan


def plan_ranges(
    job: ReplayJob, engine: Engine, records: Records, resting: Sequence[Partition]
) -> Iterator[PlannedRange]:
    """Plan a run, range by range; one without a plan has nothing that is selected.

    With a limit, ever more ranges are scanned at a time until it is reached: a small one does not
    read all there is. The first entry is selected as a whole even if it has more messages.

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
                is_first = room == job.choice.limit
                limit = max(room, whole.plan.first_messages(whole.range)) if is_first else room
                yield from engine.scan([replace(scan, choice=replace(scan.choice, limit=limit))])
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
                reader.prefetch(partition.entry_bytes),
                choice,
            )


def _pieces(resting: Sequence[Partition]) -> Iterator[tuple[Partition, Piece]]:
    for partition in resting:
        for piece in ranges.cut(partition, partition.end):
            yield partition, piece


REPORT_SECONDS = 1.0
LOOK_SECONDS = 0.1
"""The first counts are not kept waiting for a second."""


@contextmanager
def reporting_progress(engine: Engine, reporter: Reporter) -> Iterator[None]:
    """Report what scans find, at once and every `REPORT_SECONDS` in which that is more."""
    planned = threading.Event()

    def report() -> None:
        shown, due = Scanned(), -math.inf
        while not planned.wait(LOOK_SECONDS):
            scanned = engine.scanned
            if scanned == shown or time.monotonic() < due:
                continue
            due = time.monotonic() + REPORT_SECONDS
            try:
                reporter.report_scan(scanned)
                shown = scanned
            except Exception as error:  # noqa: BLE001 - it is shown only: a plan must not fail by it
                logger.warning("the status can't be written, and the scan goes on: %s", error)

    thread = threading.Thread(target=report)
    thread.start()
    try:
        yield
    finally:
        planned.set()
        thread.join()

"""A replay, from its first to its last message. Free of Spark: an engine runs the tasks.

It may be killed at any point and started again, as the same Replay or as the next one: the ledger
says what is moved, and where to look for what may be.
"""

from __future__ import annotations

import functools
import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import ClassVar

import pulsar

from redrive.errors import RedriveError
from redrive.replay.job import aftermath, planning, scanning
from redrive.replay.job.dispatch import Dispatch
from redrive.replay.job.engine import Engine, Reporter
from redrive.replay.job.preview import RunPreview
from redrive.replay.ledger import ledger as ledger_topic
from redrive.replay.ledger.account import Account
from redrive.replay.ledger.ledger import Ledger
from redrive.replay.ledger.records import Header, header_key, plan_key
from redrive.replay.moving import tail
from redrive.replay.moving.task import Route
from redrive.replay.spec import ReplayJob
from redrive.replay.topic import bitmap, broker, ranges, reading, rows, snapshot
from redrive.replay.topic.partition import Partition
from redrive.replay.topic.position import LATEST, EntryId, TargetPartition
from redrive.replay.topic.reading import ReadableTopic

ACKNOWLEDGE_TRIES = 5

logger = logging.getLogger(__name__)


class CutOffError(RedriveError):
    """A run has come to its end, and messages are left."""

    reason: ClassVar[str] = "CutOff"


def run(
    job: ReplayJob, engine: Engine, reporter: Reporter, *, was_planned: bool = False
) -> Account:
    """Move the selected dead letters to their target, report on the way, return the account.

    Args:
        job: the run.
        engine: what runs the tasks.
        reporter: what shows how far it is.
        was_planned: whether a plan was reported before: what came later is none of this Replay's.

    Raises:
        LedgerLostError: the plan that was reported is not there any more.
        FencedError: another run has taken over.
        Exception: the run did not come to its end; another of the same job, or the next Replay,
            goes on with it.
    """
    owner = f"{job.uid}/{secrets.token_hex(8)}"
    _look(job)  # of credentials that are refused the client says that it has timed out
    with Ledger.open(job.service_url, job.policy.ledger_topic, owner) as ledger:
        reporter.take_over(ledger.fencing_token)
        # All that a decision is made on is read after the takeover: no other run changes it now.
        resting = _look(job)
        _forget(job, ledger, resting)
        if job.uid not in ledger.records.headers:
            if was_planned:
                raise ledger_topic.lost(job.uid)
            with scanning.reported(engine, reporter):
                _plan(job, engine, ledger, resting)
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
    resting = _look(job)  # first, as by a run
    with broker.connect(job.service_url) as client:
        records = broker.waited(lambda: ledger_topic.read(client, job.policy.ledger_topic))
    with scanning.reported(engine, reporter):
        planned = list(planning.planned(job, engine, records, resting))
    records.plans[job.uid] = {each.range: each.plan for each in planned}
    return RunPreview.of(Account.of(job.uid, records), planned, job, engine.slots)


def _look(job: ReplayJob) -> tuple[Partition, ...]:
    topic, subscription = job.policy.dead_letter_topic, job.policy.dead_letter_subscription
    return broker.waited(lambda: snapshot.look(job.admin_url, topic, subscription))


def _forget(job: ReplayJob, ledger: Ledger, resting: Sequence[Partition]) -> None:
    held = [(partition.index, each) for partition in resting for each in partition.held]
    for key in list(ledger.records.outdated(job.uid, held)):
        ledger.write(key, None)


def _plan(job: ReplayJob, engine: Engine, ledger: Ledger, resting: Sequence[Partition]) -> None:
    """Plan the run, in the ledger: its end, too, which later dead letters lie behind."""
    for of in list(ledger.records.plans.get(job.uid, {})):  # cut off: now there is other to plan
        ledger.write(plan_key(job.uid, of), None)
    for of, plan in planning.plans(job, engine, ledger.records, resting):
        ledger.write(plan_key(job.uid, of), plan.to_json())
    target = broker.waited(lambda: snapshot.look(job.admin_url, job.destination))
    partitions = sum(partition.index != broker.UNPARTITIONED for partition in target)
    began = {} if job.follow_for is None else _tails(job, resting)
    header = Header(f"{job.namespace}/{job.name}", partitions, job.reason, job.ticket, began)
    ledger.write(header_key(job.uid), header.to_json())


def _tails(job: ReplayJob, resting: Sequence[Partition]) -> dict[TargetPartition, EntryId]:
    """Return behind which entries all lies that the run is going to cause."""
    dead = job.policy.dead_letter_topic
    tails = {TargetPartition(dead, each.index): each.tail for each in resting}
    for topic in aftermath.live_topics(job):
        tails |= broker.waited(functools.partial(tail.marks, job.admin_url, topic))
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
                after = reading.begin(of, chunked, record.chunks)
                ahead = reading.prefetch(partition.entry_bytes)
                for letter in reading.of_entries(topic, of, chunked, after, ahead):
                    yield from letter.acknowledgements

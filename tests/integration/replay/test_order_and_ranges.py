"""The order of the dead letters of a key, and small ranges that one task moves together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from pyspark.sql import SparkSession

from redrive import RetryConsumer
from redrive.delivery.middleware import sequencing
from redrive.errors import RedriveError
from redrive.policy.model import SubscriptionType
from redrive.policy.naming import (
    DEAD_LETTER_SUBSCRIPTION,
    LEDGER_SUBSCRIPTION,
    partition_of_key,
)
from redrive.reading import reader
from redrive.replay import sending
from redrive.replay.job import plan
from redrive.replay.job import run as jobs
from redrive.replay.job import run as runs
from redrive.replay.mover import RangeMover
from redrive.replay.outcome import RangeResult
from redrive.replay.spark import Spark
from redrive.replay.spec import Choice
from redrive.replay.task import RangeTask
from tests.support.consumers import handle_until_quiet
from tests.support.engines import Local
from tests.support.local_runs import Notes, job_of, numbers, replay, selecting

ProvisionPolicy = Callable[..., Any]
MakeJob = Callable[..., Any]
QUIET = timedelta(seconds=1)
LEDGERS, EACH = 6, 5


def send(provisioned: Any, *contents: bytes) -> None:  # noqa: ANN401 - see conftest
    """Produce messages of one ordering key, each with a partition key of its own."""
    topic = str(provisioned.policy.topic)
    producer = provisioned.client.create_producer(topic, batching_enabled=False)
    for content in contents:
        name = content.decode()
        producer.send(content, partition_key=name, ordering_key="a", properties={"name": name})
    producer.close()


def handled(
    provisioned: Any,  # noqa: ANN401 - see conftest
    *bad: bytes,
) -> list[bytes]:
    """Handle all that comes; *bad* ones fail."""
    with RetryConsumer(provisioned.client, provisioned.policy) as consumer:
        return handle_until_quiet(consumer, bad, quiet=QUIET, unsettled=provisioned.unsettled)


@pytest.mark.usefixtures("replay_token")
def test_sequences_by_ordering_key_share_a_partition_of_retries(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy(partitions=2)
    policy = provisioned.policy
    fields: list[dict[str, Any]] = [
        {"partition_key": f"item-{number}", "ordering_key": f"order-{number // 10}"}
        for number in range(60)
    ]
    for keys in fields:
        provisioned.bury(1, **keys)
    assert replay(provisioned).moved == len(fields)

    partitions: dict[str, set[int]] = {}
    for message in provisioned.read_all(policy.retry_topic):
        order = message.ordering_key()
        partitions.setdefault(order, set()).add(message.message_id().partition())
    assert all(len(indexes) == 1 for indexes in partitions.values())
    assert set().union(*partitions.values()) == {0, 1}


@pytest.fixture
def sequenced(provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401
    """Return a policy whose messages are dead-lettered in sequence at their first failure.

    The retry and the dead-letter topic have two partitions.
    """
    monkeypatch.setattr(sequencing, "STILL_SECONDS", 2.0)
    provisioned = provision_policy(partitions=2, dead_partitions=2)
    policy = dataclasses.replace(
        provisioned.policy,
        max_retries=0,
        subscription_type=SubscriptionType.KEY_SHARED,
        ordered=True,
        sequenced=True,
    )
    provisioned = dataclasses.replace(provisioned, policy=policy)
    provisioned.create(policy.topic, policy.subscription, 0)
    provisioned.create(policy.sequences_topic, LEDGER_SUBSCRIPTION, 0)
    return provisioned


@pytest.mark.usefixtures("replay_token")
def test_replay_moves_dead_letters_of_an_ordering_key_in_order(
    sequenced: Any,  # noqa: ANN401
) -> None:
    names = [b"a1", b"a2", b"a3", b"a4", b"a5"]
    assert len({partition_of_key(name.decode(), 2) for name in names}) == 2
    send(sequenced, *names)
    assert handled(sequenced, b"a1") == []
    assert replay(sequenced).moved == len(names)
    moved = list(sequenced.read_all(sequenced.policy.retry_topic))
    assert [message.properties()["name"].encode() for message in moved] == names
    assert handled(sequenced) == names
    assert sequenced.unacknowledged() == []


def test_partial_replay_keeps_the_order_of_a_sequence(
    sequenced: Any,  # noqa: ANN401
    make_job: MakeJob,
    spark: SparkSession,
) -> None:
    provisioned = sequenced

    def replay_part(where: str | None = None, **choice: Any) -> tuple[int, int, int]:  # noqa: ANN401
        job, progress = make_job(provisioned, where)
        job = dataclasses.replace(job, choice=Choice(**choice))
        jobs.run(job, Spark(spark, job), progress)
        account = progress.read()
        return account.counts.scanned, account.counts.moved, account.counts.refused

    send(provisioned, b"a1", b"a2", b"a3", b"a4")
    assert handled(provisioned, b"a2") == [b"a1"]
    assert replay_part("properties['name'] <> 'a2'") == (3, 2, 0)
    assert handled(provisioned) == []  # they wait for a2, and go back
    # They count as replayed, though they were not handled.
    assert replay_part(max_replays=1) == (3, 1, 2)
    assert handled(provisioned) == [b"a2"]
    send(provisioned, b"a5")
    assert handled(provisioned) == []
    assert replay_part() == (3, 3, 0)
    assert handled(provisioned) == [b"a3", b"a4", b"a5"]
    send(provisioned, b"a6")
    assert handled(provisioned) == [b"a6"]
    assert provisioned.unacknowledged() == []


@pytest.fixture
def provisioned(provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401
    """Return a policy whose dead letters are in several ledgers, which make one group."""
    monkeypatch.setattr(plan, "GROUPS", 1)
    provisioned = provision_policy()
    for ledger in range(LEDGERS):
        provisioned.bury_many(EACH, ledger * EACH)
        provisioned.admin("PUT", provisioned.policy.dead_letter_topic, "unload")
    return provisioned


class Grouped(Local):
    """Keeps the sizes of groups."""

    def __init__(self) -> None:
        super().__init__(slots=1)
        self.groups: list[int] = []

    def move_all(self, tasks: Sequence[RangeTask]) -> Sequence[RangeResult]:
        self.groups.append(len(tasks))
        return super().move_all(tasks)


def check_moved_once(provisioned: Any) -> None:  # noqa: ANN401
    assert provisioned.in_target() == numbers(LEDGERS * EACH)
    assert provisioned.backlog_of_dead_letters() == 0
    provisioned.check_audit()


@pytest.mark.usefixtures("replay_token")
@pytest.mark.parametrize("scans", [0, 1])
def test_ranges_of_several_ledgers_are_moved_in_one_task(
    provisioned: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
    scans: int,
) -> None:
    readers: list[object] = []
    open_reader = reader.read_ranges

    def counted(*arguments: Any) -> Any:  # noqa: ANN401
        readers.append(arguments)
        return open_reader(*arguments)

    monkeypatch.setattr(reader, "read_ranges", counted)
    engine = Grouped()
    job = job_of(provisioned)
    account = runs.run(selecting(job) if scans else job, engine, Notes())
    assert (account.moved, account.left, engine.groups) == (LEDGERS * EACH, 0, [LEDGERS])
    assert len(readers) == scans + 1
    check_moved_once(provisioned)


@pytest.mark.usefixtures("replay_token")
def test_condition_in_sql_is_computed_for_several_ledgers(
    provisioned: Any,  # noqa: ANN401
    spark: SparkSession,
) -> None:
    job = dataclasses.replace(job_of(provisioned), where="size > 0")
    engine = Spark(spark, job)
    assert LEDGERS // engine.slots > 1  # so there are groups
    account = runs.run(job, engine, Notes())
    assert (account.moved, account.left) == (LEDGERS * EACH, 0)
    check_moved_once(provisioned)


def fail_third(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Raise *error* instead of moving the third range."""
    run, begun = RangeMover.run, list[RangeMover]()

    def run_others(self: RangeMover) -> RangeResult:
        begun.append(self)
        if len(begun) == 3:
            raise error
        return run(self)

    monkeypatch.setattr(RangeMover, "run", run_others)


@pytest.mark.usefixtures("replay_token")
def test_ranges_of_a_lost_group_are_moved_once(
    provisioned: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail_third(monkeypatch, RuntimeError("killed"))
    engine = Grouped()
    account = runs.run(job_of(provisioned), engine, Notes())
    assert (account.moved, account.left, engine.groups) == (LEDGERS * EACH, 0, [LEDGERS])
    check_moved_once(provisioned)


@pytest.mark.usefixtures("replay_token")
def test_error_in_a_group_leaves_other_ranges_moved(
    provisioned: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail_third(monkeypatch, RedriveError("no", remedy="wait"))
    engine = Grouped()
    account = runs.run(job_of(provisioned), engine, Notes())
    assert (account.moved, engine.groups) == (LEDGERS * EACH, [LEDGERS, LEDGERS - 2])
    check_moved_once(provisioned)


@pytest.mark.usefixtures("replay_token")
def test_entries_of_a_group_settled_by_others_are_not_sent(
    provisioned: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sending, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(sending, "POLL_SHARE", 0.0)
    run, begun = RangeMover.run, list[RangeMover]()

    def run_after_skip(self: RangeMover) -> RangeResult:
        begun.append(self)
        if len(begun) == 3:
            topic = provisioned.policy.dead_letter_topic
            provisioned.admin("POST", topic, f"subscription/{DEAD_LETTER_SUBSCRIPTION}/skip_all")
        return run(self)

    monkeypatch.setattr(RangeMover, "run", run_after_skip)
    account = runs.run(job_of(provisioned), Grouped(), Notes())
    assert (account.moved, account.skipped) == (2 * EACH, (LEDGERS - 2) * EACH)
    assert provisioned.in_target() == numbers(2 * EACH)

"""Dead letters that go elsewhere than to the retry topic: once, also across targets and kills."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pulsar
import pytest

from redrive.admin.errors import AdminForbiddenError
from redrive.messages import id_text
from redrive.policy.envelope import ORIGIN_MESSAGE_ID, REAL_TOPIC, RECONSUMETIMES, REPLAYS
from redrive.policy.naming import TopicName, partition_of_key
from redrive.reading.broker import ReplayRoleRefusedError
from redrive.reading.ranges import Range
from redrive.reasons import Reason
from redrive.replay import mover, transport
from redrive.replay.account import Account
from redrive.replay.job import run as runs
from redrive.replay.job.dispatch import Dispatch
from redrive.replay.ledger import FencedError
from redrive.replay.spec import ReplayJob
from redrive.replay.task import RangeTask
from tests.integration.replay.test_topics import FIRST, bury
from tests.support.brokers import proxy_of
from tests.support.engines import Local
from tests.support.held_sends import held_at
from tests.support.local_runs import (
    DiesAtLast,
    Notes,
    job_of,
    kill_at,
    numbers,
    replay,
    wait_until_moved,
)
from tests.support.reasons import raises

ProvisionPolicy = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("replay_token", "pulsar_namespace")
COUNT = 600
RIGHTS = ("produce", "consume")


def add_source(
    provisioned: Any,  # noqa: ANN401
    partitions: int = 0,
    *,
    deduplicate: bool = True,
    rights: tuple[str, ...] = RIGHTS,
) -> TopicName:
    """Create the source topic, for two subscriptions, and return it."""
    topic: TopicName = provisioned.policy.topic
    provisioned.create(topic, provisioned.policy.subscription, partitions)
    if deduplicate:
        provisioned.deduplicate(topic)
    if rights:
        provisioned.grant(topic, *rights)
    return topic


@pytest.fixture
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process comes back: those that were cut off here are gone."""
    monkeypatch.setattr(mover, "QUIET_SECONDS", 0.0)


def job_to(provisioned: Any, target: TopicName, **fields: Any) -> ReplayJob:  # noqa: ANN401
    """Return a Replay of everything to *target*."""
    return dataclasses.replace(job_of(provisioned), target=target, **fields)


def move(job: ReplayJob) -> Account:
    return runs.run(job, Local(), Notes())


def cut_off_at(
    provisioned: Any,  # noqa: ANN401
    job: ReplayJob,
    moved: int,
    count: int = COUNT,
) -> int:
    """Kill the process of *job* after *moved* messages, and return how many its target has.

    It sends three quarters of *count*.
    """
    kill_at(provisioned, job, moved, count)
    stored = len(provisioned.in_target(job.destination))
    assert 0 < stored < COUNT
    return stored


@pytest.mark.parametrize("partitions", [0, 3])
def test_source_topic_gets_each_message_once_as_new(
    provision_policy: ProvisionPolicy, partitions: int
) -> None:
    provisioned = provision_policy(partitions=partitions)
    source = add_source(provisioned, partitions)
    producer = provisioned.client.create_producer(str(provisioned.policy.dead_letter_topic))
    carried = {"id": "1", RECONSUMETIMES: "16", ORIGIN_MESSAGE_ID: "1:2:-1", REPLAYS: "1"}
    producer.send(b"order", properties=carried)
    provisioned.bury(20)
    buried = provisioned.ids(provisioned.unacknowledged())

    account = move(job_to(provisioned, source))

    assert (account.matched, account.moved, account.left) == (21, 21, 0)
    assert provisioned.in_target(source) == buried
    assert provisioned.in_target() == []
    assert provisioned.unacknowledged() == []
    consumer = provisioned.client.subscribe(str(source), provisioned.policy.subscription)
    received = [consumer.receive(60_000).properties() for _ in range(21)]
    (mine,) = (properties for properties in received if properties["id"] == "1")
    assert (mine[RECONSUMETIMES], mine[ORIGIN_MESSAGE_ID], mine[REPLAYS]) == ("0", "1:2:-1", "2")
    assert move(job_to(provisioned, source)) == Account()


def test_source_partition_is_the_one_of_the_producer(provision_policy: ProvisionPolicy) -> None:
    """By its id where a dead letter has one, else by its key, as for producers in Java."""
    provisioned = provision_policy(partitions=3)
    source = add_source(provisioned, 3)
    consumer = provisioned.client.subscribe(str(source), provisioned.policy.subscription)
    producer = provisioned.client.create_producer(str(source))
    dead = provisioned.client.create_producer(str(provisioned.policy.dead_letter_topic))
    partitions: dict[str, int] = {}
    for number in range(40):
        key = f"order-{number}"
        receipt = producer.send(b"new", partition_key=key)
        has_id = number % 2 == 0
        partitions[key] = receipt.partition() if has_id else partition_of_key(key, 3)
        origin = {ORIGIN_MESSAGE_ID: id_text(receipt)} if has_id else {}
        dead.send(
            b"replayed",
            partition_key=key,
            ordering_key="of all",
            properties={"id": key, REAL_TOPIC: str(source), **origin},
        )

    assert move(job_to(provisioned, source)).moved == len(partitions)

    messages = [consumer.receive(60_000) for _ in range(2 * len(partitions))]
    replayed = {
        message.partition_key(): message.message_id().partition()
        for message in messages
        if message.data() == b"replayed"
    }
    assert replayed == partitions


def test_killed_run_to_busy_source_resumes_exactly_once(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    source = add_source(provisioned)
    provisioned.bury_in_ranges(COUNT)
    with ThreadPoolExecutor(1) as threads:
        traffic = threads.submit(_produce, provisioned, source, 100)
        cut_off_at(provisioned, job_to(provisioned, source), 100)
        account = move(job_to(provisioned, source))
        traffic.result()
    assert account.matched == account.moved + account.skipped
    ids = provisioned.in_target(source)
    assert [message_id for message_id in ids if message_id != "new"] == numbers(COUNT)
    assert ids.count("new") == 100
    assert provisioned.backlog_of_dead_letters() == 0
    provisioned.check_audit(source)


def _produce(provisioned: Any, topic: TopicName, count: int) -> None:  # noqa: ANN401
    producer = provisioned.client.create_producer(str(topic))
    for _ in range(count):
        producer.send(b"an order of today", properties={"id": "new"})
        time.sleep(0.01)


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("back", [False, True])
def test_next_run_finds_what_a_killed_one_moved_elsewhere(
    provision_policy: ProvisionPolicy, *, back: bool
) -> None:
    provisioned = provision_policy()
    source, retry = add_source(provisioned), provisioned.policy.retry_topic
    provisioned.bury_in_ranges(COUNT)
    first, then = (source, retry) if back else (retry, source)

    before = cut_off_at(provisioned, job_to(provisioned, first), 100)
    account = move(job_to(provisioned, then))

    assert account.left == 0
    in_first, in_then = provisioned.in_target(first), provisioned.in_target(then)
    assert len(in_first) >= before  # the broker stores all that it had received
    assert len(in_then) == account.moved > 0
    assert sorted([*in_first, *in_then]) == numbers(COUNT)
    provisioned.check_audit(source, retry)


@pytest.mark.usefixtures("_quiet")
def test_three_targets_in_turn_each_after_a_kill(provision_policy: ProvisionPolicy) -> None:
    provisioned = provision_policy()
    source, retry = add_source(provisioned), provisioned.policy.retry_topic
    checked = source.sibling("orders-checked")
    provisioned.create(checked, "check", 0)
    provisioned.deduplicate(checked)
    provisioned.grant(checked, *RIGHTS)
    provisioned.bury_in_ranges(COUNT)
    cut_off_at(provisioned, job_to(provisioned, source), 100, COUNT // 3)
    cut_off_at(provisioned, job_to(provisioned, retry), 100, COUNT // 3)
    move(job_to(provisioned, checked))
    ids = [
        message_id
        for topic in (source, retry, checked)
        for message_id in provisioned.in_target(topic)
    ]
    assert sorted(ids) == numbers(COUNT)
    provisioned.check_audit(source, retry, checked)


def test_run_without_deduplication_needs_at_least_once(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    source = add_source(provisioned, deduplicate=False)
    provisioned.bury_in_ranges(COUNT)
    with raises("DeduplicationOff", match="guarantee: AtLeastOnce"):
        move(job_to(provisioned, source))
    proofs = len(provisioned.in_target(source))
    again = job_to(provisioned, source, exactly_once=False)
    cut_off_at(provisioned, again, 100)

    account = move(again)

    assert 0 < proofs < 5  # one of each range
    assert (account.matched, account.left, account.refused) == (COUNT - proofs, 0, 0)
    assert sorted(set(provisioned.in_target(source))) == numbers(COUNT)


@pytest.mark.parametrize("rights", [(), ("consume",), ("produce",)])
def test_role_without_rights_may_use_another_target(
    provision_policy: ProvisionPolicy, rights: tuple[str, ...]
) -> None:
    provisioned = provision_policy()
    source = add_source(provisioned, rights=rights)
    provisioned.bury(3)
    with pytest.raises((AdminForbiddenError, ReplayRoleRefusedError), match=str(source)) as refused:
        move(job_to(provisioned, source))
    if rights:
        (lacking,) = set(RIGHTS) - set(rights)
        assert f"may {lacking} there" in str(refused.value)
    assert len(provisioned.unacknowledged()) == 3
    assert replay(provisioned).moved == 3


@pytest.mark.parametrize("partitions", [0, 3])
def test_job_refuses_target_that_a_policy_owns(
    provision_policy: ProvisionPolicy, partitions: int
) -> None:
    """Another policy may have got the topic since the operator has checked it."""
    provisioned = provision_policy()
    source = add_source(provisioned, partitions)
    provisioned.admin("PUT", source, "properties", {"redrive.io/owner": "here/billing/invoices"})
    provisioned.bury(3)
    with raises(Reason.TARGET_NOT_ALLOWED, match=str(source)):
        move(job_to(provisioned, source))
    assert provisioned.in_target(source) == []
    assert len(provisioned.unacknowledged()) == 3


def test_job_stops_at_a_target_that_a_policy_takes(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    provisioned = provision_policy()
    source = add_source(provisioned)
    provisioned.bury_in_ranges(COUNT)
    lease = Dispatch._lease_all  # noqa: SLF001

    def lease_and_take(self: Dispatch, group: Sequence[Range]) -> Sequence[RangeTask]:
        tasks = lease(self, group)
        owner = {"redrive.io/owner": "here/billing/invoices"}
        provisioned.admin("PUT", source, "properties", owner)
        return tasks

    monkeypatch.setattr(Dispatch, "_lease_all", lease_and_take)
    with raises(Reason.TARGET_NOT_ALLOWED):
        move(job_to(provisioned, source))
    assert len(provisioned.in_target(source)) == COUNT // 2
    assert provisioned.backlog_of_dead_letters() == COUNT // 2


@pytest.mark.usefixtures("_quiet")
def test_schema_refused_by_one_target_moves_to_another(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    source = add_source(provisioned)
    provisioned.client.create_producer(str(source), schema=pulsar.schema.StringSchema()).close()
    bury(provisioned, *[FIRST, None] * 10)

    with pytest.raises(RuntimeError):
        runs.run(job_to(provisioned, source), DiesAtLast(), Notes())
    stored = provisioned.in_target(source)
    assert len(stored) == 10

    assert replay(provisioned).left == 0
    assert sorted([*stored, *provisioned.in_target()]) == [f"{n:04}" for n in range(20)]
    provisioned.check_audit(source, provisioned.policy.retry_topic)


@pytest.mark.parametrize("seconds", [None, 3])
def test_cut_off_run_stores_nothing_after_another_replay(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch, seconds: float | None
) -> None:
    """No later message there fences off its in-flight messages: they have to be too old by then.

    It is connected again when the other has ended, or after *seconds*.
    """
    monkeypatch.setattr(transport, "SEND_SECONDS", 7)
    monkeypatch.setattr(mover, "QUIET_SECONDS", 7 + mover.GRACE_SECONDS)
    provisioned = provision_policy()
    source, retry = add_source(provisioned), provisioned.policy.retry_topic
    provisioned.bury_in_ranges(COUNT)
    with (
        proxy_of(provisioned.broker.port) as proxy,
        held_at(COUNT // 2) as resume,
        ThreadPoolExecutor(2) as threads,
    ):
        service_url = f"pulsar://127.0.0.1:{proxy.port}"
        job = dataclasses.replace(job_of(provisioned), service_url=service_url)
        cut_off = threads.submit(runs.run, job, Local(), Notes())
        wait_until_moved(provisioned, COUNT // 4)
        proxy.frozen = True
        resume.set()
        other = threads.submit(move, job_to(provisioned, source))
        futures.wait([other], seconds)
        proxy.frozen = False
        assert 0 < other.result(120).moved < COUNT
        with pytest.raises(FencedError):
            cut_off.result(120)
    ids = [message_id for topic in (source, retry) for message_id in provisioned.in_target(topic)]
    assert sorted(ids) == numbers(COUNT)
    provisioned.check_audit(source, retry)

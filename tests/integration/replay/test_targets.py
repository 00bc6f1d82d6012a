"""Dead letters that go elsewhere than to the retry topic: once, also across targets and kills."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pulsar
import pytest

from redrive.admin.errors import AdminForbiddenError
from redrive.policy.envelope import ORIGIN_MESSAGE_ID, RECONSUMETIMES, REPLAYS
from redrive.policy.naming import TopicName
from redrive.reading.broker import ReplayRoleRefusedError
from redrive.replay import mover
from redrive.replay.job import run as runs
from redrive.replay.job.plan import Local
from redrive.replay.ledger import FencedError
from redrive.replay.records import Account
from redrive.replay.sending import DeduplicationOffError
from redrive.replay.spec import ReplayJob
from tests.integration.replay.test_schemas import FIRST, bury
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
from tests.support.withholding_proxy import proxy_of

ProvisionPolicy = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("replay_token")
COUNT = 8_000
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


def job_to(provisioned: Any, target: TopicName, **of: Any) -> ReplayJob:  # noqa: ANN401
    """Return a Replay of everything to *target*."""
    return dataclasses.replace(job_of(provisioned), target=target, **of)


def move(job: ReplayJob) -> Account:
    return runs.run(job, Local(), Notes())


def cut_off_at(provisioned: Any, job: ReplayJob, moved: int) -> int:  # noqa: ANN401
    """Kill the process of *job* when so much is moved, and return what its target has."""
    kill_at(provisioned, job, moved, COUNT)
    stored = len(provisioned.in_target(job.destination))
    assert 0 < stored < COUNT
    return stored


@pytest.mark.parametrize("partitions", [0, 3])
def test_the_source_topic_gets_each_message_once_as_a_new_one(
    provision_policy: ProvisionPolicy, partitions: int
) -> None:
    provisioned = provision_policy(partitions=partitions)
    source = add_source(provisioned, partitions)
    producer = provisioned.client.create_producer(str(provisioned.policy.dead_letter_topic))
    carried = {"id": "1", RECONSUMETIMES: "16", ORIGIN_MESSAGE_ID: "1:2:-1", REPLAYS: "1"}
    producer.send(b"order", properties=carried)
    provisioned.bury(20)
    buried = provisioned.ids(provisioned.resting())

    account = move(job_to(provisioned, source))

    assert (account.matched, account.moved, account.left) == (21, 21, 0)
    assert provisioned.in_target(source) == buried
    assert provisioned.in_target() == []
    assert provisioned.resting() == []
    consumer = provisioned.client.subscribe(str(source), provisioned.policy.subscription)
    received = [consumer.receive(60_000).properties() for _ in range(21)]
    (mine,) = (each for each in received if each["id"] == "1")
    assert (mine[RECONSUMETIMES], mine[ORIGIN_MESSAGE_ID], mine[REPLAYS]) == ("0", "1:2:-1", "2")
    assert move(job_to(provisioned, source)) == Account()


def test_a_killed_run_to_a_busy_source_topic_is_gone_on_with_exactly_once(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    source = add_source(provisioned)
    provisioned.bury_in_ranges(COUNT)
    with ThreadPoolExecutor(1) as threads:
        traffic = threads.submit(_produce, provisioned, source, 400)
        cut_off_at(provisioned, job_to(provisioned, source), 2_000)
        account = move(job_to(provisioned, source))
        traffic.result()
    assert account.matched == account.moved + account.skipped
    found = provisioned.in_target(source)
    assert [each for each in found if each != "new"] == numbers(COUNT)
    assert found.count("new") == 400
    assert provisioned.backlog_of_dead_letters() == 0
    provisioned.check_audit(source)


def _produce(provisioned: Any, topic: TopicName, count: int) -> None:  # noqa: ANN401
    producer = provisioned.client.create_producer(str(topic))
    for _ in range(count):
        producer.send(b"an order of today", properties={"id": "new"})
        time.sleep(0.01)


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("back", [False, True])
def test_what_a_killed_run_has_moved_elsewhere_is_found_there_by_the_next(
    provision_policy: ProvisionPolicy, *, back: bool
) -> None:
    provisioned = provision_policy()
    source, retry = add_source(provisioned), provisioned.policy.retry_topic
    provisioned.bury_in_ranges(COUNT)
    first, then = (source, retry) if back else (retry, source)

    before = cut_off_at(provisioned, job_to(provisioned, first), 2_000)
    account = move(job_to(provisioned, then))

    assert account.left == 0
    in_first, in_then = provisioned.in_target(first), provisioned.in_target(then)
    assert len(in_first) >= before  # the broker stores what it had received
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
    cut_off_at(provisioned, job_to(provisioned, source), 1_000)
    cut_off_at(provisioned, job_to(provisioned, retry), 1_000)
    move(job_to(provisioned, checked))
    found = [each for topic in (source, retry, checked) for each in provisioned.in_target(topic)]
    assert sorted(found) == numbers(COUNT)
    provisioned.check_audit(source, retry, checked)


def test_without_deduplication_a_run_moves_all_only_if_it_may_move_more_than_once(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    source = add_source(provisioned, deduplicate=False)
    provisioned.bury_in_ranges(COUNT)
    with pytest.raises(DeduplicationOffError, match="guarantee: AtLeastOnce"):
        move(job_to(provisioned, source))
    proofs = len(provisioned.in_target(source))
    again = job_to(provisioned, source, exactly_once=False)
    cut_off_at(provisioned, again, 1_000)

    account = move(again)

    assert 0 < proofs < 5  # one of each range
    assert (account.matched, account.left, account.refused) == (COUNT - proofs, 0, 0)
    assert sorted(set(provisioned.in_target(source))) == numbers(COUNT)


@pytest.mark.parametrize("rights", [(), ("consume",), ("produce",)])
def test_a_role_without_the_rights_is_refused_and_another_target_is_open_to_it(
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
    assert len(provisioned.resting()) == 3
    assert replay(provisioned).moved == 3


@pytest.mark.usefixtures("_quiet")
def test_a_schema_that_a_target_does_not_take_keeps_nothing_from_another_target(
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


@pytest.mark.parametrize("seconds", [None, 12])
def test_a_run_that_was_cut_off_stores_nothing_after_a_replay_to_another_target(
    provision_policy: ProvisionPolicy, seconds: float | None
) -> None:
    """No later message shuts out there what it had on its way: that has to be too old by then.

    It comes back when the other is through, or after *seconds*.
    """
    provisioned = provision_policy()
    source, retry = add_source(provisioned), provisioned.policy.retry_topic
    provisioned.bury_in_ranges(COUNT)
    with (
        proxy_of(provisioned.broker.port) as proxy,
        held_at(COUNT // 2) as go_on,
        ThreadPoolExecutor(2) as threads,
    ):
        service_url = f"pulsar://127.0.0.1:{proxy.port}"
        job = dataclasses.replace(job_of(provisioned), service_url=service_url)
        cut_off = threads.submit(runs.run, job, Local(), Notes())
        wait_until_moved(provisioned, 2_000)
        proxy.frozen = True
        go_on.set()
        other = threads.submit(move, job_to(provisioned, source))
        futures.wait([other], seconds)
        proxy.frozen = False
        assert 0 < other.result(120).moved < COUNT
        with pytest.raises(FencedError):
            cut_off.result(120)
    found = [each for topic in (source, retry) for each in provisioned.in_target(topic)]
    assert sorted(found) == numbers(COUNT)
    provisioned.check_audit(source, retry)

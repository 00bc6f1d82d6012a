"""Targets that lose their subscriptions: nothing is acknowledged that reaches no consumer."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pulsar
import pytest

from redrive.policy.naming import TopicName
from redrive.reading.positions import Position
from redrive.reading.rows import DeadLetterRow
from redrive.replay import sending as windows
from redrive.replay.account import Account
from redrive.replay.job import dispatch
from redrive.replay.job import run as runs
from redrive.replay.job.plan import SUSPENDED, DesiredState, Pause
from redrive.replay.mover import RangeMover
from redrive.replay.spec import Choice, ReplayJob
from tests.support.engines import Local
from tests.support.held_sends import held_at
from tests.support.local_runs import Notes, job_of, numbers, wait_until_moved
from tests.support.topics import drain
from tests.support.waiting import wait_until

ProvisionPolicy = Callable[..., Any]
pytestmark = [
    pytest.mark.usefixtures("replay_token"),
    pytest.mark.usefixtures("_often", "pulsar_namespace"),
]
COUNT = 600
AGAIN = "again"
EARLIEST = {"ledgerId": -1, "entryId": -1}
LATEST = {"ledgerId": 2**63 - 1, "entryId": 2**63 - 1}


@pytest.fixture
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a run that waits look again soon."""
    monkeypatch.setattr(dispatch, "PAUSE_SECONDS", 1.0)


class Author(Notes):
    """The author of a Replay, who sees why it waits, and may suspend it at first."""

    def __init__(self, *, approves: bool = True) -> None:
        super().__init__()
        self.approves = approves
        self.pauses: list[Pause | None] = []
        self.awaits = threading.Event()
        self.suspended = threading.Event()

    def report(self, account: Account, *, pause: Pause | None = None) -> DesiredState:
        self.pauses.append(pause)
        if pause is not None and pause.unsubscribed_topic is not None:
            self.awaits.set()
        if pause == SUSPENDED:
            self.suspended.set()
        super().report(account)
        return DesiredState.RUN if self.approves else DesiredState.SUSPEND


def create_target(provisioned: Any, partitions: int = 0) -> TopicName:  # noqa: ANN401
    """Create a topic of an application, with one durable subscription."""
    topic: TopicName = provisioned.policy.topic.sibling("checked")
    provisioned.create(topic, "check", partitions)
    provisioned.deduplicate(topic)
    provisioned.grant(topic, "produce", "consume")
    return topic


def subscription(topic: TopicName, name: str) -> str:
    return f"/admin/v2/persistent/{topic.namespace_name}/{topic.local}/subscription/{name}"


def unsubscribe(provisioned: Any, topic: TopicName, name: str = "check") -> None:  # noqa: ANN401
    """Delete a subscription, with all that it keeps."""
    path = f"{subscription(topic, name)}?force=true"
    provisioned.broker.request("DELETE", path).check("unsubscribe")


def subscribe(
    provisioned: Any,  # noqa: ANN401
    topic: TopicName,
    where: dict[str, int],
) -> None:
    """Create another subscription."""
    path = subscription(topic, AGAIN)
    provisioned.broker.request("PUT", path, where).check("subscribe")


def kept(provisioned: Any, topic: TopicName) -> list[str]:  # noqa: ANN401
    """Return the ids of the messages that the other subscription keeps."""
    broker, client = provisioned.broker, provisioned.client
    return provisioned.ids(drain(broker, client, topic, AGAIN))  # type: ignore[no-any-return]


def job_to(provisioned: Any, target: TopicName, **fields: Any) -> ReplayJob:  # noqa: ANN401
    return dataclasses.replace(job_of(provisioned), target=target, **fields)


@pytest.mark.parametrize("partitions", [0, 3])
def test_run_waits_for_subscription_deleted_before_approval(
    provision_policy: ProvisionPolicy, partitions: int
) -> None:
    provisioned = provision_policy()
    target = create_target(provisioned, partitions)
    provisioned.bury_many(COUNT)
    author = Author(approves=False)
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(runs.run, job_to(provisioned, target), Local(), author)
        assert author.suspended.wait(60)
        one = target.partition(1) if partitions else target
        unsubscribe(provisioned, one)
        author.approves = True
        assert author.awaits.wait(60)
        assert provisioned.backlog_of_dead_letters() == COUNT
        subscribe(provisioned, target, LATEST)
        account = run.result(180)
    assert (account.matched, account.moved, account.refused) == (COUNT, COUNT, 0)
    assert kept(provisioned, target) == numbers(COUNT)
    assert author.pauses[-1] is None


@pytest.mark.parametrize("settles", [False, True], ids=["unconfirmed", "confirmed"])
@pytest.mark.parametrize("guarantee", ["ExactlyOnce", "AtLeastOnce"])
@pytest.mark.parametrize("where", [EARLIEST, LATEST], ids=["earliest", "latest"])
def test_subscription_deleted_in_the_middle_loses_no_message(
    provision_policy: ProvisionPolicy,
    monkeypatch: pytest.MonkeyPatch,
    guarantee: str,
    where: dict[str, int],
    settles: bool,  # noqa: FBT001
) -> None:
    """Each is settled before, or kept by the other subscription, or stays a dead letter.

    A confirmation that earlier messages were handled settles none of this run.
    """
    monkeypatch.setattr(windows, "CONFIRM_SECONDS", 0.1)
    acknowledge, acknowledged = RangeMover._acknowledge, set[Position]()  # noqa: SLF001

    def note_and_acknowledge(self: RangeMover, letter: DeadLetterRow) -> None:
        acknowledged.add(letter.position)
        acknowledge(self, letter)

    monkeypatch.setattr(RangeMover, "_acknowledge", note_and_acknowledge)
    provisioned = provision_policy()
    target = create_target(provisioned)
    provisioned.bury_in_ranges(COUNT)
    exactly = guarantee == "ExactlyOnce"
    choice = Choice(settles_unproven=settles)
    job = job_to(provisioned, target, exactly_once=exactly, rate_limit=COUNT / 2, choice=choice)
    author = Author()
    with held_at(COUNT // 2) as resume, ThreadPoolExecutor(1) as threads:
        run = threads.submit(runs.run, job, Local(), author)
        wait_until_moved(provisioned, COUNT // 4, target)
        unsubscribe(provisioned, target)
        resume.set()
        assert author.awaits.wait(60)
        # Clients acknowledge in groups.
        wait_until(lambda: provisioned.backlog_of_dead_letters() == COUNT - len(acknowledged))
        settled = {*numbers(COUNT)} - {*provisioned.ids(provisioned.unacknowledged())}
        subscribe(provisioned, target, where)
        account = run.result(300)
    assert account.matched == COUNT == account.moved + account.refused
    assert account.left == 0
    resting = provisioned.ids(provisioned.unacknowledged())
    assert len(resting) == account.refused
    assert {*numbers(COUNT)} == {*settled, *kept(provisioned, target), *resting}
    assert settled.isdisjoint(resting)
    if not exactly and not settles:
        assert resting == []
    again = runs.run(job_to(provisioned, target, exactly_once=False), Local(), Notes())
    assert again.moved == len(resting)
    assert provisioned.backlog_of_dead_letters() == 0


@pytest.mark.parametrize("only", ["reader", "compaction"])
def test_run_waits_if_target_has_only_reader_or_compaction(
    provision_policy: ProvisionPolicy, only: str
) -> None:
    provisioned = provision_policy()
    target = create_target(provisioned)
    provisioned.bury_many(500)
    reader = provisioned.client.create_reader(str(target), pulsar.MessageId.latest)
    if only == "compaction":
        provisioned.admin("PUT", target, "compaction")
    unsubscribe(provisioned, target)
    author = Author()
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(runs.run, job_to(provisioned, target), Local(), author)
        assert author.awaits.wait(60)
        assert provisioned.backlog_of_dead_letters() == 500
        subscribe(provisioned, target, LATEST)
        assert run.result(120).moved == 500
    reader.close()
    assert len(kept(provisioned, target)) == 500


@pytest.mark.parametrize("kind", ["retry", "source"])
def test_run_waits_for_subscription_of_policy(provision_policy: ProvisionPolicy, kind: str) -> None:
    """Another one there hands the messages to other consumers."""
    provisioned = provision_policy()
    policy = provisioned.policy
    provisioned.bury_many(100)
    topic, job = policy.retry_topic, job_of(provisioned)
    if kind == "source":
        topic = policy.topic
        provisioned.create(topic, policy.subscription, 0)
        provisioned.deduplicate(topic)
        provisioned.grant(topic, "produce", "consume")
        job = job_to(provisioned, topic)
    path = subscription(topic, "others")
    provisioned.broker.request("PUT", path, EARLIEST).check("subscribe")
    unsubscribe(provisioned, topic, policy.subscription)
    author = Author()
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(runs.run, job, Local(), author)
        assert author.awaits.wait(60)
        assert provisioned.backlog_of_dead_letters() == 100
        path = subscription(topic, policy.subscription)
        provisioned.broker.request("PUT", path, EARLIEST).check("subscribe")
        assert run.result(120).moved == 100


def test_run_waits_for_recreation_of_its_target(
    provision_policy: ProvisionPolicy,
) -> None:
    """A broker deletes topics without subscriptions; their rights go with them."""
    provisioned = provision_policy()
    target = create_target(provisioned)
    provisioned.bury_many(100)
    author = Author(approves=False)
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(runs.run, job_to(provisioned, target), Local(), author)
        assert author.suspended.wait(60)
        provisioned.delete(target)
        author.approves = True
        assert author.awaits.wait(60)
        create_target(provisioned)
        assert run.result(120).moved == 100
    wait_until(lambda: not provisioned.backlog_of_dead_letters(), seconds=60)

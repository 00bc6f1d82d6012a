"""A run is suspended, ends and keeps to its rate while its tasks are under way."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from redrive.errors import RedriveError
from redrive.policy.naming import DEAD_LETTER_SUBSCRIPTION, TopicName
from redrive.reading import broker, reader
from redrive.reading import broker as reading_broker
from redrive.reading.positions import NOWHERE, EntryId
from redrive.replay import audit, sending
from redrive.replay.account import Account
from redrive.replay.job import dispatch
from redrive.replay.job import run as runs
from redrive.replay.job.plan import SUSPENDED, DesiredState, Pause, ReplayGoneError, Scanned
from redrive.replay.spec import ReplayJob
from tests.support.engines import Local
from tests.support.held_sends import Hold, held_at
from tests.support.local_runs import (
    EverySecond,
    Notes,
    job_of,
    numbers,
    replay,
    selecting,
    wait_until_moved,
)
from tests.support.waiting import wait_until

ProvisionPolicy = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("replay_token", "pulsar_namespace")
COUNT = 1_200
SENT = 400
"""Messages that a run sends before its author or its target changes."""


class Author:
    """The author of a Replay, who changes its desired run state while it runs."""

    def __init__(self) -> None:
        self.wish = DesiredState.RUN
        self.paused = threading.Event()
        self.is_full = threading.Event()
        self.full_topics: set[TopicName] = set()
        self.accounts = [Account()]
        self.resume = Hold()
        self._reports = 0

    def rate_limit(self, job: ReplayJob) -> float | None:
        return job.rate_limit

    def take_over(self, _: EntryId) -> None:
        pass

    def report(self, account: Account, *, pause: Pause | None = None) -> DesiredState:
        self.accounts.append(account)
        if pause == SUSPENDED:
            self.paused.set()
        if pause is not None and pause.full_topic is not None:
            self.full_topics.add(pause.full_topic)
            self.is_full.set()
        self._reports += self.wish is not DesiredState.RUN
        if self._reports > 1:  # after the first, the tasks get their permit
            self.resume.set()
        return self.wish

    def report_scan(self, scanned: Scanned) -> None:
        raise AssertionError(scanned)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "REPORT_SECONDS", 0.1)
    monkeypatch.setattr(dispatch, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(dispatch, "PAUSE_SECONDS", 0.5)


@contextmanager
def running(provisioned: Any, author: Author) -> Iterator[Future[Account]]:  # noqa: ANN401
    """Run a Replay of everything beside the test: a part, and the rest once it may resume."""
    with held_at(SENT) as author.resume, ThreadPoolExecutor(1) as threads:
        try:
            yield threads.submit(runs.run, job_of(provisioned), Local(), author)
        except BaseException:
            author.wish = DesiredState.END  # else the run is waited for
            raise


def test_suspended_run_keeps_its_account_and_resumes(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned, author = provision_policy(dead_partitions=2), Author()
    provisioned.bury_many(COUNT)
    with running(provisioned, author) as run:
        wait_until(author.resume.is_reached)
        author.wish = DesiredState.SUSPEND
        assert author.paused.wait(180)
        account = author.accounts[-1]
        moved = len(provisioned.in_target())
        assert SENT <= moved < COUNT
        assert (account.matched, account.moved, account.left) == (COUNT, moved, COUNT - moved)
        assert provisioned.backlog_of_dead_letters() == COUNT - moved
        provisioned.check_audit()
        author.wish = DesiredState.RUN
        account = run.result(120)
    assert (account.moved, account.left) == (COUNT, 0)
    assert provisioned.in_target() == numbers(COUNT)
    provisioned.check_audit()


@pytest.mark.parametrize("behaviour", ["producer_request_hold", "producer_exception"])
def test_run_waits_while_target_exceeds_its_backlog_quota(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch, behaviour: str
) -> None:
    monkeypatch.setattr(broker, "WAIT_SECONDS", 1.0)
    monkeypatch.setattr(sending, "STALL_SECONDS", 1.0)
    count = 800
    provisioned, author = provision_policy(), Author()
    provisioned.bury_in_ranges(count)
    target = provisioned.policy.retry_topic
    with running(provisioned, author) as run:
        wait_until(author.resume.is_reached)
        quota = {"limitSize": 1, "limitTime": -1, "policy": behaviour}
        provisioned.change_policy("POST", target, "backlogQuota", quota)
        while not author.is_full.is_set():
            provisioned.admin("PUT", target, "unload")  # else it takes a minute to be noticed
            author.resume.set()
            author.is_full.wait(5)
            assert not run.done()
        time.sleep(broker.WAIT_SECONDS + 2 * dispatch.PAUSE_SECONDS)
        assert author.full_topics == {target}
        # Messages stored without a receipt are looked for when the run can send again.
        account = author.accounts[-1]
        moved = len(provisioned.in_target())
        assert SENT <= moved < count
        assert SENT <= account.moved <= moved
        assert account.left == count - account.moved
        provisioned.admin("DELETE", target, "backlogQuota")
        account = run.result(120)
    assert (account.moved, account.left) == (count, 0)
    assert provisioned.in_target() == numbers(count)
    provisioned.check_audit()


def test_trimming_of_a_full_target_leaves_nothing_in_doubt(
    provision_policy: ProvisionPolicy,
) -> None:
    """A task whose producer was refused has sent nothing."""
    provisioned, author = provision_policy(), Author()
    provisioned.bury_many(10)
    target = provisioned.policy.retry_topic
    quota = {"limitSize": 0, "limitTime": -1, "policy": "producer_exception"}
    provisioned.change_policy("POST", target, "backlogQuota", quota)
    with running(provisioned, author) as run:
        assert author.is_full.wait(180)
        (before,) = reading_broker.read_partitions(provisioned.broker.admin_url, target)
        provisioned.admin("PUT", target, "unload")  # which lets go of a ledger that is empty
        (after,) = reading_broker.read_partitions(provisioned.broker.admin_url, target)
        assert not before.held & after.held
        provisioned.change_policy("DELETE", target, "backlogQuota")
        account = run.result(120)
    assert (account.moved, account.refused, account.left) == (10, 0, 0)
    assert provisioned.in_target() == numbers(10)


def test_run_of_a_deleted_replay_settles_and_ends(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned, author = provision_policy(), Author()
    provisioned.bury_many(COUNT)
    with running(provisioned, author) as run:
        wait_until(author.resume.is_reached)
        author.wish = DesiredState.END
        with pytest.raises(ReplayGoneError):
            run.result(180)
    broker, policy = provisioned.broker, provisioned.policy
    topics = policy.dead_letter_topic, policy.dead_letter_subscription, policy.retry_topic
    assert audit.audit((broker.service_url, broker.admin_url), *topics) == audit.AuditFindings()
    moved = len(provisioned.in_target())
    assert SENT <= moved < COUNT
    assert replay(provisioned).moved == COUNT - moved
    assert provisioned.in_target() == numbers(COUNT)


def test_encryption_required_meanwhile_ends_a_run(provision_policy: ProvisionPolicy) -> None:
    """The client would repeat the refused producer for minutes, without the cause."""
    provisioned = provision_policy()
    provisioned.bury_many(COUNT)
    namespace = provisioned.policy.topic.namespace_name

    def require_encryption(*, is_required: bool) -> None:
        path = f"/admin/v2/namespaces/{namespace}/encryptionRequired"
        provisioned.broker.request("POST", path, is_required).check("set encryptionRequired")

    job = dataclasses.replace(job_of(provisioned), rate_limit=30.0)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(runs.run, job, Local(), Notes())
        wait_until_moved(provisioned, 20)
        require_encryption(is_required=True)
        begun = time.monotonic()
        with pytest.raises(RedriveError, match="encryptionRequired") as failure:
            run.result(180)
    assert failure.value.reason == "EncryptionRequired"
    assert time.monotonic() - begun < 30

    require_encryption(is_required=False)
    wait_until(lambda: replay(provisioned).left == 0)
    assert provisioned.in_target() == numbers(COUNT)


def test_all_tasks_together_keep_to_the_rate(
    provision_policy: ProvisionPolicy,
) -> None:
    rate, count = 400, 3_000
    provisioned = provision_policy(dead_partitions=2)
    provisioned.bury_many(count)
    job = dataclasses.replace(job_of(provisioned), rate_limit=rate)

    author = Author()

    assert runs.run(job, Local(), author).moved == count

    moved = [account.moved for account in author.accounts]
    assert moved == sorted(moved)
    # More than none, those of one range, those of both: each tells of itself while it is moved.
    assert len(set(moved)) > 3
    sent = sorted(published(provisioned))
    logging.getLogger(__name__).info("%.0f a second", count * 1_000 / (sent[-1] - sent[0]))
    for second in range(0, len(sent) - rate, rate // 4):
        for end in range(second + 2 * rate, len(sent), rate):
            taken = (sent[end] - sent[second]) / 1_000
            # A task makes up for a second in which the broker, or this machine, was slow.
            assert end - second < rate * (1.1 * taken + 1), (second, end)


def published(provisioned: Any) -> list[int]:  # noqa: ANN401
    """Return when each message of the retry topic was sent, in milliseconds."""
    policy, broker = provisioned.policy, provisioned.broker
    (partition,) = reading_broker.read_partitions(broker.admin_url, policy.retry_topic)
    topic = reader.ReadableTopic(provisioned.client, broker.admin_url, policy.retry_topic)
    span = partition.behind(NOWHERE)
    messages = reader.read_messages(topic, partition.index, NOWHERE, span, reader.MAX_PREFETCH)
    return [message.publish_timestamp() for message in messages]


def test_recreated_subscription_keeps_unselected_messages(
    provision_policy: ProvisionPolicy,
) -> None:
    """The broker creates subscriptions automatically."""
    count = 400
    provisioned = provision_policy()
    topic = provisioned.policy.dead_letter_topic
    path = f"/admin/v2/namespaces/{topic.namespace_name}/autoSubscriptionCreation"
    made = {"allowAutoSubscriptionCreation": True}
    provisioned.broker.request("POST", path, made).check("have subscriptions made")
    provisioned.bury_many(count)
    job = dataclasses.replace(selecting(job_of(provisioned)), rate_limit=50)
    with held_at(count // 4) as resume, ThreadPoolExecutor(1) as threads:
        run = threads.submit(runs.run, job, EverySecond(), Notes())
        wait_until_moved(provisioned, count // 8)
        provisioned.admin("DELETE", topic, f"subscription/{DEAD_LETTER_SUBSCRIPTION}?force=true")
        resume.set()
        account = run.result(120)
    assert (account.matched, account.moved) == (count // 2, count // 2)
    assert provisioned.in_target() == numbers(count)[::2]
    assert provisioned.ids(provisioned.unacknowledged()) == numbers(count)[1::2]

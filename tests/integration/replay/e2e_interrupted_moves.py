"""Replays of one process whose broker, sends or tasks are interrupted: none lost, none doubled."""

from __future__ import annotations

import dataclasses
import functools
import secrets
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from redrive.reading import broker, session
from redrive.replay import sending
from redrive.replay.job import run as runs
from redrive.replay.ledger import FencedError
from tests.chaos.proxy import Proxy, answering
from tests.support.local_engine import Local
from tests.support.local_runs import (
    Notes,
    job_of,
    kill_at,
    numbers,
    process,
    replay,
    selecting,
    wait_until_moved,
)
from tests.support.withholding_proxy import PRODUCER_SUCCESS, SUCCESS, proxy_of

ProvisionPolicy = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("replay_token")


def test_refusals_are_recorded_before_a_task_gives_up(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each refusal uses up attempts of its task; the next task resumes behind it."""
    monkeypatch.setattr(sending, "MAX_TRIES", 5)
    monkeypatch.setattr(sending, "STALL_SECONDS", 1.0)
    monkeypatch.setattr(sending, "ALONE_SECONDS", 1.5)
    provisioned = provision_policy()
    provisioned.bury(1, content=b"0" * 20_000)  # as it is compressed it is smaller than the others
    for _ in range(3):
        provisioned.bury(1, content=secrets.token_bytes(5_000))
    provisioned.bury(5)
    provisioned.change_policy("POST", provisioned.policy.retry_topic, "maxMessageSize", 1_000)

    account = replay(provisioned)

    assert (account.matched, account.moved, account.refused, account.left) == (9, 6, 3, 0)


def test_message_refused_by_the_broker_is_never_skipped(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "STALL_SECONDS", 1.0)
    monkeypatch.setattr(sending, "ALONE_SECONDS", 1.5)
    provisioned = provision_policy()
    provisioned.bury(10)
    provisioned.bury(1, content=secrets.token_bytes(5_000))
    provisioned.bury(10)
    buried = provisioned.ids(provisioned.unacknowledged())
    provisioned.change_policy("POST", provisioned.policy.retry_topic, "maxMessageSize", 1_000)

    account = replay(provisioned)

    assert (account.matched, account.moved, account.refused, account.left) == (21, 20, 1, 0)
    assert [refusal.cause for refusal in account.refusals] == ["NotAccepted"]
    assert len(provisioned.unacknowledged()) == 1
    provisioned.change_policy("DELETE", provisioned.policy.retry_topic, "maxMessageSize")
    assert replay(provisioned).moved == 1
    assert provisioned.in_target() == buried


@pytest.mark.parametrize("batch", [False, True])
def test_run_woken_after_a_stop_stores_nothing(
    provision_policy: ProvisionPolicy,
    batch: bool,  # noqa: FBT001
) -> None:
    count = 600
    provisioned = provision_policy()
    provisioned.bury_in_ranges(count)
    with process(job_of(provisioned, batch=batch), count) as stopped:
        wait_until_moved(provisioned, 200, run=stopped)
        stopped.send_signal(signal.SIGSTOP)
        account = replay(provisioned)
        assert 0 < account.moved < count
        stopped.send_signal(signal.SIGCONT)
        _, log = stopped.communicate(timeout=180)
    assert stopped.returncode != 0
    assert FencedError.__name__ in log
    assert provisioned.in_target() == numbers(count)
    provisioned.check_audit()


def test_requests_with_lost_answers_are_repeated(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic that is unloaded meanwhile answers none of those who were about to use it."""
    provisioned = provision_policy(partitions=2)
    provisioned.bury(10)
    buried = provisioned.ids(provisioned.unacknowledged())
    impatient = functools.partial(broker.ReadingClient, operation_timeout_seconds=1)
    monkeypatch.setattr(broker, "ReadingClient", impatient)
    monkeypatch.setattr(session, "ANSWER_SECONDS", 1.0)
    with proxy_of(provisioned.broker.port) as proxy:
        proxy.halved = frozenset({SUCCESS, PRODUCER_SUCCESS})
        service_url = f"pulsar://127.0.0.1:{proxy.port}"
        job = dataclasses.replace(selecting(job_of(provisioned)), service_url=service_url)
        account = runs.run(job, Local(), Notes())

    assert (account.matched, account.moved) == (10, 10)
    assert provisioned.in_target() == buried
    provisioned.check_audit()


def test_failed_lookup_requests_are_repeated(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy(partitions=2)
    provisioned.bury(10)
    buried = provisioned.ids(provisioned.unacknowledged())
    with ExitStack() as stack:
        proxy = stack.enter_context(Proxy.before(provisioned.broker.admin_url))
        for number in range(1, 60, 3):  # a lookup makes two calls at most
            trap = proxy.trap("internalStats", number, answering(503))
            last = stack.enter_context(trap)
        job = dataclasses.replace(selecting(job_of(provisioned)), admin_url=proxy.url)
        account = runs.run(job, Local(), Notes())
        assert last.count > 10

    assert (account.matched, account.moved) == (10, 10)
    assert provisioned.in_target() == buried


def test_run_killed_among_batches_keeps_its_message_count(
    provision_policy: ProvisionPolicy,
) -> None:
    """They were not read before the first was moved."""
    count = 1_200
    provisioned = provision_policy()
    provisioned.bury_in_ranges(count, batching_enabled=True, batching_max_messages=10)
    job = job_of(provisioned)
    kill_at(provisioned, job, 200, count)
    assert 0 < len(provisioned.in_target()) < count

    account = replay(provisioned, uid=job.uid)

    assert (account.scanned, account.matched, account.moved, account.left) == (*[count] * 3, 0)
    assert provisioned.in_target() == numbers(count)
    provisioned.check_audit()


@pytest.mark.parametrize("batch", [False, True])
def test_topics_may_be_unloaded_meanwhile(
    provision_policy: ProvisionPolicy,
    batch: bool,  # noqa: FBT001
) -> None:
    count = 1_200
    provisioned = provision_policy()
    provisioned.bury_in_ranges(count)
    with process(job_of(provisioned, batch=batch), count) as running:
        for _ in range(2):
            wait_until_moved(provisioned, 200, run=running)  # since the last time
            provisioned.admin("PUT", provisioned.policy.retry_topic, "unload")
            provisioned.admin("PUT", provisioned.policy.dead_letter_topic, "unload")
            running.send_signal(signal.SIGCONT)
            time.sleep(1)
        _, log = running.communicate(timeout=180)
        assert running.returncode == 0, log
    provisioned.check_audit()
    assert provisioned.in_target() == numbers(count)

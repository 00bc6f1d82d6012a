"""A broker that is killed during or after a replay: no message is lost, or sent twice."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from redrive.replay import audit
from redrive.replay.audit import AuditFindings
from redrive.replay.job import run as runs
from sandbox import pulsar
from sandbox.sandbox import Sandbox
from tests.support.local_runs import (
    EverySecond,
    Notes,
    job_of,
    numbers,
    process,
    replay,
    selecting,
    wait_until_moved,
)

ProvisionPolicy = Callable[..., Any]
CURSORS_SELDOM = {
    "bookkeeperEnsemble": 1,
    "bookkeeperWriteQuorum": 1,
    "bookkeeperAckQuorum": 1,
    "managedLedgerMaxMarkDeleteRate": 0.001,
}
"""A cursor is stored every thousand seconds; every ten of them by default, so that a slow run may
end with one that holds all of its acknowledgements."""
pytestmark = [pytest.mark.usefixtures("replay_token"), pytest.mark.xdist_group("own sandbox")]


@pytest.fixture
def killable(sandbox: Sandbox) -> Iterator[Sandbox]:
    """The sandbox; its broker runs again after the test."""
    yield sandbox
    sandbox.restart_broker()


def findings(provisioned: Any) -> AuditFindings:  # noqa: ANN401
    """Compare dead-letter topic, ledger and target, message by message."""
    broker, policy = provisioned.broker, provisioned.policy
    urls = broker.service_url, broker.admin_url
    dead_letter = policy.dead_letter_topic, policy.dead_letter_subscription
    return audit.audit(urls, *dead_letter, policy.retry_topic)


def check(provisioned: Any, moved: list[str], *, remaining: int) -> None:  # noqa: ANN401
    """Check that these dead letters are moved, each once, and that *remaining* others are not."""
    assert provisioned.in_target() == moved
    assert findings(provisioned) == AuditFindings()
    assert provisioned.backlog_of_dead_letters() == remaining


def test_run_resumes_when_the_broker_is_killed(
    provision_policy: ProvisionPolicy, killable: Sandbox
) -> None:
    count = 8_000
    provisioned = provision_policy()
    provisioned.bury_in_ranges(count)
    with process(job_of(provisioned), count) as running:
        wait_until_moved(provisioned, 1_000, run=running)
        killable.processes.kill(pulsar.NAME)
        assert running.poll() is None
        running.send_signal(signal.SIGCONT)
        killable.restart_broker()
        _, errors = running.communicate(timeout=200)
    assert running.returncode == 0, errors
    check(provisioned, numbers(count), remaining=0)


def test_acknowledgements_forgotten_by_a_broker_are_repeated(
    provision_policy: ProvisionPolicy, killable: Sandbox
) -> None:
    """It keeps all that was stored. Of acknowledgements it keeps those of some time ago."""
    count = 8_000
    provisioned = provision_policy()
    dead_letter_topic = provisioned.policy.dead_letter_topic
    provisioned.change_policy("POST", dead_letter_topic, "persistence", CURSORS_SELDOM)
    provisioned.bury_many(count)
    assert runs.run(selecting(job_of(provisioned)), EverySecond(), Notes()).moved == count // 2
    killable.processes.kill(pulsar.NAME)
    killable.restart_broker()
    returned = provisioned.backlog_of_dead_letters() - count // 2
    assert returned > 0
    assert len(findings(provisioned).returned) == returned

    same = runs.run(selecting(job_of(provisioned)), EverySecond(), Notes())

    assert (same.matched, same.moved) == (0, 0)
    check(provisioned, numbers(count)[::2], remaining=count // 2)

    other = replay(provisioned)

    assert (other.scanned, other.matched, other.moved) == (count // 2, count // 2, count // 2)
    check(provisioned, numbers(count), remaining=0)

"""A broker that is killed or frozen during or after a Replay: no message is lost, or sent twice."""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from redrive.auth.files import BrokerCredentials
from redrive.replay import lookup, sending
from redrive.replay.audit import AuditFindings
from redrive.replay.job import run as runs
from sandbox import pulsar
from sandbox.sandbox import Sandbox
from tests.chaos.scene import findings
from tests.support.frozen_threads import frozen_threads
from tests.support.held_sends import held_at
from tests.support.local_engine import Local
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
pytestmark = pytest.mark.usefixtures("replay_token")


@pytest.fixture
def killable(sandbox: Sandbox) -> Iterator[Sandbox]:
    """The sandbox; its broker runs again after the test."""
    yield sandbox
    sandbox.restart_broker()


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


def test_entries_received_and_not_yet_stored_are_awaited(
    provision_policy: ProvisionPolicy, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bookie does not answer for longer than it takes to give a producer up."""
    count = 400
    provisioned = provision_policy()
    provisioned.bury_many(count)
    client, find, looks = BrokerCredentials.client, lookup.find_in_target, threading.Event()

    def impatient_client(self: BrokerCredentials, url: str) -> dict[str, Any]:
        return {**client(self, url), "operation_timeout_seconds": 5}

    def note_and_find(*arguments: Any) -> None:  # noqa: ANN401 - as it takes them
        looks.set()
        find(*arguments)

    monkeypatch.setattr(BrokerCredentials, "client", impatient_client)
    monkeypatch.setattr(lookup, "find_in_target", note_and_find)
    monkeypatch.setattr(sending, "STALL_SECONDS", 1.0)
    # So slow that the threads to freeze wait for work.
    job = dataclasses.replace(job_of(provisioned), rate_limit=100)
    with held_at(count // 2) as go_on, ThreadPoolExecutor(1) as threads:
        run = threads.submit(runs.run, job, Local(), Notes())
        wait_until_moved(provisioned, count // 4)
        with frozen_threads(sandbox.processes.pid(pulsar.NAME), "BookieJournal"):
            go_on.set()
            assert looks.wait(120)
            time.sleep(5)
        account = run.result(120)

    assert (account.matched, account.moved, account.refused) == (count, count, 0)
    assert provisioned.in_target() == numbers(count)
    provisioned.check_audit()

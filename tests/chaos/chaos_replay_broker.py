"""Replays whose broker or driver is killed, frozen or stopped: no message is lost, or sent twice.

A driver that is stopped wakes after another one has taken its Replay over, or ended it. The running
executors share the rate limit of a Replay, by default one with one core; this needs Spark with
separate executors, which take a minute to start on two cores.
"""

from __future__ import annotations

import ctypes
import dataclasses
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from redrive.auth.files import BrokerCredentials
from redrive.kube import resources
from redrive.replay import lookup, sending
from redrive.replay.audit import AuditFindings
from redrive.replay.job import run as runs
from redrive.replay.spec import ReplayJob
from sandbox import pulsar
from sandbox.kubernetes import Cluster
from sandbox.sandbox import Sandbox
from tests.chaos.scene import findings
from tests.integration.replay.e2e_control import published
from tests.support import held_sends, spark_runs
from tests.support.engines import Local
from tests.support.held_sends import held_at
from tests.support.local_runs import (
    EverySecond,
    Notes,
    driver_process,
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


_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_WALL = 0x40000000
"""Also wait for threads."""
_AT_WORK = "-1"
"""The kernel's text in place of a system call."""


@contextmanager
def frozen_threads(process: int, name: str) -> Iterator[None]:
    """Freeze the threads of *process* whose names begin with *name*, as one that waits for a disk.

    A signal stops a process as a whole; a tracer stops single threads, on Linux only. A thread is
    frozen in a system call: a virtual machine that collects its garbage would wait for one that is
    frozen at work.
    """
    assert sys.platform == "linux"
    tasks = Path(f"/proc/{process}/task")
    threads = [task for task in tasks.iterdir() if (task / "comm").read_text().startswith(name)]
    assert threads, f"no thread {name}"
    for task in threads:
        while not _freeze(task):
            time.sleep(0.01)
    try:
        yield
    finally:
        for task in threads:
            _trace(_DETACH, task)


def _freeze(task: Path) -> bool:
    _trace(_SEIZE, task)
    _trace(_INTERRUPT, task)
    os.waitpid(int(task.name), _WALL)
    if (task / "syscall").read_text().split()[0] != _AT_WORK:
        return True
    _trace(_DETACH, task)
    return False


def _trace(request: int, task: Path) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    library.ptrace.restype = ctypes.c_long
    arguments = (ctypes.c_long(thread) for thread in (request, int(task.name), 0, 0))
    if library.ptrace(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


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
    assert findings(provisioned).result((), 0).returned == returned

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


MakeJob = Callable[..., Any]

COUNT = 600
DRIVER = f"""{inspect.getsource(held_sends)}
import signal
import sys
from contextlib import nullcontext
from redrive.replay.__main__ import main
from tests.support.engines import Local
from redrive.replay import spark

spark.spark_session = nullcontext
spark.Spark = lambda *_: Local()
with held_at(int(sys.argv[2])) as go_on:
    signal.signal(signal.SIGCONT, lambda *_: go_on.set())
    main([sys.argv[1]])
"""
"""A driver that runs its tasks itself, and sends so many messages before it is continued."""


def started(job: ReplayJob, sends: int) -> AbstractContextManager[subprocess.Popen[str]]:
    return driver_process("-c", DRIVER, job.encode(), str(sends))


@pytest.mark.parametrize("phase", [None, "Completed", "Failed"])
def test_woken_driver_leaves_the_account_as_it_is(
    provision_policy: ProvisionPolicy,
    make_job: MakeJob,
    replay_api: Cluster,
    phase: str | None,
) -> None:
    provisioned = provision_policy()
    provisioned.bury_in_ranges(COUNT)
    job, progress = make_job(provisioned)
    with started(job, COUNT * 3 // 4) as stopped:
        wait_until_moved(provisioned, COUNT // 2)
        stopped.send_signal(signal.SIGSTOP)
        with started(job, COUNT) as second:
            _, log = second.communicate(timeout=300)
            assert second.returncode == 0, log
        if phase is not None:
            end(replay_api, job, phase)
        account = read(replay_api, job)
        stopped.send_signal(signal.SIGCONT)
        _, log = stopped.communicate(timeout=180)
    assert read(replay_api, job) == account, log
    status = progress.read()
    counts = status.counts
    assert (counts.matched, counts.moved, counts.left) == (COUNT, COUNT, 0)
    assert (status.finished, status.failure) == (True, None)
    assert provisioned.in_target() == numbers(COUNT)
    provisioned.check_audit()


def end(api: Cluster, job: ReplayJob, phase: str) -> None:
    """End the Replay, as the operator does."""
    api.kubectl(
        "--namespace", job.namespace, "patch", resources.REPLAYS.plural, job.name,
        "--subresource=status", "--type=merge",
        "--patch", json.dumps({"status": {"phase": phase}}),
    )  # fmt: skip


def read(api: Cluster, job: ReplayJob) -> Any:  # noqa: ANN401  JSON
    """The Replay, with the version of its last write."""
    return json.loads(
        api.kubectl(
            "--namespace", job.namespace, "get", resources.REPLAYS.plural, job.name, "-o", "json"
        )
    )


ONE_CORE = "local-cluster[1,1,1024]"


def test_one_executor_of_one_core_has_all_of_the_rate(
    provision_policy: ProvisionPolicy, tmp_path: Path
) -> None:
    """A range that waits for the core has no share of the rate; otherwise three take 15 s."""
    rate, count = 100, 900
    provisioned = provision_policy(dead_partitions=3)
    provisioned.bury_many(count)
    job = dataclasses.replace(job_of(provisioned), rate_limit=rate)
    with spark_runs.spark_run(job, ONE_CORE, tmp_path) as run:
        assert run.wait() == 0, run.log.read_text()[-3_000:]
    sent = sorted(published(provisioned))
    assert len(sent) == count
    assert 0.9 * count / rate < (sent[-1] - sent[0]) / 1_000 < 1.35 * count / rate

"""Drivers as processes of their own: killed children, killed drivers, and reviews."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest

from redrive.kube import resources
from redrive.reading.positions import EntryId
from redrive.reading.stored import MAX_READ_CONTENT
from redrive.replay import __main__ as driver
from redrive.replay.job import children
from redrive.replay.job import run as runs
from redrive.replay.job.children import Children, LostTaskError
from redrive.replay.job.progress import Progress
from redrive.replay.records import RefusedEntry
from redrive.replay.spec import Choice, PodSize, ReplayJob
from sandbox.kubernetes import Cluster
from tests.support.engines import SILENT, HarmedChildren, Local, run_out_of_memory
from tests.support.local_runs import (
    Notes,
    driver_process,
    job_of,
    numbers,
    replay,
    selecting,
    wait_until_moved,
)
from tests.support.raw_entries import HARMFUL, RawEntry, store
from tests.support.raw_entries import numbers as fields
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("replay_token")

ProvisionPolicy = Callable[..., Any]
POD = PodSize(cores=2, memory=2**30)
UNREADABLE = [RawEntry(fields(compression=2, uncompressed=10), b"no zlib"), *HARMFUL.values()]
MakeJob = Callable[..., Any]
DRIVER = """
import sys
from contextlib import nullcontext
from redrive.replay import spark
from redrive.replay.__main__ import main
from tests.support.engines import Local

spark.spark_session = nullcontext
spark.Spark = lambda *_: Local()
main([sys.argv[1]])
"""
"""A driver that runs its tasks itself."""


@pytest.mark.parametrize("selects", [False, True])
def test_malformed_entries_are_refused_by_children(
    provision_policy: ProvisionPolicy, *, selects: bool
) -> None:
    provisioned = provision_policy()
    provisioned.bury(10)
    store(provisioned.broker, provisioned.policy.dead_letter_topic, UNREADABLE)
    provisioned.bury(10)
    letters = provisioned.read_all(provisioned.policy.dead_letter_topic)
    buried = provisioned.ids(letter for letter in letters if "id" in letter.properties())
    job = job_of(provisioned)
    job = dataclasses.replace(job, approval_above=1_000) if selects else job

    with Children(POD) as engine:
        account = runs.run(job, engine, Notes())

    assert (account.moved, account.refused, account.left) == (20, len(UNREADABLE), 0)
    assert provisioned.in_target() == buried
    wait_until(lambda: provisioned.backlog_of_dead_letters() == len(UNREADABLE))
    provisioned.check_audit()


@pytest.mark.parametrize("selects", [False, True])
def test_entry_that_kills_children_is_refused_alone(
    provision_policy: ProvisionPolicy, *, selects: bool
) -> None:
    count = 4
    provisioned = provision_policy()
    provisioned.bury(count)
    letters = list(provisioned.unacknowledged())
    harmful = letters[0]
    entry = EntryId(harmful.message_id().ledger_id(), harmful.message_id().entry_id())
    job = job_of(provisioned)
    job = dataclasses.replace(job, choice=Choice(max_replays=9)) if selects else job

    with HarmedChildren(POD) as engine:
        engine.harmful = entry
        account = runs.run(job, engine, Notes())

    assert (account.matched, account.moved, account.left) == (count, count - 1, 0)
    assert account.refusals == (RefusedEntry(entry, 1, "NotDelivered"),)
    assert provisioned.in_target() == provisioned.ids(letters[1:])
    assert provisioned.ids(provisioned.unacknowledged()) == provisioned.ids([harmful])
    provisioned.check_audit()


def test_largest_messages_move_in_the_smallest_child(provision_policy: ProvisionPolicy) -> None:
    provisioned = provision_policy()
    provisioned.bury(1)
    large = fields(compression=2, uncompressed=MAX_READ_CONTENT)
    entry = RawEntry(large, zlib.compress(bytes(MAX_READ_CONTENT)))
    store(provisioned.broker, provisioned.policy.dead_letter_topic, [entry] * 3)

    with Children(PodSize(1, children.DRIVER_MEMORY + children.LEAST_MEMORY)) as engine:
        account = runs.run(selecting(job_of(provisioned)), engine, Notes())

    assert (account.moved, account.refusals) == (4, ())


def test_child_without_memory_is_lost(provision_policy: ProvisionPolicy) -> None:
    """A client that lacks the memory of a thread would never close."""
    provisioned = provision_policy()
    policy, url = provisioned.policy, provisioned.broker.service_url
    task = url, policy.dead_letter_topic, policy.dead_letter_subscription

    with Children(POD) as engine, pytest.raises(LostTaskError):
        engine.run(run_out_of_memory, task)


def test_children_that_all_end_fail_the_run_and_refuse_nothing(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    provisioned.bury(3)

    with HarmedChildren(POD) as engine:
        for job in (job_of(provisioned), selecting(job_of(provisioned))):
            with pytest.raises(LostTaskError):
                runs.run(job, engine, Notes())

    assert replay(provisioned).moved == 3


RUN = f"""{SILENT}
import sys
from redrive.replay.job.children import Children
from redrive.replay.job.run import run
from redrive.replay.spec import ReplayJob

job = ReplayJob.decode(sys.argv[1])
with Children(job.pod) as engine:
    print(run(job, engine, Silent()))
"""


def test_children_end_with_a_killed_driver_and_run_is_resumed(
    provision_policy: ProvisionPolicy,
) -> None:
    count = 1_000
    provisioned = provision_policy()
    provisioned.bury_in_ranges(count)
    job = dataclasses.replace(job_of(provisioned), rate_limit=50, pod=POD)
    driver = subprocess.Popen(
        [sys.executable, "-c", RUN, job.encode()],
        env=os.environ | {"PYTHONPATH": str(Path(runs.__file__).parents[3])},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until_moved(provisioned, count // 20, run=driver)
        processes = psutil.Process(driver.pid).children(recursive=True)
        assert len(processes) >= POD.cores
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.communicate()
    assert psutil.wait_procs(processes, 10)[1] == []

    account = replay(provisioned)

    assert 0 < account.moved < count
    assert (account.matched, account.left) == (account.moved + account.skipped, 0)
    assert provisioned.in_target() == numbers(count)
    assert provisioned.backlog_of_dead_letters() == 0
    provisioned.check_audit()


def started(job: ReplayJob) -> AbstractContextManager[subprocess.Popen[str]]:
    """Start a driver in a process; it is killed in the end."""
    return driver_process("-c", DRIVER, job.encode())


@contextlib.contextmanager
def running(job: ReplayJob, monkeypatch: pytest.MonkeyPatch) -> Iterator[Future[None]]:
    """Run a driver in this process, which ends with its Replay."""
    monkeypatch.setattr(driver, "_engine", lambda _: contextlib.nullcontext(Local()))
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(driver.main, [job.encode()])


class Reviewed:
    """A Replay in review, with a driver that shows its plan."""

    def __init__(self, api: Cluster, job: ReplayJob, progress: Progress) -> None:
        self._api, self.job, self._progress = api, job, progress

    def shows(self, messages: int) -> None:
        """Wait until a driver has shown its plan of a number of messages."""

        def is_shown() -> bool:
            run = self._progress.read()
            return run.review is not None and run.counts.matched == run.counts.left == messages

        wait_until(is_shown, seconds=120)

    def confirm(self) -> None:
        """Confirm it as its author, and admit it as the operator does."""
        annotations = {"redrive.io/admitted": self.job.uid}
        self._patch({"spec": {"mode": "Run"}, "metadata": {"annotations": annotations}})

    def expire(self) -> None:
        """Let its time be over."""
        expiry = {"expiryTime": "2026-01-01T00:00:00Z"}
        self._patch({"status": {"run": {"review": expiry}}}, "--subresource=status")

    def ends(self, process: subprocess.Popen[str]) -> list[int | None]:
        """Wait for the end of a driver, and return the account."""
        _, log = process.communicate(timeout=120)
        assert process.returncode == 0, log
        return self.account()

    def account(self) -> list[int | None]:
        """Return matched, moved, skipped and left of an ended run."""
        run = self._progress.read()
        assert (run.finished, run.failure) == (True, None)
        counts = run.counts
        return [counts.matched, counts.moved, counts.skipped, counts.left]

    def _patch(self, patch: dict[str, Any], *options: str) -> None:
        self._api.kubectl(
            "--namespace", self.job.namespace, "patch", resources.REPLAYS.plural, self.job.name,
            "--type=merge", "--patch", json.dumps(patch), *options,
        )  # fmt: skip


@pytest.fixture
def review(replay_api: Cluster, make_job: MakeJob) -> Callable[..., Reviewed]:
    def review(provisioned: Any, choice: Choice, **spec: object) -> Reviewed:  # noqa: ANN401
        job, progress = make_job(provisioned, mode="Review", **spec)
        job = dataclasses.replace(job, review=True, choice=choice)
        return Reviewed(replay_api, job, progress)

    return review


def test_killed_driver_moves_nothing_that_came_later(
    provision_policy: ProvisionPolicy, review: Callable[..., Reviewed]
) -> None:
    provisioned = provision_policy()
    provisioned.bury_many(9)
    reviewed = review(provisioned, Choice(limit=6))
    with started(reviewed.job) as first:
        reviewed.shows(6)
        provisioned.bury_many(5, 9)
        first.send_signal(signal.SIGKILL)
        first.wait()
    provisioned.skip(2)  # others must not take their place in the limit
    with started(reviewed.job) as second:
        reviewed.shows(4)
        reviewed.confirm()
        assert reviewed.ends(second) == [4, 4, 0, 0]
    assert provisioned.in_target() == numbers(6)[2:]
    assert provisioned.backlog_of_dead_letters() == 8


def test_driver_killed_after_confirmation_moves_each_once(
    provision_policy: ProvisionPolicy, review: Callable[..., Reviewed]
) -> None:
    provisioned = provision_policy(dead_partitions=2)
    provisioned.bury_many(6)
    reviewed = review(provisioned, Choice(since=0))
    with started(reviewed.job) as first:
        reviewed.shows(6)
        first.send_signal(signal.SIGSTOP)
        reviewed.confirm()
        provisioned.bury_many(3, 6)
        first.send_signal(signal.SIGKILL)
        first.wait()
    with started(reviewed.job) as second:
        assert reviewed.ends(second) == [6, 6, 0, 0]
    assert provisioned.in_target() == numbers(6)
    provisioned.check_audit()


def test_review_of_trimmed_topic_skips_what_is_gone(
    provision_policy: ProvisionPolicy,
    review: Callable[..., Reviewed],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    provisioned = provision_policy()
    provisioned.bury_in_ranges(8)
    reviewed = review(provisioned, Choice(since=0))
    with running(reviewed.job, monkeypatch):
        reviewed.shows(8)
        assert replay(provisioned, name="other").moved == 8  # meanwhile
        topic = provisioned.policy.dead_letter_topic
        provisioned.admin("PUT", topic, "unload")
        provisioned.admin("POST", topic, "trim")
        provisioned.bury_many(2, 8)
        reviewed.confirm()
    assert reviewed.account() == [8, 0, 8, 0]
    assert provisioned.in_target() == numbers(8)
    assert provisioned.backlog_of_dead_letters() == 2


def test_review_that_is_over_moves_and_follows_nothing(
    provision_policy: ProvisionPolicy,
    review: Callable[..., Reviewed],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    provisioned = provision_policy()
    provisioned.bury_many(3)
    reviewed = review(provisioned, Choice(), followFor="1h")
    reviewed.job = dataclasses.replace(reviewed.job, follow_for=3600.0)
    with running(reviewed.job, monkeypatch):
        reviewed.shows(3)
        reviewed.expire()
    assert reviewed.account() == [3, 0, 0, 3]
    driver.main([reviewed.job.encode()])
    assert provisioned.in_target() == []

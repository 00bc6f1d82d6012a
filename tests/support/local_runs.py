"""Runs of Replays without Spark, in this process or in one that can be killed."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from redrive.policy.naming import TopicName
from redrive.reading import bitmap
from redrive.reading.positions import EntryId
from redrive.reading.ranges import RANGE_ENTRIES
from redrive.replay import mover
from redrive.replay.account import Account
from redrive.replay.job import run as runs
from redrive.replay.job.plan import (
    SUSPENDED,
    DesiredState,
    Pause,
    PlannedRange,
    Scan,
    Scanned,
)
from redrive.replay.outcome import RangeResult
from redrive.replay.spec import Choice, ReplayJob
from redrive.replay.task import RangeTask
from tests.support import held_sends
from tests.support.engines import SILENT, Local
from tests.support.waiting import pauses


class Notes:
    """A reporter that stores the reports."""

    def __init__(self) -> None:
        self.accounts: list[Account] = []
        self.scans: list[Scanned] = []

    def rate_limit(self, job: ReplayJob) -> float | None:
        return job.rate_limit

    def take_over(self, _: EntryId) -> None:
        pass

    def report(self, account: Account, *, pause: Pause | None = None) -> DesiredState:
        self.accounts.append(account)
        return DesiredState.SUSPEND if pause == SUSPENDED else DesiredState.RUN

    def report_scan(self, scanned: Scanned) -> None:
        self.scans.append(scanned)


def job_of(
    provisioned: Any,  # noqa: ANN401
    name: str = "again",
    uid: str = "",
    *,
    batch: bool = False,
) -> ReplayJob:
    """Return a Replay of everything."""
    broker = provisioned.broker
    uid = uid or f"uid-{secrets.token_hex(4)}"
    urls = broker.service_url, broker.admin_url
    return ReplayJob("tests", name, uid, provisioned.policy, *urls, where=None, batch=batch)


def selecting(job: ReplayJob) -> ReplayJob:
    """Return *job* with a selection of everything, so that its plan reads dead letters."""
    return dataclasses.replace(job, choice=Choice(since=0))


def replay(provisioned: Any, **options: Any) -> Account:  # noqa: ANN401
    """Run a Replay in this process."""
    return runs.run(job_of(provisioned, **options), Local(), Notes())


class EverySecond(Local):
    """Selects every second entry, of a job that is `selecting`."""

    def scan(self, scans: Sequence[Scan]) -> Iterable[PlannedRange]:
        half = bitmap.of(range(0, RANGE_ENTRIES, 2), RANGE_ENTRIES)
        for planned in super().scan(scans):
            selected = planned.plan.selected & half
            yield planned._replace(plan=dataclasses.replace(planned.plan, selected=selected))


RUN = f"""{inspect.getsource(held_sends)}{SILENT}
import signal
import sys
from redrive.replay import mover
from tests.support.engines import Local
from redrive.replay.job.run import run
from redrive.replay.spec import ReplayJob

mover.QUIET_SECONDS = float(sys.argv[3])
with held_at(int(sys.argv[2])) as go_on:
    signal.signal(signal.SIGCONT, lambda *_: go_on.set())
    print(run(ReplayJob.decode(sys.argv[1]), Local(), Silent()))
"""


@contextlib.contextmanager
def driver_process(
    *arguments: str, env: Mapping[str, str] = MappingProxyType({})
) -> Iterator[subprocess.Popen[str]]:
    """Run Python with *arguments* and the package of this process; it is killed in the end."""
    package = str(Path(inspect.getfile(mover)).parents[2])
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=os.environ | env | {"PYTHONPATH": package},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def process(job: ReplayJob, count: int) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """Run *job*, of *count* messages, in a process.

    The run stays active: its last quarter waits for SIGCONT. `mover.QUIET_SECONDS` is that of
    this process.
    """
    moved = str(count * 3 // 4)
    return driver_process("-c", RUN, job.encode(), moved, str(mover.QUIET_SECONDS))


class DiesAtLast(Local):
    """Moves each range, and is killed before it records the result."""

    def move(self, task: RangeTask) -> RangeResult:
        super().move(task)
        msg = "killed before the result was on record"
        raise RuntimeError(msg)


def kill_at(provisioned: Any, job: ReplayJob, moved: int, count: int) -> None:  # noqa: ANN401
    """Run *job* in a process, and kill it when its target has a number of messages of *count*."""
    with process(job, count) as killed:
        wait_until_moved(provisioned, moved, job.destination, run=killed)
        killed.send_signal(signal.SIGKILL)
        killed.wait()


def wait_until_moved(
    provisioned: Any,  # noqa: ANN401
    count: int,
    target: TopicName | None = None,
    *,
    run: subprocess.Popen[str] | None = None,
) -> None:
    """Wait until the retry topic, or another *target*, has stored a number since it was loaded.

    A *run* that ends before, or stops moving, fails the test with its log.
    """
    target = target or provisioned.policy.retry_topic
    for _ in pauses():
        if (stored := _stored_since_load(provisioned, target)) >= count:
            return
        if run is not None and run.poll() is not None:
            break
    log = ""
    if run is not None:
        run.kill()
        log = run.communicate()[1]
    pytest.fail(f"only {stored} of {count} messages are stored; {log}")


def _stored_since_load(provisioned: Any, target: TopicName) -> int:  # noqa: ANN401
    stats = json.loads(provisioned.admin("GET", target, "stats"))
    return int(stats["msgInCounter"])


def numbers(count: int) -> list[str]:
    return [f"{number:07}" for number in range(count)]

"""Replays in child processes of one pod, without Spark: killed children and killed drivers."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from redrive.reading.positions import EntryId
from redrive.replay.job import run as runs
from redrive.replay.job.children import Children, LostTaskError
from redrive.replay.records import RefusedEntry
from redrive.replay.spec import Choice, PodSize
from tests.support.harmed_children import HarmedChildren
from tests.support.local_runs import Notes, job_of, numbers, replay, selecting, wait_until_moved
from tests.support.program_parts import SILENT
from tests.support.raw_entries import HARMFUL, RawEntry, store
from tests.support.raw_entries import numbers as fields
from tests.support.waiting import wait_until

ProvisionPolicy = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("replay_token")

POD = PodSize(cores=2, memory=2**30)
UNREADABLE = [RawEntry(fields(compression=2, uncompressed=10), b"no zlib"), *HARMFUL.values()]


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

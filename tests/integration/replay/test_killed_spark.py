"""A run by Spark that is killed: the next Replay resumes it. `make chaos` has the others."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import spark_runs
from tests.support.local_runs import job_of, numbers, replay

ProvisionPolicy = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("replay_token")


def test_run_with_killed_driver_is_resumed(
    provision_policy: ProvisionPolicy, tmp_path: Path
) -> None:
    count = 10_000
    provisioned = provision_policy()
    for first in (0, count // 2):
        provisioned.bury_many(count // 2, first)
        provisioned.admin("PUT", provisioned.policy.dead_letter_topic, "unload")  # a new ledger
    # Slow enough to be under way whenever it is looked at.
    job = dataclasses.replace(job_of(provisioned), rate_limit=1_000)
    with spark_runs.spark_run(job, spark_runs.LOCAL, tmp_path) as run:
        spark_runs.wait_until_under_way(run, provisioned, count // 10, count)
        run.send("driver", signal.SIGKILL)
        run.wait()
        account = replay(provisioned)

    assert 0 < account.moved < count
    assert account.matched == account.moved + account.skipped
    assert provisioned.in_target() == numbers(count)
    assert provisioned.backlog_of_dead_letters() == 0
    provisioned.check_audit()

"""A driver that is stopped, and wakes after another one has taken its Replay over, or ended it."""

from __future__ import annotations

import inspect
import json
import signal
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from redrive.kube import resources
from redrive.replay.spec import ReplayJob
from sandbox.kubernetes import Cluster
from tests.support import held_sends
from tests.support.local_runs import driver_process, numbers, wait_until_moved

ProvisionPolicy = Callable[..., Any]
MakeJob = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("replay_token")

COUNT = 600
DRIVER = f"""{inspect.getsource(held_sends)}
import signal
import sys
from contextlib import nullcontext
from redrive.replay.__main__ import main
from tests.support.local_engine import Local
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

"""What a replay of large messages holds in memory, as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from redrive.replay.job import run as runs
from tests.integration.replay.test_large import noise
from tests.support.local_runs import job_of
from tests.support.program_parts import PEAK, SILENT

ProvisionPolicy = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("replay_token")

COUNT, BYTES = 300, 1_000_000
MOST_MEBIBYTES = 200
"""Beside what the process has before. It takes 130; 430 if what was read were not moved by and by,
and 230 if the broker were asked for more than 16 MiB ahead."""
RUN = f"""{SILENT}{PEAK}
import sys
from redrive.replay.job.plan import Local
from redrive.replay.job.run import run
from redrive.replay.spec import ReplayJob

before = peak()
account = run(ReplayJob.decode(sys.argv[1]), Local(), Silent())
print(account.moved, peak() - before)
"""


def test_large_messages_are_never_in_memory_together(provision_policy: ProvisionPolicy) -> None:
    provisioned = provision_policy()
    for _ in range(2):  # ranges, which are moved at the same time
        provisioned.bury(COUNT // 2, content=noise(BYTES))
        provisioned.admin("PUT", provisioned.policy.dead_letter_topic, "unload")
    done = subprocess.run(
        [sys.executable, "-c", RUN, job_of(provisioned).encode()],
        env=os.environ | {"PYTHONPATH": str(Path(runs.__file__).parents[3])},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    moved, mebibytes = map(int, done.stdout.split())
    assert moved == COUNT
    assert mebibytes < MOST_MEBIBYTES

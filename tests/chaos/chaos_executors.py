"""The running executors share the rate limit of a Replay; by default one with one core.

This needs Spark with separate executors, which take a minute to start on two cores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.replay.e2e_control import published
from tests.support import spark_runs
from tests.support.local_runs import job_of

ProvisionPolicy = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("replay_token")

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

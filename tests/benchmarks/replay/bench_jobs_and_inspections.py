"""Time and memory of Jobs and commands: a Replay by a Job, and the reading of dead letters.

A Replay by a Job is measured from its creation to its end, with the operator and a pod's start. The
stand-in of the sandbox starts the pod as a process. Commands are processes, with their start.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.benchmarks.figures import Figure
from tests.integration.replay.test_inspection import POLICY
from tests.support.replay_shop import Shop, shop

__all__ = ["shop"]

ProvisionPolicy = Callable[..., Any]
TRIALS = 3
MESSAGES, MORE = 10_000, 100_000
LARGE, LARGE_BYTES = 150, 2 * 2**20


class Usage(NamedTuple):
    """Time of a process in seconds, and its largest memory in MiB."""

    seconds: float
    memory: float


def test_reading_of_dead_letters(
    provision_policy: ProvisionPolicy, replay_token: str, tmp_path: Path, figures: list[Figure]
) -> None:
    provisioned = provision_policy()
    (tmp_path / "token").write_text(replay_token, "utf-8")
    policy = provisioned.policy
    manifest = POLICY.format(topic=policy.topic, subscription=policy.subscription)
    (tmp_path / "policy.yaml").write_text(manifest, "utf-8")
    provisioned.bury_many(MESSAGES)
    for name in ("causes", "peek"):
        seconds = [run(provisioned, tmp_path, name).seconds for _ in range(TRIALS)]
        quantity = f"{name} of {MESSAGES} messages"
        figures.append(Figure("reading", quantity, statistics.median(seconds), "s", at_most=10))
    provisioned.bury_many(MORE - MESSAGES)
    usage = run(provisioned, tmp_path, "causes", "--all")
    figures.append(Figure("reading", f"causes of {MORE} messages", MORE / usage.seconds, "/s"))
    usage = run(provisioned, tmp_path, "export", "--to", "messages.parquet")
    quantity = f"export of {MORE} messages to Parquet"
    figures += [
        Figure("reading", quantity, MORE / usage.seconds, "/s"),
        Figure("reading", f"memory of the {quantity}", usage.memory, "MiB", at_most=256),
    ]
    provisioned.bury(LARGE, content=os.urandom(LARGE_BYTES))
    for name in ("causes", "peek"):
        usage = run(provisioned, tmp_path, name, "--all")
        quantity = f"memory of {name}, with {LARGE * LARGE_BYTES // 2**20} MiB of payloads"
        figures.append(Figure("reading", quantity, usage.memory, "MiB", at_most=256))


@pytest.mark.parametrize("command", [("causes", "--refresh"), ("peek",)], ids=" ".join)
def test_reading_by_an_inspection(
    shop: Shop, figures: list[Figure], command: tuple[str, ...]
) -> None:
    """With the start of the command and of a pod, which the sandbox starts as a process."""
    shop.declare_inspection()
    shop.bury(MESSAGES, "WarehouseDown")
    environment = os.environ | {"KUBECONFIG": str(shop.sandbox.cluster.kubeconfig)}
    seconds = []
    for _ in range(TRIALS):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "redrive", *command, "orders", "-n", shop.name],
            env=environment, check=True, text=True, stdout=subprocess.PIPE,
        )  # fmt: skip
        seconds.append(time.perf_counter() - start)
        assert "WarehouseDown" in done.stdout
    quantity = f"{command[0]} of {MESSAGES} messages by an Inspection"
    figures.append(Figure("reading", quantity, statistics.median(seconds), "s", at_most=10))


def run(provisioned: Any, folder: Path, name: str, *arguments: str) -> Usage:  # noqa: ANN401
    """Run a command; return its usage."""
    broker = provisioned.broker
    urls = ["--service-url", broker.service_url, "--admin-url", broker.admin_url]
    direct = ["--direct", *urls, "--token-file", "token"]
    command = [sys.executable, "-m", "redrive", name, "policy.yaml", *arguments, *direct]
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *command],
        cwd=folder, check=True, text=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    return Usage(time.perf_counter() - start, int(done.stdout) / 1_024)


# By a small process: a process inherits the largest memory of the one that starts it.
MEASURE = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


REPLAYED = 1_000
CAUSE = "WarehouseDown"


@pytest.mark.parametrize(
    ("kind", "select", "at_most"),
    [
        ("without SQL", {"causes": [CAUSE]}, 5.0),
        ("with SQL", {"where": f"cause_type = '{CAUSE}'"}, 15.0),
    ],
)
def test_replay_by_a_job(
    shop: Shop, figures: list[Figure], kind: str, select: dict[str, object], at_most: float
) -> None:
    shop.declare()
    times = []
    for trial in range(TRIALS):
        shop.bury(REPLAYED, CAUSE)
        start = time.perf_counter()
        shop.replay(f"trial-{trial}", engine="Job", select=select)
        status = shop.reaches(f"trial-{trial}", "Completed")
        times.append(time.perf_counter() - start)
        assert status["run"]["counts"]["moved"] == REPLAYED
    quantity = f"{REPLAYED:,} messages {kind}, create to complete"
    figures.append(
        Figure("replay by a Job", quantity, statistics.median(times), "s", at_most=at_most)
    )

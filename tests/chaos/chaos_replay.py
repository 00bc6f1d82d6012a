"""Replays by Spark and by Jobs lose and double no message when parts or topics fail.

`make chaos CHAOS="-k replay --rounds 10 --messages 100000"` is the long form. After each fault come
another selection and one of everything, in a form that differs by fault and round.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from redrive.reading.positions import EntryId
from redrive.replay.spec import Choice
from sandbox import pulsar
from sandbox.sandbox import Sandbox
from tests.chaos.conftest import wait_for
from tests.chaos.scene import ANOTHER, BY_SQL, THE_SAME, Scene
from tests.support import spark_runs
from tests.support.local_runs import job_of
from tests.support.spark_runs import CLUSTER, JOB, LOCAL
from tests.support.topics import compact_topic

pytestmark = pytest.mark.usefixtures("replay_token")

ProvisionPolicy = Callable[..., Any]
PARTS = {"driver": LOCAL, "worker": LOCAL, "jvm": LOCAL, "executor": CLUSTER}
PARTS_OF_A_JOB = ("driver", "child", "node")
STOPPED_SECONDS = 40.0
"""Longer than the client's time-outs of a receipt and of a send."""
RUN_SECONDS = 15
"""The minimum duration of a run."""
BURIED_AT_ONCE = 10_000


def kill(part: str, number: signal.Signals = signal.SIGKILL) -> Callable[[Scene], None]:
    def fault(scene: Scene) -> None:
        scene.kill(part, number)
        scene.finish()

    return fault


def stop(part: str) -> Callable[[Scene], None]:
    def fault(scene: Scene) -> None:
        scene.run.send(part, signal.SIGSTOP)
        # After other faults the tasks continue.
        time.sleep(STOPPED_SECONDS if part in {"worker", "child"} else 0)
        scene.finish()
        scene.run.send(part, signal.SIGCONT)
        scene.is_fenced()
        scene.check()

    return fault


def overtake(master: str) -> Callable[[Scene], None]:
    """Have a Replay by another engine move at the same time, as by the operator of a copy."""

    def fault(scene: Scene) -> None:
        scene.run.send("node", signal.SIGSTOP)  # so that it has not ended before the other begins
        with scene.overtaken(master):
            scene.run.send("node", signal.SIGCONT)
        scene.is_fenced()
        scene.check()

    return fault


def kill_broker(scene: Scene) -> None:
    """The broker deletes entries during the run and after it."""
    for _ in range(2):
        scene.sandbox.processes.kill(pulsar.NAME)
        scene.sandbox.restart_broker()
        scene.complete()
    scene.finish()


def stop_broker(scene: Scene) -> None:
    broker = scene.sandbox.processes.pid(pulsar.NAME)
    os.kill(broker, signal.SIGSTOP)
    try:
        time.sleep(STOPPED_SECONDS)
        assert scene.run.is_running()
    finally:
        os.kill(broker, signal.SIGCONT)
    scene.complete()
    scene.finish()


def unload(scene: Scene) -> None:
    policy = scene.provisioned.policy
    for _ in range(3):
        for topic in (policy.retry_topic, policy.ledger_topic, policy.dead_letter_topic):
            scene.admin("PUT", topic, "unload")
        time.sleep(1)
    scene.complete()
    scene.finish()


def trim(scene: Scene) -> None:
    """The broker deletes moved dead letters and the compacted part of the ledger."""
    policy = scene.provisioned.policy
    compact_topic(scene.provisioned.broker, policy.ledger_topic)
    scene.trim(policy.ledger_topic)
    ledger, entries = scene.dead_letters()[0].ledgers[0]
    while scene.dead_letters()[0].acknowledged.through < EntryId(ledger, entries - 1):
        assert scene.run.is_running()
    scene.kill("driver")
    scene.trim(policy.dead_letter_topic)
    wait_for(lambda: ledger not in scene.dead_letters()[0].held, "nothing is trimmed")
    scene.finish()


def switch_deduplication(scene: Scene) -> None:
    topic = scene.provisioned.policy.retry_topic
    for on in (False, True):
        scene.admin("POST", topic, "deduplicationEnabled", on)
        time.sleep(1)
    scene.kill("driver")
    scene.finish()


def limit_sizes(scene: Scene) -> None:
    """Messages that cannot be sent wait, or are refused and moved by the next Replay."""
    topic = scene.provisioned.policy.retry_topic
    scene.admin("POST", topic, "maxMessageSize", 1)
    time.sleep(STOPPED_SECONDS)
    scene.admin("DELETE", topic, "maxMessageSize")
    scene.complete()
    scene.finish()


FAULTS: dict[str, tuple[str, Callable[[Scene], None]]] = {
    **{f"killed {part}": (master, kill(part)) for part, master in PARTS.items()},
    **{f"stopped {part}": (master, stop(part)) for part, master in PARTS.items()},
    # As by an eviction, after the delay of the entrypoint.
    "evicted driver": (LOCAL, kill("jvm", signal.SIGTERM)),
    "killed broker": (LOCAL, kill_broker),
    "stopped broker": (LOCAL, stop_broker),
    "unloaded topics": (LOCAL, unload),
    "trimmed topics": (LOCAL, trim),
    "deduplication switched": (LOCAL, switch_deduplication),
    "sizes limited": (LOCAL, limit_sizes),
    **{f"killed {part} of a Job": (JOB, kill(part)) for part in PARTS_OF_A_JOB},
    **{f"stopped {part} of a Job": (JOB, stop(part)) for part in PARTS_OF_A_JOB},
    "evicted driver of a Job": (JOB, kill("driver", signal.SIGTERM)),
    "overtaken by Spark": (JOB, overtake(LOCAL)),
    "killed broker, by a Job": (JOB, kill_broker),
    "unloaded topics, by a Job": (JOB, unload),
}
THEN = ((ANOTHER,), (BY_SQL,), (THE_SAME, ANOTHER))
"""The Replays after a fault, before one of everything."""
HOW = tuple(itertools.product(("unread", "read"), ("one by one", "in batches")))
"""The forms of a run: with or without a plan before the first move, and its way of sending."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    rounds: int = metafunc.config.getoption("--rounds")
    metafunc.parametrize(
        "case",
        [
            pytest.param(
                (fault, HOW[(number + at) % len(HOW)], THEN[(number + at) % len(THEN)]),
                id=f"{fault}-{number}",
            )
            for number in range(rounds)
            for at, fault in enumerate(FAULTS)
        ],
    )


def test_each_message_is_moved_once(
    provision_policy: ProvisionPolicy,
    sandbox: Sandbox,
    tmp_path: Path,
    pytestconfig: pytest.Config,
    case: tuple[str, tuple[str, str], tuple[str, ...]],
) -> None:
    fault, (planned, sent), then = case
    total: int = pytestconfig.getoption("--messages")
    provisioned = provision_policy()
    for first in range(0, total, BURIED_AT_ONCE):
        provisioned.bury_many(min(BURIED_AT_ONCE, total - first), first)
        provisioned.admin("PUT", provisioned.policy.dead_letter_topic, "unload")  # a new ledger
    job = job_of(provisioned, batch=sent == "in batches")
    job = dataclasses.replace(job, rate_limit=total / RUN_SECONDS)
    if planned == "read":  # leaves dead letters for another selection
        job = dataclasses.replace(job, choice=Choice(limit=total * 3 // 4))
    after = tmp_path / "after"
    after.mkdir()
    master, do = FAULTS[fault]
    with spark_runs.spark_run(job, master, tmp_path) as run:
        spark_runs.wait_until_under_way(run, provisioned, total // 8, total)
        do(Scene(sandbox, provisioned, run, job, after, total, then))

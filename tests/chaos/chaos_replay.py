"""Replays by Spark lose and double no message, whatever ends, sleeps or changes meanwhile.

`make chaos CHAOS="-k replay --rounds 10 --messages 100000"` is the long form. By default what
comes after a fault is one of three, another one for each fault and each round.
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

from redrive.policy.naming import TopicName
from redrive.replay.audit import AuditFindings
from redrive.replay.job import run as runs
from redrive.replay.job.engine import Engine, Local
from redrive.replay.ledger.account import Account
from redrive.replay.ledger.records import Records
from redrive.replay.spec import ReplayJob
from redrive.replay.topic import bitmap, snapshot
from redrive.replay.topic.partition import Partition
from redrive.replay.topic.position import EntryId, Source
from redrive.replay.topic.ranges import Range
from sandbox import pulsar
from sandbox.sandbox import Sandbox
from tests.chaos.conftest import wait_for
from tests.integration.replay.test_killed_broker import findings
from tests.integration.replay.test_mover import EverySecond, Notes, job_of, numbers, selecting
from tests.support import spark_runs
from tests.support.compaction import compact
from tests.support.spark_runs import CLUSTER, LOCAL, SparkRun

pytestmark = pytest.mark.usefixtures("replay_token")

ProvisionPolicy = Callable[..., Any]
PARTS = {"driver": LOCAL, "worker": LOCAL, "jvm": LOCAL, "executor": CLUSTER}
SURVIVED = {"worker", "executor"}
"""What Spark, or the driver, has another of."""
STOPPED_SECONDS = 40.0
"""Longer than a client waits for a receipt, and tries to send."""
RUN_SECONDS = 15
"""So long a run takes at least."""
BURIED_AT_ONCE = 10_000


@dataclasses.dataclass(frozen=True)
class Scene:
    """A run that is under way.

    Attributes:
        total: of the messages that it moves.
        then: which Replays come after the fault.
    """

    sandbox: Sandbox
    provisioned: Any
    run: SparkRun
    uid: str
    total: int
    then: str

    def dead_letters(self) -> tuple[Partition, ...]:
        """Look at the dead-letter topic."""
        policy, url = self.provisioned.policy, self.provisioned.broker.admin_url
        return snapshot.look(url, policy.dead_letter_topic, policy.dead_letter_subscription)

    def admin(self, method: str, topic: TopicName, what: str, body: object = None) -> None:
        """Do something to a topic as its administrator."""
        self.provisioned.admin(method, topic, what, body)

    def trim(self, topic: TopicName) -> None:
        """Have the broker delete what is not needed any more of a topic."""
        self.admin("PUT", topic, "unload")
        self.admin("POST", topic, "trim")

    def complete(self) -> None:
        """Have the run come to its end."""
        assert self.run.wait() == 0, self.run.log.read_text()[-3_000:]

    def kill(self, part: str) -> None:
        """Kill a part of the run, and have it come to its end."""
        self.run.send(part, signal.SIGKILL)
        ended = self.run.wait()
        assert (ended == 0) == (part in SURVIVED), self.run.log.read_text()[-3_000:]

    def go_on(self) -> None:
        """Run the Replays that come after the fault, the last one of everything."""
        if self.then == "the same Replay":
            self._replay(job_of(self.provisioned, uid=self.uid), Local())
        elif self.then == "another selection":
            self._replay(selecting(job_of(self.provisioned)), EverySecond())
        self._replay(job_of(self.provisioned), Local())
        self.check()

    def _replay(self, job: ReplayJob, engine: Engine) -> None:
        self._check(runs.run(job, engine, Notes()), job.uid)

    def _check(self, account: Account, uid: str) -> None:
        assert account.left == 0
        assert account.matched == account.moved + account.skipped + account.refused
        moved = spark_runs.moved(self.provisioned)
        assert account.moved == sum(source.uid == uid for _, source in moved)

    def check(self) -> None:
        """Check that each message was moved once, and that all accounts say so."""
        moved = spark_runs.moved(self.provisioned)
        assert [written for written, _ in moved] == numbers(self.total)
        records = spark_runs.records(self.provisioned)
        (dead_letters,) = self.dead_letters()
        assert all(
            _is_on_record(records, source)
            for _, source in moved
            # What the dead-letter topic does not hold any more, the ledger forgets.
            if source.position.ledger in dead_letters.held
        )
        found = findings(self.provisioned)
        # A lease is open for ever if all its messages were acknowledged when its run was killed.
        assert dataclasses.replace(found, open=()) == AuditFindings()
        assert self.provisioned.backlog_of_dead_letters() == 0


def _is_on_record(records: Records, source: Source) -> bool:
    """Whether the ledger has a message as moved by the Replay that did, or a lease for it."""
    of = Range.of(source.partition, source.position)
    record, offset = records.range(of), source.position.entry - of.first
    moved = record.moved.get(source.uid, bitmap.EMPTY)
    # Found by a Replay that had not selected it.
    part = record.partly.get(source.uid, {}).get(offset, bitmap.EMPTY)
    return (
        record.leased
        or bitmap.contains(moved, offset)
        or bitmap.contains(part, source.position.batch_index)
    )


def kill(part: str) -> Callable[[Scene], None]:
    def fault(scene: Scene) -> None:
        scene.kill(part)
        scene.go_on()

    return fault


def stop(part: str) -> Callable[[Scene], None]:
    def fault(scene: Scene) -> None:
        scene.run.send(part, signal.SIGSTOP)
        # Of the others the tasks go on meanwhile.
        time.sleep(STOPPED_SECONDS if part == "worker" else 0)
        scene.go_on()
        scene.run.send(part, signal.SIGCONT)
        assert scene.run.wait() != 0
        assert "another run has taken over the ledger" in scene.run.log.read_text()
        scene.check()

    return fault


def kill_broker(scene: Scene) -> None:
    """While the run is under way, and behind it."""
    for _ in range(2):
        scene.sandbox.processes.kill(pulsar.NAME)
        scene.sandbox.restart_broker()
        scene.complete()
    scene.go_on()


def stop_broker(scene: Scene) -> None:
    broker = scene.sandbox.processes.pid(pulsar.NAME)
    os.kill(broker, signal.SIGSTOP)
    try:
        time.sleep(STOPPED_SECONDS)
        assert scene.run.goes_on()
    finally:
        os.kill(broker, signal.SIGCONT)
    scene.complete()
    scene.go_on()


def unload(scene: Scene) -> None:
    policy = scene.provisioned.policy
    for _ in range(3):
        for topic in (policy.retry_topic, policy.ledger_topic, policy.dead_letter_topic):
            scene.admin("PUT", topic, "unload")
        time.sleep(1)
    scene.complete()
    scene.go_on()


def trim(scene: Scene) -> None:
    """The broker deletes dead letters that were moved, and of the ledger what is compacted."""
    policy = scene.provisioned.policy
    compact(scene.provisioned.broker, policy.ledger_topic)
    scene.trim(policy.ledger_topic)
    ledger, entries = scene.dead_letters()[0].ledgers[0]
    while scene.dead_letters()[0].acknowledged.through < EntryId(ledger, entries - 1):
        assert scene.run.goes_on()
    scene.kill("driver")
    scene.trim(policy.dead_letter_topic)
    wait_for(lambda: ledger not in scene.dead_letters()[0].held, "nothing is trimmed")
    scene.go_on()


def switch_deduplication(scene: Scene) -> None:
    topic = scene.provisioned.policy.retry_topic
    for on in (False, True):
        scene.admin("POST", topic, "deduplicationEnabled", on)
        time.sleep(1)
    scene.kill("driver")
    scene.go_on()


def limit_sizes(scene: Scene) -> None:
    """What does not pass meanwhile waits, or is refused and moved by the next Replay."""
    topic = scene.provisioned.policy.retry_topic
    scene.admin("POST", topic, "maxMessageSize", 1)
    time.sleep(STOPPED_SECONDS)
    scene.admin("DELETE", topic, "maxMessageSize")
    scene.complete()
    scene.go_on()


FAULTS: dict[str, tuple[str, Callable[[Scene], None]]] = {
    **{f"killed {part}": (master, kill(part)) for part, master in PARTS.items()},
    **{f"stopped {part}": (master, stop(part)) for part, master in PARTS.items()},
    "killed broker": (LOCAL, kill_broker),
    "stopped broker": (LOCAL, stop_broker),
    "unloaded topics": (LOCAL, unload),
    "trimmed topics": (LOCAL, trim),
    "deduplication switched": (LOCAL, switch_deduplication),
    "sizes limited": (LOCAL, limit_sizes),
}
THEN = ("another selection", "the same Replay", "another Replay")
HOW = tuple(itertools.product(("unread", "read"), ("one by one", "in batches")))
"""Whether the run has read the dead letters before it moves the first, and how it sends."""


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
    case: tuple[str, tuple[str, str], str],
) -> None:
    fault, (planned, sent), then = case
    total: int = pytestconfig.getoption("--messages")
    provisioned = provision_policy()
    for first in range(0, total, BURIED_AT_ONCE):
        provisioned.bury_many(min(BURIED_AT_ONCE, total - first), first)
        provisioned.admin("PUT", provisioned.policy.dead_letter_topic, "unload")  # a new ledger
    job = job_of(provisioned, batch=sent == "in batches")
    job = dataclasses.replace(job, rate_limit=total / RUN_SECONDS)
    job = selecting(job) if planned == "read" else job
    master, do = FAULTS[fault]
    with spark_runs.spark_run(job, master, tmp_path) as run:
        spark_runs.wait_until_under_way(run, provisioned, total // 8, total)
        do(Scene(sandbox, provisioned, run, job.uid, total, then))

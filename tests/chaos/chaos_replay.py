"""Replays by Spark lose and double no message, whichever of their processes ends or sleeps.

`make chaos CHAOS="-k replay --rounds 10 --messages 100000"` is the long form. By default what
comes after a fault is one of three, another one for each fault and each round.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from redrive.replay.audit import AuditFindings
from redrive.replay.job import run as runs
from redrive.replay.job.engine import Engine, Local
from redrive.replay.ledger.account import Account
from redrive.replay.ledger.records import Records
from redrive.replay.topic import bitmap, snapshot
from redrive.replay.topic.partition import Partition
from redrive.replay.topic.position import Source
from redrive.replay.topic.ranges import Range
from tests.chaos import replays
from tests.chaos.replays import CLUSTER, LOCAL, SparkRun
from tests.integration.replay.test_killed_broker import findings
from tests.integration.replay.test_mover import EverySecond, Notes, job_of, numbers

pytestmark = pytest.mark.usefixtures("replay_token")

ProvisionPolicy = Callable[..., Any]
PARTS = {"driver": LOCAL, "worker": LOCAL, "jvm": LOCAL, "executor": CLUSTER}
SURVIVED = {"worker", "executor"}
"""What Spark, or the driver, has another of."""
BURIED_AT_ONCE = 10_000


@dataclasses.dataclass(frozen=True)
class Scene:
    """A run that is under way.

    Attributes:
        total: of the messages that it moves.
        then: which Replays come after the fault.
    """

    provisioned: Any
    run: SparkRun
    uid: str
    total: int
    then: str

    def dead_letters(self) -> tuple[Partition, ...]:
        """Look at the dead-letter topic."""
        topic = self.provisioned.policy.dead_letter_topic
        return snapshot.look(self.provisioned.broker.admin_url, topic)

    def go_on(self) -> None:
        """Run the Replays that come after the fault, the last one of everything."""
        if self.then == "the same Replay":
            self._replay(Local(), uid=self.uid)
        elif self.then == "another selection":
            self._replay(EverySecond())
        self._replay(Local())

    def _replay(self, engine: Engine, **of: str) -> None:
        job = job_of(self.provisioned, **of)
        self._check(runs.run(job, engine, Notes()), job.uid)

    def _check(self, account: Account, uid: str) -> None:
        assert account.left == 0
        assert account.matched == account.moved + account.skipped + account.refused
        moved = replays.moved(self.provisioned)
        assert account.moved == sum(source.uid == uid for _, source in moved)

    def check(self) -> None:
        """Check that each message was moved once, and that all accounts say so."""
        moved = replays.moved(self.provisioned)
        assert [written for written, _ in moved] == numbers(self.total)
        records = replays.records(self.provisioned)
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
        scene.run.send(part, signal.SIGKILL)
        ended = scene.run.wait()
        assert (ended == 0) == (part in SURVIVED), scene.run.log.read_text()[-3_000:]
        scene.go_on()
        scene.check()

    return fault


def stop(part: str) -> Callable[[Scene], None]:
    def fault(scene: Scene) -> None:
        scene.run.send(part, signal.SIGSTOP)
        scene.go_on()
        scene.check()
        scene.run.send(part, signal.SIGCONT)
        assert scene.run.wait() != 0
        assert "another run has taken over the ledger" in scene.run.log.read_text()
        scene.check()

    return fault


FAULTS: dict[str, tuple[str, Callable[[Scene], None]]] = {
    **{f"killed {part}": (master, kill(part)) for part, master in PARTS.items()},
    "stopped driver": (LOCAL, stop("driver")),
}
THEN = ("another selection", "the same Replay", "another Replay")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    rounds: int = metafunc.config.getoption("--rounds")
    metafunc.parametrize(
        "case",
        [
            pytest.param((fault, THEN[(number + at) % len(THEN)]), id=f"{fault}-{number}")
            for number in range(rounds)
            for at, fault in enumerate(FAULTS)
        ],
    )


def test_each_message_is_moved_once(
    provision_policy: ProvisionPolicy,
    tmp_path: Path,
    pytestconfig: pytest.Config,
    case: tuple[str, str],
) -> None:
    fault, then = case
    total: int = pytestconfig.getoption("--messages")
    provisioned = provision_policy()
    for first in range(0, total, BURIED_AT_ONCE):
        provisioned.bury_many(min(BURIED_AT_ONCE, total - first), first)
        provisioned.admin("PUT", provisioned.policy.dead_letter_topic, "unload")  # a new ledger
    job = job_of(provisioned)
    master, do = FAULTS[fault]
    with replays.spark_run(job, master, tmp_path) as run:
        replays.wait_until_under_way(run, provisioned, total // 8, total)
        do(Scene(provisioned, run, job.uid, total, then))

"""A replay by Spark that is under way, what comes after it, and what has to hold then."""

from __future__ import annotations

import dataclasses
import signal
from collections import Counter
from pathlib import Path
from typing import Any

from redrive.policy.naming import TopicName
from redrive.reading import bitmap, broker
from redrive.reading.positions import Source
from redrive.reading.ranges import Partition, Range
from redrive.replay.audit import AuditFindings
from redrive.replay.job import run as runs
from redrive.replay.job.plan import Engine, Local
from redrive.replay.records import Account, Records
from redrive.replay.spec import ReplayJob
from sandbox.sandbox import Sandbox
from tests.integration.replay.test_killed_broker import findings
from tests.support import spark_runs
from tests.support.local_runs import EverySecond, Notes, job_of, numbers, selecting
from tests.support.spark_runs import LOCAL, SparkRun

SURVIVED = {"worker", "executor"}
"""What Spark, or the driver, has another of."""
ANOTHER, BY_SQL, THE_SAME = "another selection", "one by SQL, by Spark", "the same Replay"
SQL = "cast(properties['id'] AS int) % 2 = 1"


@dataclasses.dataclass(frozen=True)
class Scene:
    """A run that is under way.

    Attributes:
        job: which it is of.
        folder: for runs of Spark that come after the fault.
        total: of the messages that rested.
        then: which Replays come after the fault, before one of everything.
    """

    sandbox: Sandbox
    provisioned: Any
    run: SparkRun
    job: ReplayJob
    folder: Path
    total: int
    then: tuple[str, ...]

    def dead_letters(self) -> tuple[Partition, ...]:
        """Look at the dead-letter topic."""
        policy, url = self.provisioned.policy, self.provisioned.broker.admin_url
        return broker.read_partitions(
            url, policy.dead_letter_topic, policy.dead_letter_subscription
        )

    def admin(self, method: str, topic: TopicName, what: str, body: object = None) -> None:
        """Do something to a topic as its administrator."""
        self.provisioned.admin(method, topic, what, body)

    def trim(self, topic: TopicName) -> None:
        """Have the broker delete what is not needed any more of a topic."""
        self.admin("PUT", topic, "unload")
        self.admin("POST", topic, "trim")

    def complete(self) -> None:
        """Have the run come to its end, and check its account, as the ledger has it."""
        self._complete(self.run, self.job.uid)

    def kill(self, part: str) -> None:
        """Kill a part of the run, and have it come to its end; check it if it survives."""
        self.run.send(part, signal.SIGKILL)
        if part in SURVIVED:
            self.complete()
        else:
            assert self.run.wait() != 0

    def go_on(self) -> None:
        """Run the Replays that come after the fault, the last one of everything."""
        for name in self.then:
            if name == THE_SAME:
                self._replay(dataclasses.replace(self.job, rate_limit=None), Local())
            elif name == BY_SQL:
                self._replay_by_spark(dataclasses.replace(job_of(self.provisioned), where=SQL))
            else:
                self._replay(selecting(job_of(self.provisioned)), EverySecond())
        self._replay(job_of(self.provisioned), Local())
        self.check()

    def _replay(self, job: ReplayJob, engine: Engine) -> None:
        self._check(runs.run(job, engine, Notes()), job.uid)

    def _replay_by_spark(self, job: ReplayJob) -> None:
        with spark_runs.spark_run(job, LOCAL, self.folder) as run:
            self._complete(run, job.uid)

    def _complete(self, run: SparkRun, uid: str) -> None:
        assert run.wait() == 0, run.log.read_text()[-3_000:]
        self._check(Account.of(uid, spark_runs.records(self.provisioned)), uid)

    def _check(self, account: Account, uid: str) -> None:
        assert account.left == 0
        assert account.matched == account.moved + account.skipped + account.refused
        carried = Counter(source.uid for _, source in spark_runs.moved(self.provisioned))
        assert account.moved == carried[uid], (account, carried)

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

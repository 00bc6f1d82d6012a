"""A running Replay by Spark or by a Job, the Replays after it, and the checks at the end."""

from __future__ import annotations

import dataclasses
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redrive.policy.naming import TopicName
from redrive.reading import bitmap, broker
from redrive.reading.positions import Source
from redrive.reading.ranges import Partition, Range
from redrive.replay import audit
from redrive.replay.account import Account
from redrive.replay.audit import AuditFindings
from redrive.replay.job import run as runs
from redrive.replay.job.plan import Engine
from redrive.replay.records import Records
from redrive.replay.spec import ReplayJob
from sandbox.sandbox import Sandbox
from tests.support import spark_runs
from tests.support.engines import Local
from tests.support.local_runs import EverySecond, Notes, job_of, numbers, selecting
from tests.support.spark_runs import LOCAL, SparkRun
from tests.support.waiting import wait_until

SURVIVED = {"worker", "executor", "child"}
"""The parts that Spark or the driver replaces."""
ANOTHER, BY_SQL, THE_SAME = "another selection", "one by SQL, by Spark", "the same Replay"
SQL = "cast(properties['id'] AS int) % 2 = 1"


@dataclasses.dataclass(frozen=True)
class Scene:
    """A running Replay.

    Attributes:
        job: of the run.
        folder: for the runs of Spark after the fault.
        total: the number of dead letters.
        then: the Replays after the fault, before one of everything.
    """

    sandbox: Sandbox
    provisioned: Any
    run: SparkRun
    job: ReplayJob
    folder: Path
    total: int
    then: tuple[str, ...]

    def dead_letters(self) -> tuple[Partition, ...]:
        """Return the partitions of the dead-letter topic."""
        policy, url = self.provisioned.policy, self.provisioned.broker.admin_url
        return broker.read_partitions(
            url, policy.dead_letter_topic, policy.dead_letter_subscription
        )

    def admin(self, method: str, topic: TopicName, part: str, body: object = None) -> None:
        """Call the admin API about a topic."""
        self.provisioned.admin(method, topic, part, body)

    def trim(self, topic: TopicName) -> None:
        """Have the broker delete the acknowledged ledgers of a topic."""
        self.admin("PUT", topic, "unload")
        self.admin("POST", topic, "trim")

    def complete(self) -> None:
        """Wait for the end of the run, and check its account in the ledger."""
        self._complete(self.run, self.job.uid)

    def kill(self, part: str, number: signal.Signals = signal.SIGKILL) -> None:
        """End a part of the run, and wait for its end; check the account if the run survives."""
        self.run.send(part, number)
        if part in SURVIVED:
            self.complete()
        else:
            assert self.run.wait() != 0

    def is_fenced(self) -> None:
        """Check that the run ends because another one owns the ledger."""
        assert self.run.wait() != 0
        assert "another run has taken over the ledger" in self.run.log.read_text()

    @contextmanager
    def overtaken(self, master: str) -> Iterator[None]:
        """Have *master* run everything that is left, from its first record until its end."""
        before = spark_runs.records(self.provisioned).owner
        job = dataclasses.replace(job_of(self.provisioned), rate_limit=self.job.rate_limit)
        with spark_runs.spark_run(job, master, self.folder) as other:
            wait_until(lambda: spark_runs.records(self.provisioned).owner != before)
            yield
            self._complete(other, job.uid)

    def finish(self) -> None:
        """Run the Replays after the fault, the last one of everything."""
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
        """Check that each message was moved once, by the target and by all accounts."""
        moved = spark_runs.moved(self.provisioned)
        assert [written for written, _ in moved] == numbers(self.total)
        records = spark_runs.records(self.provisioned)
        (dead_letters,) = self.dead_letters()
        assert all(
            _is_on_record(records, source)
            for _, source in moved
            # The ledger forgets entries that the dead-letter topic has deleted.
            if source.position.ledger in dead_letters.held
        )
        compared = findings(self.provisioned)
        # A lease stays open if all its messages were acknowledged when its run was killed.
        assert dataclasses.replace(compared, open=()) == AuditFindings()
        assert self.provisioned.backlog_of_dead_letters() == 0


def findings(provisioned: Any) -> AuditFindings:  # noqa: ANN401
    """Compare dead-letter topic, ledger and target, message by message."""
    broker, policy = provisioned.broker, provisioned.policy
    urls = broker.service_url, broker.admin_url
    dead_letter = policy.dead_letter_topic, policy.dead_letter_subscription
    return audit.audit(urls, *dead_letter, policy.retry_topic)


def _is_on_record(records: Records, source: Source) -> bool:
    """Return True if the ledger records the move of a message, or a lease for it."""
    range_ = Range.of(source.partition, source.position)
    record, offset = records.range(range_), source.position.entry - range_.first
    moved = record.moved.get(source.uid, bitmap.EMPTY)
    # Recorded by a Replay that had not selected it.
    part = record.partly.get(source.uid, {}).get(offset, bitmap.EMPTY)
    return (
        record.leased
        or bitmap.contains(moved, offset)
        or bitmap.contains(part, source.position.batch_index)
    )

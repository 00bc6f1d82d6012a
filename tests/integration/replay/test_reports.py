"""Dry runs and outcomes: both report what a Replay does with messages, and change nothing."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pulsar
import pytest
from pyspark.sql import SparkSession

from redrive import RetryConsumer
from redrive.api.replay_status import ReplayRun
from redrive.policy.ladder import Ladder
from redrive.policy.model import Policy
from redrive.reading import broker
from redrive.replay import ledger as ledgers
from redrive.replay.job import outcomes
from redrive.replay.job import run as runs
from redrive.replay.job.outcomes import MessageOutcomes
from redrive.replay.job.plan import DesiredState, PlannedRange, Scan
from redrive.replay.job.progress import Progress
from redrive.replay.ledger import Ledger
from redrive.replay.spark import Spark
from redrive.replay.spec import Choice, ReplayJob
from tests.support.engines import Local
from tests.support.local_runs import Notes, job_of, replay

pytestmark = pytest.mark.usefixtures("replay_token")

ProvisionPolicy = Callable[..., Any]
MakeJob = Callable[..., Any]
COUNT = 60


def test_dry_run_moves_nothing_and_leaves_the_ledger_alone(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy(dead_partitions=2)
    provisioned.bury(3)
    replay(provisioned)
    provisioned.bury(6, "TimeoutError")
    provisioned.bury(2, "ValueError")
    job = dataclasses.replace(job_of(provisioned), dry_run=True)
    with Ledger.open(job.service_url, job.policy.ledger_topic, "running") as running:
        before = running.records

        preview = runs.preview(job, Local(), Notes())

        running.write("plan/other", None)  # it was not fenced off
    account = preview.account
    assert (account.scanned, account.matched, account.moved, account.left) == (8, 8, 0, 8)
    numbers = {failure.cause: figures.messages for failure, figures in preview.causes.items()}
    assert numbers == {"TimeoutError": 6, "ValueError": 2}
    assert len(preview.samples) == 8
    with broker.connect(job.service_url) as client:
        after = ledgers.read(client, job.policy.ledger_topic, ledgers.mounted_key())
    assert (after.ranges, after.plans, after.owner) == (before.ranges, before.plans, "running")
    assert len(provisioned.in_target()) == 3
    assert provisioned.backlog_of_dead_letters() == 8


def test_selection_counted_by_spark_is_shown_in_status(
    provision_policy: ProvisionPolicy, make_job: MakeJob, spark: SparkSession
) -> None:
    provisioned = provision_policy()
    provisioned.bury(5, "TimeoutError")
    provisioned.bury(4, "ValueError")
    provisioned.bury_batch("TimeoutError", "ValueError")
    job, progress = make_job(provisioned, "cause_type = 'TimeoutError'")
    job = dataclasses.replace(job, dry_run=True)

    engine = Spark(spark, job)
    progress.preview(runs.preview(job, engine, progress))

    status, scanned = progress.read(), engine.scanned
    assert (scanned.messages, scanned.refused) == (11, Counter(PartOfBatch=1))
    (figures,) = scanned.causes.values()
    assert (figures.messages, figures.replayed) == (5, 0)
    assert 0 < figures.first <= figures.last
    counts = status.counts
    assert (counts.scanned, counts.matched, counts.refused, counts.left) == (11, 6, 1, 5)
    assert [(count.cause, count.messages) for count in status.preview.causes] == [
        ("TimeoutError", 5)
    ]
    assert [(count.cause, count.messages) for count in status.preview.refused] == [
        ("PartOfBatch", 1)
    ]
    assert len(status.preview.samples) == 5
    assert len(provisioned.unacknowledged()) == 11


class Watched(Local):
    """Continues once the status shows the messages of the first range."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self.shown: ReplayRun | None = None

    def scan(self, scans: Sequence[Scan]) -> Iterable[PlannedRange]:
        deadline = time.monotonic() + 60
        for planned in super().scan(scans):
            yield planned
            while self.shown is None:
                assert time.monotonic() < deadline
                status = self._progress.read()
                self.shown = status if status.counts.scanned else None


@pytest.mark.parametrize("limit", [None, 12])
def test_counts_by_cause_are_shown_before_all_is_scanned(
    provision_policy: ProvisionPolicy, make_job: MakeJob, limit: int | None
) -> None:
    provisioned = provision_policy(dead_partitions=2)
    for key in range(12):
        provisioned.bury(1, "TimeoutError", partition_key=str(key))
    job, _ = make_job(provisioned)
    job = dataclasses.replace(job, dry_run=True, choice=Choice(limit=limit))
    progress = Progress(job)
    engine = Watched(progress)

    progress.preview(runs.preview(job, engine, progress))

    first, last = engine.shown, progress.read()
    assert first is not None
    scanned = first.counts.scanned
    assert scanned is not None
    assert 0 < scanned < 12
    # Of a limited one scans look at more than it takes.
    shown = None if first.preview is None else first.preview.causes
    numbers = None if shown is None else [(count.cause, count.messages) for count in shown]
    assert numbers == ([("TimeoutError", scanned)] if limit is None else None)
    assert last.counts.scanned == 12
    assert last.preview is not None
    assert (last.preview.causes[0].messages, last.preview.estimated_seconds) == (12, 1)


def test_selection_requires_all_its_parts(
    provision_policy: ProvisionPolicy, make_job: MakeJob, spark: SparkSession
) -> None:
    provisioned = provision_policy(dead_partitions=2)
    for key in ("eu", "us"):
        provisioned.bury(3, "TimeoutError", partition_key=key)
        provisioned.bury(3, "ValueError", partition_key=key)
    provisioned.bury(1, "TimeoutError", partition_key="de", replays=2)
    job, _ = make_job(provisioned)
    engine = Spark(spark, job)
    by_key = Choice(keys=("eu",))
    samples = runs.preview(dataclasses.replace(job, choice=by_key), Local(), Notes()).samples
    assert len(samples) == 6
    published = [message.publish_timestamp() for message in provisioned.unacknowledged()]
    whole = {"since": min(published), "until": max(published) + 1}
    for choice, count in (
        (by_key, 6),
        (Choice(samples, limit=4), 4),
        (Choice((samples[0],), ("us",)), 0),
        (Choice(**whole), 13),
        (Choice(max_replays=2), 12),
        (Choice(since=whole["until"]), 0),
        (Choice(until=whole["since"]), 0),
    ):
        everything = dataclasses.replace(job, choice=choice)
        assert runs.preview(everything, Local(), Notes()).account.left == count
    for choice, count in (
        (Choice(keys=("eu", "de"), max_replays=2, **whole), 3),
        (Choice(samples, limit=4), 3),
    ):
        selective = dataclasses.replace(job, choice=choice, where="cause_type = 'TimeoutError'")
        assert runs.preview(selective, Spark(spark, selective), Notes()).account.left == count
    assert (
        runs.run(dataclasses.replace(job, choice=Choice(samples, limit=4)), engine, Notes()).moved
        == 4
    )
    assert {message.partition_key() for message in provisioned.replayed()} == {"eu"}
    assert len(provisioned.unacknowledged()) == 9


@dataclass
class Handler:
    """Handles two of three messages, one of these at the second attempt; counts both."""

    seen: Counter[str] = field(default_factory=Counter)
    handled: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, message: pulsar.Message) -> None:
        number = message.data().decode()
        with self.lock:
            self.seen[number] += 1
            attempt = self.seen[number]
        if int(number) % 3 == 0:
            raise ValueError(number)
        if int(number) % 3 == 1 and attempt == 1:
            raise TimeoutError(number)
        with self.lock:
            self.handled[number] += 1


@contextmanager
def consumed(provisioned: Any, policy: Policy) -> Iterator[Handler]:  # noqa: ANN401
    """Handle the messages of *policy* meanwhile."""
    handler = Handler()
    with RetryConsumer(provisioned.client, policy) as consumer:
        thread = threading.Thread(target=consumer.run, args=(handler,), kwargs={"workers": 4})
        thread.start()
        try:
            yield handler
        finally:
            consumer.stop()
            thread.join()


class Shown:
    """Records the reported outcomes."""

    def __init__(self) -> None:
        self.outcomes: list[MessageOutcomes] = []

    def report_outcomes(self, outcome: MessageOutcomes) -> None:
        self.outcomes.append(outcome)

    def desired_state(self) -> DesiredState:
        return DesiredState.RUN


def buried(provisioned: Any, count: int) -> None:  # noqa: ANN401
    """Lay dead letters with their numbers as content."""
    for number in range(count):
        provisioned.bury(1, "OldError", str(number).encode())


@pytest.mark.parametrize("target", ["retry", "source"])
def test_moved_messages_are_followed_until_all_are_settled(
    provision_policy: ProvisionPolicy, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "POLL_SECONDS", 0.3)
    provisioned = provision_policy(partitions=3, dead_partitions=2)
    policy = replace(provisioned.policy, max_retries=2, ladder=Ladder((1,)))
    source = policy.topic
    provisioned.create(source, policy.subscription, 2)
    provisioned.deduplicate(source)
    provisioned.grant(source, "produce", "consume")
    provisioned.bury(7, "OldError", b"0")
    runs.run(job_of(provisioned, "before"), Local(), Notes())  # of which nothing may be counted
    buried(provisioned, COUNT)
    job = replace(
        job_of(provisioned), follow_for=120.0, target=source if target == "source" else None
    )
    assert runs.run(job, Local(), Notes()).moved == COUNT

    shown = Shown()
    with consumed(provisioned, policy) as handler:
        outcomes.follow(job, shown)
        last = shown.outcomes[-1]

    assert last.settled
    assert last.moved == COUNT
    assert (last.handled, last.waiting, last.dead) == (40, 0, 20)
    assert sum(handler.handled.values()) == 40
    assert last.causes == {"ValueError": 20}
    for reported in shown.outcomes:
        assert reported.handled + reported.waiting + reported.dead == COUNT
        assert reported.handled <= 40


def test_status_without_consumers_counts_all_as_waiting(
    provision_policy: ProvisionPolicy, make_job: MakeJob
) -> None:
    provisioned = provision_policy(partitions=2)
    buried(provisioned, 5)
    job, progress = make_job(provisioned, followFor="1s")
    job = replace(job, follow_for=0.0)
    runs.run(job, Local(), progress)

    outcomes.follow(job, progress)

    last = progress.read().outcome
    assert last is not None
    assert (last.handled, last.waiting, last.dead_again, last.settled) == (0, 5, 0, False)
    assert last.causes == ()


def test_replayed_batch_counts_each_message(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    provisioned.bury_batch("A", "B", "C")
    job: ReplayJob = replace(job_of(provisioned), follow_for=0.0)
    runs.run(job, Local(), Notes())
    shown = Shown()
    outcomes.follow(job, shown)
    assert [(reported.moved, reported.waiting) for reported in shown.outcomes] == [(3, 3)]
    assert shown.outcomes[-1].to_status() == {
        "handled": 0, "waiting": 3, "deadAgain": 0, "causes": [], "settled": False,
    }  # fmt: skip

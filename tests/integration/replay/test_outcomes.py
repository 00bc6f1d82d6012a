"""The outcome of replayed messages agrees with the work of their consumers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pulsar
import pytest

from redrive import RetryConsumer
from redrive.policy.ladder import Ladder
from redrive.policy.model import Policy
from redrive.replay.job import outcomes
from redrive.replay.job import run as runs
from redrive.replay.job.outcomes import MessageOutcomes
from redrive.replay.job.plan import DesiredState
from redrive.replay.spec import ReplayJob
from tests.support.local_engine import Local
from tests.support.local_runs import Notes, job_of

ProvisionPolicy = Callable[..., Any]
MakeJob = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("replay_token")
COUNT = 60


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

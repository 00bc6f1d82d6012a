"""Small ranges, such as those of many ledgers, are moved together by one task."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from pyspark.sql import SparkSession

from redrive.errors import RedriveError
from redrive.policy.naming import DEAD_LETTER_SUBSCRIPTION
from redrive.reading import reader
from redrive.replay import sending
from redrive.replay.job import plan
from redrive.replay.job import run as runs
from redrive.replay.mover import RangeMover
from redrive.replay.outcome import RangeResult
from redrive.replay.spark import Spark
from redrive.replay.task import RangeTask
from tests.support.local_engine import Local
from tests.support.local_runs import Notes, job_of, numbers, selecting

ProvisionPolicy = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("replay_token")
LEDGERS, EACH = 6, 5


@pytest.fixture
def provisioned(provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401
    """Return a policy whose dead letters are in several ledgers, which make one group."""
    monkeypatch.setattr(plan, "GROUPS", 1)
    provisioned = provision_policy()
    for ledger in range(LEDGERS):
        provisioned.bury_many(EACH, ledger * EACH)
        provisioned.admin("PUT", provisioned.policy.dead_letter_topic, "unload")
    return provisioned


class Grouped(Local):
    """Keeps the sizes of groups."""

    def __init__(self) -> None:
        super().__init__(slots=1)
        self.groups: list[int] = []

    def move_all(self, tasks: Sequence[RangeTask]) -> Sequence[RangeResult]:
        self.groups.append(len(tasks))
        return super().move_all(tasks)


def check_moved_once(provisioned: Any) -> None:  # noqa: ANN401
    assert provisioned.in_target() == numbers(LEDGERS * EACH)
    assert provisioned.backlog_of_dead_letters() == 0
    provisioned.check_audit()


@pytest.mark.parametrize("scans", [0, 1])
def test_ranges_of_several_ledgers_are_moved_in_one_task(
    provisioned: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
    scans: int,
) -> None:
    readers: list[object] = []
    open_reader = reader.read_ranges

    def counted(*arguments: Any) -> Any:  # noqa: ANN401
        readers.append(arguments)
        return open_reader(*arguments)

    monkeypatch.setattr(reader, "read_ranges", counted)
    engine = Grouped()
    job = job_of(provisioned)
    account = runs.run(selecting(job) if scans else job, engine, Notes())
    assert (account.moved, account.left, engine.groups) == (LEDGERS * EACH, 0, [LEDGERS])
    assert len(readers) == scans + 1
    check_moved_once(provisioned)


def test_condition_in_sql_is_computed_for_several_ledgers(
    provisioned: Any,  # noqa: ANN401
    spark: SparkSession,
) -> None:
    job = dataclasses.replace(job_of(provisioned), where="size > 0")
    engine = Spark(spark, job)
    assert LEDGERS // engine.slots > 1  # so there are groups
    account = runs.run(job, engine, Notes())
    assert (account.moved, account.left) == (LEDGERS * EACH, 0)
    check_moved_once(provisioned)


def fail_third(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Raise *error* instead of moving the third range."""
    run, begun = RangeMover.run, list[RangeMover]()

    def run_others(self: RangeMover) -> RangeResult:
        begun.append(self)
        if len(begun) == 3:
            raise error
        return run(self)

    monkeypatch.setattr(RangeMover, "run", run_others)


def test_ranges_of_a_lost_group_are_moved_once(
    provisioned: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail_third(monkeypatch, RuntimeError("killed"))
    engine = Grouped()
    account = runs.run(job_of(provisioned), engine, Notes())
    assert (account.moved, account.left, engine.groups) == (LEDGERS * EACH, 0, [LEDGERS])
    check_moved_once(provisioned)


def test_error_in_a_group_leaves_other_ranges_moved(
    provisioned: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail_third(monkeypatch, RedriveError("no", remedy="wait"))
    engine = Grouped()
    account = runs.run(job_of(provisioned), engine, Notes())
    assert (account.moved, engine.groups) == (LEDGERS * EACH, [LEDGERS, LEDGERS - 2])
    check_moved_once(provisioned)


def test_entries_of_a_group_settled_by_others_are_not_sent(
    provisioned: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sending, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(sending, "POLL_SHARE", 0.0)
    run, begun = RangeMover.run, list[RangeMover]()

    def run_after_skip(self: RangeMover) -> RangeResult:
        begun.append(self)
        if len(begun) == 3:
            topic = provisioned.policy.dead_letter_topic
            provisioned.admin("POST", topic, f"subscription/{DEAD_LETTER_SUBSCRIPTION}/skip_all")
        return run(self)

    monkeypatch.setattr(RangeMover, "run", run_after_skip)
    account = runs.run(job_of(provisioned), Grouped(), Notes())
    assert (account.moved, account.skipped) == (2 * EACH, (LEDGERS - 2) * EACH)
    assert provisioned.in_target() == numbers(2 * EACH)

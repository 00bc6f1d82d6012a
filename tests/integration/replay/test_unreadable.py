"""Entries that no client can show: in the account of each Replay, and discarded by choice alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import SparkSession

from redrive.reading import ranges
from redrive.replay import mover
from redrive.replay.job import run as runs
from redrive.replay.job.plan import Local
from redrive.replay.spark import Spark
from redrive.replay.spec import Choice, ReplayJob
from tests.support.local_runs import Notes, job_of
from tests.support.raw_entries import HARMFUL, RawEntry, chunk, numbers, store
from tests.support.waiting import wait_until

ProvisionPolicy = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("replay_token")

GOOD = 6
UNREADABLE = [
    RawEntry(numbers(compression=2, uncompressed=10), b"no zlib"),
    *(chunk("killed", part, 11, 110, b"0123456789") for part in range(10)),
    *HARMFUL.values(),
]


def bury(provisioned: Any) -> list[str]:  # noqa: ANN401
    """Lay unreadable entries among good dead letters; return the ids of these."""
    provisioned.bury(GOOD // 2)
    store(provisioned.broker, provisioned.policy.dead_letter_topic, UNREADABLE)
    provisioned.bury(GOOD // 2)
    letters = provisioned.read_all(provisioned.policy.dead_letter_topic)
    ids: list[str] = provisioned.ids(each for each in letters if "id" in each.properties())
    return ids


def choosing(job: ReplayJob, **choice: Any) -> ReplayJob:  # noqa: ANN401  as a Choice takes it
    return dataclasses.replace(job, choice=Choice(**choice))


@pytest.mark.parametrize("reads_first", [False, True])
def test_backlog_after_a_replay_of_everything_is_refused(
    provision_policy: ProvisionPolicy, *, reads_first: bool
) -> None:
    provisioned = provision_policy()
    buried = bury(provisioned)
    job = dataclasses.replace(job_of(provisioned), approval_above=1_000 if reads_first else None)

    account = runs.run(job, Local(), Notes())

    assert provisioned.in_target() == buried
    assert (account.moved, account.left, account.discarded) == (GOOD, 0, 0)
    assert account.matched == account.moved + account.refused
    assert {each.cause for each in account.refusals} == {"NotDelivered"}
    assert account.refused == len(UNREADABLE)
    wait_until(lambda: provisioned.backlog_of_dead_letters() == account.refused)


@pytest.mark.parametrize("reads_first", [False, True])
def test_unreadable_entries_are_discarded_by_choice(
    provision_policy: ProvisionPolicy,
    monkeypatch: pytest.MonkeyPatch,
    *,
    reads_first: bool,
) -> None:
    monkeypatch.setattr(mover, "QUIET_SECONDS", 2.0)
    provisioned = provision_policy()
    buried = bury(provisioned)
    job = choosing(job_of(provisioned), discards=True)
    job = dataclasses.replace(job, approval_above=1_000 if reads_first else None)

    account = runs.run(job, Local(), Notes())

    assert provisioned.in_target() == buried
    assert (account.moved, account.refused, account.left) == (GOOD, 0, 0)
    assert account.discarded == len(UNREADABLE)
    assert account.matched == account.moved + account.discarded
    wait_until(lambda: provisioned.backlog_of_dead_letters() == 0)


def test_selection_by_content_leaves_unreadable_entries(
    provision_policy: ProvisionPolicy, spark: SparkSession
) -> None:
    """What they hold can't be computed."""
    provisioned = provision_policy()
    bury(provisioned)
    everything = choosing(job_of(provisioned), since=0, discards=True)
    of_sql = dataclasses.replace(job_of(provisioned), where="size >= 0 or size < 0")
    for job, engine in ((everything, Local()), (of_sql, Spark(spark, of_sql))):
        account = runs.preview(job, engine, Notes()).account
        assert (account.matched, account.left, account.refused) == (GOOD, GOOD, 0)
        assert (account.unevaluated, account.scanned) == (len(UNREADABLE), GOOD + len(UNREADABLE))


def test_chunks_ending_in_the_next_range_count_once(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "RANGE_ENTRIES", 4)
    provisioned = provision_policy()
    whole = [chunk("whole", part, 3, 30, b"0123456789") for part in range(3)]
    partial = [chunk("partial", part, 3, 30, b"0123456789") for part in range(2)]
    provisioned.bury(2)
    topic = provisioned.policy.dead_letter_topic
    store(provisioned.broker, topic, [whole[0], partial[0], whole[1], partial[1], whole[2]])
    provisioned.bury(1)

    account = runs.run(job_of(provisioned), Local(), Notes())

    assert (account.matched, account.moved, account.refused) == (6, 4, 2)
    (moved,) = [
        each
        for each in provisioned.read_all(provisioned.policy.retry_topic)
        if len(each.data()) > 5
    ]
    assert moved.data() == b"0123456789" * 3
    wait_until(lambda: provisioned.backlog_of_dead_letters() == 2)

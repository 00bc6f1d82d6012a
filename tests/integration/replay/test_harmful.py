"""Entries that no client lives through, or shows: a Replay moves all others, and ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import SparkSession

from redrive.delivery.inspection import MALFORMED_ENTRY
from redrive.policy.envelope import CAUSE_TYPE
from redrive.policy.naming import DEAD_LETTER_SUBSCRIPTION
from redrive.replay import harmful
from redrive.replay.job import run as runs
from redrive.replay.job.plan import Local
from redrive.replay.spark import Spark
from tests.support.local_runs import Notes, job_of, replay, selecting
from tests.support.raw_entries import HARMFUL, store

ProvisionPolicy = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("replay_token")
GOOD = 10


def bury_among_harmful(provisioned: Any) -> list[str]:  # noqa: ANN401
    """Lay good dead letters around each of the harmful ones, and return their ids."""
    topic = provisioned.policy.dead_letter_topic
    for entry in HARMFUL.values():
        provisioned.bury(1)
        store(provisioned.broker, topic, [entry])
    provisioned.bury(GOOD)
    letters = provisioned.read_all(topic)
    ids: list[str] = provisioned.ids(each for each in letters if "id" in each.properties())
    return ids


@pytest.mark.parametrize("selects", [False, True])
def test_harmful_dead_letters_stay_and_others_move(
    provision_policy: ProvisionPolicy, *, selects: bool
) -> None:
    provisioned = provision_policy()
    buried = bury_among_harmful(provisioned)
    assert len(buried) == len(HARMFUL) + GOOD

    job = job_of(provisioned)
    account = runs.run(selecting(job) if selects else job, Local(), Notes())

    assert (account.moved, account.left) == (len(buried), 0)
    assert provisioned.in_target() == buried


def test_harmful_messages_in_a_target_hold_no_search_up(provision_policy: ProvisionPolicy) -> None:
    provisioned = provision_policy()
    provisioned.bury(GOOD)

    class Lost(Local):
        """Loses its task once some is moved, so that the next one looks for it."""

        lost = False

        def move(self, task: Any) -> Any:  # noqa: ANN401
            moved = super().move(task)
            if not self.lost:
                self.lost = True
                store(provisioned.broker, provisioned.policy.retry_topic, HARMFUL.values())
                raise RuntimeError("lost")
            return moved

    account = runs.run(job_of(provisioned), Lost(), Notes())

    assert (account.moved, account.left) == (GOOD, 0)
    assert (
        len(
            provisioned.ids(
                message
                for message in provisioned.read_all(provisioned.policy.retry_topic)
                if "id" in message.properties()
            )
        )
        == GOOD
    )


def test_harmful_dead_letters_fail_no_task_of_spark(
    provision_policy: ProvisionPolicy, spark: SparkSession
) -> None:
    provisioned = provision_policy()
    buried = bury_among_harmful(provisioned)

    job = dataclasses.replace(job_of(provisioned), where="size >= 0")
    account = runs.run(job, Spark(spark, job), Notes())

    assert (account.moved, account.left) == (len(buried), 0)
    assert provisioned.in_target() == buried
    assert replay(provisioned).left == 0


def test_harmful_entries_move_out_of_the_way_of_consumers(
    provision_policy: ProvisionPolicy,
) -> None:
    """The client in this process would end it at many of them."""
    provisioned = provision_policy()
    policy, broker = provisioned.policy, provisioned.broker
    buried = bury_among_harmful(provisioned)
    quarantine = provisioned.policy.retry_topic
    provisioned.grant(policy.dead_letter_topic, "consume")
    here = [broker.service_url, broker.admin_url, str(policy.dead_letter_topic)]

    assert harmful.main([*here, DEAD_LETTER_SUBSCRIPTION]) == 1
    assert harmful.main([*here, DEAD_LETTER_SUBSCRIPTION, "--dead-letter", str(quarantine)]) == 0
    assert harmful.main([*here, DEAD_LETTER_SUBSCRIPTION]) == 0

    moved = list(provisioned.read_all(quarantine))
    assert {message.properties()[CAUSE_TYPE] for message in moved} == {MALFORMED_ENTRY}
    stored = {entry.content for entry in HARMFUL.values()}
    assert all(any(message.data().endswith(each) for each in stored) for message in moved)
    resting = provisioned.resting()
    assert provisioned.ids(each for each in resting if "id" in each.properties()) == buried
    # What is left is no harm: one chunk that others are to follow.
    assert provisioned.backlog_of_dead_letters() == len(buried) + len(HARMFUL) - len(moved)
    assert len(HARMFUL) - len(moved) <= 1

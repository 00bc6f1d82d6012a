"""Dead letters that others acknowledge, or delete with their topic, while a Replay moves them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pulsar
import pytest

from redrive.policy.naming import DEAD_LETTER_SUBSCRIPTION
from redrive.replay.account import Account
from redrive.replay.job import run as runs
from redrive.replay.job.plan import Local
from redrive.replay.lookup import DeadLetterTopicLostError
from tests.support.local_runs import Notes, job_of, wait_until_moved

ProvisionPolicy = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("replay_token")
COUNT, RATE, MOVED = 300, 25, 50
"""After two seconds all are old enough to expire; others have eight to acknowledge some."""


@contextmanager
def slow_run(provisioned: Any) -> Iterator[Future[Account]]:  # noqa: ANN401
    """Run a Replay of `COUNT` dead letters, of which the first `MOVED` are in the target."""
    provisioned.bury_many(COUNT)
    job = dataclasses.replace(job_of(provisioned), rate_limit=RATE)
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(runs.run, job, Local(), Notes())
        wait_until_moved(provisioned, MOVED)
        yield run


def skip_all(provisioned: Any) -> None:  # noqa: ANN401
    topic = provisioned.policy.dead_letter_topic
    provisioned.admin("POST", topic, f"subscription/{DEAD_LETTER_SUBSCRIPTION}/skip_all")


def expire(provisioned: Any) -> None:  # noqa: ANN401
    at = f"subscription/{DEAD_LETTER_SUBSCRIPTION}/expireMessages/1"
    provisioned.admin("POST", provisioned.policy.dead_letter_topic, at)


def consume(provisioned: Any) -> None:  # noqa: ANN401
    """Acknowledge all but the first fifth, in the order in which they lie, as a consumer does."""
    topic = str(provisioned.policy.dead_letter_topic)
    consumer = provisioned.client.subscribe(
        topic, DEAD_LETTER_SUBSCRIPTION, pulsar.ConsumerType.Shared
    )
    for _ in range(COUNT - MOVED):
        message = consumer.receive(60_000)
        if int(message.properties()["id"]) >= COUNT // 5:
            consumer.acknowledge(message)
        if int(message.properties()["id"]) == COUNT - 1:
            break
    consumer.close()


@pytest.mark.parametrize("acknowledge", [skip_all, expire, consume])
def test_what_others_acknowledge_meanwhile_is_not_sent(
    provision_policy: ProvisionPolicy, acknowledge: Callable[[Any], None]
) -> None:
    provisioned = provision_policy()
    with slow_run(provisioned) as run:
        acknowledge(provisioned)
        account = run.result()

    assert account.moved + account.skipped == account.matched == COUNT
    assert len(provisioned.in_target()) == account.moved
    assert account.skipped >= COUNT // 10
    assert provisioned.backlog_of_dead_letters() == 0


@pytest.mark.parametrize("again", [False, True])
def test_deleted_dead_letter_topic_fails_the_replay(
    provision_policy: ProvisionPolicy, *, again: bool
) -> None:
    provisioned = provision_policy()
    topic = provisioned.policy.dead_letter_topic
    with slow_run(provisioned) as run:
        provisioned.delete(topic)
        if again:
            provisioned.create(topic, DEAD_LETTER_SUBSCRIPTION, 0)
            provisioned.grant(topic, "consume")
        with pytest.raises(DeadLetterTopicLostError, match=topic.local):
            run.result(60)

"""Dead letters that others acknowledge, or delete with their topic, while a Replay moves them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pulsar
import pytest

from redrive.policy.naming import DEAD_LETTER_SUBSCRIPTION
from redrive.replay import sending
from redrive.replay.account import Account
from sandbox.errors import SandboxError
from tests.support.held_sends import held_at
from tests.support.local_runs import replay, wait_until_moved
from tests.support.reasons import raises
from tests.support.waiting import wait_until

ProvisionPolicy = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("replay_token")
COUNT, MOVED, FIRST = 100, 20, 30
"""All but the `FIRST` are acknowledged by `consume`."""


@contextmanager
def held_run(
    provisioned: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Future[Account]]:
    """Run a Replay of `COUNT` dead letters, which moves `MOVED` before the block and others after.

    It looks for acknowledgements before each message.
    """
    monkeypatch.setattr(sending, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(sending, "POLL_SHARE", 0.0)
    provisioned.bury_many(COUNT)
    with ThreadPoolExecutor(1) as threads, held_at(MOVED):
        run = threads.submit(replay, provisioned)
        wait_until_moved(provisioned, MOVED)
        yield run


def skip_all(provisioned: Any) -> None:  # noqa: ANN401
    topic = provisioned.policy.dead_letter_topic
    provisioned.admin("POST", topic, f"subscription/{DEAD_LETTER_SUBSCRIPTION}/skip_all")


def expire(provisioned: Any) -> None:  # noqa: ANN401
    """Expire all, as soon as all are older than a second."""
    at = f"subscription/{DEAD_LETTER_SUBSCRIPTION}/expireMessages/1"

    def are_expired() -> bool:
        with suppress(SandboxError):  # the last request is not finished
            provisioned.admin("POST", provisioned.policy.dead_letter_topic, at)
        return bool(provisioned.backlog_of_dead_letters() == 0)

    wait_until(are_expired)


def consume(provisioned: Any) -> None:  # noqa: ANN401
    """Acknowledge all but the first ones, in the order in which they lie, as a consumer does."""
    topic = str(provisioned.policy.dead_letter_topic)
    consumer = provisioned.client.subscribe(
        topic, DEAD_LETTER_SUBSCRIPTION, pulsar.ConsumerType.Shared
    )
    number = -1
    while number < COUNT - 1:
        message = consumer.receive(60_000)
        number = int(message.properties()["id"])
        if number >= FIRST:
            consumer.acknowledge(message)
    consumer.close()
    wait_until(lambda: provisioned.backlog_of_dead_letters() <= FIRST)


@pytest.mark.parametrize(
    ("acknowledge", "moved"), [(skip_all, MOVED), (expire, MOVED), (consume, FIRST)]
)
def test_what_others_acknowledge_meanwhile_is_not_sent(
    provision_policy: ProvisionPolicy,
    monkeypatch: pytest.MonkeyPatch,
    acknowledge: Callable[[Any], None],
    moved: int,
) -> None:
    provisioned = provision_policy()
    with held_run(provisioned, monkeypatch) as run:
        acknowledge(provisioned)
    account = run.result()

    assert (account.matched, account.moved, account.skipped) == (COUNT, moved, COUNT - moved)
    assert len(provisioned.in_target()) == moved
    assert provisioned.backlog_of_dead_letters() == 0


@pytest.mark.parametrize("again", [False, True])
def test_deleted_dead_letter_topic_fails_the_replay(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch, *, again: bool
) -> None:
    provisioned = provision_policy()
    topic = provisioned.policy.dead_letter_topic
    with held_run(provisioned, monkeypatch) as run:
        provisioned.delete(topic)
        if again:
            provisioned.create(topic, DEAD_LETTER_SUBSCRIPTION, 0)
            provisioned.grant(topic, "consume")
    with raises("DeadLetterTopicLost", match=topic.local):
        run.result()

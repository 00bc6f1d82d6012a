"""Where it is looked for what an earlier lease has stored, though the topic has changed since."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from redrive.replay.job import run as runs
from redrive.replay.job.engine import Local
from redrive.replay.moving import window
from redrive.replay.moving.mover import RangeTask
from redrive.replay.moving.outcome import RangeResult
from redrive.replay.moving.sending import Sender
from redrive.replay.topic.rows import DeadLetterRow
from tests.integration.replay.test_mover import (
    Notes,
    check_audit,
    job_of,
    numbers,
    replay,
)

ProvisionPolicy = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("replay_token")


class Dies(Local):
    """Is killed once a range is leased."""

    def move(self, task: RangeTask) -> RangeResult:
        raise RuntimeError(str(task.range))


def test_a_ledger_that_was_never_written_to_may_be_gone(provision_policy: ProvisionPolicy) -> None:
    provisioned = provision_policy()
    topic = provisioned.policy.retry_topic
    producer = provisioned.client.create_producer(str(topic))
    producer.send(b"a retry that waits", properties={"id": "before"})
    producer.close()
    provisioned.admin("PUT", topic, "unload")
    provisioned.bury_many(10)
    with pytest.raises(RuntimeError):
        runs.run(job_of(provisioned), Dies(), Notes())
    provisioned.admin("PUT", topic, "unload")

    account = replay(provisioned)

    assert (account.matched, account.moved, account.refused) == (10, 10, 0)
    assert provisioned.in_target() == [*numbers(10), "before"]


def test_a_task_knows_of_what_it_has_sent_itself_that_none_is_stored(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the broker is killed behind the first message to a topic that was empty."""
    provisioned = provision_policy()
    provisioned.bury_many(10)
    send, lost = Sender.send, iter([True])

    def lose_the_first(
        sender: Sender, letter: DeadLetterRow, properties: Mapping[str, str]
    ) -> None:
        if next(lost, False):
            sender.hold(sender.partition(letter), letter.schema_version)
            provisioned.admin("PUT", provisioned.policy.retry_topic, "unload")
        else:
            send(sender, letter, properties)

    monkeypatch.setattr(window, "STALL_SECONDS", 1.0)
    monkeypatch.setattr(Sender, "send", lose_the_first)

    account = replay(provisioned)

    assert (account.matched, account.moved, account.refused) == (10, 10, 0)
    assert provisioned.in_target() == numbers(10)
    check_audit(provisioned)


def test_what_may_have_been_stored_and_trimmed_is_refused(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    provisioned.bury_many(10)
    with pytest.raises(RuntimeError):
        runs.run(job_of(provisioned), Dies(), Notes())
    provisioned.admin("PUT", provisioned.policy.retry_topic, "unload")

    account = replay(provisioned)

    assert (account.matched, account.moved, account.refused) == (10, 0, 10)
    assert {refusal.cause for refusal in account.refusals} == {"Unproven"}

"""The search for messages that an earlier lease has stored, in a topic that has changed since."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from redrive.api.replay import ReplaySpec
from redrive.reading import broker
from redrive.reading.ranges import Partition, Range
from redrive.reading.rows import DeadLetterRow
from redrive.replay import mover, sending
from redrive.replay.controller.admission import choice_of
from redrive.replay.job import run as runs
from redrive.replay.job.plan import PlannedRange, Scan
from redrive.replay.outcome import Key, RangeResult
from redrive.replay.records import Permit
from redrive.replay.sending import Sender
from redrive.replay.spec import Choice, ReplayJob
from redrive.replay.task import RangeTask
from tests.support.engines import Local
from tests.support.local_runs import (
    Notes,
    job_of,
    numbers,
    replay,
)
from tests.support.waiting import wait_until

ProvisionPolicy = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("replay_token", "pulsar_namespace")


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


def test_task_knows_that_none_of_its_own_sends_is_stored(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the broker is killed behind the first message to a topic that was empty."""
    provisioned = provision_policy()
    provisioned.bury_many(10)
    send, lost = Sender.send, iter([True])

    def lose_the_first(
        sender: Sender, key: Key, letter: DeadLetterRow, partition: int, properties: dict[str, str]
    ) -> None:
        if next(lost, False):
            sender.hold(partition, letter.schema_version)
            provisioned.admin("PUT", provisioned.policy.retry_topic, "unload")
        else:
            send(sender, key, letter, partition, properties)

    monkeypatch.setattr(sending, "STALL_SECONDS", 1.0)
    monkeypatch.setattr(Sender, "send", lose_the_first)

    account = replay(provisioned)

    assert (account.matched, account.moved, account.refused) == (10, 10, 0)
    assert provisioned.in_target() == numbers(10)
    provisioned.check_audit()


@pytest.mark.parametrize("guarantee", ["ExactlyOnce", "AtLeastOnce"])
def test_message_perhaps_stored_and_trimmed_is_refused(
    provision_policy: ProvisionPolicy, guarantee: str
) -> None:
    provisioned = provision_policy()
    provisioned.bury_many(10)
    forgets_a_lease(provisioned)

    account = replay(provisioned)

    assert (account.matched, account.moved, account.refused) == (10, 0, 10)
    assert {refusal.cause for refusal in account.refusals} == {"Unproven"}

    confirmed = {"policyRef": {"name": "orders"}, "confirmations": ["UnprovenHandled"]}
    choice = choice_of(ReplaySpec.model_validate(confirmed))
    is_exact = guarantee == "ExactlyOnce"
    job = dataclasses.replace(job_of(provisioned), choice=choice, exactly_once=is_exact)
    mounted = job.encode()
    account = runs.run(ReplayJob.decode(mounted), Local(), Notes())

    assert (account.matched, account.skipped, account.refused, account.left) == (10, 10, 0, 0)
    assert provisioned.in_target() == []
    wait_until(lambda: not provisioned.backlog_of_dead_letters())
    assert replay(provisioned).matched == 0


@pytest.mark.parametrize("guarantee", ["ExactlyOnce", "AtLeastOnce"])
def test_confirmation_settles_no_message_of_its_own_run(
    provision_policy: ProvisionPolicy, guarantee: str
) -> None:
    """Its author confirmed what earlier runs may have moved; this run was killed before it sent."""
    provisioned = provision_policy()
    provisioned.bury_many(10)
    is_exact = guarantee == "ExactlyOnce"
    choice = Choice(settles_unproven=True)
    job = dataclasses.replace(job_of(provisioned), choice=choice, exactly_once=is_exact)
    forgets_a_lease(provisioned, job)

    account = runs.run(job, Local(), Notes())

    assert (account.matched, account.moved, account.skipped) == (10, 0, 0)
    assert account.refused == 10
    assert provisioned.in_target() == []
    assert provisioned.backlog_of_dead_letters() == 10

    later = runs.run(dataclasses.replace(job, uid="later"), Local(), Notes())

    assert (later.matched, later.skipped, later.refused) == (10, 10, 0)


def test_confirmation_settles_only_what_earlier_runs_selected(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    for cause in ("KeyError", "TimeoutError", "KeyError"):
        provisioned.bury(2, cause)
    some = dataclasses.replace(job_of(provisioned), choice=Choice(causes=("TimeoutError",)))
    forgets_a_lease(provisioned, some)
    confirmed = dataclasses.replace(
        job_of(provisioned, uid="confirmed"), choice=Choice(settles_unproven=True)
    )

    account = runs.run(confirmed, Local(), Notes())

    assert (account.matched, account.moved, account.skipped, account.refused) == (6, 4, 2, 0)
    assert len(provisioned.in_target()) == 4


class DrainsFirst(Local):
    """Ends the first task before it moves anything, as a suspension does."""

    def move(self, task: RangeTask) -> RangeResult:
        if task.generation == 2:
            task = dataclasses.replace(task, permit=Permit(drain=True))
        return super().move(task)


def test_confirmation_holds_after_a_suspension(provision_policy: ProvisionPolicy) -> None:
    provisioned = provision_policy()
    provisioned.bury_many(10)
    forgets_a_lease(provisioned)
    job = dataclasses.replace(job_of(provisioned), choice=Choice(settles_unproven=True))

    account = runs.run(job, DrainsFirst(), Notes())

    assert (account.matched, account.skipped, account.refused) == (10, 10, 0)


def test_confirmation_settles_no_batch_partly_in_doubt(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of two keys, of which one partition of the target proves to have none."""
    monkeypatch.setattr(mover, "QUIET_SECONDS", 0.0)  # the run that dies has sent nothing
    provisioned = provision_policy(partitions=2)
    provisioned.bury_batch(*(["timeout"] * 8))
    with pytest.raises(RuntimeError):
        runs.run(job_of(provisioned), Dies(), Notes())
    provisioned.admin("PUT", provisioned.policy.retry_topic.partition(0), "unload")

    job = dataclasses.replace(job_of(provisioned), choice=Choice(settles_unproven=True))
    account = runs.run(job, Local(), Notes())

    assert (account.matched, account.skipped, account.refused) == (8, 0, 8)


def bury_in_two_ranges(provisioned: Any) -> None:  # noqa: ANN401
    """Lay ten dead letters into each of two ledgers."""
    for first in (0, 10):
        provisioned.bury_many(10, first)
        provisioned.admin("PUT", provisioned.policy.dead_letter_topic, "unload")


class DiesAtTheSecond(Local):
    """Is killed once the first range is moved."""

    def __init__(self) -> None:
        super().__init__(slots=1)
        self._ranges: set[Range] = set()

    def move(self, task: RangeTask) -> RangeResult:
        self._ranges.add(task.range)
        if len(self._ranges) > 1:
            raise RuntimeError(str(task.range))
        return super().move(task)


def test_resumed_run_accounts_for_trimmed_dead_letters(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    topic = provisioned.policy.dead_letter_topic
    bury_in_two_ranges(provisioned)
    job = job_of(provisioned)
    with pytest.raises(RuntimeError):
        runs.run(job, DiesAtTheSecond(), Notes())
    before = broker.read_partitions(provisioned.broker.admin_url, topic)
    provisioned.admin("PUT", topic, "unload")
    provisioned.admin("POST", topic, "trim")
    wait_until_trimmed(provisioned, before)

    account = replay(provisioned, uid=job.uid)

    assert (account.matched, account.moved, account.skipped) == (20, 20, 0)
    assert provisioned.in_target() == numbers(20)
    provisioned.check_audit()


def wait_until_trimmed(provisioned: Any, before: tuple[Partition, ...]) -> None:  # noqa: ANN401
    """Wait until the first ledger of the dead-letter topic is gone."""
    deadline = time.monotonic() + 60
    topic = provisioned.policy.dead_letter_topic
    while (
        min(before[0].held) in broker.read_partitions(provisioned.broker.admin_url, topic)[0].held
    ):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def forgets_a_lease(provisioned: Any, job: ReplayJob | None = None) -> None:  # noqa: ANN401
    """Kill a run that has leased its range, then have the broker trim the target.

    Of *job*, or of a Replay of everything.
    """
    with pytest.raises(RuntimeError):
        runs.run(job or job_of(provisioned), Dies(), Notes())
    provisioned.admin("PUT", provisioned.policy.retry_topic, "unload")


def test_unproven_messages_stay_refused_until_at_least_once(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    provisioned.bury_many(10)
    forgets_a_lease(provisioned)
    provisioned.bury_many(10, 10)

    first = replay(provisioned)

    assert (first.matched, first.moved, first.refused) == (20, 10, 10)
    assert provisioned.in_target() == numbers(20)[10:]
    provisioned.bury_many(5, 20)

    second = replay(provisioned)

    assert (second.matched, second.moved, second.refused) == (15, 5, 10)

    twice = dataclasses.replace(job_of(provisioned), exactly_once=False)
    third = runs.run(twice, Local(), Notes())

    assert (third.matched, third.moved, third.refused) == (10, 10, 0)
    assert provisioned.in_target() == numbers(25)


def test_grown_target_keeps_messages_at_their_partition(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover, "QUIET_SECONDS", 0.0)  # the run that dies has sent nothing
    provisioned = provision_policy(partitions=2)
    provisioned.bury_many(30)
    with pytest.raises(RuntimeError):
        runs.run(job_of(provisioned), Dies(), Notes())
    topic = provisioned.policy.retry_topic
    provisioned.admin("POST", topic, "partitions", 3)
    provisioned.admin("PUT", topic, "unload")

    account = replay(provisioned)

    assert (account.matched, account.moved, account.refused) == (30, 0, 30)


def test_deleted_target_does_not_block_a_later_replay(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    provisioned.bury_many(10)
    parking = provisioned.policy.topic.sibling("parked")
    provisioned.create(parking, "keeps", 0)
    provisioned.deduplicate(parking)
    provisioned.grant(parking, "produce", "consume")
    elsewhere = dataclasses.replace(job_of(provisioned), target=parking)
    with pytest.raises(RuntimeError):
        runs.run(elsewhere, Dies(), Notes())
    provisioned.delete(parking)
    provisioned.bury_many(10, 10)

    account = replay(provisioned)

    assert (account.matched, account.moved, account.refused) == (20, 10, 10)
    assert {refusal.cause for refusal in account.refusals} == {"Unproven"}


class DiesWhilePlanning(Local):
    """Is killed once the plan of one range is on record."""

    def scan(self, scans: Sequence[Scan]) -> Iterable[PlannedRange]:
        if self.scanned:
            raise RuntimeError(str(scans))
        return super().scan(scans)


def test_rest_of_an_old_plan_is_not_in_the_new_plan(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    bury_in_two_ranges(provisioned)
    job = dataclasses.replace(job_of(provisioned), choice=Choice(limit=15))
    with pytest.raises(RuntimeError):
        runs.run(job, DiesWhilePlanning(slots=1), Notes())
    provisioned.skip(10)

    account = runs.run(job, Local(), Notes())

    assert (account.matched, account.moved, account.skipped) == (10, 10, 0)
    assert provisioned.in_target() == numbers(20)[10:]


def test_ledger_recreated_during_a_run_is_complete_at_the_end(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    provisioned.bury_many(10)
    policy = provisioned.policy
    provisioned.admin("PUT", policy.dead_letter_topic, "unload")
    provisioned.bury_many(10, 10)

    class CreatesLedgerAgain(Local):
        def move(self, task: RangeTask) -> RangeResult:
            moved = super().move(task)
            provisioned.make_again(policy.ledger_topic)
            return moved

    account = runs.run(job_of(provisioned), CreatesLedgerAgain(slots=1), Notes())

    assert account.moved == 20
    provisioned.check_audit()

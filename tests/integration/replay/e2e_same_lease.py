"""Two processes of one lease: Spark starts a task again whose process is gone, or asleep.

The second may be drained before it knows each message that the first has stored; so the next
lease looks for them.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from redrive.reading.positions import EntryId, Position, Tail, TargetPartition, target_partition
from redrive.reading.ranges import Range
from redrive.reading.reader import ReadableTopic
from redrive.reading.rows import DeadLetterRow
from redrive.replay import lookup, mover, sending
from redrive.replay.account import Account
from redrive.replay.evidence import LedgerKey
from redrive.replay.job import run as runs
from redrive.replay.job.plan import SUSPENDED, DesiredState, Pause, Scanned
from redrive.replay.ledger import FencedError
from redrive.replay.mover import RangeMover
from redrive.replay.outcome import RangeResult, StoredMessages
from redrive.replay.sending import Sender, Window
from redrive.replay.spec import ReplayJob
from redrive.replay.task import RangeTask
from tests.support.engines import Local
from tests.support.local_runs import job_of
from tests.support.memory_brokers import Killed
from tests.support.waiting import wait_until

ProvisionPolicy = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("replay_token")


class Suspended:
    """A run that is suspended on request, and resumed once its tasks are drained."""

    def __init__(self) -> None:
        self.wish = DesiredState.RUN
        self._reports = 0

    def suspend(self) -> None:
        """Suspend the run: its tasks notice when they next read the lease."""
        self.wish = DesiredState.SUSPEND
        wait_until(lambda: self._reports > 1)  # each report takes effect before the next

    def rate_limit(self, job: ReplayJob) -> float | None:
        return job.rate_limit

    def take_over(self, _: EntryId) -> None:
        pass

    def report(self, _: Account, *, pause: Pause | None = None) -> DesiredState:
        self._reports += self.wish is DesiredState.SUSPEND
        if pause == SUSPENDED:
            self.wish = DesiredState.RUN
        return self.wish

    def report_scan(self, _: Scanned) -> None:
        pass


class Again(Local):
    """Moves the first range by *twice*, each other one as ever.

    Args:
        twice: gets the task, and has it moved by two processes.
        before: called before a range is moved once more.
    """

    def __init__(
        self,
        twice: Callable[[RangeTask], RangeResult],
        before: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._twice, self._before = twice, before
        self.generations = list[int]()

    def move(self, task: RangeTask) -> RangeResult:
        self.generations.append(task.generation)
        if len(self.generations) == 1:
            return self._twice(task)
        if len(self.generations) == 2:
            self._before()
        return mover.move(task)


def test_drained_task_leaves_the_search_to_the_next_lease(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first message, to the other partition, is refused: nothing there tells of the first."""
    monkeypatch.setattr(sending, "STALL_SECONDS", 1.0)
    monkeypatch.setattr(sending, "ALONE_SECONDS", 1.5)
    keys = {target_partition(key, Position(0, 0, 0), 2): key for key in map(str, range(20))}
    provisioned = provision_policy(partitions=2)
    provisioned.bury(1, content=secrets.token_bytes(5_000), partition_key=keys[0])
    provisioned.bury(300, partition_key=keys[1])
    provisioned.change_policy("POST", provisioned.policy.retry_topic, "maxMessageSize", 1_000)
    acknowledge = RangeMover._acknowledge  # noqa: SLF001 - the moment to be killed at
    run, acknowledged = Suspended(), list[DeadLetterRow]()

    def acknowledge_until_killed(self: RangeMover, letter: DeadLetterRow) -> None:
        acknowledged.append(letter)
        if len(acknowledged) == 100:
            time.sleep(1)  # until the in-flight messages are stored
            raise Killed
        acknowledge(self, letter)

    def twice(task: RangeTask) -> RangeResult:
        with pytest.raises(Killed):
            mover.move(task)
        run.suspend()
        return mover.move(task, again=True)

    monkeypatch.setattr(RangeMover, "_acknowledge", acknowledge_until_killed)
    engine = Again(twice)
    account = runs.run(job_of(provisioned), engine, run)

    stored = provisioned.in_target()
    assert engine.generations == [1, 2]
    assert len(stored) == len(set(stored)) == 300
    assert (account.moved, account.refused, account.left) == (300, 1, 0)


def test_task_woken_behind_drained_successor_doubles_nothing(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, sleeper = 3_000, "asleep"
    provisioned = provision_policy()
    provisioned.bury_many(count)
    run, stopped, wake = Suspended(), threading.Event(), threading.Event()
    acknowledge = RangeMover._acknowledge  # noqa: SLF001 - the moment to fall asleep at
    prove, acknowledged = Sender.prove, list[DeadLetterRow]()

    def acknowledge_until_asleep(self: RangeMover, letter: DeadLetterRow) -> None:
        if threading.current_thread().name == sleeper:
            acknowledged.append(letter)
            if len(acknowledged) == 100:
                stopped.set()
                assert wake.wait(120)
        acknowledge(self, letter)

    def prove_and_suspend(self: Sender, letter: DeadLetterRow) -> None:
        prove(self, letter)
        if stopped.is_set() and not wake.is_set():
            run.suspend()

    def move_until_fenced(task: RangeTask) -> None:
        with pytest.raises(FencedError):
            mover.move(task)

    def twice(task: RangeTask) -> RangeResult:
        thread.append(threading.Thread(target=move_until_fenced, args=(task,), name=sleeper))
        thread[0].start()
        assert stopped.wait(180)
        return mover.move(task, again=True)

    def have_it_wake() -> None:
        time.sleep(4)
        wake.set()
        thread[0].join(100)

    thread = list[threading.Thread]()
    # It falls asleep in the middle: stored messages are acknowledged whenever the lease is read.
    monkeypatch.setattr(sending, "LEASE_CHECK_SECONDS", 0.02)
    monkeypatch.setattr(sending, "CONFIRM_SECONDS", 0.0)
    monkeypatch.setattr(RangeMover, "_acknowledge", acknowledge_until_asleep)
    monkeypatch.setattr(Sender, "prove", prove_and_suspend)
    engine = Again(twice, have_it_wake)
    account = runs.run(job_of(provisioned), engine, run)

    stored = provisioned.in_target()
    assert engine.generations == [1, 2]
    assert len(stored) == len(set(stored)) == count
    assert (account.moved + account.skipped, account.left) == (count, 0)


def test_earlier_attempt_of_killed_task_may_have_stored_more(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stores all but one, which the second sends alone; all is trimmed then."""
    provisioned = provision_policy()
    provisioned.bury_many(200)
    provisioned.bury(1, content=secrets.token_bytes(5_000))
    provisioned.bury_many(200, 200)
    target = provisioned.policy.retry_topic
    provisioned.change_policy("POST", target, "maxMessageSize", 1_000)
    acknowledge = RangeMover._acknowledge  # noqa: SLF001 - the moment to be killed at
    find, looks, armed = lookup.find_in_target, list[StoredMessages](), [True]
    give_up = Window.give_up

    def give_up_once_stored(self: Window) -> None:
        if armed and not looks:
            wait_until(lambda: len(provisioned.in_target()) == 400)
        give_up(self)

    def acknowledge_until_killed(self: RangeMover, letter: DeadLetterRow) -> None:
        if armed and letter.size == 5_000:
            armed.clear()
            raise Killed
        acknowledge(self, letter)

    def allow_and_find(
        result: StoredMessages,
        topic: ReadableTopic,
        tails: Mapping[TargetPartition, Tail],
        within: Range,
        key: LedgerKey,
    ) -> None:
        looks.append(result)
        if armed:
            provisioned.change_policy("DELETE", target, "maxMessageSize")
            find(result, topic, tails, within, key)
        else:
            result.trimmed.update(tails)

    def twice(task: RangeTask) -> RangeResult:
        with pytest.raises(Killed):
            mover.move(task)
        return mover.move(task, again=True)

    # It sends all messages before it processes the first receipt or refusal.
    monkeypatch.setattr(sending, "LEASE_CHECK_SECONDS", 60.0)
    monkeypatch.setattr(Window, "give_up", give_up_once_stored)
    monkeypatch.setattr(RangeMover, "_acknowledge", acknowledge_until_killed)
    monkeypatch.setattr(lookup, "find_in_target", allow_and_find)
    account = runs.run(job_of(provisioned), Again(twice), Suspended())

    stored = provisioned.in_target()
    assert len(looks) == 2
    assert len(stored) == len(set(stored)) == 401
    assert account.left == 0
    assert {refusal.cause for refusal in account.refusals} == {"Unproven"}

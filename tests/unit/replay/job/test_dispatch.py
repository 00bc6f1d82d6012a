"""Ranges go to an engine side by side, or in their order; together they keep to the rate."""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ALL_COMPLETED
from dataclasses import replace
from typing import cast

import pulsar
import pytest

from redrive.admin.errors import AdminForbiddenError, BrokerUnreachableError
from redrive.errors import RedriveError
from redrive.kube.client import ForbiddenError, UnavailableError
from redrive.policy.model import Policy, SubscriptionType
from redrive.policy.naming import TopicName
from redrive.reading import bitmap, broker, ranges
from redrive.reading.positions import NOWHERE, EntryId, Tail, TargetPartition
from redrive.reading.ranges import (
    RANGE_ENTRIES,
    Acknowledged,
    Partition,
    Range,
)
from redrive.replay import lookup
from redrive.replay.account import Account
from redrive.replay.job import dispatch, plan
from redrive.replay.job.dispatch import Dispatch
from redrive.replay.job.plan import (
    SUSPENDED,
    DesiredState,
    Engine,
    Pause,
    PlannedRange,
    ReplayGoneError,
    Reporter,
    Scan,
    Scanned,
)
from redrive.replay.ledger import Ledger
from redrive.replay.outcome import RangeResult
from redrive.replay.records import PERMIT, Header, Permit, RangePlan, RangeRecord, Records
from redrive.replay.spec import ReplayJob
from redrive.replay.task import RangeTask, Route
from tests.support.reasons import raises
from tests.support.waiting import wait_until

POLICY = Policy(TopicName("shop", "prod", "orders"), "fulfilment")
ORDERED = replace(POLICY, subscription_type=SubscriptionType.KEY_SHARED, ordered=True)
RANGES = 4
WAIT_SECONDS = 60.0
FENCED_SECONDS = 100.0


class InMemory:
    """A ledger that no other run takes over."""

    def __init__(self, partitions: int) -> None:
        self.records = Records()
        self.number, self.owned_since = 0, time.monotonic() - FENCED_SECONDS
        self.permits: list[Permit] = []
        held = {index: partition(index).held for index in range(partitions)}
        self.records.headers["uid"] = Header("shop/a", 0, held=held)
        self.records.plans["uid"] = {
            Range(index, index, number * RANGE_ENTRIES, (number + 1) * RANGE_ENTRIES - 1): (
                RangePlan(1, 0b1, {}, ())
            )
            for index in range(partitions)
            for number in range(RANGES)
        }

    def write(self, key: str, value: object) -> pulsar.MessageId:
        content = b"" if value is None else json.dumps(value).encode()
        if key == PERMIT:
            self.permits.append(Permit.from_json(content))
        self.records.apply(key, content)
        return pulsar.MessageId(-1, 0, 0, -1)

    def write_all(self, records: Iterable[tuple[str, object]]) -> list[pulsar.MessageId]:
        return [self.write(key, value) for key, value in records]


class InStep:
    """An engine whose tasks end once so many of them are under way, *beside* each other."""

    def __init__(self, slots: int, beside: int) -> None:
        self.slots, self.capacity, self.scanned = slots, slots, Scanned()
        self.moved: list[Range] = []
        self.acknowledged: list[int] = []
        self.most: Counter[int] = Counter()
        self._beside = threading.Barrier(beside)
        self._under_way: Counter[int] = Counter()
        self._lock = threading.Lock()

    def scan(self, scans: Sequence[Scan]) -> Iterable[PlannedRange]:
        raise AssertionError(scans)

    def cancel(self, error: RedriveError) -> None:
        raise AssertionError(error)

    def move_all(self, tasks: Sequence[RangeTask]) -> Sequence[RangeResult]:
        raise AssertionError(tasks)

    def move(self, task: RangeTask) -> RangeResult:
        index = task.range.partition
        with self._lock:
            self._under_way[index] += 1
            self.most[index] = max(self.most[index], self._under_way[index])
            self.moved.append(task.range)
            self.acknowledged.append(task.acknowledged)
        self._beside.wait(WAIT_SECONDS)
        with self._lock:
            self._under_way[index] -= 1
        return RangeResult({"uid": task.entries}, {}, (), 0, {}, frozenset())


class Silent:
    """Lets the run continue, or ends it after so many reports."""

    def __init__(self, reports: float = math.inf, last: DesiredState = DesiredState.END) -> None:
        self._reports, self._last = reports, last

    def rate_limit(self, job: ReplayJob) -> float | None:
        return job.rate_limit

    def take_over(self, _: EntryId) -> None:
        pass

    def report(self, account: Account, *, pause: Pause | None = None) -> DesiredState:
        assert account.matched
        self._reports -= 1
        if self._reports < 0:
            return self._last
        return DesiredState.SUSPEND if pause == SUSPENDED else DesiredState.RUN

    def report_scan(self, scanned: Scanned) -> None:
        raise AssertionError(scanned)


@pytest.fixture(autouse=True)
def no_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers to the calls that a dispatch makes to the broker."""
    monkeypatch.setattr(lookup, "target_ends", lambda *_: {})
    monkeypatch.setattr(broker, "is_subscribed", lambda *_: True)
    monkeypatch.setattr(broker, "read_partition", lambda _, __, index, ___: partition(index))


def partition(index: int) -> Partition:
    entries = RANGES * RANGE_ENTRIES
    return Partition(index, ((index, entries),), Acknowledged(NOWHERE), held=frozenset({index}))


def run(
    policy: Policy,
    engine: InStep,
    partitions: int,
    rate: float | None = None,
    reporter: Silent | None = None,
) -> InMemory:
    """Have *engine* move all ranges of *partitions*."""
    ledger = InMemory(partitions)
    resting = [partition(index) for index in range(partitions)]
    dispatched(policy, engine, ledger, resting, reporter or Silent(), rate)
    assert Account.of("uid", ledger.records).moved == partitions * RANGES
    return ledger


def dispatched(  # noqa: PLR0913, PLR0917  one each
    policy: Policy,
    engine: Engine,
    ledger: InMemory,
    resting: Sequence[Partition],
    reporter: Reporter,
    rate: float | None = None,
) -> None:
    """Have *engine* move all ranges that *ledger* has a plan for."""
    job = ReplayJob("shop", "a", "uid", policy, "pulsar://p", "http://p", None, rate_limit=rate)
    route = Route(
        "pulsar://p", "http://p", policy.dead_letter_topic, "redrive", policy.retry_topic, 0,
        exactly_once=True, batch=False, ledger=policy.ledger_topic, replay="shop/a", uid="uid",
        owner="uid/1",
    )  # fmt: skip
    Dispatch(job, route, engine, cast("Ledger", ledger), resting, reporter).run()


def test_ordered_policy_moves_one_range_per_partition() -> None:
    """The partitions are moved beside each other, each in the order of its positions."""
    engine = InStep(slots=5, beside=3)
    run(ORDERED, engine, partitions=3)
    assert set(engine.most.values()) == {1}
    for index in range(3):
        own = [piece for piece in engine.moved if piece.partition == index]
        assert own == sorted(own)
        assert len(own) == RANGES


def test_unordered_policy_moves_ranges_concurrently() -> None:
    engine = InStep(slots=RANGES, beside=RANGES)
    run(POLICY, engine, partitions=1)
    assert engine.most[0] == RANGES


def test_rate_is_shared_by_running_tasks() -> None:
    ledger = run(POLICY, InStep(slots=RANGES, beside=RANGES), partitions=1, rate=400.0)
    assert ledger.permits[0] == Permit(100.0)


class Growing(InStep):
    """An engine with one task at first, that has as many as wait once the first one runs."""

    def __init__(self, most: int) -> None:
        super().__init__(slots=1, beside=most)
        self.capacity = 2

    def move(self, task: RangeTask) -> RangeResult:
        with self._lock:
            self.slots = RANGES
            self.capacity = RANGES + 1
        return super().move(task)


@pytest.mark.parametrize("rate", [None, 400.0])
def test_later_executors_get_ranges(monkeypatch: pytest.MonkeyPatch, rate: float | None) -> None:
    monkeypatch.setattr(dispatch, "REPORT_SECONDS", 0.01)
    engine = Growing(most=RANGES)
    ledger = run(POLICY, engine, partitions=1, rate=rate)
    assert engine.most[0] == RANGES
    if rate is not None:
        assert Permit(rate / RANGES) in ledger.permits


class LosesFirstTask(InStep):
    """An engine that loses its first task."""

    def __init__(self) -> None:
        super().__init__(slots=1, beside=1)
        self.fenced: list[tuple[Range, float]] = []

    def move(self, task: RangeTask) -> RangeResult:
        self.fenced.append((task.range, task.fenced_seconds))
        if len(self.fenced) == 1:
            raise RuntimeError("the executor is gone")
        return super().move(task)


def test_quiet_time_counts_from_takeover_unless_leased_again() -> None:
    engine = LosesFirstTask()
    run(POLICY, engine, partitions=1)
    (lost, first), (again, second), *others = engine.fenced
    assert lost == again
    assert (second, len(others)) == (0.0, RANGES - 1)
    assert all(seconds >= FENCED_SECONDS for seconds in [first, *(age for _, age in others)])


def test_successors_of_tasks_that_end_together_share_the_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "FIRST_COMPLETED", ALL_COMPLETED)
    ledger = run(POLICY, InStep(slots=RANGES, beside=RANGES), partitions=2, rate=400.0)
    assert ledger.permits == [Permit(100.0)] * 2


def test_waiting_task_has_no_share_of_the_rate() -> None:
    engine = InStep(slots=1, beside=1)
    engine.capacity = 3
    ledger = run(POLICY, engine, partitions=1, rate=400.0)
    assert set(ledger.permits) <= {Permit(400.0)}
    assert engine.most[0] == 1


class Throttled(Silent):
    """A reporter of a Replay whose rate limit changes while its first task runs."""

    def __init__(self, limit: float | None) -> None:
        super().__init__()
        self.moving = threading.Event()
        self._limit = limit

    def rate_limit(self, job: ReplayJob) -> float | None:
        return self._limit if self.moving.is_set() else job.rate_limit


class UntilPermitted(InStep):
    """An engine whose tasks end once the ledger has a permit."""

    def __init__(self, ledger: InMemory, moving: threading.Event, permit: Permit) -> None:
        super().__init__(slots=1, beside=1)
        self._ledger, self._moving, self._permit = ledger, moving, permit

    def move(self, task: RangeTask) -> RangeResult:
        wait_until(lambda: self._ledger.permits)  # the one of the launch
        self._moving.set()
        wait_until(lambda: self._permit in self._ledger.permits)
        return super().move(task)


@pytest.mark.parametrize("limit", [100.0, None])
def test_changed_rate_limit_reaches_running_tasks(
    monkeypatch: pytest.MonkeyPatch, limit: float | None
) -> None:
    monkeypatch.setattr(dispatch, "REPORT_SECONDS", 0.01)
    ledger, author = InMemory(1), Throttled(limit)
    engine = UntilPermitted(ledger, author.moving, Permit(limit))
    dispatched(POLICY, engine, ledger, [partition(0)], author, rate=400.0)
    assert ledger.permits[0] == Permit(400.0)
    assert ledger.permits[-1] == Permit(limit)


class Together(InStep):
    """An engine that moves groups; *ends* are errors, or numbers of moved ranges, of the first."""

    def __init__(self, *ends: Exception | int) -> None:
        super().__init__(slots=1, beside=1)
        self.groups: list[list[int]] = []
        self._ends = iter(ends)

    def move_all(self, tasks: Sequence[RangeTask]) -> Sequence[RangeResult]:
        self.groups.append([task.range.first // RANGE_ENTRIES for task in tasks])
        end = next(self._ends, len(tasks))
        if isinstance(end, Exception):
            raise end
        moved = [self.move(task) for task in tasks[:end]]
        return [*moved, *(replace(EMPTY, drained=True) for _ in tasks[end:])]


EMPTY = RangeResult({}, {}, (), 0, {}, frozenset())


@pytest.fixture
def close(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Have all ranges lie close together, and make one group for each task."""
    monkeypatch.setattr(ranges, "LOOK_BACK", RANGE_ENTRIES)
    monkeypatch.setattr(plan, "GROUPS", 1)
    return monkeypatch


def test_small_ranges_of_a_partition_are_moved_together(close: pytest.MonkeyPatch) -> None:
    engine = Together()
    run(POLICY, engine, partitions=2)
    assert engine.groups == [[0, 1, 2, 3]] * 2
    close.setattr(plan, "GROUP_RANGES", 2)
    engine = Together()
    run(POLICY, engine, partitions=1)
    assert engine.groups == [[0, 1], [2, 3]]


def test_ranges_of_a_lost_group_are_leased_one_by_one(close: pytest.MonkeyPatch) -> None:
    place = TargetPartition(POLICY.retry_topic, broker.UNPARTITIONED)
    close.setattr(lookup, "target_ends", lambda *_: {place: NOWHERE})
    engine = Together(RuntimeError("lost"))
    run(POLICY, engine, partitions=1)
    assert engine.groups == [[0, 1, 2, 3]]
    assert [piece.first // RANGE_ENTRIES for piece in engine.moved] == [0, 1, 2, 3]


@pytest.mark.usefixtures("close")
def test_group_that_ends_early_keeps_its_order() -> None:
    engine = Together(1)
    run(ORDERED, engine, partitions=1)
    assert engine.groups == [[0, 1, 2, 3], [1, 2, 3]]
    assert engine.moved == sorted(engine.moved)


def test_ranges_far_apart_are_moved_by_a_task_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "GROUPS", 1)
    engine = Together()
    run(POLICY, engine, partitions=1)
    assert engine.groups == []
    assert len(engine.moved) == RANGES


class LostOnce(InStep):
    """An engine that loses the first task of each range."""

    def __init__(self) -> None:
        super().__init__(slots=1, beside=1)
        self.generations: dict[Range, list[int]] = {}

    def move(self, task: RangeTask) -> RangeResult:
        leases = self.generations.setdefault(task.range, [])
        leases.append(task.generation)
        if len(leases) == 1:
            raise RuntimeError("lost")
        return super().move(task)


def test_each_lease_has_the_next_generation_of_its_range() -> None:
    engine = LostOnce()
    ledger = run(POLICY, engine, partitions=1)
    assert list(engine.generations.values()) == [[1, 2]] * RANGES
    assert {ledger.records.range(piece).generation for piece in engine.generations} == {2}


def test_missing_partitions_fail_the_run() -> None:
    """A broker only adds partitions, so the dead-letter topic was created again."""
    ledger, engine = InMemory(3), InStep(slots=1, beside=1)
    with raises("DeadLetterTopicLost"):
        dispatched(POLICY, engine, ledger, [partition(0)], Silent())
    assert engine.moved == []
    assert Account.of("uid", ledger.records).left == 3 * RANGES


class FindsNothing(InStep):
    """An engine whose tasks find all entries acknowledged by others."""

    def move(self, task: RangeTask) -> RangeResult:
        return replace(super().move(task), moved={}, gone=task.entries)


@pytest.mark.parametrize("was_leased", [False, True])
def test_topic_created_again_between_runs_skips_nothing(
    monkeypatch: pytest.MonkeyPatch,
    *,
    was_leased: bool,
) -> None:
    created_again = replace(partition(0), ledgers=(), held=frozenset({50}))
    monkeypatch.setattr(broker, "read_partition", lambda *_: created_again)
    ledger = InMemory(1)
    if was_leased:  # by a driver that was killed
        tails = {TargetPartition(POLICY.retry_topic, -1): Tail(NOWHERE, 1)}
        for source_range in ledger.records.plans["uid"]:
            ledger.records.ranges[source_range] = RangeRecord(1, leased=True, tails=tails)
    with raises("DeadLetterTopicLost"):
        dispatched(POLICY, FindsNothing(1, beside=1), ledger, [created_again], Silent())
    account = Account.of("uid", ledger.records)
    assert (account.skipped, account.left) == (0, RANGES)


def test_task_knows_entries_acknowledged_before_its_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A backlog that was cleared while the run was suspended must not be sent."""
    passed = Acknowledged(EntryId(0, RANGES * RANGE_ENTRIES - 1))
    cleared = replace(partition(0), acknowledged=passed)
    monkeypatch.setattr(broker, "read_partition", lambda *_: cleared)
    engine = InStep(slots=RANGES, beside=RANGES)
    run(POLICY, engine, partitions=1)
    assert engine.acknowledged == [2**RANGE_ENTRIES - 1] * RANGES


class InOneRange:
    """Tasks that end once their progress was reported, which the broker alone tells of."""

    slots = capacity = 1
    scanned = Scanned()

    def __init__(self) -> None:
        self.reported: list[int] = []
        self._looks = 0
        self._shown = threading.Event()

    def move_all(self, tasks: Sequence[RangeTask]) -> Sequence[RangeResult]:
        raise AssertionError(tasks)

    def scan(self, scans: Sequence[Scan]) -> Iterable[PlannedRange]:
        raise AssertionError(scans)

    def cancel(self, error: RedriveError) -> None:
        raise AssertionError(error)

    def look_at(self, *_: object) -> Partition:
        """Have one more entry acknowledged at each poll since the lease."""
        self._looks += 1
        return replace(partition(0), acknowledged=Acknowledged(EntryId(0, self._looks - 2)))

    def rate_limit(self, job: ReplayJob) -> float | None:
        return job.rate_limit

    def take_over(self, _: EntryId) -> None:
        pass

    def report(self, account: Account, *, pause: Pause | None = None) -> DesiredState:
        assert pause is None
        self.reported.append(account.moved)
        if account.moved == 3:
            self._shown.set()
        return DesiredState.RUN

    def report_scan(self, scanned: Scanned) -> None:
        raise AssertionError(scanned)

    def move(self, task: RangeTask) -> RangeResult:
        assert self._shown.wait(WAIT_SECONDS)
        return RangeResult({"uid": task.entries}, {}, (), 0, {}, frozenset())


def test_progress_shows_entries_acknowledged_by_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert dispatch.POLL_SECONDS < 5, "so often progress is shown, also where a look takes a second"
    monkeypatch.setattr(dispatch, "REPORT_SECONDS", 0.01)
    monkeypatch.setattr(dispatch, "POLL_SECONDS", 0.01)
    tasks = InOneRange()
    monkeypatch.setattr(broker, "read_partition", tasks.look_at)
    ledger = InMemory(1)
    first = min(ledger.records.plans["uid"])
    ledger.records.plans["uid"] = {first: RangePlan(3, 0b111, {}, ())}
    dispatched(POLICY, tasks, ledger, [partition(0)], tasks)
    assert sorted(set(tasks.reported)) == [0, 1, 2, 3]


class Away:
    """A broker that does not answer, so many times."""

    def __init__(self, times: float) -> None:
        self.times = times

    def marks(self, *_: object) -> dict[TargetPartition, EntryId]:
        self.times -= 1
        if self.times >= 0:
            raise BrokerUnreachableError("nothing answers", remedy="start it")
        return {}


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "REPORT_SECONDS", 0.0)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("times", [1, 3])
def test_range_is_leased_once_the_broker_is_back(
    monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    monkeypatch.setattr(lookup, "target_ends", Away(times).marks)
    run(POLICY, InStep(slots=2, beside=1), partitions=1)


@pytest.mark.usefixtures("at_once")
def test_range_is_leased_once_its_subscription_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0

    def look_at(_: object, __: object, index: int, ___: object) -> Partition:
        nonlocal looks
        looks += 1
        if looks < 3:
            raise RedriveError("there is none", remedy="wait", reason="SubscriptionMissing")
        return partition(index)

    monkeypatch.setattr(broker, "read_partition", look_at)
    run(POLICY, InStep(slots=2, beside=1), partitions=1)


@pytest.mark.usefixtures("at_once")
def test_unavailable_broker_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "target_ends", Away(math.inf).marks)
    monkeypatch.setattr(broker, "WAIT_SECONDS", 0.1)
    with pytest.raises(BrokerUnreachableError):
        run(POLICY, InStep(slots=2, beside=1), partitions=1)


class SuspendedOnce(Silent):
    """Has the run suspended at its second report, for longer than a broker is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._wishes = iter([DesiredState.RUN, DesiredState.SUSPEND])

    def report(self, account: Account, *, pause: Pause | None = None) -> DesiredState:
        super().report(account, pause=pause)
        desired = next(self._wishes, DesiredState.RUN)
        time.sleep(0.5 * (desired is DesiredState.SUSPEND))
        return desired


@pytest.mark.usefixtures("at_once")
def test_suspended_run_waits_for_broker_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookup, "target_ends", Away(2).marks)
    monkeypatch.setattr(broker, "WAIT_SECONDS", 0.4)
    run(POLICY, InStep(slots=2, beside=1), partitions=1, reporter=SuspendedOnce())


@pytest.mark.usefixtures("at_once")
def test_deleted_replay_ends_run_during_broker_outage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookup, "target_ends", Away(math.inf).marks)
    reporter = Silent(reports=3)
    with pytest.raises(ReplayGoneError):
        run(POLICY, InStep(slots=2, beside=1), partitions=1, reporter=reporter)


@pytest.mark.parametrize(
    ("desired", "reason"),
    [(DesiredState.CANCEL, "Canceled"), (DesiredState.EXPIRE, "DeadlineExceeded")],
)
def test_canceled_or_late_run_ends_with_messages_left(desired: DesiredState, reason: str) -> None:
    with raises(reason, match="dead letters are left"):
        run(POLICY, InStep(slots=2, beside=1), partitions=1, reporter=Silent(0, desired))


@pytest.mark.usefixtures("at_once")
class Scripted(Silent):
    """Answers reports in order, and records their accounts. Errors are raised."""

    def __init__(self, *answers: DesiredState | RedriveError) -> None:
        super().__init__()
        self._answers = iter(answers)
        self.accounts: list[Account] = []
        self.pauses: list[Pause | None] = []
        self.canceled = threading.Event()

    def report(self, account: Account, *, pause: Pause | None = None) -> DesiredState:
        self.accounts.append(account)
        self.pauses.append(pause)
        answer = next(self._answers)
        if isinstance(answer, RedriveError):
            raise answer
        if answer is DesiredState.CANCEL:
            self.canceled.set()
        return answer


UNAVAILABLE = UnavailableError("the API server does not answer", remedy="wait")
FORBIDDEN = ForbiddenError("the status may not be written", remedy="grant it")


@pytest.mark.usefixtures("at_once")
def test_run_leases_nothing_before_its_first_report() -> None:
    """An earlier run may have been suspended, or the Replay canceled since."""
    reporter = Scripted(UNAVAILABLE, UNAVAILABLE, *[DesiredState.CANCEL] * 2)
    engine = InStep(slots=1, beside=1)
    with raises("Canceled"):
        dispatched(POLICY, engine, InMemory(1), [partition(0)], reporter)
    assert engine.moved == []
    assert reporter.pauses == [None] * 4


def test_first_report_that_is_refused_fails_the_run() -> None:
    engine = InStep(slots=1, beside=1)
    with pytest.raises(ForbiddenError):
        dispatched(POLICY, engine, InMemory(1), [partition(0)], Scripted(FORBIDDEN, FORBIDDEN))
    assert engine.moved == []


class UntilCanceled(InStep):
    """An engine whose task ends once the run has read that it is canceled."""

    def __init__(self, canceled: threading.Event) -> None:
        super().__init__(slots=1, beside=1)
        self._canceled = canceled

    def move(self, task: RangeTask) -> RangeResult:
        assert self._canceled.wait(WAIT_SECONDS)
        return super().move(task)


@pytest.mark.parametrize("last", [DesiredState.CANCEL, DesiredState.SUSPEND, UNAVAILABLE])
def test_canceled_run_reports_messages_of_its_last_tasks(
    monkeypatch: pytest.MonkeyPatch, last: DesiredState | RedriveError
) -> None:
    monkeypatch.setattr(dispatch, "REPORT_SECONDS", 0.5)
    reporter = Scripted(DesiredState.RUN, DesiredState.CANCEL, last)
    with raises("Canceled"):
        engine = UntilCanceled(reporter.canceled)
        dispatched(POLICY, engine, InMemory(1), [partition(0)], reporter)
    assert [account.moved for account in reporter.accounts] == [0, 0, 1]


def test_forbidden_read_ends_the_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> dict[TargetPartition, EntryId]:
        raise AdminForbiddenError("it may not", remedy="let it")

    monkeypatch.setattr(lookup, "target_ends", refuse)
    with pytest.raises(AdminForbiddenError):
        run(POLICY, InStep(slots=2, beside=1), partitions=1)


FULL = RangeResult({}, {}, (), 0, {}, frozenset(), drained=True, full=POLICY.retry_topic)


class Full(InStep):
    """An engine whose target takes nothing, for so many tasks."""

    def __init__(self, tasks: float) -> None:
        super().__init__(slots=2, beside=1)
        self._tasks = tasks

    def move(self, task: RangeTask) -> RangeResult:
        with self._lock:
            self._tasks -= 1
            is_full = self._tasks >= 0
        return FULL if is_full else super().move(task)


class Noted(Silent):
    """Notes how the run stands."""

    def __init__(self, reports: float = math.inf) -> None:
        super().__init__(reports)
        self.pauses: list[Pause | None] = []

    def report(self, account: Account, *, pause: Pause | None = None) -> DesiredState:
        self.pauses.append(pause)
        return super().report(account, pause=pause)


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch, at_once: None) -> None:  # noqa: ARG001
    monkeypatch.setattr(broker, "WAIT_SECONDS", 0.1)
    monkeypatch.setattr(dispatch, "PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(dispatch, "POLL_SECONDS", 0.0)


@pytest.mark.usefixtures("_soon")
def test_full_target_is_probed_with_one_range() -> None:
    status, began = Noted(), time.monotonic()
    run(POLICY, Full(5), partitions=1, reporter=status)
    assert time.monotonic() - began > 4 * dispatch.PAUSE_SECONDS  # two, then one at a time
    assert set(status.pauses) == {None, Pause(POLICY.retry_topic)}
    # Without a break, whatever is tried meanwhile.
    assert sum(a != b for a, b in itertools.pairwise(status.pauses)) == 2


class OneContinues(InStep):
    """An engine with one task that moves all beside others at a full target.

    The others are accepted once it has ended; the broker shows its progress.
    """

    def __init__(self) -> None:
        super().__init__(slots=2, beside=1)
        self._first = threading.Event()
        self._through = threading.Event()
        self.looks = 0

    def move(self, task: RangeTask) -> RangeResult:
        with self._lock:
            is_first = not self._first.is_set()
            self._first.set()
        if is_first:
            assert self._through.wait(WAIT_SECONDS)
            return super().move(task)
        if not self._through.is_set():
            return FULL
        return super().move(task)

    def look_at(self, *_: object) -> Partition:
        """Have one more entry acknowledged at each poll, then let the first task end."""
        self.looks += 1
        if self.looks > 9:
            self._through.set()
        return replace(partition(0), acknowledged=Acknowledged(EntryId(0, self.looks - 3)))


@pytest.mark.usefixtures("_soon")
def test_run_waits_after_last_task_at_full_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "PAUSE_SECONDS", 0.5)
    tasks = OneContinues()
    monkeypatch.setattr(broker, "read_partition", tasks.look_at)
    run(POLICY, tasks, partitions=1)


@pytest.mark.usefixtures("at_once")
def test_deleted_replay_ends_run_at_full_target() -> None:
    with pytest.raises(ReplayGoneError):
        run(POLICY, Full(math.inf), partitions=1, reporter=Silent(reports=9))


class Unsubscribed(Silent):
    """A target without a subscription, until *reports* reports of it; records the reports."""

    def __init__(self, reports: int) -> None:
        super().__init__()
        self.pauses: list[Pause | None] = []
        self._until = reports

    def is_subscribed(self, *_: object) -> bool:
        return self.pauses.count(self.awaited) >= self._until

    @property
    def awaited(self) -> Pause:
        return Pause(unsubscribed_topic=POLICY.retry_topic)

    def report(self, account: Account, *, pause: Pause | None = None) -> DesiredState:
        self.pauses.append(pause)
        return super().report(account, pause=pause)


@pytest.mark.usefixtures("at_once")
def test_no_range_is_leased_while_target_has_no_subscription(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "PAUSE_SECONDS", 0.0)
    target = Unsubscribed(3)
    monkeypatch.setattr(broker, "is_subscribed", target.is_subscribed)
    engine = InStep(slots=2, beside=1)
    run(POLICY, engine, partitions=1, reporter=target)
    assert target.pauses.count(target.awaited) >= 3
    assert target.pauses[-1] is None
    assert len(engine.moved) == RANGES


class LosesSubscription(InStep):
    """An engine whose first task finds that the target has lost its subscription."""

    def move(self, task: RangeTask) -> RangeResult:
        moved = super().move(task)
        if len(self.moved) > 1:
            return moved
        return replace(moved, moved={}, drained=True, unsubscribed=True)


@pytest.mark.usefixtures("at_once")
def test_task_that_lost_its_target_is_leased_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "PAUSE_SECONDS", 0.0)
    target = Unsubscribed(0)
    engine = LosesSubscription(slots=1, beside=1)
    run(POLICY, engine, partitions=1, reporter=target)
    assert len(engine.moved) == RANGES + 1
    assert target.awaited in target.pauses


class KilledBy(InStep):
    """An engine whose task is lost if it reads one of some entries, or whenever *always*."""

    def __init__(self, *entries: int, always: bool = False) -> None:
        super().__init__(slots=2, beside=1)
        self._harmful = bitmap.of(entries, RANGE_ENTRIES)
        self._always = always
        self.losses = 0

    def move(self, task: RangeTask) -> RangeResult:
        if self._always or task.entries & self._harmful:
            self.losses += 1
            raise RuntimeError("the process was killed")
        return super().move(task)


def of_one_range(entries: int) -> InMemory:
    ledger = InMemory(1)
    (first, *_) = ledger.records.plans["uid"]
    ledger.records.plans["uid"] = {first: RangePlan.of_unread(entries)}
    return ledger


@pytest.mark.parametrize("harmful", [[7], [0, 99], [40, 41, 42], list(range(100))[::9]])
def test_entries_that_kill_are_refused_and_others_move(harmful: list[int]) -> None:
    ledger, engine = of_one_range(bitmap.span(0, 99)), KilledBy(*harmful)
    dispatched(POLICY, engine, ledger, [partition(0)], Silent())
    account = Account.of("uid", ledger.records)
    assert (account.moved, account.left) == (100 - len(harmful), 0)
    (plan,) = ledger.records.plans["uid"].values()
    assert sorted(entry.entry.entry for entry in plan.refused) == harmful
    assert {entry.cause for entry in plan.refused} == {"NotDelivered"}
    assert plan.done
    assert engine.losses <= dispatch.MAX_LOSSES + len(harmful) * (7 + dispatch.MAX_LOSSES)


def test_lost_tasks_without_entries_fail_the_run() -> None:
    ledger, engine = of_one_range(0b1), KilledBy(always=True)
    with pytest.raises(RuntimeError, match="killed"):
        dispatched(POLICY, engine, ledger, [partition(0)], Silent())
    assert engine.losses == dispatch.MAX_LOSSES + 1  # the last one had none
    assert not any(plan.refused for plan in ledger.records.plans["uid"].values())


class BlockedAtFirst(InStep):
    """An engine whose first task finds its producer names blocked."""

    def __init__(self) -> None:
        super().__init__(slots=1, beside=1)
        self.tasks = list[RangeTask]()

    def move(self, task: RangeTask) -> RangeResult:
        self.tasks.append(task)
        result = super().move(task)
        if len(self.tasks) == 1:
            return replace(result, moved={}, drained=True, blocked=True)
        return result


def test_range_with_blocked_names_is_leased_under_others() -> None:
    engine = BlockedAtFirst()
    ledger = run(POLICY, engine, partitions=1)
    first, second = engine.tasks[:2]
    assert (second.range, second.entries) == (first.range, first.entries)
    assert [(task.generation, task.renamed) for task in (first, second)] == [(1, 0), (2, 1)]
    assert ledger.records.range(first.range).renamed == 1
    assert all(task.renamed == 0 for task in engine.tasks[2:])

"""Dispatch of the ranges of a plan: each is leased, moved and recorded, several concurrently.

No message is sent without a lease, and a lease needs the ledger. A run that has lost the ledger
starts no more tasks, and its tasks stop at their next read of the ledger.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace

import pulsar

from redrive.errors import RedriveError
from redrive.kube.client import UnavailableError
from redrive.kube.resources import TOPIC_OWNER
from redrive.policy.naming import TopicName
from redrive.reading import bitmap, broker, ranges, reader
from redrive.reading.positions import EntryId, Tail, TargetPartition
from redrive.reading.ranges import SUBSCRIPTION_MISSING, Partition, Range
from redrive.reasons import Reason
from redrive.replay import lookup
from redrive.replay.account import Account
from redrive.replay.job import plan as plans
from redrive.replay.job.plan import (
    SUSPENDED,
    DesiredState,
    Engine,
    Pause,
    Reporter,
    check_continues,
)
from redrive.replay.ledger import FencedError, Ledger
from redrive.replay.outcome import RangeResult
from redrive.replay.records import (
    PERMIT,
    Permit,
    RangePlan,
    RangeRecord,
    plan_key,
    range_key,
    unite,
)
from redrive.replay.spec import ReplayJob
from redrive.replay.task import RangeTask, Route

REPORT_SECONDS = 2.0
POLL_SECONDS = 4.0
"""Time without a completed range after which acknowledgements of running tasks are read. The broker
takes a second to answer if hundreds of thousands of single messages are acknowledged."""
PAUSE_SECONDS = 15.0
"""Pause of leases while the target is over its backlog quota, or has no subscription that retains
messages."""
MAX_LOSSES = 3
"""Number of lost tasks after which a range is halved."""

logger = logging.getLogger(__name__)


class Dispatch:
    """Moves all ranges of the plan that the ledger has for a Replay.

    Args:
        job: the run.
        route: source and target.
        engine: engine of the tasks.
        ledger: ledger that this run owns.
        backlog: unacknowledged dead letters at the start of the run.
        reporter: reporter of the progress.
    """

    def __init__(  # noqa: PLR0913, PLR0917  one run
        self,
        job: ReplayJob,
        route: Route,
        engine: Engine,
        ledger: Ledger,
        backlog: Sequence[Partition],
        reporter: Reporter,
    ) -> None:
        self._job, self._route, self._engine = job, route, engine
        self._ledger, self._reporter = ledger, reporter
        self._backlog = {partition.index: partition for partition in backlog}
        self._held = ledger.records.headers[job.uid].held
        self._waiting = [piece for piece in sorted(self._plans) if self._to_move(piece)]
        self._leased: set[Range] = set()
        self._running: dict[Future[Sequence[RangeResult]], Sequence[RangeTask]] = {}
        # Ranges with lost tasks: consecutive losses, parts to lease one by one, ranges in halves,
        # and entries that were leased before a task without entries tests if tasks end at all.
        self._losses: Counter[Range] = Counter()
        self._parts: dict[Range, list[int]] = {}
        self._halved: set[Range] = set()
        self._suspects: dict[Range, int] = {}
        self._failed: list[Exception] = []
        # Entries of leased ranges that were acknowledged since the run began.
        self._acknowledged: dict[Range, int] = {}
        self._reported = self._poll_due = -math.inf
        # None before the first report: an earlier run may have been suspended.
        self._desired: DesiredState | None = None
        # Permit of all running tasks; None if they differ.
        self._permitted: Permit | None = Permit()
        self._unavailable_since: float | None = None
        # Topic over its backlog quota at the last attempt, and the moved messages at that time.
        self._full: TopicName | None = None
        self._moved_when_full = 0
        # Target without a subscription at the last check.
        self._unsubscribed: TopicName | None = None
        self._pause_until: float | None = None

    def run(self) -> None:
        """Move all ranges; wait while the run is suspended.

        Running tasks end before an error is raised.

        Raises:
            ReplayGoneError: the Replay was deleted.
            RunEndedError: the deadline has passed, or the Replay was canceled.
            Exception: the first error of a task.
        """
        self._check_partitions()
        with ThreadPoolExecutor(max(1, len(self._waiting))) as pool:
            self._advance(pool)
            while self._running or self._is_suspended or self._is_postponed:
                self._wait()
                self._advance(pool)
        desired = self._desired
        if self._failed or self._waiting:
            self._reported = -math.inf  # tasks have ended since
            self._report()
        if self._failed:
            raise self._failed[0]
        if self._waiting:
            check_continues(desired, self._account().left)

    @property
    def _is_on(self) -> bool:
        return self._desired is DesiredState.RUN and not self._failed

    @property
    def _pause(self) -> Pause | None:
        if self._is_suspended and self._desired is not None and not self._running:
            return SUSPENDED
        if self._unsubscribed is not None and self._is_on:
            return Pause(unsubscribed_topic=self._unsubscribed)
        return Pause(self._full) if self._full is not None and self._is_on else None

    @property
    def _is_suspended(self) -> bool:
        """Return True if ranges wait for the author, or for the first report."""
        is_held = self._desired in {None, DesiredState.SUSPEND}
        return is_held and bool(self._waiting) and not self._failed

    @property
    def _is_postponed(self) -> bool:
        awaited = self._unavailable_since is not None or self._pause_until is not None
        return awaited and bool(self._waiting) and self._is_on

    def _advance(self, pool: ThreadPoolExecutor) -> None:
        """Report progress, apply the desired state, and notify the tasks."""
        self._report()
        try:
            self._start(pool)
            self._permit()
        except RedriveError as error:
            self._failed.append(error)

    def _wait(self) -> None:
        """Wait until a task ends, or it is time to report."""
        if not self._running:
            time.sleep(REPORT_SECONDS)
        for future in wait(self._running, REPORT_SECONDS, FIRST_COMPLETED).done:
            self._collect(self._running.pop(future), future)

    def _report(self) -> None:
        """Report every `REPORT_SECONDS`, and read the desired state."""
        if time.monotonic() - self._reported < REPORT_SECONDS:
            return
        account = self._account()
        if account.moved > self._moved_when_full:
            self._full = None
        try:
            self._desired = self._reporter.report(account, pause=self._pause)
        except FencedError as error:
            self._failed.append(error)
        except RedriveError as error:
            if self._desired is None and not isinstance(error, UnavailableError):
                self._failed.append(error)
            logger.warning("status update failed, retrying", exc_info=True)
        self._reported = time.monotonic()

    def _account(self) -> Account:
        """Return the account, with the messages that running tasks have acknowledged.

        Tasks report when they end, which takes minutes at a low rate.
        """
        running = self._running_ranges if time.monotonic() >= self._poll_due else []
        try:
            for index in {source_range.partition for source_range in running}:
                partition = self._read_partition(index)
                for source_range in running:
                    if source_range.partition == index:
                        before = ranges.settled(source_range, self._backlog[index])
                        acknowledged = ranges.settled(source_range, partition) & ~before
                        self._acknowledged[source_range] = acknowledged
        except RedriveError:
            logger.warning("acknowledgement state could not be read", exc_info=True)
        if running:
            self._poll_due = time.monotonic() + POLL_SECONDS
        return Account.of(self._job.uid, self._ledger.records, self._acknowledged)

    def _start(self, pool: ThreadPoolExecutor) -> None:
        """Submit as many ranges as the engine takes, unless a task has failed.

        Tasks share a limited rate. So with a limit no more tasks are submitted than can run.
        """
        if not self._is_on:
            self._unavailable_since = None  # nothing is leased, so no broker is waited for
        if self._pause_until is not None and time.monotonic() < self._pause_until:
            return
        self._pause_until = None
        engine, limited = self._engine, self._reporter.rate_limit(self._job)
        room = engine.capacity if limited is None else engine.slots
        if self._full is not None:
            room = 1  # one task tests if the target still is full
        while self._is_on and len(self._running) < room:
            group = self._next(plans.GROUPS * room)
            if not group:
                return
            try:
                if not self._is_subscribed():
                    return
                self._check_owner()
                tasks = self._lease_all(group)
            except RedriveError as error:
                self._postpone(error)
                return
            self._unavailable_since = None
            for source_range in group:
                self._waiting.remove(source_range)
            self._running[pool.submit(self._move, tasks)] = tasks
            if tasks[0].permit != self._permitted:
                self._permitted = None

    def _is_subscribed(self) -> bool:
        """Return True if the target retains messages; otherwise pause leases.

        Raises:
            RedriveError: the broker does not answer.
        """
        if self._route.is_subscribed():
            self._unsubscribed = None
            return True
        self._pause_without_subscription()
        return False

    def _check_owner(self) -> None:
        """Check that the target has not become a topic of a policy since the launch.

        Raises:
            TargetNotAllowed: it has.
            RedriveError: the broker does not answer.
        """
        job, route = self._job, self._route
        if job.destination == job.policy.retry_topic:
            return
        properties = broker.read_properties(route.admin_url, route.target, route.target_partitions)
        if properties.get(TOPIC_OWNER):
            raise Reason.TARGET_NOT_ALLOWED.error(
                "the target has become a retry, dead-letter or other topic of a RetryPolicy, and "
                "no more messages are moved there",
                got=str(route.target),
                remedy="create another Replay with another target",
            )

    def _pause_without_subscription(self) -> None:
        target = self._route.target
        logger.warning("%s, or a partition, lacks its subscription; the run waits", target)
        self._unsubscribed, self._pause_until = target, time.monotonic() + PAUSE_SECONDS

    def _postpone(self, error: RedriveError) -> None:
        """Postpone a lease to the next report while the broker is unavailable.

        The operator creates a deleted subscription again.

        Raises:
            RedriveError: the error is not transient, or the broker was unavailable for
                `broker.WAIT_SECONDS`.
        """
        now = time.monotonic()
        if self._unavailable_since is None:
            self._unavailable_since = now
        is_transient = broker.may_pass(error) or error.reason == SUBSCRIPTION_MISSING
        if not is_transient or now - self._unavailable_since > broker.WAIT_SECONDS:
            raise error
        logger.warning("lease failed, retrying: %s", error)

    def _permit(self) -> None:
        """Write the permit of running tasks to the ledger if any of them has another one."""
        permit = self._share(len(self._running))
        if self._running and permit != self._permitted:
            self._ledger.write(PERMIT, permit.to_json())
            self._permitted = permit

    def _share(self, tasks: int) -> Permit:
        """Return the permit of each of so many tasks, which share the rate of the run."""
        limit = self._reporter.rate_limit(self._job)
        return Permit(limit and limit / max(1, tasks), drain=self._desired is not DesiredState.RUN)

    def _move(self, tasks: Sequence[RangeTask]) -> Sequence[RangeResult]:
        return self._engine.move_all(tasks) if len(tasks) > 1 else [self._engine.move(tasks[0])]

    def _next(self, groups: int) -> list[Range]:
        """Return the next ranges to move by one task; none if there are none.

        Small ranges that lie close together are grouped, into *groups* of all waiting ones or more.
        Ordered policies have one running task for each partition.
        """
        ordered = self._job.policy.ordered
        busy = {running.partition for running in self._running_ranges} if ordered else ()
        waiting = [waiting for waiting in self._waiting if waiting.partition not in busy]
        group: list[Range] = []
        room = plans.GROUP_ENTRIES
        for source_range in waiting[: max(1, min(plans.GROUP_RANGES, len(waiting) // groups))]:
            room -= self._to_move(source_range).bit_count()
            is_small = room >= 0 and not self._ledger.records.range(source_range).tails
            if group and not (is_small and self._is_close(group[-1], source_range)):
                break
            group.append(source_range)
            if not is_small:
                break
        return group

    def _is_close(self, before: Range, source_range: Range) -> bool:
        """Return True if reading of a range begins before the end of another in any case."""
        if before.partition != source_range.partition:
            return False
        first = source_range.entry_id(bitmap.lowest(self._to_move(source_range)))
        after = ranges.look_back(self._backlog[source_range.partition], first)
        return after <= before.entry_id(bitmap.highest(self._to_move(before)))

    @property
    def _running_ranges(self) -> list[Range]:
        return [task.range for tasks in self._running.values() for task in tasks]

    def _collect(self, tasks: Sequence[RangeTask], future: Future[Sequence[RangeResult]]) -> None:
        try:
            self._settle(list(zip(tasks, future.result(), strict=True)))
        except RedriveError as error:
            self._failed.append(error)
        except Exception as error:
            logger.warning("a task of range %s is lost", tasks[0].range, exc_info=True)
            self._waiting[:0] = [task.range for task in tasks]
            # The ranges of a group are leased one by one then.
            if len(tasks) == 1 and not self._lease_again(tasks[0]):
                self._failed.append(error)

    def _lease_again(self, task: RangeTask) -> bool:
        """Schedule the entries of a lost task again, and return True if that may help.

        After `MAX_LOSSES` losses, a task without entries tests if tasks end at all. If it ends, the
        entries are leased in halves, until the entry that ends each process is alone. That entry is
        refused.
        """
        source_range, entries = task.range, task.entries
        if source_range in self._suspects or not entries:
            return False
        parts = self._parts.setdefault(source_range, [])
        del parts[:1]
        self._losses[source_range] += 1
        if source_range in self._halved and entries.bit_count() > 1:
            self._halve(source_range, entries)
        elif self._losses[source_range] < MAX_LOSSES:
            parts[:0] = [entries]
        else:
            self._suspects[source_range] = entries
        return True

    def _halve(self, source_range: Range, entries: int) -> None:
        numbers = list(bitmap.members(entries))
        lower = bitmap.of(numbers[: len(numbers) // 2], source_range.size)
        self._parts[source_range][:0] = [lower, entries & ~lower]
        self._halved.add(source_range)
        self._losses[source_range] = 0

    def _record_end(self, source_range: Range) -> EntryId | None:
        """Record that a task was not lost. Return the entry that proved to be harmful, if any."""
        self._losses[source_range] = 0
        suspect = self._suspects.pop(source_range, bitmap.EMPTY)
        if not suspect:
            del self._parts.get(source_range, [])[:1]
        elif suspect.bit_count() > 1:
            self._halve(source_range, suspect)
        else:
            entry = source_range.entry_id(bitmap.lowest(suspect))
            logger.warning("no task with entry %s of range %s ends", entry, source_range)
            return entry
        return None

    def _lease_all(self, group: Sequence[Range]) -> Sequence[RangeTask]:
        """Record leases with the current ends of the target, and return their tasks.

        Raises:
            RedriveError: the ledger is lost, or the broker does not answer.
        """
        # Lost tasks and other clients may have acknowledged entries since the run began.
        partition = self._read_partition(group[0].partition)
        if not self._ledger.records.range(group[0]).tails:
            self._check_not_recreated(partition)
        ends = lookup.target_ends(self._job.admin_url, self._route.target)
        records = [self._ledger.records.range(source_range) for source_range in group]
        stored = self._ledger.write_all(
            (range_key(source_range), self._leased_record(source_range, ends).to_json())
            for source_range in group
        )
        return [
            self._task(source_range, partition, before, lease)
            for source_range, before, lease in zip(group, records, stored, strict=True)
        ]

    def _leased_record(
        self, source_range: Range, ends: Mapping[TargetPartition, EntryId]
    ) -> RangeRecord:
        """Return the record of the next lease of a range."""
        before = self._ledger.records.range(source_range)
        generation, entries = before.generation + 1, self._to_lease(source_range)
        since = {
            place: Tail(entry, generation, self._route.target_partitions, entries)
            for place, entry in ends.items()
        }
        joined = {place: tail.joined(since.get(place)) for place, tail in before.tails.items()}
        return replace(
            before,
            generation=generation,
            leased=True,
            tails={**since, **joined},
            replays=None if before.replays is None else before.replays | {self._job.uid},
        )

    def _task(
        self,
        source_range: Range,
        partition: Partition,
        before: RangeRecord,
        lease: pulsar.MessageId,
    ) -> RangeTask:
        """Return the task of a range; *before* is its record before the *lease*, a record's id."""
        leased = self._ledger.records.range(source_range)
        is_first = source_range not in self._leased
        self._leased.add(source_range)
        plan, entries = self._plans[source_range], self._to_lease(source_range)
        first = bitmap.lowest(entries or self._to_move(source_range))
        return RangeTask(
            route=self._route,
            range=source_range,
            entries=entries,
            chunks=plan.chunks,
            unread=plan.unread & entries,
            after=ranges.look_back(partition, source_range.entry_id(first)),
            max_replays=self._job.choice.max_replays,
            discards=self._job.choice.discards,
            settles_unproven=self._job.choice.settles_unproven,
            acknowledged=ranges.settled(source_range, partition),
            partly=leased.partly,
            tails=before.tails,
            unproven=leased.unproven,
            replays=before.replays,
            since=leased.tails,
            generation=leased.generation,
            renamed=leased.renamed,
            lease=EntryId(lease.ledger_id(), lease.entry_id()),
            number=self._ledger.number,
            permit=self._share(len(self._running) + 1),
            # The record of the owner of the ledger fenced off all other runs at once.
            fenced_seconds=time.monotonic() - self._ledger.owned_since if is_first else 0.0,
            # Some entries may be much larger than the average, and a task be lost for lack of
            # memory.
            ahead=reader.MIN_PREFETCH
            if source_range in self._parts
            else reader.prefetch(partition.entry_bytes),
        )

    def _read_partition(self, index: int) -> Partition:
        """Return the current state of a partition of the dead-letter topic."""
        route = self._route
        return lookup.read_source(route.admin_url, route.source, route.subscription, index)

    def _check_partitions(self) -> None:
        """Check that the dead-letter topic has all partitions with ranges to move.

        Raises:
            RedriveError: it was created again with others, because a broker only adds partitions.
        """
        if not {source_range.partition for source_range in self._waiting} <= self._backlog.keys():
            raise lookup.topic_lost(self._route.source, sorted(self._backlog))

    def _check_not_recreated(self, partition: Partition) -> None:
        """Check that the dead-letter topic was not deleted and created again since the plan.

        The broker deletes ledgers once all their entries are acknowledged, and the last one only
        when the topic is unloaded. A topic that was created again counts all entries of the plan as
        acknowledged.

        Raises:
            RedriveError: the topic has none of the ledgers that it had when the run was planned.
        """
        held = self._held.get(partition.index)
        if held and held.isdisjoint(partition.held):
            raise lookup.topic_lost(self._route.source, "none of its ledgers at the plan")

    def _settle(self, results: Sequence[tuple[RangeTask, RangeResult]]) -> None:
        """Record the results of the ranges of a task, or of parts of them.

        The plans are written first, because acknowledged entries that the task has read may not be
        readable again.
        """
        uid = self._job.uid
        settled = [(task.range, *self._settled(task, result)) for task, result in results]
        self._ledger.write_all((plan_key(uid, piece), plan.to_json()) for piece, plan, _ in settled)
        self._ledger.write_all((range_key(piece), record.to_json()) for piece, _, record in settled)
        self._poll_due = time.monotonic() + POLL_SECONDS
        # The first of the ranges that are left is leased first again.
        for task, result in reversed(results):
            if not self._plans[task.range].done and self._to_move(task.range):
                self._waiting.insert(0, task.range)
            if result.blocked:
                logger.warning(
                    "other clients used the producer names of range %s, which are replaced",
                    task.range,
                )
            if result.unsubscribed:
                self._pause_without_subscription()
            if result.full is not None:
                logger.warning("%s is over its backlog quota; the run waits", result.full)
                account = Account.of(self._job.uid, self._ledger.records, self._acknowledged)
                self._full, self._moved_when_full = result.full, account.moved
                self._pause_until = time.monotonic() + PAUSE_SECONDS

    def _settled(self, task: RangeTask, result: RangeResult) -> tuple[RangePlan, RangeRecord]:
        """Return the plan and the record of a range after the result of its task."""
        source_range, refused = task.range, result.refused
        if result.gone:
            try:
                self._check_not_recreated(self._read_partition(source_range.partition))
            except RedriveError as error:
                result = replace(result, gone=bitmap.EMPTY, drained=True)
                self._failed.append(error)
        before = self._ledger.records.range(source_range)
        if not result.drained and (harmful := self._record_end(source_range)) is not None:
            refused = (*refused, (harmful, "NotDelivered"))
        plan = self._plans[source_range].read(result.read)
        plan = plan.after(
            source_range, refused, result.gone, done=False, discarded=result.discarded
        )
        out = before.moved_by_any | unite(result.moved.values())
        is_left = bool(plan.selected & ~plan.skipped & ~out)
        in_parts = bool(self._parts.get(source_range))
        plan = replace(plan, done=not result.drained and not (in_parts and is_left))
        moved = {
            uid: before.moved.get(uid, 0) | result.moved.get(uid, 0)
            for uid in {*before.moved, *result.moved}
        }
        out = unite(result.moved.values())
        chunks = {at: chunk for at, chunk in plan.chunks.items() if out >> at & 1}
        return plan, RangeRecord(
            before.generation,
            leased=False,
            moved=moved,
            partly=result.partly,
            tails=result.tails,
            replays=result.replays,
            unproven=result.unproven,
            chunks={**before.chunks, **chunks},
            renamed=before.generation if result.blocked else before.renamed,
        )

    @property
    def _plans(self) -> Mapping[Range, RangePlan]:
        return self._ledger.records.plans.get(self._job.uid, {})

    def _to_lease(self, source_range: Range) -> int:
        """Return the entries of a range to lease next: all entries to move, or a part of them."""
        to_move = self._to_move(source_range)
        if source_range in self._suspects:
            return bitmap.EMPTY
        parts = self._parts.get(source_range, [])
        while parts and not to_move & parts[0]:
            del parts[0]
        return to_move & parts[0] if parts else to_move

    def _to_move(self, source_range: Range) -> int:
        plan, record = self._plans[source_range], self._ledger.records.range(source_range)
        return plan.selected & ~plan.skipped & ~record.moved_by_any

"""The ranges of a plan, each leased, moved and put on record; several at a time.

Nothing is sent without a lease, and a lease needs the ledger: a run that has lost it starts nothing
more, and what it has started stops at its next look at the ledger.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace

from redrive.errors import RedriveError
from redrive.kube.resources import TOPIC_OWNER
from redrive.policy.naming import TopicName
from redrive.reading import bitmap, broker, ranges, reader
from redrive.reading.positions import EntryId, Tail
from redrive.reading.ranges import Partition, Range, SubscriptionMissingError
from redrive.reasons import Reason
from redrive.replay import lookup
from redrive.replay.job.plan import SUSPENDED, Engine, Reporter, Rest, Wish
from redrive.replay.ledger import FencedError, Ledger
from redrive.replay.outcome import RangeResult
from redrive.replay.records import (
    PERMIT,
    Account,
    Permit,
    RangePlan,
    RangeRecord,
    plan_key,
    range_key,
    unite,
)
from redrive.replay.spec import ReplayJob
from redrive.replay.task import RangeTask, Route


class RunEndedError(RedriveError):
    """The Replay of a run is deleted."""

    reason = "RunEnded"


class DeadlineError(RedriveError):
    """A run has reached its deadline."""

    reason = "DeadlineExceeded"


class CanceledRunError(RedriveError):
    """The author of a run canceled it."""

    reason = "Canceled"


REPORT_SECONDS = 2.0
LOOK_SECONDS = 4.0
"""What tasks under way have acknowledged is looked at when no range has come to its end for so
long. Where that is single messages, by the hundred thousand, the broker takes a second to tell."""
FULL_SECONDS = 15.0
"""The time for which nothing is leased when the target was over its backlog quota, or had no
subscription that keeps messages."""
TRIES = 3
"""A range whose task is lost, as with its executor, is leased so often before it is halved."""

logger = logging.getLogger(__name__)


class Dispatch:
    """Moves all ranges of the plan that the ledger has for a Replay.

    Args:
        resting: what rested when the run began.
    """

    def __init__(  # noqa: PLR0913, PLR0917  one run
        self,
        job: ReplayJob,
        route: Route,
        engine: Engine,
        ledger: Ledger,
        resting: Sequence[Partition],
        reporter: Reporter,
    ) -> None:
        self._job, self._route, self._engine = job, route, engine
        self._ledger, self._reporter = ledger, reporter
        self._resting = {partition.index: partition for partition in resting}
        self._waiting = [of for of in sorted(self._plans) if self._to_move(of)]
        self._leased: set[Range] = set()
        self._under_way: dict[Future[RangeResult], RangeTask] = {}
        # Of ranges whose task was lost: how often in a row, what is leased one by one, which are
        # leased in halves, and what was leased when a task without entries was to tell more.
        self._losses: Counter[Range] = Counter()
        self._parts: dict[Range, list[int]] = {}
        self._halved: set[Range] = set()
        self._suspects: dict[Range, int] = {}
        self._failed: list[Exception] = []
        # Of ranges that are or were under way, what was acknowledged since the run began.
        self._acknowledged: dict[Range, int] = {}
        self._reported = self._look_due = -math.inf
        self._wish = Wish.RUN
        self._permitted = Permit()
        self._away_since: float | None = None
        # Which topic took nothing at the last try, when so many messages had been moved.
        self._full: TopicName | None = None
        self._moved_when_full = 0
        # Which target had no subscription at the last look.
        self._unsubscribed: TopicName | None = None
        self._pause_until: float | None = None

    def run(self) -> None:
        """Move range after range; wait while the run is suspended.

        Raises:
            RunEndedError: its Replay is deleted. What was under way has been settled.
            DeadlineError: its time is over; likewise.
            CanceledRunError: it is canceled; likewise.
            Exception: the first that a task raised; those under way have come to their end by then.
        """
        self._skip_gone()
        with ThreadPoolExecutor(max(1, len(self._waiting))) as pool:
            self._go_on(pool)
            while self._under_way or self._is_suspended or self._is_put_off:
                self._wait()
                self._go_on(pool)
        if self._failed:
            raise self._failed[0]
        if self._wish is Wish.EXPIRE and self._waiting:
            raise DeadlineError(
                "the run has reached its deadline, and dead letters are left",
                got=self._account().left,
                remedy="make another Replay with a longer one: it goes on from what was moved",
            )
        if self._wish is Wish.CANCEL and self._waiting:
            raise CanceledRunError(
                "the Replay was canceled, and dead letters are left",
                got=self._account().left,
                remedy="make another Replay for those that are left",
            )
        if self._wish is Wish.END and self._waiting:
            raise RunEndedError(
                "the Replay is deleted",
                remedy="nothing: another Replay goes on from what was moved",
            )

    @property
    def _is_on(self) -> bool:
        return self._wish is Wish.RUN and not self._failed

    @property
    def _rests(self) -> Rest | None:
        if self._is_suspended and not self._under_way:
            return SUSPENDED
        if self._unsubscribed is not None and self._is_on:
            return Rest(unsubscribed_topic=self._unsubscribed)
        return Rest(self._full) if self._full is not None and self._is_on else None

    @property
    def _is_suspended(self) -> bool:
        return self._wish is Wish.SUSPEND and bool(self._waiting) and not self._failed

    @property
    def _is_put_off(self) -> bool:
        awaited = self._away_since is not None or self._pause_until is not None
        return awaited and bool(self._waiting) and self._is_on

    def _go_on(self, pool: ThreadPoolExecutor) -> None:
        """Report, do what is wanted, and have the tasks know."""
        self._report()
        try:
            self._start(pool)
            self._permit()
        except RedriveError as error:
            self._failed.append(error)

    def _wait(self) -> None:
        """Wait until a task ends, or it is time to report."""
        if not self._under_way:
            time.sleep(REPORT_SECONDS)
        for future in wait(self._under_way, REPORT_SECONDS, FIRST_COMPLETED).done:
            self._collect(self._under_way.pop(future), future)

    def _report(self) -> None:
        """Report from time to time, and take note of what is wanted."""
        if time.monotonic() - self._reported < REPORT_SECONDS:
            return
        account = self._account()
        if account.moved > self._moved_when_full:
            self._full = None
        try:
            self._wish = self._reporter.report(account, rests=self._rests)
        except FencedError as error:
            self._failed.append(error)
        except RedriveError:
            logger.warning("the status can't be written; the run goes on", exc_info=True)
        self._reported = time.monotonic()

    def _account(self) -> Account:
        """Draw up the account, with what tasks under way have acknowledged by now.

        Nothing else tells of it before a range is through, which takes minutes at a low rate.
        """
        under_way = self._ranges_under_way if time.monotonic() >= self._look_due else []
        try:
            for index in {of.partition for of in under_way}:
                found = self._look_at(index)
                for of in under_way:
                    if of.partition == index:
                        before = ranges.settled(of, self._resting[index])
                        self._acknowledged[of] = ranges.settled(of, found) & ~before
        except RedriveError:
            logger.warning("the broker does not tell what is acknowledged", exc_info=True)
        if under_way:
            self._look_due = time.monotonic() + LOOK_SECONDS
        return Account.of(self._job.uid, self._ledger.records, self._acknowledged)

    def _start(self, pool: ThreadPoolExecutor) -> None:
        """Have as many ranges under way as the engine takes, unless something has failed.

        Of a rate that is limited each task has its share, so then none may wait with one.
        """
        if not self._is_on:
            self._away_since = None  # nothing is tried, so nothing is waited for
        if self._pause_until is not None and time.monotonic() < self._pause_until:
            return
        self._pause_until = None
        engine, limited = self._engine, self._reporter.rate_limit(self._job)
        room = engine.capacity if limited is None else engine.slots
        if self._full is not None:
            room = 1  # which tells whether it is full yet
        while self._is_on and len(self._under_way) < room:
            of = self._next()
            if of is None:
                return
            try:
                if not self._is_subscribed():
                    return
                self._check_owner()
                task = self._lease(of)
            except RedriveError as error:
                self._put_off(error)
                return
            self._away_since = None
            self._waiting.remove(of)
            self._under_way[pool.submit(self._engine.move, task)] = task

    def _is_subscribed(self) -> bool:
        """Return True if the target keeps messages; else nothing is leased for a while.

        Raises:
            RedriveError: the broker does not answer.
        """
        if self._route.is_subscribed():
            self._unsubscribed = None
            return True
        self._pause_without_subscription()
        return False

    def _check_owner(self) -> None:
        """Check that no policy has made the target one of its own topics since the launch.

        Raises:
            TargetNotAllowed: one has.
            RedriveError: the broker does not answer.
        """
        job, route = self._job, self._route
        if job.destination == job.policy.retry_topic:
            return
        properties = broker.read_properties(route.admin_url, route.target, route.target_partitions)
        if properties.get(TOPIC_OWNER):
            raise Reason.TARGET_NOT_ALLOWED.error(
                "the target is a retry, dead-letter or other topic that redrive keeps for a "
                "RetryPolicy by now, and nothing more is moved there",
                got=str(route.target),
                remedy="make another Replay, with a target that is no such topic",
            )

    def _pause_without_subscription(self) -> None:
        target = self._route.target
        logger.warning("%s has no durable subscription on each partition; the run waits", target)
        self._unsubscribed, self._pause_until = target, time.monotonic() + FULL_SECONDS

    def _put_off(self, error: RedriveError) -> None:
        """Lease at the next look, while the broker is away: what is wanted may change meanwhile.

        A subscription that was deleted is made again by the operator.
        """
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
        passes = broker.may_pass(error) or isinstance(error, SubscriptionMissingError)
        if not passes or now - self._away_since > broker.WAIT_SECONDS:
            raise error
        logger.warning("trying again: %s", error)

    def _permit(self) -> None:
        """Have tasks that are under way know by the ledger what they may do now."""
        permit = self._share(len(self._under_way))
        if self._under_way and permit != self._permitted:
            self._ledger.write(PERMIT, permit.to_json())
            self._permitted = permit

    def _share(self, tasks: int) -> Permit:
        """Return what each of so many tasks may do: they share the rate of the run."""
        limit = self._reporter.rate_limit(self._job)
        return Permit(limit and limit / max(1, tasks), drain=self._wish is not Wish.RUN)

    def _next(self) -> Range | None:
        """Choose a range; of an ordered policy, none of a partition that one is under way of."""
        busy = {of.partition for of in self._ranges_under_way} if self._job.policy.ordered else ()
        return next((of for of in self._waiting if of.partition not in busy), None)

    @property
    def _ranges_under_way(self) -> list[Range]:
        return [task.range for task in self._under_way.values()]

    def _collect(self, task: RangeTask, future: Future[RangeResult]) -> None:
        try:
            self._settle(task, future.result())
        except RedriveError as error:
            self._failed.append(error)
        except Exception as error:
            logger.warning("a task of range %s is lost", task.range, exc_info=True)
            self._waiting.insert(0, task.range)
            if not self._lease_again(task):
                self._failed.append(error)

    def _lease_again(self, task: RangeTask) -> bool:
        """Have what a lost task had leased again, and return True if that may help.

        After `TRIES` losses a task without any entry tells whether tasks come to their end at all.
        If one does, the entries are leased in halves, until the one that ends each process that
        reads it is alone; that is refused.
        """
        of, entries = task.range, task.entries
        if of in self._suspects or not entries:
            return False
        parts = self._parts.setdefault(of, [])
        del parts[:1]
        self._losses[of] += 1
        if of in self._halved and entries.bit_count() > 1:
            self._halve(of, entries)
        elif self._losses[of] < TRIES:
            parts[:0] = [entries]
        else:
            self._suspects[of] = entries
        return True

    def _halve(self, of: Range, entries: int) -> None:
        numbers = list(bitmap.members(entries))
        lower = bitmap.of(numbers[: len(numbers) // 2], of.size)
        self._parts[of][:0] = [lower, entries & ~lower]
        self._halved.add(of)
        self._losses[of] = 0

    def _see_end(self, of: Range) -> EntryId | None:
        """Take note that a task was not lost, and return the entry that is refused for that."""
        self._losses[of] = 0
        suspect = self._suspects.pop(of, bitmap.EMPTY)
        if not suspect:
            del self._parts.get(of, [])[:1]
        elif suspect.bit_count() > 1:
            self._halve(of, suspect)
        else:
            entry = of.entry_id(bitmap.lowest(suspect))
            logger.warning("no task with entry %s of range %s comes to its end", entry, of)
            return entry
        return None

    def _lease(self, of: Range) -> RangeTask:
        """Put on record that *of* is going to be moved, and from where to look for it if it fails.

        Raises:
            RedriveError: the ledger is lost, or the broker does not answer.
        """
        before = self._ledger.records.range(of)
        # What was acknowledged since the run began counts, too: by a lost task, or by others.
        partition = self._look_at(of.partition)
        if not before.tails:
            self._check_kept(partition)
        generation, through = before.generation + 1, of.offset_through(partition.end)
        since = {
            place: Tail(entry, generation, self._route.target_partitions, through)
            for place, entry in lookup.target_ends(self._job.admin_url, self._route.target).items()
        }
        joined = {place: each.joined(since.get(place)) for place, each in before.tails.items()}
        leased = replace(
            before,
            generation=generation,
            leased=True,
            tails={**since, **joined},
            replays=None if before.replays is None else before.replays | {self._job.uid},
        )
        stored = self._ledger.write(range_key(of), leased.to_json())
        is_first = of not in self._leased
        self._leased.add(of)
        plan, entries = self._plans[of], self._to_lease(of)
        first = bitmap.lowest(entries or self._to_move(of))
        return RangeTask(
            route=self._route,
            range=of,
            entries=entries,
            chunks=plan.chunks,
            unread=plan.unread & entries,
            after=ranges.look_back(partition, of.entry_id(first)),
            max_replays=self._job.choice.max_replays,
            discards=self._job.choice.discards,
            settles_unproven=self._job.choice.settles_unproven,
            acknowledged=ranges.settled(of, partition),
            partly=before.partly,
            tails=before.tails,
            unproven=before.unproven,
            replays=leased.replays,
            since=leased.tails,
            generation=generation,
            renamed=leased.renamed,
            lease=EntryId(stored.ledger_id(), stored.entry_id()),
            number=self._ledger.number,
            permit=self._share(len(self._under_way) + 1),
            # The takeover of the ledger fenced off all other runs at once.
            fenced_seconds=time.monotonic() - self._ledger.owned_since if is_first else 0.0,
            # Of the average size, many may be much larger, and a task be lost for want of memory.
            ahead=reader.MIN_PREFETCH
            if of in self._parts
            else reader.prefetch(partition.entry_bytes),
        )

    def _look_at(self, index: int) -> Partition:
        """Look at a partition of the dead-letter topic as it is now."""
        route = self._route
        return lookup.read_source(route.admin_url, route.source, route.subscription, index)

    def _check_kept(self, partition: Partition) -> None:
        """Check that the dead-letter topic is the one that the run began with.

        Ledgers go once all in them is acknowledged, and the last one only if the topic is unloaded.

        Raises:
            DeadLetterTopicLostError: it holds none of its ledgers any more.
        """
        held = self._resting[partition.index].held
        if held and held.isdisjoint(partition.held):
            raise lookup.topic_lost(self._route.source, "none of the ledgers of then")

    def _skip_gone(self) -> None:
        """Put on record that nothing is left of partitions that the topic has no more."""
        for of in [each for each in self._waiting if each.partition not in self._resting]:
            plan = self._plans[of].after(of, (), self._to_move(of), done=True)
            self._ledger.write(plan_key(self._job.uid, of), plan.to_json())
            self._waiting.remove(of)

    def _settle(self, task: RangeTask, result: RangeResult) -> None:
        """Put on record what became of a range, or a part of it.

        Its plan first: what a task has read of it, the next one may find acknowledged and gone.
        """
        of, refused = task.range, result.refused
        if result.gone and not task.tails:
            try:
                self._check_kept(self._look_at(of.partition))
            except RedriveError as error:
                result = replace(result, gone=bitmap.EMPTY, drained=True)
                self._failed.append(error)
        before = self._ledger.records.range(of)
        if not result.drained and (harmful := self._see_end(of)) is not None:
            refused = (*refused, (harmful, "NotDelivered"))
        plan = self._plans[of].read(result.read)
        plan = plan.after(of, refused, result.gone, done=False, discarded=result.discarded)
        out = before.moved_by_any | unite(result.moved.values())
        is_left = bool(plan.selected & ~plan.skipped & ~out)
        in_parts = bool(self._parts.get(of))
        plan = replace(plan, done=not result.drained and not (in_parts and is_left))
        self._ledger.write(plan_key(self._job.uid, of), plan.to_json())
        moved = {
            uid: before.moved.get(uid, 0) | result.moved.get(uid, 0)
            for uid in {*before.moved, *result.moved}
        }
        out = unite(result.moved.values())
        chunks = {at: chunk for at, chunk in plan.chunks.items() if out >> at & 1}
        record = RangeRecord(
            before.generation,
            leased=False,
            moved=moved,
            partly=result.partly,
            tails=result.tails,
            replays=before.replays if result.tails else frozenset(),
            unproven=result.unproven,
            chunks={**before.chunks, **chunks},
            renamed=before.generation if result.blocked else before.renamed,
        )
        self._ledger.write(range_key(of), record.to_json())
        self._look_due = time.monotonic() + LOOK_SECONDS
        if not plan.done and self._to_move(of):
            self._waiting.insert(0, of)
        if result.blocked:
            logger.warning("others have used the producer names of range %s; they are replaced", of)
        if result.unsubscribed:
            self._pause_without_subscription()
        if result.full is not None:
            logger.warning("%s is over its backlog quota; the run waits", result.full)
            account = Account.of(self._job.uid, self._ledger.records, self._acknowledged)
            self._full, self._moved_when_full = result.full, account.moved
            self._pause_until = time.monotonic() + FULL_SECONDS

    @property
    def _plans(self) -> Mapping[Range, RangePlan]:
        return self._ledger.records.plans.get(self._job.uid, {})

    def _to_lease(self, of: Range) -> int:
        """Return what to lease of a range at a time: all that is to be moved, or a part."""
        to_move = self._to_move(of)
        if of in self._suspects:
            return bitmap.EMPTY
        parts = self._parts.get(of, [])
        while parts and not to_move & parts[0]:
            del parts[0]
        return to_move & parts[0] if parts else to_move

    def _to_move(self, of: Range) -> int:
        plan = self._plans[of]
        return plan.selected & ~plan.skipped & ~self._ledger.records.range(of).moved_by_any

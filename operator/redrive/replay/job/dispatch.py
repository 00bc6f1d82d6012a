"""The ranges of a plan, each leased, moved and put on record; several at a time.

Nothing is sent without a lease, and a lease needs the ledger: a run that has lost it starts nothing
more, and what it has started stops at its next look at the ledger.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace

from redrive.errors import RedriveError
from redrive.replay.job.engine import Engine, Reporter
from redrive.replay.ledger.account import Account
from redrive.replay.ledger.ledger import Ledger
from redrive.replay.ledger.records import RangePlan, RangeRecord, plan_key, range_key, unite
from redrive.replay.moving import tail
from redrive.replay.moving.mover import RangeTask, Route
from redrive.replay.moving.outcome import RangeResult
from redrive.replay.spec import ReplayJob
from redrive.replay.topic import ranges, reading
from redrive.replay.topic.partition import Partition
from redrive.replay.topic.ranges import Range

REPORT_SECONDS = 2.0
TRIES = 3
"""A range whose task is lost, as with its executor, is leased again so often."""

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
        self._under_way: dict[Future[RangeResult], Range] = {}
        self._losses: Counter[Range] = Counter()
        self._failed: list[Exception] = []
        self._reported = time.monotonic()

    def run(self) -> None:
        """Move range after range.

        Raises:
            Exception: the first that a task raised; those under way have come to their end by then.
        """
        with ThreadPoolExecutor(self._engine.slots) as pool:
            self._start(pool)
            while self._under_way:
                for future in wait(self._under_way, return_when=FIRST_COMPLETED).done:
                    self._collect(self._under_way.pop(future), future)
                self._start(pool)
        if self._failed:
            raise self._failed[0]

    def _start(self, pool: ThreadPoolExecutor) -> None:
        """Have as many ranges under way as there are slots, unless something has failed."""
        while not self._failed and len(self._under_way) < self._engine.slots:
            of = self._next()
            if of is None:
                return
            self._waiting.remove(of)
            try:
                task = self._lease(of)
            except RedriveError as error:
                self._failed.append(error)
                return
            self._under_way[pool.submit(self._engine.move, task)] = of

    def _next(self) -> Range | None:
        """Choose a range; of an ordered policy, none of a partition that one is under way of."""
        busy = {of.partition for of in self._under_way.values()} if self._job.policy.ordered else ()
        return next((of for of in self._waiting if of.partition not in busy), None)

    def _collect(self, of: Range, future: Future[RangeResult]) -> None:
        try:
            self._settle(of, future.result())
        except RedriveError as error:
            self._failed.append(error)
        except Exception as error:
            logger.warning("the task of range %s failed", of, exc_info=True)
            self._waiting.insert(0, of)
            self._losses[of] += 1
            if self._losses[of] >= TRIES:
                self._failed.append(error)

    def _lease(self, of: Range) -> RangeTask:
        """Put on record that *of* is going to be moved, and from where to look for it if it fails.

        Raises:
            RedriveError: the ledger is lost, or the broker does not answer.
        """
        before = self._ledger.records.range(of)
        since = tail.marks(self._job.admin_url, self._job.policy.retry_topic)
        leased = replace(
            before,
            generation=before.generation + 1,
            leased=True,
            tails={**since, **before.tails},
        )
        lease = self._ledger.write(range_key(of), leased.to_json())
        partition = self._resting[of.partition]
        return RangeTask(
            route=self._route,
            range=of,
            entries=self._to_move(of),
            chunks=self._plans[of].chunks,
            acknowledged=ranges.settled(of, partition),
            partly=before.partly,
            tails=before.tails,
            since=since,
            generation=leased.generation,
            lease=lease.serialize(),
            ahead=reading.prefetch(partition.entry_bytes),
        )

    def _settle(self, of: Range, result: RangeResult) -> None:
        """Put on record what became of a range."""
        before = self._ledger.records.range(of)
        moved = {
            uid: before.moved.get(uid, 0) | result.moved.get(uid, 0)
            for uid in {*before.moved, *result.moved}
        }
        out = unite(result.moved.values())
        chunks = {at: chunk for at, chunk in self._plans[of].chunks.items() if out >> at & 1}
        record = RangeRecord(
            before.generation,
            leased=False,
            moved=moved,
            partly=result.partly,
            tails=result.tails,
            chunks={**before.chunks, **chunks},
        )
        self._ledger.write(range_key(of), record.to_json())
        plan = self._plans[of].after(of, result.refused, result.gone)
        self._ledger.write(plan_key(self._job.uid, of), plan.to_json())
        if time.monotonic() - self._reported > REPORT_SECONDS:
            self._reporter.report(Account.of(self._job.uid, self._ledger.records))
            self._reported = time.monotonic()

    @property
    def _plans(self) -> Mapping[Range, RangePlan]:
        return self._ledger.records.plans.get(self._job.uid, {})

    def _to_move(self, of: Range) -> int:
        plan = self._plans[of]
        return plan.selected & ~plan.skipped & ~self._ledger.records.range(of).moved_by_any

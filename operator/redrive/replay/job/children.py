"""Child processes as the engine of a replay job that runs in one pod, without Spark.

Only children decode entries. If an entry ends its process, the driver starts another child and
halves the range of the task, until the harmful entry is alone and is refused.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import resource
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple, Self, TypeVar

from redrive.errors import RedriveError
from redrive.reading import bitmap
from redrive.reading.rows import DeadLetterRow
from redrive.replay import mover
from redrive.replay.job import plan
from redrive.replay.job.dispatch import MAX_LOSSES
from redrive.replay.job.plan import PlannedRange, Scan, Scanned
from redrive.replay.outcome import RangeResult
from redrive.replay.spec import PodSize
from redrive.replay.task import RangeTask, TaskFailure

DRIVER_MEMORY: Final = 256 * 2**20
"""Memory of the driver in a pod, in bytes."""
LEAST_MEMORY: Final = 512 * 2**20
"""Minimum memory of a child, in bytes, which limits the number of children. A move of messages with
`stored.MAX_READ_CONTENT` needs up to 490 MiB, because the client copies them twice."""
_END_SECONDS = 10.0

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")

logger = logging.getLogger(__name__)


class LostTaskError(Exception):
    """A child process ended before its task. The task may succeed in another process."""


class Children:
    """Engine that runs tasks in child processes, one task at a time in each.

    A child that ends is replaced. All children end with this process, even if it is killed.

    Args:
        size: size of the pod. Each child may allocate its share of the memory. A task that needs
            more is lost.
    """

    def __init__(self, size: PodSize) -> None:
        memory = size.memory - DRIVER_MEMORY
        self.slots = self.capacity = max(1, min(size.cores, memory // LEAST_MEMORY))
        self.scanned = Scanned()
        self._memory = max(LEAST_MEMORY, memory // self.slots)
        self._idle: queue.LifoQueue[_Child] = queue.LifoQueue()
        self._adding = threading.Lock()
        self._end: RedriveError | None = None

    def __enter__(self) -> Self:
        """Start the children."""
        for _ in range(self.slots):
            self._idle.put(_Child(self._memory))
        return self

    def __exit__(self, *_: object) -> None:
        """End the children."""
        for child in [self._idle.get() for _ in range(self.slots)]:
            child.end()

    def scan(self, scans: Sequence[Scan]) -> Iterator[PlannedRange]:
        """Plan ranges.

        Raises:
            RedriveError: as for `plan.scan`.
            LostTaskError: a task without entries was lost, too.
        """
        with ThreadPoolExecutor(self.slots) as pool:
            for planned in pool.map(self._scan_all, plan.grouped(scans, self.slots)):
                yield from planned

    def cancel(self, error: RedriveError) -> None:
        """Begin no more tasks, which fail with *error*. Running tasks end in seconds."""
        self._end = error

    def move(self, task: RangeTask) -> RangeResult:
        """Move one range.

        Raises:
            RedriveError: as for `mover.move`.
            LostTaskError: the task was lost.
        """
        return self.run(mover.move, task)

    def move_all(self, tasks: Sequence[RangeTask]) -> Sequence[RangeResult]:
        """Move several ranges in one child; errors are those of `move`."""
        return self.run(mover.move_all, tasks)

    def _scan_all(self, group: Sequence[Scan]) -> Sequence[PlannedRange]:
        together: Sequence[PlannedRange] = ()
        if len(group) > 1:
            with suppress(LostTaskError):
                together = self.run(plan.scan_all, group)
        planned = together or [self._planned(scan, MAX_LOSSES) for scan in group]
        with self._adding:
            self.scanned = sum(map(Scanned.of, planned), self.scanned)
        return planned

    def _planned(self, scan: Scan, tries: int) -> PlannedRange:
        """Plan a range; after *tries* lost tasks, plan its halves."""
        for _ in range(tries):
            try:
                return self.run(plan.scan, scan)
            except LostTaskError:
                logger.warning("a scan of range %s is lost", scan.piece.range, exc_info=True)
        entries = list(bitmap.members(scan.piece.pending & ~scan.moved))
        self.run(plan.scan, _part(scan, ()))  # fails if tasks are lost without entries, too
        if len(entries) == 1:
            return _undelivered(scan, entries[0])
        half = len(entries) // 2
        lower = self._planned(_part(scan, entries[:half]), 1)
        upper = _part(scan, entries[half:])
        if scan.choice.limit is not None:
            limit = scan.choice.limit - lower.plan.matched
            upper = replace(upper, choice=replace(scan.choice, limit=limit))
        return lower.joined(self._planned(upper, 1))

    def run(self, work: Callable[[_Task], _Result], task: _Task) -> _Result:
        """Run a function of a module with its argument in a child, and return its result.

        Raises:
            RedriveError: the function raised it, or the tasks were canceled.
            LostTaskError: the child ended, by another error too.
        """
        if self._end is not None:
            raise self._end
        child = self._idle.get()
        try:
            result: _Result | TaskFailure = child.run(work, task)
        except LostTaskError:
            child.end()
            child = _Child(self._memory)
            raise
        finally:
            self._idle.put(child)
        if isinstance(result, TaskFailure):
            raise result.error()
        return result


def _part(scan: Scan, entries: Iterable[int]) -> Scan:
    """Return *scan* with only these entries, as offsets."""
    resting = bitmap.of(entries, scan.piece.range.size)
    return replace(scan, piece=scan.piece._replace(pending=resting))


def _undelivered(scan: Scan, offset: int) -> PlannedRange:
    """Plan an entry that ends each process that reads it as an undelivered entry."""
    entry = scan.piece.range.entry_id(offset)
    logger.warning("no scan with entry %s of range %s ends", entry, scan.piece.range)
    row = DeadLetterRow.undelivered(scan.piece.range.partition, entry)
    return plan.plan_dead_letters(scan, [row], lambda _: "")


class _Lost(NamedTuple):
    """Last message of a child: the error that ends it."""

    message: str


class _Child:
    """A child process. Its standard error is that of this process.

    It is forked within milliseconds from a server that has only imported modules, because threads
    and connections of this process do not survive a fork.
    """

    def __init__(self, memory: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, memory), daemon=True)
        self._process.start()
        other.close()

    def run(self, work: Callable[[_Task], _Result], task: _Task) -> _Result | TaskFailure:
        """Run a task, and return its result, or the `RedriveError` that it raised.

        Raises:
            LostTaskError: the process ended.
        """
        try:
            self._connection.send((work, task))
            result: _Result | TaskFailure | _Lost = self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join(_END_SECONDS)
            message = f"a child process ended with exit code {self._process.exitcode}"
            raise LostTaskError(message) from error
        if isinstance(result, _Lost):
            raise LostTaskError(result.message)
        return result

    def end(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.kill()
        self._process.join()


def _serve(connection: Connection, memory: int) -> None:
    """Run tasks in a child, until the parent ends or a task raises an unexpected error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        work, task = connection.recv()
        connection.send(_result(connection, work, task))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None  # noqa: S101  a child has one
    parent.join()
    os._exit(1)


def _result(connection: Connection, work: Callable[[Any], Any], task: object) -> object:
    try:
        return work(task)
    except RedriveError as error:
        return TaskFailure.of(error)
    except BaseException as error:
        connection.send(_Lost(f"{type(error).__name__}: {error}"))
        raise

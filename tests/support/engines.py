"""Engines of replay jobs in this process or with children that die, and parts of programs."""

from __future__ import annotations

import functools
import itertools
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from redrive.errors import RedriveError
from redrive.policy.naming import TopicName
from redrive.reading import bitmap, broker
from redrive.reading.positions import EntryId
from redrive.replay import mover
from redrive.replay.job.children import Children
from redrive.replay.job.plan import PlannedRange, Scan, Scanned, grouped, scan_all
from redrive.replay.outcome import RangeResult
from redrive.replay.task import RangeTask


class Local:
    """Engine that runs tasks in this process."""

    def __init__(self, slots: int = 2) -> None:
        self.slots = self.capacity = slots
        self.scanned = Scanned()

    def scan(self, scans: Sequence[Scan]) -> Iterable[PlannedRange]:
        """Plan ranges one after the other."""
        for planned in itertools.chain.from_iterable(map(scan_all, grouped(scans, self.slots))):
            self.scanned += Scanned.of(planned)
            yield planned

    def cancel(self, error: RedriveError) -> None:
        """Do nothing: a scan ends soon."""

    def move(self, task: RangeTask) -> RangeResult:
        """Move one range."""
        return mover.move(task)

    def move_all(self, tasks: Sequence[RangeTask]) -> Sequence[RangeResult]:
        """Move several ranges."""
        return mover.move_all(tasks)


class HarmedChildren(Children):
    """Children that get SIGKILL before a task with the entry *harmful*; None: before each task."""

    harmful: EntryId | None = None

    def run(self, work: Callable[[Any], Any], task: Any) -> Any:  # noqa: ANN401  any task
        return super().run(functools.partial(_run_unless_harmed, self.harmful, work), task)


def _run_unless_harmed(
    harmful: EntryId | None,
    work: Callable[[Any], Any],
    task: Any,  # noqa: ANN401  any task
) -> Any:  # noqa: ANN401
    if harmful is None:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError
    is_scan = isinstance(task, Scan)
    range_ = task.piece.range if is_scan else task.range
    entries = task.piece.pending if is_scan else task.entries
    offset = harmful.entry - range_.first
    if harmful.ledger == range_.ledger and offset >= 0 and bitmap.contains(entries, offset):
        os.kill(os.getpid(), signal.SIGKILL)
    return work(task)


def run_out_of_memory(task: tuple[str, TopicName, str]) -> None:
    """Allocate memory without end while a client has a consumer."""
    service_url, topic, subscription = task
    with broker.connect(service_url) as client:
        consumer = broker.acknowledger(client, topic, subscription)
        kept: list[object] = [consumer]
        size = 2**24
        while True:
            try:
                kept.append(bytes(size))
            except MemoryError:
                if size == 1:
                    raise
                size //= 2


SILENT = """
from redrive.replay.job.plan import DesiredState

class Silent:
    def take_over(self, token):
        pass

    def rate_limit(self, job):
        return job.rate_limit

    def report(self, account, *, pause=None):
        return DesiredState.RUN

    def report_scan(self, scanned):
        pass
"""
"""A `Reporter` that ignores its reports: `Silent()`."""

PEAK = r"""
import re
from pathlib import Path

def peak():  # what `resource` tells includes that of the process which has started this one
    kibibytes = re.search("VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]
    return int(kibibytes) // 1_024
"""
"""The peak memory of this process: `peak()`, in MiB."""

"""Engine of replay jobs that runs tasks one after the other in this process."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from redrive.replay import mover
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

    def move(self, task: RangeTask) -> RangeResult:
        """Move one range."""
        return mover.move(task)

    def move_all(self, tasks: Sequence[RangeTask]) -> Sequence[RangeResult]:
        """Move several ranges."""
        return mover.move_all(tasks)

"""Children of an engine that one entry kills, as a defect of a decoder would."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

from redrive.reading import bitmap
from redrive.reading.positions import EntryId
from redrive.replay.job.children import Children
from redrive.replay.job.plan import Scan


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

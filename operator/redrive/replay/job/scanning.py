"""What a run shows while it is planned, which takes minutes where millions of messages rest."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from redrive.replay.job.engine import Engine, Reporter
from redrive.replay.job.plan import Scanned

REPORT_SECONDS = 1.0
LOOK_SECONDS = 0.1
"""The first counts are not kept waiting for a second."""

logger = logging.getLogger(__name__)


@contextmanager
def reported(engine: Engine, reporter: Reporter) -> Iterator[None]:
    """Report what scans find, at once and every `REPORT_SECONDS` in which that is more."""
    planned = threading.Event()

    def report() -> None:
        shown, due = Scanned(), -math.inf
        while not planned.wait(LOOK_SECONDS):
            scanned = engine.scanned
            if scanned == shown or time.monotonic() < due:
                continue
            due = time.monotonic() + REPORT_SECONDS
            try:
                reporter.report_scan(scanned)
                shown = scanned
            except Exception as error:  # noqa: BLE001 - it is shown only: a plan must not fail by it
                logger.warning("the status can't be written, and the scan goes on: %s", error)

    thread = threading.Thread(target=report)
    thread.start()
    try:
        yield
    finally:
        planned.set()
        thread.join()

"""What a run shows while it is planned, which takes minutes where millions of messages rest."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from redrive.replay.job.engine import Engine, Reporter
from redrive.replay.job.plan import Scanned

REPORT_SECONDS = 1.0

logger = logging.getLogger(__name__)


@contextmanager
def reported(engine: Engine, reporter: Reporter) -> Iterator[None]:
    """Report what scans find, every `REPORT_SECONDS` in which that is more, until they are done."""
    planned = threading.Event()

    def report() -> None:
        shown = Scanned()
        while not planned.wait(REPORT_SECONDS):
            scanned = engine.scanned
            if scanned == shown:
                continue
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

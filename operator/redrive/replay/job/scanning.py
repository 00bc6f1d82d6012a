"""What a run shows while it is planned, which takes minutes where millions of messages rest."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from redrive.replay.job import dispatch
from redrive.replay.job.engine import Engine, Reporter
from redrive.replay.ledger.account import Account

logger = logging.getLogger(__name__)


@contextmanager
def reported(engine: Engine, reporter: Reporter) -> Iterator[None]:
    """Report how many messages are scanned, every `REPORT_SECONDS` until the plan is there."""
    planned = threading.Event()

    def report() -> None:
        while not planned.wait(dispatch.REPORT_SECONDS):
            try:
                reporter.report(Account(scanned=engine.scanned, planned=False))
            except Exception as error:  # noqa: BLE001 - it is shown only: a plan must not fail by it
                logger.warning("the status can't be written, and the scan goes on: %s", error)

    thread = threading.Thread(target=report)
    thread.start()
    try:
        yield
    finally:
        planned.set()
        thread.join()

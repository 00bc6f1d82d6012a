"""What a run shows while it is planned, which takes minutes where millions of messages rest."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from redrive.errors import RedriveError
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
            except RedriveError:
                logger.warning("the status can't be written; the scan goes on", exc_info=True)

    with ThreadPoolExecutor(1) as thread:
        reporting = thread.submit(report)
        try:
            yield
        finally:
            planned.set()
        reporting.result()

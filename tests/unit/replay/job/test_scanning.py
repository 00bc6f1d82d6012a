"""While a run is planned it tells how far it is, whatever becomes of its words."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import pytest

from redrive.replay.job import dispatch, scanning
from redrive.replay.job.engine import Wish
from redrive.replay.job.plan import PlannedRange, Scan
from redrive.replay.ledger.account import Account
from redrive.replay.moving.outcome import RangeResult
from redrive.replay.moving.task import RangeTask

WAIT_SECONDS = 60.0


class Counted:
    """An engine that is asked how far it is."""

    slots = capacity = 2

    def __init__(self) -> None:
        self.scanned = 0

    def scan(self, scans: Sequence[Scan]) -> Iterable[PlannedRange]:
        raise AssertionError(scans)

    def move(self, task: RangeTask) -> RangeResult:
        raise AssertionError(task)


class Status:
    """Notes what is reported; the API server refuses the first report."""

    def __init__(self) -> None:
        self.written: list[Account] = []
        self.has_changed = threading.Condition()

    def report(self, account: Account, *, suspended: bool = False) -> Wish:
        assert not suspended
        with self.has_changed:
            self.written.append(account)
            self.has_changed.notify_all()
        if len(self.written) == 1:
            raise OSError("no connection to the API server")
        return Wish.RUN

    def waits_for(self, scanned: int) -> None:
        with self.has_changed:
            assert self.has_changed.wait_for(
                lambda: self.written and self.written[-1].scanned == scanned, WAIT_SECONDS
            )


def test_what_is_scanned_is_reported_while_the_run_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert dispatch.REPORT_SECONDS <= 5
    monkeypatch.setattr(dispatch, "REPORT_SECONDS", 0.01)
    engine, status = Counted(), Status()
    with scanning.reported(engine, status):
        for scanned in (0, 10_000, 30_000):
            engine.scanned = scanned
            status.waits_for(scanned)
    count = len(status.written)
    assert not any(account.planned for account in status.written)
    assert status.written[-1].to_status() == {"scanned": 30_000}
    engine.scanned = 40_000
    assert (len(status.written), status.written[-1].scanned) == (count, 30_000)


def test_an_error_of_the_scan_is_the_one_that_is_raised() -> None:
    with pytest.raises(ZeroDivisionError), scanning.reported(Counted(), Status()):
        raise ZeroDivisionError

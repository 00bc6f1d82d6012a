"""While a run is planned it tells how far it is, whatever becomes of its words."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest

from redrive.reading.positions import EntryId
from redrive.replay.job import run
from redrive.replay.job.plan import PlannedRange, Rest, Scan, Scanned, Wish
from redrive.replay.job.run import REPORT_SECONDS, reporting_progress
from redrive.replay.outcome import RangeResult
from redrive.replay.records import Account
from redrive.replay.task import RangeTask

WAIT_SECONDS = 60.0


class Counted:
    """An engine that is asked how far it is."""

    slots = capacity = 2

    def __init__(self) -> None:
        self.scanned = Scanned()

    def scan(self, scans: Sequence[Scan]) -> Iterable[PlannedRange]:
        raise AssertionError(scans)

    def move(self, task: RangeTask) -> RangeResult:
        raise AssertionError(task)


class Status:
    """Notes what is reported; the API server refuses the first report."""

    def __init__(self) -> None:
        self.written: list[Scanned] = []
        self._refused = 0
        self.has_changed = threading.Condition()

    def take_over(self, _: EntryId) -> None:
        pass

    def report(self, account: Account, *, rests: Rest | None = None) -> Wish:
        raise AssertionError(account, rests)

    def report_scan(self, scanned: Scanned) -> None:
        if not self._refused:
            self._refused += 1
            raise OSError("no connection to the API server")
        with self.has_changed:
            self.written.append(scanned)
            self.has_changed.notify_all()

    def waits_for(self, scanned: Scanned) -> None:
        with self.has_changed:
            assert self.has_changed.wait_for(
                lambda: self.written and self.written[-1] == scanned, WAIT_SECONDS
            )


def test_what_scans_find_is_reported_while_the_run_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert REPORT_SECONDS <= 1
    monkeypatch.setattr(run, "REPORT_SECONDS", 0.01)
    monkeypatch.setattr(run, "LOOK_SECONDS", 0.01)
    engine, status = Counted(), Status()
    some = Scanned(10_000, Counter(TimeoutError=9_000), Counter(Encrypted=1_000))
    more = some + Scanned(5_000, Counter(ValueError=1, TimeoutError=4_999))
    with reporting_progress(engine, status):
        for scanned in (some, more):
            engine.scanned = scanned
            status.waits_for(scanned)
    engine.scanned += some
    assert status.written == [some, more]  # each once
    assert more.causes == {"TimeoutError": 13_999, "ValueError": 1}


def test_an_error_of_the_scan_is_the_one_that_is_raised() -> None:
    with pytest.raises(ZeroDivisionError), reporting_progress(Counted(), Status()):
        raise ZeroDivisionError

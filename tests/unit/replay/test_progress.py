"""The numbers of a run stay true across restarts of its job."""

from __future__ import annotations

from redrive.api.replay import ReplayStatus
from redrive.replay.move import Tally
from redrive.replay.progress import Numbers


def test_a_run_begins_with_what_is_selected() -> None:
    begun = Numbers.at_begin(ReplayStatus(), looked_at=100, selected=70)
    assert begun.to_status() == {"matched": 70, "replayed": 0, "skipped": 30, "duplicates": 0}


def test_a_slice_adds_what_was_moved_and_what_was_kept() -> None:
    begun = Numbers.at_begin(ReplayStatus(), looked_at=100, selected=70)
    after = begun.after(Tally(replayed=40, duplicates=2, kept=3)).after(Tally(replayed=27))
    assert after.to_status() == {"matched": 70, "replayed": 67, "skipped": 33, "duplicates": 2}
    assert after.kept == 3


def test_a_restarted_run_counts_what_was_acknowledged_before_it_by_what_is_left() -> None:
    # 70 were selected; the job reported 40, moved 5 more and was killed.
    before = ReplayStatus(matched=70, replayed=40, skipped=30, duplicates=1)
    begun = Numbers.at_begin(before, looked_at=55, selected=25)
    assert begun.to_status() == {"matched": 70, "replayed": 45, "skipped": 30, "duplicates": 1}

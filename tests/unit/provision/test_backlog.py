from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial

import pytest

from redrive.admin.model import SubscriptionStats
from redrive.api.retrypolicy import Backlog
from redrive.provision.health_checks import (
    BACKLOG_CHANGED_AFTER,
    BACKLOG_UNCHANGED_AFTER,
    backlog_of,
    backlog_patch,
    is_backlog_worth_writing,
    read_backlog,
)

MOMENT = datetime(2026, 11, 21, 9, 0, 0, 700_000, tzinfo=UTC)
AT_ONCE = timedelta(0)
READ = MOMENT + timedelta(minutes=1)


def waits(count: int, oldest: datetime | None = None) -> SubscriptionStats:
    """A subscription with so many messages."""
    return SubscriptionStats(count, 0, 0, durable=True, ack_holes=0, oldest=oldest)


def test_what_is_found_is_read_back_as_it_was_written() -> None:
    found = backlog_of(waits(3), waits(41, MOMENT), discards=False, now=READ)
    written = backlog_patch(found)
    assert written == {
        "backlog": {
            "retry": 3,
            "deadLetter": 41,
            "oldestDeadLetter": "2026-11-21T09:00:00Z",
            "observedAt": "2026-11-21T09:01:00Z",
        }
    }
    assert read_backlog(written) == found


def test_what_is_there_no_more_is_taken_away() -> None:
    observed = {"observedAt": "2026-11-21T09:01:00Z"}
    none = backlog_patch(backlog_of(None, waits(0), discards=False, now=READ))["backlog"]
    assert none == {"retry": 0, "deadLetter": 0, "oldestDeadLetter": None, **observed}
    discards = backlog_patch(backlog_of(waits(2), None, discards=True, now=READ))["backlog"]
    assert discards == {"retry": 2, "deadLetter": None, "oldestDeadLetter": None, **observed}


@pytest.mark.parametrize(
    ("before", "now", "worth"),
    [
        ((0, 0), (0, 0), False),
        ((0, 0), (1, 0), True),
        ((0, 1), (0, 0), True),
        ((100, 0), (110, 0), False),
        ((100, 0), (111, 0), True),
        ((0, 100), (0, 89), True),
        ((0, 1), (0, 2), True),
        ((0, None), (0, 0), True),
    ],
)
def test_what_begins_or_ends_or_moves_much_is_written_at_once_and_the_rest_later(
    before: tuple[int, int | None], now: tuple[int, int | None], *, worth: bool
) -> None:
    def is_worth(age: timedelta) -> bool:
        written, found = (
            Backlog(retry=r, dead_letter=d, observed_at=at)
            for (r, d), at in ((before, MOMENT), (now, MOMENT + age))
        )
        return is_backlog_worth_writing(written, found)

    assert is_worth(AT_ONCE) is worth
    assert is_worth(BACKLOG_CHANGED_AFTER) is (before != now)


def test_unchanged_figures_are_written_once_an_hour() -> None:
    written = backlog_of(waits(3), waits(41, MOMENT), discards=False, now=MOMENT)
    found = partial(backlog_of, waits(3), waits(41, MOMENT), discards=False)
    assert not is_backlog_worth_writing(written, found(now=READ))
    assert not is_backlog_worth_writing(written, found(now=MOMENT + BACKLOG_UNCHANGED_AFTER * 0.9))
    assert is_backlog_worth_writing(written, found(now=MOMENT + BACKLOG_UNCHANGED_AFTER))


def test_what_can_not_be_read_counts_as_not_written() -> None:
    spoilt = {
        "retry": 3,
        "deadLetter": 41,
        "oldestDeadLetter": "0000-01-01T00:00:00Z",
        "observedAt": "2026-11-21T09:01:00Z",
    }
    assert read_backlog({"backlog": spoilt}) is None


def test_the_first_look_is_written() -> None:
    assert is_backlog_worth_writing(None, Backlog(retry=0, observed_at=MOMENT))


def test_figures_of_an_operator_that_wrote_no_time_are_read_and_written_again() -> None:
    before = read_backlog({"backlog": {"retry": 3, "deadLetter": 1}})
    assert before is not None
    assert is_backlog_worth_writing(before, Backlog(retry=3, dead_letter=1, observed_at=MOMENT))

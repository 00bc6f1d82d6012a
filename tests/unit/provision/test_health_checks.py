"""Checks of health: warnings, backlogs and counts of deliveries."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from redrive.admin.model import AckPersistence, SubscriptionStats
from redrive.api.conditions import StatusWarning
from redrive.api.retrypolicy import Backlog
from redrive.policy import naming
from redrive.policy.model import Policy
from redrive.policy.naming import Scheme, TopicName
from redrive.provision.health_checks import (
    BACKLOG_CHANGED_AFTER,
    BACKLOG_UNCHANGED_AFTER,
    CHECKS,
    REASONS,
    THRESHOLDS,
    WINDOW_SECONDS,
    CheckInput,
    Deliveries,
    Findings,
    Reading,
    backlog_of,
    backlog_patch,
    check,
    is_backlog_worth_writing,
    read_backlog,
)

TOPIC = TopicName("shop", "prod", "orders")
QUIET = Deliveries.begin(0.0, 0, 0)
STILL = QUIET.seen(60.0, 0, 0)
NOW = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)


def policy(max_retries: int = 16) -> Policy:
    """A policy of the subscription `s`."""
    return Policy(
        topic=TOPIC,
        subscription="s",
        max_retries=max_retries,
        retry_topic=naming.retry_topic(TOPIC, "s", Scheme.PULSAR),
        dead_letter_topic=naming.dead_letter_topic(TOPIC, "s", Scheme.PULSAR),
    )


def stats(consumers: int = 0, ack_holes: int = 0, *, durable: bool = True) -> SubscriptionStats:
    """How a subscription stands that nothing waits in."""
    return SubscriptionStats(0, 0, consumers, durable=durable, ack_holes=ack_holes, oldest=None)


def found(published: Iterable[StatusWarning] = (), **changes: Any) -> tuple[StatusWarning, ...]:  # noqa: ANN401
    """What is found of a policy that fares well, but for *changes*."""
    well: dict[str, Any] = {
        "policy": policy(),
        "source": stats(consumers=1),
        "retry": {"s": stats(consumers=1)},
        "dead_letter": {"redrive": stats()},
        "deliveries": QUIET,
        "unconsumed_before": False,
        "published": {warning.reason: warning for warning in published},
        "now": NOW,
    }
    return check(CheckInput(**(well | changes)), THRESHOLDS)


def test_a_policy_that_fares_well_needs_no_caution() -> None:
    assert found() == ()
    assert len(REASONS) == len(CHECKS)


@pytest.mark.parametrize(
    ("holes", "acknowledged", "limit", "warned"),
    [
        (1, 4_999, 10_000, None),
        (1, 5_000, 10_000, "got 5000;"),
        (5_000, 0, 10_000, "got 5000;"),  # each range has a message
        (0, 5_000, 10_000, None),
        (1, 60, 100, "until there are 100 (managedLedgerMaxUnackedRangesToPersist, as it is con"),
    ],
)
def test_where_whole_ledgers_are_stored_messages_count(
    holes: int, acknowledged: int, limit: int, warned: str | None
) -> None:
    persistence = AckPersistence(limit, whole_ledgers=True, configured=True)
    retry = {"s": stats(consumers=1, ack_holes=holes)}
    warnings = found(retry=retry, acknowledged=acknowledged, persistence=persistence)
    assert [warning.reason for warning in warnings] == ["AckHoles"] * (warned is not None)
    assert warned is None or warned in warnings[0].message


def test_many_holes_are_told_once_and_taken_back_when_they_are_clearly_fewer() -> None:
    def with_holes(
        count: int, published: Iterable[StatusWarning] = ()
    ) -> tuple[StatusWarning, ...]:
        return found(published, retry={"s": stats(consumers=1, ack_holes=count)})

    assert with_holes(4_999) == ()
    told = with_holes(5_000)
    [warning] = told
    assert warning.reason == "AckHoles"
    assert "remembers at most 10000 (managedLedgerMaxUnackedRangesToPersist, " in warning.message
    assert "got 5000; make the delays more alike, " in warning.message
    assert with_holes(9_000, told) == told
    assert with_holes(4_500, told) == told
    assert with_holes(4_499, told) == ()


def test_subscriptions_that_are_not_the_policys_are_named() -> None:
    reader, broker = stats(durable=False), stats()
    retry = {"s": stats(consumers=1), "all-orders": stats(), "__compaction": broker}
    dead_letter = {"redrive": stats(), "reader-1": reader, "s": stats()}
    [warning] = found(retry=retry, dead_letter=dead_letter)
    assert warning.reason == "ForeignSubscription"
    assert "got all-orders on orders-s-RETRY, s on orders-s-DLQ; have the pattern" in (
        warning.message
    )


def test_of_many_foreign_subscriptions_the_first_are_named() -> None:
    retry = {"s": stats(consumers=1)} | {f"f{number}": stats() for number in range(7)}
    [warning] = found(retry=retry)
    assert "f4 on orders-s-RETRY, 2 more; have" in warning.message


def test_a_retry_topic_without_consumers_twice_in_a_row_is_warned_of() -> None:
    alone: dict[str, Any] = {"retry": {"s": stats()}}
    assert found(**alone) == ()
    told = found(**alone, unconsumed_before=True)
    [warning] = told
    assert warning.reason == "RetryTopicNotConsumed"
    assert "consumers on orders and none on orders-s-RETRY" in warning.message
    assert found(told, **alone) == told  # said before a restart, and still so
    assert found(told, unconsumed_before=True) == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"source": None},
        {"source": stats()},
        {"retry": {}},
        {"policy": policy(max_retries=0)},
    ],
)
def test_a_retry_topic_that_needs_no_consumers_is_not_warned_of(changes: dict[str, Any]) -> None:
    assert found(**({"retry": {"s": stats()}} | changes), unconsumed_before=True) == ()


@pytest.mark.parametrize(
    ("first", "retries", "storm"),
    [(49, 51, True), (50, 50, False), (40, 59, False), (0, 100, True), (999, 1, False)],
)
def test_a_storm_is_more_than_half_of_at_least_a_hundred_deliveries(
    first: int, retries: int, *, storm: bool
) -> None:
    warnings = found(deliveries=QUIET.seen(60.0, first, retries))
    assert [warning.reason for warning in warnings] == ["RetryStorm"] * storm
    for warning in warnings:
        assert f"got {retries} retries among {first + retries} deliveries" in warning.message


def test_a_storm_keeps_its_words_and_is_over_when_enough_was_seen() -> None:
    told = found(deliveries=QUIET.seen(60.0, 0, 100))
    assert found(told, deliveries=QUIET.seen(60.0, 0, 200)) == told
    assert found(told, deliveries=QUIET.seen(60.0, 150, 50)) == ()
    restarted = Deliveries.begin(0.0, 500, 500)
    assert found(told, deliveries=restarted) == told
    assert found(told, deliveries=restarted.seen(600.0, 501, 510)) == ()


def waiting(since: timedelta, **changes: Any) -> SubscriptionStats:  # noqa: ANN401
    """A retry subscription with consumers, whose oldest message was published so long ago."""
    return replace(stats(consumers=1), backlog=1, oldest=NOW - since, **changes)


LATE = timedelta(hours=2, minutes=6)


def test_retries_that_are_due_and_are_not_delivered_to_consumers_are_overdue() -> None:
    (overdue,) = found(retry={"s": waiting(LATE)}, deliveries=STILL)
    assert overdue.reason == "RetriesOverdue"
    assert "a longest delay of 2h" in overdue.message
    assert f"pulsar-admin topics unload {policy().retry_topic}" in overdue.message
    later = waiting(LATE + timedelta(minutes=1))
    assert found([overdue], retry={"s": later}, deliveries=STILL) == (overdue,)


@pytest.mark.parametrize(
    ("retry", "deliveries"),
    [
        (waiting(timedelta(hours=2, minutes=4)), STILL),  # maybe not due
        (waiting(LATE, consumers=0), STILL),  # nothing to deliver it to
        (waiting(LATE, unacknowledged=1), STILL),  # delivered
        (waiting(LATE), QUIET.seen(30.0, 0, 0)),  # seen for too short
        (waiting(LATE), STILL.seen(90.0, 0, 1)),  # others are delivered
        (stats(consumers=1), STILL),  # nothing waits
    ],
)
def test_retries_that_may_not_be_due_or_are_being_delivered_are_not_overdue(
    retry: SubscriptionStats, deliveries: Deliveries
) -> None:
    assert found(retry={"s": retry}, deliveries=deliveries, source=None) == ()


def dead_letters(size: int) -> dict[str, SubscriptionStats]:
    return {"redrive": replace(stats(), bytes=size)}


def test_consumers_that_have_paused_are_warned_of_by_their_causes() -> None:
    [warning] = found(outages=("TimeoutError", "ConnectionError", "ConnectionError"))
    assert warning.reason == "OutageSuspected"
    assert "got ConnectionError, TimeoutError; fix what they depend on" in warning.message
    assert "redrive.io/ignore-outages=true" in warning.message
    [hostile] = found(outages=tuple(f"{number}\n" + "x" * 9_999 for number in range(1_000)))
    assert len(hostile.message) < 2_000
    assert hostile.message.isprintable()
    assert "995 more" in hostile.message


def test_a_dead_letter_topic_near_its_quota_is_warned_of_until_it_is_well_below() -> None:
    assert found(dead_letter=dead_letters(799), quota=1_000) == ()
    (near,) = found(dead_letter=dead_letters(800), quota=1_000)
    assert near.reason == "QuotaNearlyReached"
    assert "got 800 of 1000 bytes" in near.message
    assert found([near], dead_letter=dead_letters(700), quota=1_000) == (near,)
    assert found([near], dead_letter=dead_letters(699), quota=1_000) == ()
    assert found(dead_letter=dead_letters(10**9), quota=None) == ()


MOMENT = datetime(2026, 11, 21, 9, 0, 0, 700_000, tzinfo=UTC)
AT_ONCE = timedelta(0)
READ = MOMENT + timedelta(minutes=1)


def subscription_with(count: int, oldest: datetime | None = None) -> SubscriptionStats:
    """A subscription with so many messages."""
    return SubscriptionStats(count, 0, 0, durable=True, ack_holes=0, oldest=oldest)


def test_what_is_found_is_read_back_as_it_was_written() -> None:
    found = backlog_of(
        subscription_with(3), subscription_with(41, MOMENT), discards=False, now=READ
    )
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
    none = backlog_patch(backlog_of(None, subscription_with(0), discards=False, now=READ))[
        "backlog"
    ]
    assert none == {"retry": 0, "deadLetter": 0, "oldestDeadLetter": None, **observed}
    discards = backlog_patch(backlog_of(subscription_with(2), None, discards=True, now=READ))[
        "backlog"
    ]
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
    written = backlog_of(
        subscription_with(3), subscription_with(41, MOMENT), discards=False, now=MOMENT
    )
    found = partial(backlog_of, subscription_with(3), subscription_with(41, MOMENT), discards=False)
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


def test_the_first_look_counts_nothing_of_what_was_before() -> None:
    window = Deliveries.begin(5.0, 1_000, 2_000)
    assert (window.first, window.retries, window.last) == (0, 0, (0, 0))
    assert not window.is_whole


def test_what_came_between_looks_is_counted_and_goes_after_ten_minutes() -> None:
    window = Deliveries.begin(0.0, 10, 20).seen(60.0, 15, 40).seen(120.0, 16, 41)
    assert (window.first, window.retries, window.last) == (6, 21, (1, 1))
    later = window.seen(60.0 + WINDOW_SECONDS, 16, 41)
    assert (later.first, later.retries, later.last) == (1, 1, (0, 0))
    assert later.is_whole


def test_a_counter_that_was_set_back_counts_on_from_there() -> None:
    window = Deliveries.begin(0.0, 100, 200).seen(60.0, 3, 5)
    assert (window.first, window.retries) == (0, 0)
    assert (window.seen(120.0, 5, 9).first, window.seen(120.0, 5, 9).retries) == (2, 4)


def test_a_subscription_that_comes_later_counts_from_its_first_look() -> None:
    window = Deliveries.begin(0.0, None, 0).seen(60.0, 70, 1).seen(120.0, 75, None)
    assert (window.first, window.retries) == (5, 1)


def test_a_window_does_not_grow_for_ever() -> None:
    window = Deliveries.begin(0.0, 0, 0)
    for look in range(1, 1_000):
        window = window.seen(look * 60.0, look, look)
    assert (window.first, window.retries) == (10, 10)


POLICY = Policy(TopicName("shop", "prod", "orders"), "s")
READ_AT = datetime(2026, 11, 21, 9, tzinfo=UTC)


def reading(seconds: float, *, requested: bool = False) -> Reading:
    """A reading of topics of which the source alone has a consumer."""
    source, retry = (
        SubscriptionStats(2, 0, consumers, durable=True, ack_holes=0, oldest=None)
        for consumers in (1, 0)
    )
    return Reading(POLICY, READ_AT, seconds, requested, None, {"s": source}, {"s": retry}, {})


def test_a_requested_reading_is_no_second_finding_of_a_retry_topic_without_consumers() -> None:
    first = Findings.of(reading(0), None, (), THRESHOLDS)
    assert first.warnings == ()
    requested = Findings.of(reading(1, requested=True), first, first.warnings, THRESHOLDS)
    assert requested.warnings == ()
    second = Findings.of(reading(61), requested, requested.warnings, THRESHOLDS)
    assert [warning.reason for warning in second.warnings] == ["RetryTopicNotConsumed"]
    third = Findings.of(reading(62, requested=True), second, second.warnings, THRESHOLDS)
    assert third.warnings == second.warnings


def test_a_backlog_says_when_its_reading_began() -> None:
    assert reading(0).backlog.observed_at == READ_AT
    assert (reading(0).backlog.retry, reading(0).backlog.dead_letter) == (2, 0)

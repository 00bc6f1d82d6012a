from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from redrive.admin.model import AckPersistence, SubscriptionStats
from redrive.api.conditions import StatusWarning
from redrive.policy import naming
from redrive.policy.model import Policy
from redrive.policy.naming import Scheme, TopicName
from redrive.provision.health_checks import (
    CHECKS,
    REASONS,
    THRESHOLDS,
    CheckInput,
    Deliveries,
    check,
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

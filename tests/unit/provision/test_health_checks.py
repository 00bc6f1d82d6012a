"""Checks of health: warnings, backlogs and counts of deliveries."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from redrive.admin.internal_stats import AckPersistence
from redrive.admin.model import SubscriptionStats
from redrive.api.conditions import StatusWarning
from redrive.api.retrypolicy import Backlog
from redrive.policy import naming
from redrive.policy.model import Policy
from redrive.policy.naming import Scheme, TopicName
from redrive.provision.findings import (
    BACKLOG_CHANGED_AFTER,
    BACKLOG_UNCHANGED_AFTER,
    Findings,
    figures_patch,
    is_backlog_worth_writing,
    read_backlog,
    stored_since,
)
from redrive.provision.health_checks import (
    THRESHOLDS,
    WINDOW_SECONDS,
    CheckInput,
    Deliveries,
    Reading,
    backlog_of,
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
    """Statistics of a subscription without a backlog."""
    return SubscriptionStats(0, 0, consumers, durable=durable, ack_holes=ack_holes, oldest=None)


def found(published: Iterable[StatusWarning] = (), **changes: Any) -> tuple[StatusWarning, ...]:  # noqa: ANN401
    """Return the warnings about a healthy policy with *changes*."""
    source = changes.pop("source", stats(consumers=1))
    well: dict[str, Any] = {
        "policy": policy(),
        "begun": NOW,
        "seconds": 0.0,
        "requested": False,
        "quota": None,
        "source": source if isinstance(source, dict) else {"s": source} if source else {},
        "retry": {"s": stats(consumers=1)},
        "dead_letter": {"redrive": stats()},
        "deliveries": QUIET,
        "unconsumed_before": False,
        "warnings": {warning.reason: warning for warning in published},
    }
    return check(CheckInput(**(well | changes)), THRESHOLDS)


def test_healthy_policy_has_no_warnings() -> None:
    assert found() == ()


RETRY, DEAD_LETTER = policy().retry_topic, policy().dead_letter_topic


def test_refused_sends_name_topics_and_setting() -> None:
    limits = {RETRY: {"maxProducersPerTopic": 2}, DEAD_LETTER: {"maxProducersPerTopic": 2}}
    producers = {RETRY: 1, DEAD_LETTER: 2}
    [warning] = found(terminated=(RETRY,), limits=limits, producers=producers)
    assert warning.reason == "SendsRefused"
    refusing = "orders-s-RETRY is terminated; orders-s-DLQ has maxProducersPerTopic=2 producers"
    assert f"got {refusing}; process" in warning.message
    assert "at the topic (pulsar-admin topicPolicies), at the Pulsar namespace shop/prod" in (
        warning.message
    )


@pytest.mark.parametrize(
    ("source", "retry", "warned"),
    [
        (0, 100, "orders-s-RETRY has maxMessageSize=100, and orders 5242880 bytes"),
        (200, 100, "orders-s-RETRY has maxMessageSize=100, and orders 200 bytes"),
        (100, 100, None),
        (100, 200, None),
        (100, 0, None),
        (0, 2**23, None),  # above the broker's own limit it has no effect
    ],
)
def test_smaller_messages_than_the_source_topics_are_named(
    source: int, retry: int, warned: str | None
) -> None:
    sizes = {TOPIC: source, RETRY: retry, DEAD_LETTER: 0}
    limits = {topic: {"maxMessageSize": size} for topic, size in sizes.items()}
    warnings = found(limits=limits)
    assert [warning.reason for warning in warnings] == ["SendsRefused"] * (warned is not None)
    assert warned is None or f"got {warned}; process" in warnings[0].message


def test_message_size_is_compared_with_the_source_topics_alone() -> None:
    """It is read later than that of the retry topic: a broker may have one smaller than 5 MiB."""
    assert found(limits={RETRY: {"maxMessageSize": 2**20}}, refusals_known=False) == ()


HOUR = timedelta(hours=1)


@pytest.mark.parametrize(
    ("topic", "limit", "age", "warned"),
    [
        (DEAD_LETTER, 3_600, HOUR * 2, "orders-s-DLQ has message_age=3600 s, and older messages"),
        (RETRY, 7_200, HOUR * 3, "orders-s-RETRY has message_age=7200 s, and older messages"),
        (RETRY, 7_200, HOUR * 2, None),
        (RETRY, 7_199, HOUR * 0, "orders-s-RETRY has message_age=7199 s, and delays of 2h"),
        (DEAD_LETTER, 10, HOUR * 0, None),  # it delays nothing
        (DEAD_LETTER, 3_600, HOUR, None),
        (DEAD_LETTER, 0, HOUR * 2, None),
        (DEAD_LETTER, 2**53, HOUR * 2, None),
    ],
)
def test_quota_by_age_below_waiting_time_is_named(
    topic: TopicName, limit: int, age: timedelta, warned: str | None
) -> None:
    waiting = {"other": stats(), "redrive": replace(stats(), oldest=NOW - age)}
    retry = waiting if topic == RETRY else {}
    dead_letter = waiting if topic == DEAD_LETTER else {}
    retry |= {"s": stats(consumers=1)}
    limits = {topic: {"message_age": limit}}
    warnings = found(limits=limits, retry=retry, dead_letter=dead_letter)
    shown = [warning.message for warning in warnings if warning.reason == "SendsRefused"]
    assert len(shown) == (warned is not None)
    assert warned is None or f"got {warned}; process" in shown[0]
    assert warned is None or "pulsar-admin namespaces set-backlog-quota --type mess" in shown[0]


@pytest.mark.parametrize("reason", ["SendsRefused", "ConsumersRefused"])
def test_refusals_end_once_all_settings_are_read_again(reason: str) -> None:
    published = [StatusWarning(reason, "read before the operator was restarted")]
    assert found(published, refusals_known=False) == (*published,)
    assert found(published) == ()


@pytest.mark.parametrize(
    ("topic", "setting", "limit", "warned"),
    [
        (TOPIC, "maxConsumersPerTopic", 3, "orders has maxConsumersPerTopic=3 and 3"),
        (TOPIC, "maxConsumersPerTopic", 4, None),
        (TOPIC, "maxConsumersPerSubscription", 2, "orders has maxConsumersPerSubscription=2 and 2"),
        (RETRY, "maxConsumersPerSubscription", 2, None),
        (RETRY, "maxSubscriptionsPerTopic", 1, "orders-s-RETRY has maxSubscriptionsPerTopic=1"),
        (DEAD_LETTER, "maxSubscriptionsPerTopic", 1, "orders-s-DLQ has maxSubscriptionsPerTopic=1"),
        (DEAD_LETTER, "maxSubscriptionsPerTopic", 2, None),  # a reader is another for a moment
        (TOPIC, "maxSubscriptionsPerTopic", 1, None),  # it has the one that consumers need
        (TOPIC, "maxConsumersPerTopic", 0, None),
    ],
)
def test_refused_consumers_name_topic_and_setting(
    topic: TopicName, setting: str, limit: int, warned: str | None
) -> None:
    source = {"s": stats(consumers=2), "audit": stats(consumers=1)}
    dead_letter = {"redrive": stats(), "reader-1": stats(durable=False)}
    limits = {topic: {setting: limit}}
    warnings = found(source=source, dead_letter=dead_letter, limits=limits)
    assert [warning.reason for warning in warnings] == ["ConsumersRefused"] * (warned is not None)
    assert warned is None or f"got {warned}" in warnings[0].message


def test_topic_that_refuses_the_type_of_consumers_is_named() -> None:
    types = {TOPIC: frozenset({"Shared"}), RETRY: frozenset({"Failover", "Exclusive"})}
    [warning] = found(types=types)
    assert warning.reason == "ConsumersRefused"
    assert "got orders-s-RETRY has subscriptionTypesEnabled=Exclusive,Failover without Shared;" in (
        warning.message
    )


def test_dead_letter_topic_that_refuses_readers_is_named() -> None:
    [warning] = found(types={DEAD_LETTER: frozenset({"Shared"})})
    assert warning.reason == "ConsumersRefused"
    assert f"got {DEAD_LETTER.local} has subscriptionTypesEnabled=Shared without Exclusive;" in (
        warning.message
    )
    assert found(types={DEAD_LETTER: frozenset({"Shared", "Exclusive"})}) == ()


def test_consumers_without_their_subscription_need_another() -> None:
    source = {"audit": stats(consumers=1)}
    [warning] = found(source=source, limits={TOPIC: {"maxSubscriptionsPerTopic": 1}})
    assert "got orders has maxSubscriptionsPerTopic=1 and 1;" in warning.message


@pytest.mark.parametrize(
    ("holes", "acknowledged", "limit", "warned"),
    [
        (1, 4_999, 10_000, None),
        (1, 5_000, 10_000, "got 5000;"),
        (5_000, 0, 10_000, "got 5000;"),  # each range has a message
        (0, 5_000, 10_000, None),
        (1, 60, 100, "until there are 100 (managedLedgerMaxUnackedRangesToPersist, configured"),
    ],
)
def test_stored_whole_ledgers_count_acknowledged_messages(
    holes: int, acknowledged: int, limit: int, warned: str | None
) -> None:
    persistence = AckPersistence(limit, whole_ledgers=True, configured=True)
    retry = {"s": stats(consumers=1, ack_holes=holes)}
    warnings = found(retry=retry, acknowledged=acknowledged, persistence=persistence)
    assert [warning.reason for warning in warnings] == ["AckHoles"] * (warned is not None)
    assert warned is None or warned in warnings[0].message


def test_ack_holes_warning_ends_below_hysteresis() -> None:
    def with_holes(
        count: int, published: Iterable[StatusWarning] = ()
    ) -> tuple[StatusWarning, ...]:
        return found(published, retry={"s": stats(consumers=1, ack_holes=count)})

    assert with_holes(4_999) == ()
    warnings = with_holes(5_000)
    [warning] = warnings
    assert warning.reason == "AckHoles"
    assert "keeps at most 10000 (managedLedgerMaxUnackedRangesToPersist, " in warning.message
    assert "got 5000; make the delays more similar, " in warning.message
    assert with_holes(9_000, warnings) == warnings
    assert with_holes(4_500, warnings) == warnings
    assert with_holes(4_499, warnings) == ()


def test_foreign_subscriptions_are_named() -> None:
    reader, broker = stats(durable=False), stats()
    retry = {"s": stats(consumers=1), "all-orders": stats(), "__compaction": broker}
    dead_letter = {"redrive": stats(), "reader-1": reader, "s": stats()}
    [warning] = found(retry=retry, dead_letter=dead_letter)
    assert warning.reason == "ForeignSubscription"
    assert "got all-orders on orders-s-RETRY, s on orders-s-DLQ; exclude these topics" in (
        warning.message
    )


def test_foreign_subscriptions_beyond_limit_are_counted() -> None:
    retry = {"s": stats(consumers=1)} | {f"f{number}": stats() for number in range(7)}
    [warning] = found(retry=retry)
    assert "f4 on orders-s-RETRY, 2 more; exclude" in warning.message


def test_unconsumed_retry_topic_is_warned_about_on_second_read() -> None:
    alone: dict[str, Any] = {"retry": {"s": stats()}}
    assert found(**alone) == ()
    warnings = found(**alone, unconsumed_before=True)
    [warning] = warnings
    assert warning.reason == "RetryTopicNotConsumed"
    assert "consumers on orders and none on orders-s-RETRY" in warning.message
    assert found(warnings, **alone) == warnings  # said before a restart, and still so
    assert found(warnings, unconsumed_before=True) == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"source": None},
        {"source": stats()},
        {"retry": {}},
        {"policy": policy(max_retries=0)},
    ],
)
def test_retry_topic_without_need_of_consumers_is_not_warned(changes: dict[str, Any]) -> None:
    assert found(**({"retry": {"s": stats()}} | changes), unconsumed_before=True) == ()


@pytest.mark.parametrize(
    ("first", "retries", "storm"),
    [(49, 51, True), (50, 50, False), (40, 59, False), (0, 100, True), (999, 1, False)],
)
def test_retry_storm_needs_most_of_a_hundred_deliveries(
    first: int, retries: int, *, storm: bool
) -> None:
    warnings = found(deliveries=QUIET.seen(60.0, first, retries))
    assert [warning.reason for warning in warnings] == ["RetryStorm"] * storm
    for warning in warnings:
        assert f"got {retries} retries among {first + retries} deliveries" in warning.message


def test_retry_storm_warning_ends_after_enough_deliveries() -> None:
    warnings = found(deliveries=QUIET.seen(60.0, 0, 100))
    assert found(warnings, deliveries=QUIET.seen(60.0, 0, 200)) == warnings
    assert found(warnings, deliveries=QUIET.seen(60.0, 150, 50)) == ()
    restarted = Deliveries.begin(0.0, 500, 500)
    assert found(warnings, deliveries=restarted) == warnings
    assert found(warnings, deliveries=restarted.seen(600.0, 501, 510)) == ()


def waiting(since: timedelta, **changes: Any) -> SubscriptionStats:  # noqa: ANN401
    """A retry subscription with consumers, whose oldest message was published so long ago."""
    return replace(stats(consumers=1), backlog=1, oldest=NOW - since, **changes)


LATE = timedelta(hours=2, minutes=6)


def test_due_retries_without_delivery_are_overdue() -> None:
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
def test_retries_not_due_or_in_delivery_are_not_overdue(
    retry: SubscriptionStats, deliveries: Deliveries
) -> None:
    assert found(retry={"s": retry}, deliveries=deliveries, source=None) == ()


def dead_letters(size: int) -> dict[str, SubscriptionStats]:
    return {"redrive": replace(stats(), bytes=size)}


def test_paused_consumers_are_warned_about_with_causes() -> None:
    outages = ("TimeoutError", "ConnectionError", "ConnectionError")
    [warning] = found(outages=outages, policy=replace(policy(), name="shop/orders"))
    assert warning.reason == "OutageSuspected"
    assert "got ConnectionError, TimeoutError; fix the dependency" in warning.message
    assert "`kubectl redrive ignore-outage orders -n shop --for 1h`" in warning.message
    [hostile] = found(outages=tuple(f"{number}\n" + "x" * 9_999 for number in range(1_000)))
    assert len(hostile.message) < 2_000
    assert hostile.message.isprintable()
    assert "995 more" in hostile.message


def test_quota_warning_ends_below_hysteresis() -> None:
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


def subscription_with(
    count: int, oldest: datetime | None = None, delayed: int = 0
) -> SubscriptionStats:
    """A subscription with so many messages."""
    return SubscriptionStats(count, 0, 0, durable=True, ack_holes=0, oldest=oldest, delayed=delayed)


def test_backlog_is_read_as_it_was_written() -> None:
    backlog = backlog_of(
        replace(subscription_with(310), consumers=2),
        replace(subscription_with(3, delayed=1), consumers=1),
        replace(subscription_with(41, MOMENT), bytes=900),
        quota=1_000,
        discards=False,
        now=READ,
    )
    written = figures_patch(backlog, ())
    assert written == {
        "backlog": {
            "source": 310,
            "sourceConsumers": 2,
            "retryConsumers": 1,
            "retry": 3,
            "retryDue": 2,
            "deadLetter": 41,
            "deadLetterBytes": 900,
            "deadLetterQuotaBytes": 1_000,
            "deadLettersLastHour": None,
            "oldestDeadLetterTime": "2026-11-21T09:00:00Z",
            "observedTime": "2026-11-21T09:01:00Z",
        },
        "blockedKeys": None,
    }
    assert read_backlog(written) == backlog


def test_backlog_without_messages_clears_its_fields() -> None:
    observed = {"observedTime": "2026-11-21T09:01:00Z"}
    empty = subscription_with(0)
    none = figures_patch(backlog_of(None, None, empty, discards=False, now=READ), ())["backlog"]
    counts: dict[str, Any] = {"retry": 0, "retryDue": 0, "deadLetter": 0, **observed}
    counts |= {"source": None, "sourceConsumers": None, "retryConsumers": 0}
    counts |= {"deadLetterBytes": 0, "deadLetterQuotaBytes": None, "deadLettersLastHour": None}
    assert none == {**counts, "oldestDeadLetterTime": None}
    retry = subscription_with(2)
    discards = figures_patch(backlog_of(empty, retry, None, quota=9, discards=True, now=READ), ())[
        "backlog"
    ]
    counts |= {"source": 0, "sourceConsumers": 0, "retry": 2, "retryDue": 2}
    counts |= {"deadLetter": None, "deadLetterBytes": None}
    assert discards == {**counts, "oldestDeadLetterTime": None}


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
def test_changed_backlog_is_written_at_once_if_large(
    before: tuple[int, int | None], now: tuple[int, int | None], *, worth: bool
) -> None:
    def is_worth(age: timedelta) -> bool:
        written, backlog = (
            Backlog(retry=r, dead_letter=d, observed_time=at)
            for (r, d), at in ((before, MOMENT), (now, MOMENT + age))
        )
        return is_backlog_worth_writing(written, backlog)

    assert is_worth(AT_ONCE) is worth
    assert is_worth(BACKLOG_CHANGED_AFTER) is (before != now)


@pytest.mark.parametrize("field", ["source_consumers", "retry_consumers"])
def test_first_and_last_consumer_are_written_at_once(field: str) -> None:
    def is_worth(before: int | None, now: int) -> bool:
        written = Backlog(retry=0, observed_time=MOMENT).model_copy(update={field: before})
        backlog = Backlog(retry=0, observed_time=MOMENT + AT_ONCE).model_copy(update={field: now})
        return is_backlog_worth_writing(written, backlog)

    changes = [(None, 1), (0, 1), (1, 0), (1, 2), (0, 0), (None, 0)]
    assert [is_worth(*change) for change in changes] == [True] * 3 + [False] * 3


def test_unchanged_backlog_is_written_hourly() -> None:
    topics = subscription_with(0), subscription_with(3), subscription_with(41, MOMENT)
    backlog = partial(backlog_of, *topics, discards=False)
    written = backlog(now=MOMENT)
    assert not is_backlog_worth_writing(written, backlog(now=READ))
    assert not is_backlog_worth_writing(
        written, backlog(now=MOMENT + BACKLOG_UNCHANGED_AFTER * 0.9)
    )
    assert is_backlog_worth_writing(written, backlog(now=MOMENT + BACKLOG_UNCHANGED_AFTER))


def test_unreadable_backlog_counts_as_not_written() -> None:
    spoilt = {
        "retry": 3,
        "deadLetter": 41,
        "oldestDeadLetterTime": "0000-01-01T00:00:00Z",
        "observedTime": "2026-11-21T09:01:00Z",
    }
    assert read_backlog({"backlog": spoilt}) is None


def test_first_backlog_is_written() -> None:
    assert is_backlog_worth_writing(None, Backlog(retry=0, observed_time=MOMENT))


def test_backlog_without_time_is_written_again() -> None:
    before = read_backlog({"backlog": {"retry": 3, "deadLetter": 1}})
    assert before is not None
    assert is_backlog_worth_writing(before, Backlog(retry=3, dead_letter=1, observed_time=MOMENT))


def test_first_read_counts_no_deliveries() -> None:
    window = Deliveries.begin(5.0, 1_000, 2_000)
    assert (window.first, window.retries, window.last) == (0, 0, (0, 0))
    assert not window.is_whole


def test_deliveries_expire_after_ten_minutes() -> None:
    window = Deliveries.begin(0.0, 10, 20).seen(60.0, 15, 40).seen(120.0, 16, 41)
    assert (window.first, window.retries, window.last) == (6, 21, (1, 1))
    later = window.seen(60.0 + WINDOW_SECONDS, 16, 41)
    assert (later.first, later.retries, later.last) == (1, 1, (0, 0))
    assert later.is_whole


def test_deliveries_after_counter_reset_count_from_there() -> None:
    window = Deliveries.begin(0.0, 100, 200).seen(60.0, 3, 5)
    assert (window.first, window.retries) == (0, 0)
    assert (window.seen(120.0, 5, 9).first, window.seen(120.0, 5, 9).retries) == (2, 4)


def test_later_subscription_counts_from_its_first_read() -> None:
    window = Deliveries.begin(0.0, None, 0).seen(60.0, 70, 1).seen(120.0, 75, None)
    assert (window.first, window.retries) == (5, 1)


def test_deliveries_window_stays_bounded() -> None:
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


def test_requested_read_does_not_confirm_unconsumed_topic() -> None:
    first = Findings.of(reading(0), None, (), THRESHOLDS)
    assert first.warnings == ()
    requested = Findings.of(reading(1, requested=True), first, first.warnings, THRESHOLDS)
    assert requested.warnings == ()
    second = Findings.of(reading(61), requested, requested.warnings, THRESHOLDS)
    assert [warning.reason for warning in second.warnings] == ["RetryTopicNotConsumed"]
    third = Findings.of(reading(62, requested=True), second, second.warnings, THRESHOLDS)
    assert third.warnings == second.warnings


def test_stranded_chunks_are_reported_after_five_readings() -> None:
    def following(
        before: Findings | None, stranded: int = 18, *, requested: bool = False
    ) -> Findings:
        source = replace(stats(consumers=1), unacknowledged=stranded, stranded=stranded)
        after = Reading(
            POLICY, READ_AT, 0.0, requested, None, {"s": source}, {"s": stats(consumers=1)}, {}
        )
        return Findings.of(after, before, () if before is None else before.warnings, THRESHOLDS)

    findings = following(None)
    for requested in (False, True, False, False):
        findings = following(findings, requested=requested)
        assert findings.warnings == ()
    findings = following(findings)
    [warning] = findings.warnings
    assert warning.reason == "ChunksStranded"
    assert "got 18 chunks; reload the topic, which " in warning.message
    assert warning.message.endswith(f": pulsar-admin topics unload {POLICY.topic}")
    assert following(findings, 21).warnings == (warning,)
    assert following(findings, 0).warnings == ()
    assert following(following(findings, 0)).warnings == ()


@pytest.mark.parametrize(
    ("before", "now", "stored"),
    [
        ({}, {"a": 9}, 0),  # the first reading
        ({"a": 9}, {"a": 9}, 0),
        ({"a": 9, "b": 1}, {"a": 11, "b": 2}, 3),
        ({"a": 9, "b": 1}, {"a": 4, "b": 2}, 5),  # the broker has loaded a again
        ({"a": 9}, {"a": 9, "b": 7}, 0),  # not known when they were stored
        ({"a": 9, "b": 1}, {"b": 3}, 2),
    ],
)
def test_stored_messages_are_counted_across_loads(
    before: dict[str, int], now: dict[str, int], stored: int
) -> None:
    assert stored_since(before, now) == stored


def test_partition_missing_from_an_answer_is_counted_later() -> None:
    first = Findings.of(replace(reading(0), published={"a": 5, "b": 5}), None, (), THRESHOLDS)
    second = Findings.of(replace(reading(60), published={"a": 6}), first, (), THRESHOLDS)
    third = Findings.of(replace(reading(120), published={"a": 6, "b": 8}), second, (), THRESHOLDS)
    assert [findings.dead_letters for findings in (first, second, third)] == [0, 1, 3]


def test_dead_letters_of_the_last_hour_end_after_an_hour() -> None:
    findings = Findings.of(replace(reading(0), published={"a": 5}), None, (), THRESHOLDS)
    for seconds, count in ((60, 7), (120, 7), (1_800, 17), (3_700, 17)):
        now = replace(reading(seconds), published={"a": count})
        findings = Findings.of(now, findings, (), THRESHOLDS)
        expected = {60: 2, 120: 2, 1_800: 12, 3_700: 10}[seconds]
        assert findings.last_hour == expected


@pytest.mark.parametrize(("minutes", "expected"), [(0, 90), (20, 60), (61, 0)])
def test_dead_letters_of_the_last_hour_survive_a_restart(minutes: int, expected: int) -> None:
    written = Backlog(
        retry=0, dead_letters_last_hour=90, observed_time=READ_AT - timedelta(minutes=minutes)
    )
    findings = Findings.of(reading(0), None, (), THRESHOLDS).resumed(reading(0), written)
    assert findings.last_hour == expected


def test_dead_letters_expire_although_operators_restart() -> None:
    count, moment = 90, READ_AT
    for _ in range(6):
        written = Backlog(retry=0, dead_letters_last_hour=count, observed_time=moment)
        moment += timedelta(minutes=30)
        now = replace(reading(0), begun=moment)
        count = Findings.of(now, None, (), THRESHOLDS).resumed(now, written).last_hour
    assert count == 2


def test_backlog_has_time_and_counts_of_its_read() -> None:
    assert reading(0).backlog.observed_time == READ_AT
    assert (reading(0).backlog.retry, reading(0).backlog.dead_letter) == (2, 0)


@pytest.mark.parametrize(
    ("source", "retry", "others"),
    [
        ("Shared", "Shared", None),
        ("", "", None),
        ("Key_Shared", "", "got Key_Shared on orders, which should be Shared;"),
        ("Shared", "Key_Shared", "got Key_Shared on orders-s-RETRY, which should be Shared;"),
    ],
)
def test_consumers_of_another_type_are_found(source: str, retry: str, others: str | None) -> None:
    warnings = found(
        source=replace(stats(consumers=1), type=source),
        retry={"s": replace(stats(consumers=1), type=retry)},
    )
    assert [warning.reason for warning in warnings] == (
        [] if others is None else ["SubscriptionTypeDiffers"]
    )
    assert all(others is not None and others in warning.message for warning in warnings)

"""Topics as a broker describes them: statistics, policies, quotas and rights."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from redrive.admin.internal_stats import (
    REQUIRES_ENCRYPTION,
    SUBSCRIPTION_TYPES,
    AckPersistence,
    BrokerSettings,
    acknowledged_behind,
)
from redrive.admin.model import (
    LONGEST_TEXT,
    RightsChange,
    SubscriptionStats,
    read_stats,
)
from redrive.admin.policies import (
    Deduplicates,
    DelaysWithin,
    Holds,
    KeepsBacklog,
    LimitsBacklog,
    Quotas,
    TopicPolicy,
    Ttl,
    Write,
    age_limit,
    default_quotas,
    evicting,
    restoring,
    size_limit,
    withdrawing,
)
from redrive.errors import InvalidSpecError
from redrive.policy.naming import TopicName


def subscription(**changes: object) -> dict[str, Any]:
    """Stats of a subscription without any message."""
    return {
        "msgBacklog": 0,
        "msgOutCounter": 0,
        "consumers": [],
        "isDurable": True,
        "nonContiguousDeletedMessagesRanges": 0,
        "earliestMsgPublishTimeInBacklog": -1,
        **changes,
    }


def test_stats_of_subscriptions_are_read() -> None:
    answer = {
        "subscriptions": {
            "s": subscription(
                msgBacklog=3,
                msgOutCounter=7,
                consumers=[{}, {}],
                type="Key_Shared",
                nonContiguousDeletedMessagesRanges=2,
                earliestMsgPublishTimeInBacklog=1_500,
            ),
            "reader": subscription(isDurable=False),
        }
    }
    at = datetime(1970, 1, 1, 0, 0, 1, 500_000, tzinfo=UTC)
    assert read_stats(answer) == {
        "s": SubscriptionStats(3, 7, 2, durable=True, ack_holes=2, oldest=at, type="Key_Shared"),
        "reader": SubscriptionStats(0, 0, 0, durable=False, ack_holes=0, oldest=None),
    }


@pytest.mark.parametrize(
    ("unacknowledged", "held", "stranded"), [(18, [0, 4], 14), (4, [0, 4], 0), (18, [], 0)]
)
def test_stranded_messages_are_with_no_consumer(
    unacknowledged: int, held: list[int], stranded: int
) -> None:
    consumers = [{"unackedMessages": count} for count in held]
    stats = subscription(unackedMessages=unacknowledged, consumers=consumers)
    partitions = {name: {"subscriptions": {"s": stats}} for name in ("p-0", "p-1")}
    [alone] = read_stats({"subscriptions": {"s": stats}}).values()
    [combined] = read_stats({"partitions": partitions}).values()
    assert (alone.stranded, combined.stranded) == (stranded, 2 * stranded)


def test_producer_metadata_is_read_per_partition() -> None:
    producers: list[dict[str, Any]] = [{"metadata": {"a": "1"}}, {"metadata": {}}, {}]
    none: dict[str, Any] = {"subscriptions": {}}
    assert read_stats({**none, "publishers": producers}).producers == [{"a": "1"}, {}, {}]
    parts = {"p-0": {**none, "publishers": producers[:1]}, "p-1": {**none, "publishers": []}}
    assert read_stats({"publishers": producers, "partitions": parts}).producers == [{"a": "1"}]
    long = {"a": "x" * (LONGEST_TEXT + 1), "b": "x" * LONGEST_TEXT}
    assert [*read_stats({**none, "publishers": [{"metadata": long}]}).producers[0]] == ["b"]


def test_stats_of_partitions_are_combined() -> None:
    one = subscription(
        msgBacklog=3,
        msgOutCounter=7,
        consumers=[{}, {}],
        nonContiguousDeletedMessagesRanges=4_000,
        earliestMsgPublishTimeInBacklog=3_000,
    )
    two = {**one, "earliestMsgPublishTimeInBacklog": 2_000}
    answer = {
        "subscriptions": {"s": subscription()},  # the sums of the broker are ignored
        "partitions": {
            f"p-{index}": {"subscriptions": {"s": stats}}
            for index, stats in enumerate([one, subscription(), two])
        },
    }
    at = datetime(1970, 1, 1, 0, 0, 2, tzinfo=UTC)
    [stats] = read_stats(answer).values()
    combined = SubscriptionStats(6, 14, 2, durable=True, ack_holes=4_000, oldest=at, partitions=3)
    assert stats == combined


@pytest.mark.parametrize("answer", [{}, {"subscriptions": {"s": {}}}, {"subscriptions": []}])
def test_stats_not_of_a_broker_are_refused(answer: dict[str, Any]) -> None:
    with pytest.raises((AttributeError, KeyError)):
        read_stats(answer)


def test_messages_stored_are_read_per_partition() -> None:
    assert read_stats({"subscriptions": {}, "msgInCounter": 3}).published == {"": 3}
    parts = {"p-0": {"subscriptions": {}, "msgInCounter": 3}, "p-1": {"subscriptions": {}}}
    assert read_stats({"msgInCounter": 9, "partitions": parts}).published == {"p-0": 3, "p-1": 0}


def test_due_messages_are_the_backlog_without_delayed_ones() -> None:
    stats = subscription(msgBacklog=5, msgDelayed=3)
    partitions = {name: {"subscriptions": {"s": stats}} for name in ("p-0", "p-1")}
    [alone] = read_stats({"subscriptions": {"s": stats}}).values()
    [combined] = read_stats({"partitions": partitions}).values()
    assert (alone.due, combined.due) == (2, 4)
    # A message that was acknowledged may still be in the tracker of delays.
    [late] = read_stats({"subscriptions": {"s": subscription(msgDelayed=3)}}).values()
    assert late.due == 0


RANGES = "managedLedgerMaxUnackedRangesToPersist"
AS_ARRAYS = "managedLedgerPersistIndividualAckAsLongArray"


@pytest.mark.parametrize(
    ("settings", "release", "expected"),
    [
        ({}, (), AckPersistence(10_000, whole_ledgers=False)),
        ({}, (4, 0, 8), AckPersistence(10_000, whole_ledgers=False)),
        ({}, (4, 1), AckPersistence(10_000, whole_ledgers=True)),
        ({}, (4, 2, 4), AckPersistence(10_000, whole_ledgers=True)),
        (
            {RANGES: "500", AS_ARRAYS: "false"},
            (4, 2, 4),
            AckPersistence(500, whole_ledgers=False, configured=True),
        ),
        (
            {RANGES: "500", AS_ARRAYS: "true"},
            (4, 0, 8),
            AckPersistence(500, whole_ledgers=True, configured=True),
        ),
        (
            {
                RANGES: "500",
                AS_ARRAYS: "true",
                "managedLedgerUnackedRangesOpenCacheSetEnabled": "false",
            },
            (4, 2, 4),
            AckPersistence(500, whole_ledgers=False, configured=True),
        ),
    ],
)
def test_ack_persistence_follows_settings_or_release(
    settings: dict[str, str], release: tuple[int, ...], expected: AckPersistence
) -> None:
    assert AckPersistence.of(settings, release) == expected


@pytest.mark.parametrize(
    ("settings", "types", "encrypted"),
    [
        ({}, set(), False),
        ({SUBSCRIPTION_TYPES: "[]", REQUIRES_ENCRYPTION: "false"}, set(), False),
        (
            {SUBSCRIPTION_TYPES: "[Key_Shared, Shared]", REQUIRES_ENCRYPTION: "true"},
            {"Key_Shared", "Shared"},
            True,
        ),
        ({SUBSCRIPTION_TYPES: "Exclusive,Shared"}, {"Exclusive", "Shared"}, False),
    ],
)
def test_broker_settings_have_types_and_encryption(
    settings: dict[str, str], types: set[str], *, encrypted: bool
) -> None:
    read = BrokerSettings.of(settings, (4, 0, 8))
    assert (set(read.subscription_types), read.requires_encryption) == (types, encrypted)


def internal(through: str, consumed: int, name: str = "s") -> dict[str, Any]:
    """A topic of three ledgers with 10, 10 and 5 entries, the last of which is being written."""
    return {
        "entriesAddedCounter": 25,
        "lastConfirmedEntry": "7:4",
        "ledgers": [{"ledgerId": i, "entries": n} for i, n in ((3, 10), (5, 10), (7, 0))],
        "cursors": {name: {"markDeletePosition": through, "messagesConsumedCounter": consumed}},
    }


@pytest.mark.parametrize(
    ("through", "consumed", "expected"),
    [
        ("3:-1", 0, 0),  # nothing
        ("3:0", 1, 0),  # all that is before
        ("3:0", 24, 23),
        ("3:9", 20, 10),  # from the second ledger on
        ("5:9", 24, 0),  # in the last one alone: that is stored as a whole
        ("7:4", 25, 0),
        ("2:99", 24, 24),  # a ledger that is gone
    ],
)
def test_acknowledged_messages_behind_a_gap_are_counted(
    through: str, consumed: int, expected: int
) -> None:
    assert acknowledged_behind(internal(through, consumed), "s") == expected


def test_cursor_is_found_by_its_java_encoded_name() -> None:
    assert acknowledged_behind(internal("3:0", 24, "a+%2F%7E*"), "a /~*") == 23
    assert acknowledged_behind(internal("3:0", 24), "other") == 0


@pytest.mark.parametrize("answer", [{}, {"cursors": {"s": {}}}, {"cursors": []}])
def test_internal_stats_not_of_a_broker_are_refused(answer: dict[str, Any]) -> None:
    with pytest.raises((AttributeError, KeyError)):
        acknowledged_behind(answer, "s")


def test_rights_on_a_system_topic_are_revoked_only() -> None:
    topic, produce = TopicName("shop", "prod", "__change_events"), frozenset({"produce"})
    with pytest.raises(InvalidSpecError):
        RightsChange(topic, "a", give=produce)
    assert RightsChange(topic, "a", take=produce).on(produce) == frozenset()


STAYS = Holds("inactive", (("delete", False),))
LATE = {"active": True, "tickTime": 1_000, "maxDeliveryDelayInMillis": 9}
EVICTS = {"limitSize": 5, "policy": "consumer_backlog_eviction"}
REFUSES = {"limitSize": 5, "policy": "producer_exception"}
SIZE = "backlogQuota?backlogQuotaType=destination_storage"
HOLDS = {"limitSize": 5, "policy": "producer_request_hold"}


@pytest.mark.parametrize(
    ("policy", "setting", "written"),
    [
        (Deduplicates(), True, None),
        (Ttl(0), 0, None),
        (Ttl(60), 60, None),
        (DelaysWithin(100), {"active": True, "tickTime": 100, "maxDeliveryDelayInMillis": 9}, None),
        (STAYS, {"delete": False, "after": 5}, None),
        (KeepsBacklog(), None, None),
        (KeepsBacklog(), {"destination_storage": HOLDS, "message_age": REFUSES}, None),
        (LimitsBacklog(5), {"destination_storage": HOLDS}, None),
        (Deduplicates(), None, Write("deduplicationEnabled", body=True)),
        (Deduplicates(), False, Write("deduplicationEnabled", body=True)),
        (Ttl(0), None, Write("messageTTL?messageTTL=0", None)),
        (Ttl(0), 60, Write("messageTTL?messageTTL=0", None)),
        (DelaysWithin(100), LATE, Write("delayedDelivery", LATE | {"tickTime": 100})),
        (
            DelaysWithin(1_000),
            LATE | {"active": False, "tickTime": 10},
            Write("delayedDelivery", LATE),
        ),
        (STAYS, None, Write("inactive", {"delete": False})),
        (STAYS, {"delete": True, "after": 5}, Write("inactive", {"delete": False, "after": 5})),
        (
            KeepsBacklog(),
            {"destination_storage": HOLDS, "message_age": {"limitTime": 60} | EVICTS},
            Write("backlogQuota?backlogQuotaType=message_age", {"limitTime": -1} | REFUSES),
        ),
        (KeepsBacklog(), {"destination_storage": EVICTS}, Write(SIZE, REFUSES)),
        (KeepsBacklog(), {"message_age": {"limitTime": -1, "policy": "producer_exception"}}, None),
        (
            LimitsBacklog(5),
            {},
            Write("backlogQuota?backlogQuotaType=destination_storage", REFUSES),
        ),
        (
            LimitsBacklog(5),
            {"destination_storage": {"limit": 9, "limitSize": 9, "policy": "producer_exception"}},
            Write("backlogQuota?backlogQuotaType=destination_storage", REFUSES),
        ),
    ],
)
def test_topic_policy_writes_only_differences(
    policy: TopicPolicy,
    setting: Any,  # noqa: ANN401 - the broker's JSON
    written: Write | None,
) -> None:
    assert list(policy.writes(setting)) == ([] if written is None else [written])


@pytest.mark.parametrize(
    ("before", "namespace", "written"),
    [
        (None, {}, Write(SIZE, None, "DELETE")),
        ({"destination_storage": HOLDS}, {}, Write(SIZE, HOLDS)),
        ({"destination_storage": EVICTS}, {}, Write(SIZE, REFUSES)),
        ({"message_age": EVICTS}, {"destination_storage": HOLDS}, Write(SIZE, None, "DELETE")),
        # Else the quota of the namespace would drop messages until the next reconcile.
        (None, {"destination_storage": EVICTS}, Write(SIZE, REFUSES)),
    ],
)
def test_withdrawn_size_leaves_no_evicting_quota(
    before: Any,  # noqa: ANN401 - the broker's JSON
    namespace: dict[str, Any],
    written: Write,
) -> None:
    inherited = {LimitsBacklog.read: namespace}
    assert list(withdrawing(LimitsBacklog.name, before, inherited)) == [written]


def test_restored_policy_equals_the_recorded_one() -> None:
    before = {"destination_storage": EVICTS}
    age = Write("backlogQuota?backlogQuotaType=message_age", None, "DELETE")
    assert list(restoring(KeepsBacklog.name, before)) == [Write(SIZE, EVICTS), age]
    assert list(restoring(LimitsBacklog.name, before)) == [Write(SIZE, EVICTS)]
    assert list(restoring("retention", None)) == [Write("retention", None, "DELETE")]


@pytest.mark.parametrize(
    ("quotas", "expected"),
    [
        ({}, None),
        ({"message_age": {"limitTime": 60, "limitSize": 0}}, None),
        ({"destination_storage": {"limitSize": -1, "limitTime": -1}}, None),
        ({"destination_storage": {"limitSize": 500}}, 500),
        ({"destination_storage": {"limit": 500}}, 500),  # as older brokers write it
    ],
)
def test_size_limit_is_read_from_quotas(quotas: Quotas, expected: int | None) -> None:
    assert size_limit(quotas) == expected


@pytest.mark.parametrize(
    ("policy", "limit", "expected"),
    [
        ("producer_exception", 60, 60),
        ("producer_request_hold", 60, 60),
        ("consumer_backlog_eviction", 60, 0),
        ("producer_exception", -1, 0),
        ("producer_exception", None, 0),
    ],
)
def test_age_limit_is_that_of_a_quota_that_refuses(
    policy: str, limit: int | None, expected: int
) -> None:
    assert age_limit({"message_age": {"limitTime": limit, "policy": policy}}) == expected
    assert age_limit({"destination_storage": {"limitTime": limit, "policy": policy}}) == 0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, None),
        ({"backlogQuotaDefaultLimitGB": "-1.0", "backlogQuotaDefaultLimitBytes": "-1"}, None),
        ({"backlogQuotaDefaultLimitGB": "-1.0", "backlogQuotaDefaultLimitBytes": "500"}, 500),
        # The older setting goes before the newer one, as in the broker.
        ({"backlogQuotaDefaultLimitGB": "0.5", "backlogQuotaDefaultLimitBytes": "500"}, 2**29),
    ],
)
def test_size_limit_is_read_from_broker_settings(
    settings: dict[str, str], expected: int | None
) -> None:
    assert size_limit(default_quotas(settings)) == expected


EVICTING, REFUSING = "consumer_backlog_eviction", "producer_exception"


@pytest.mark.parametrize(
    ("quotas", "kind"),
    [
        ({}, ""),
        ({"destination_storage": {"limitSize": 500, "policy": REFUSING}}, ""),
        ({"destination_storage": {"limitSize": 500, "policy": EVICTING}}, "destination_storage"),
        ({"destination_storage": {"limit": 500, "policy": EVICTING}}, "destination_storage"),
        ({"destination_storage": {"limitSize": -1, "limit": -1, "policy": EVICTING}}, ""),
        ({"message_age": {"limitTime": 60, "limitSize": -1, "policy": EVICTING}}, "message_age"),
        ({"message_age": {"limitTime": 0, "policy": EVICTING}}, ""),
        ({"message_age": {"limitTime": 60}}, ""),
    ],
)
def test_quota_evicts_by_its_limit_and_policy(quotas: Quotas, kind: str) -> None:
    assert evicting(quotas) == kind


def test_default_quotas_have_limit_and_policy_of_broker() -> None:
    settings = {
        "backlogQuotaDefaultLimitBytes": "500",
        "backlogQuotaDefaultLimitSecond": "60",
        "backlogQuotaDefaultRetentionPolicy": EVICTING,
    }
    assert default_quotas(settings) == {
        "destination_storage": {"limitSize": 500, "policy": EVICTING},
        "message_age": {"limitTime": 60, "policy": EVICTING},
    }
    assert default_quotas({"backlogQuotaDefaultRetentionPolicy": EVICTING}) == {}

from __future__ import annotations

from typing import Any

import pytest

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
    default_quotas,
    evicting,
    restoring,
    size_limit,
    withdrawing,
)

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
            {"destination_storage": HOLDS, "message_age": EVICTS},
            Write("backlogQuota?backlogQuotaType=message_age", REFUSES),
        ),
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

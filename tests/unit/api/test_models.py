"""Models of the objects, their conditions, and the reference of reasons."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from redrive.api.conditions import (
    MAX_CONDITIONS,
    READY,
    RECONCILING,
    STALLED,
    Condition,
    ConditionStatus,
    StatusWarning,
    failed,
    merge,
    warning,
)
from redrive.api.connection import BrokerConnectionSpec
from redrive.api.model import parse_spec
from redrive.api.replay import PolicyKind, ReplaySpec
from redrive.api.replay_status import ReplayRun, ReplayStatus, RunCounts
from redrive.api.retrypolicy import RetryPolicySpec
from redrive.errors import InvalidSpecError
from redrive.policy import naming as naming_of
from redrive.policy.ladder import LEVELS, PRESETS
from redrive.policy.model import SubscriptionType
from redrive.policy.naming import Scheme, TopicName
from redrive.policy.values import format_duration
from redrive.reasons import Reason, Shown

names = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)
words = st.from_regex(r"[-_.a-zA-Z0-9]{1,20}", fullmatch=True).filter(
    lambda word: "-partition-" not in word and word not in {".", ".."}
)
topics = st.builds("persistent://{}/{}/{}".format, words, words, words)
delays = st.timedeltas(timedelta(seconds=1), timedelta(seconds=864_000)).map(format_duration)
ladders = st.one_of(
    st.fixed_dictionaries({"preset": st.sampled_from(sorted(PRESETS))}),
    st.fixed_dictionaries({"delays": st.lists(delays, min_size=1, max_size=5)}),
    st.fixed_dictionaries({"fixed": delays}),
    st.fixed_dictionaries(
        {
            "exponential": st.fixed_dictionaries(
                {
                    "initial": st.just("1s"),
                    "factorPercent": st.integers(110, 10_000),
                    "max": delays,
                    "jitterPercent": st.integers(0, 100),
                }
            )
        }
    ),
)
choices = {
    "maxRetries": st.integers(0, 1_000),
    "delayLadder": ladders,
    "delayLevels": st.lists(delays, min_size=1, max_size=5),
    "deletionPolicy": st.sampled_from(["Retain", "DeleteIfEmpty", "Delete"]),
}
tokens = st.fixed_dictionaries(
    {"secretRef": st.fixed_dictionaries({"name": names, "key": words})},
)
policies = st.fixed_dictionaries(
    {
        "connectionRef": st.fixed_dictionaries({"name": names}, optional={"namespace": names}),
        "topic": topics,
        "subscription": words,
        "subscriptionType": st.just("KeyShared"),
        "ordering": st.sampled_from(["None", "PerKey"]),
        "consumerRoles": st.lists(words, max_size=3, unique=True),
        "naming": st.fixed_dictionaries({"scheme": st.sampled_from(list(Scheme))}),
        "adoption": st.sampled_from(["Never", "IfPresent"]),
        "chaining": st.sampled_from(["Forbidden", "Allowed"]),
        "managementPolicy": st.sampled_from(["Manage", "Observe"]),
        "replay": st.fixed_dictionaries(
            {
                "approvalAbove": st.integers(0, 1_000),
                "safety": st.sampled_from(["Idempotent", "ReconcileFirst", "Never"]),
            }
        ),
        "retry": st.fixed_dictionaries(
            {"messageTTL": st.sampled_from(["Unlimited", "11d", "10d1s"])},
            optional={"partitions": st.integers(1, 256)},
        ),
        "deadLetter": st.fixed_dictionaries(
            {
                "mode": st.sampled_from(["Keep", "Discard"]),
                "messageTTL": st.just("Unlimited") | delays,
                "readerRoles": st.lists(words, max_size=3, unique=True),
                "sequenced": st.just(False),  # noqa: FBT003 - True needs other fields
            },
            optional={
                "partitions": st.integers(1, 256),
                "subscription": words,
                "retention": st.fixed_dictionaries(
                    {"time": st.sampled_from(["1m", "1h30m", "3650d", "Unlimited"])},
                    optional={"size": st.sampled_from(["8Gi", "1024Ti", "Unlimited"])},
                ),
                "backlogQuota": st.fixed_dictionaries(
                    {"size": st.sampled_from(["1Mi", "2000k", "7Gi"])}
                ),
            },
        ),
    },
    optional=choices,
)
labels = st.dictionaries(words, words, min_size=1, max_size=2)
rule_names = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True)
expressions = st.builds(
    lambda key, operator, values: {
        "key": key,
        "operator": operator,
        "values": values if operator in {"In", "NotIn"} else [],
    },
    st.builds("{}{}".format, st.just("") | st.builds("{}/".format, names), names),
    st.sampled_from(["In", "NotIn", "Exists", "DoesNotExist"]),
    st.lists(words, min_size=1, max_size=2),
)
selectors = st.fixed_dictionaries(
    {"matchExpressions": st.lists(expressions, max_size=2)}, optional={"matchLabels": labels}
)
rules = st.fixed_dictionaries(
    {
        "name": rule_names,
        "topics": st.lists(topics, max_size=3),
        "roles": st.lists(words, max_size=3, unique=True),
        "adoption": st.sampled_from(["Never", "Allowed"]),
        "deletion": st.sampled_from(["Never", "Allowed"]),
    },
    optional={
        "namespaces": st.fixed_dictionaries({"names": st.lists(names, max_size=3)})
        | st.fixed_dictionaries({"selector": selectors})
    },
)
methods: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"type": st.just("Token"), "token": tokens}
) | st.just({"type": "None"})
identities = st.fixed_dictionaries({"role": words, "authentication": methods})
brokers = st.fixed_dictionaries(
    {
        "serviceURL": st.builds("pulsar://{}:{}".format, names, st.integers(1, 65_535)),
        "adminURL": st.builds("https://{}:{}".format, names, st.integers(1, 65_535)),
        "authentication": methods,
        "redirectHosts": st.lists(words, max_size=3, unique=True),
    }
)
connections = st.fixed_dictionaries(
    {
        "pulsar": brokers,
        "allow": st.lists(rules, max_size=3),
    },
    optional={
        "replay": identities,
        "policyDefaults": st.fixed_dictionaries(
            {"maxRetries": choices["maxRetries"]},
            optional={name: values for name, values in choices.items() if name != "maxRetries"},
        ),
    },
)
letter_ids = st.builds("{}:{}:{}:{}".format, *[st.integers(0, 9)] * 2, *[st.integers(-1, 9)] * 2)
targets = st.fixed_dictionaries(
    {
        "target": st.fixed_dictionaries({"type": st.sampled_from(["Retry", "Source"])}),
        "guarantee": st.sampled_from(["ExactlyOnce", "AtLeastOnce"]),
        "mode": st.sampled_from(["Run", "Review"]),
        "followFor": st.sampled_from(["30s", "2h"]),
    }
) | st.just(
    {
        "target": {"type": "Topic", "topic": "persistent://shop/prod/checked"},
        "guarantee": "ExactlyOnce",
    }
)
replays = st.fixed_dictionaries(
    {
        "policyRef": st.fixed_dictionaries({"kind": st.sampled_from(PolicyKind), "name": names}),
        "mode": st.sampled_from(["Run", "Plan", "Review"]),
        "suspend": st.booleans(),
        "cancel": st.booleans(),
        "sending": st.sampled_from(["Individual", "Batched"]),
        "engine": st.sampled_from(["Auto", "Job", "Spark"]),
    },
    optional={
        "select": st.fixed_dictionaries(
            {"where": st.text(min_size=1, max_size=50)},
            optional={
                "ids": st.lists(letter_ids, min_size=1, max_size=3, unique=True),
                "keys": st.lists(st.text(min_size=1, max_size=9), min_size=1, unique=True),
                "causes": st.lists(st.text(max_size=9), min_size=1, max_size=3, unique=True),
                "fingerprints": st.just(["0f4a9c31d2be7755"]),
                "since": st.just("2026-11-20T10:00:00.5+01:00"),
                "until": st.just("2026-11-20T09:00:01Z"),
                "limit": st.integers(1, 256),
            },
        ),
        "rateLimit": st.fixed_dictionaries(
            {"messages": st.integers(1, 1_000_000), "per": st.sampled_from(["1s", "10s"])}
        ),
        "startBefore": st.just("2026-11-20T10:00:00Z"),
        "confirmations": st.sampled_from(
            [["Reconciled"], ["Reconciled", "DiscardUnreadable", "UnprovenHandled"]]
        ),
        "maxReplays": st.integers(1, 9),
        "deadline": st.just("2h30m"),
        "ttlAfterFinished": st.just("1s"),
        "reason": st.text(min_size=1, max_size=50),
        "ticket": st.text(min_size=1, max_size=50),
    },
)

MINIMAL = {
    "connectionRef": {"name": "main"},
    "topic": "persistent://shop/prod/orders",
    "subscription": "fulfilment",
}


def policy_spec(**fields: object) -> RetryPolicySpec:
    return parse_spec(RetryPolicySpec, {"spec": MINIMAL | fields})


def connection_spec(**fields: object) -> BrokerConnectionSpec:
    spec = {
        "pulsar": {
            "serviceURL": "pulsar://pulsar:6650",
            "adminURL": "http://pulsar:8080",
            "authentication": {"type": "None"},
        }
    }
    return parse_spec(BrokerConnectionSpec, {"spec": spec | fields})


@given(policies)
def test_retry_policy_round_trips(spec: dict[str, Any]) -> None:
    assert parse_spec(RetryPolicySpec, {"spec": spec}).to_manifest() == spec


@given(connections)
def test_broker_connection_round_trips(spec: dict[str, Any]) -> None:
    assert parse_spec(BrokerConnectionSpec, {"spec": spec}).to_manifest() == spec


@given(replays, targets)
def test_replay_round_trips(spec: dict[str, Any], target: dict[str, Any]) -> None:
    whole = {**spec, **target}
    if spec["policyRef"]["kind"] == "RocketMQRetryPolicy":
        if "topic" in target["target"]:
            whole["target"] = {"type": "Topic", "topic": "orders-repair"}
        if "ids" in spec.get("select", {}):
            whole["select"] = {**spec["select"], "ids": ["broker-a:0:17"]}
    assert parse_spec(ReplaySpec, {"spec": whole}).to_manifest() == whole


def test_minimal_policy_has_the_defaults() -> None:
    policy = policy_spec().to_policy("shop/orders", 7)
    assert (policy.name, policy.generation) == ("shop/orders", 7)
    assert policy.subscription_type is SubscriptionType.SHARED
    assert policy.max_retries == 16
    assert policy.ladder.rungs == LEVELS


def test_policy_spec_fields_reach_the_consumer_policy() -> None:
    policy = policy_spec(
        subscriptionType="KeyShared", maxRetries=0, delayLadder={"delays": ["1m30s", "10d"]}
    ).to_policy("shop/orders", 1)
    assert policy.subscription_type is SubscriptionType.KEY_SHARED
    assert policy.max_retries == 0
    assert policy.ladder.rungs == (timedelta(seconds=90), timedelta(days=10))


@pytest.mark.parametrize(
    ("ladder", "first"),
    [
        ({"preset": "TDMQ"}, 1),
        ({"delays": ["3s", "1m"]}, 3),
        ({"fixed": "5s"}, 5),
        ({"exponential": {"initial": "2s", "max": "1m"}}, 2),
        (None, 1),
    ],
)
def test_ordering_per_key_accepts_any_ladder(ladder: dict[str, Any] | None, first: int) -> None:
    fields = {} if ladder is None else {"delayLadder": ladder}
    options = {"subscriptionType": "KeyShared", **fields}
    policy = policy_spec(ordering="PerKey", **options).to_policy("shop/orders", 1)
    assert policy.ordered
    assert policy.ladder.delay(1) == timedelta(seconds=first)
    for ordering in ({}, {"ordering": "None"}):
        assert not policy_spec(**ordering, **options).to_policy("shop/orders", 1).ordered


def test_exponential_ladder_defaults_to_factor_2_without_jitter() -> None:
    options = {"exponential": {"initial": "1s", "max": "5s"}}
    ladder = policy_spec(delayLadder=options).to_policy("shop/orders", 1).ladder
    assert [rung.total_seconds() for rung in ladder.rungs] == [1, 2, 4, 5]
    assert ladder.jitter == 0


def test_naming_and_dead_letter_mode_follow_the_policy() -> None:
    naming = {"scheme": "SubscriptionLower", "deadLetterTopic": "persistent://shop/prod/dead"}
    policy = policy_spec(naming=naming, deadLetter={"mode": "Discard"}).to_policy("", 1)
    assert str(policy.retry_topic) == "persistent://shop/prod/fulfilment-retry"
    assert str(policy.dead_letter_topic) == "persistent://shop/prod/dead"
    assert not policy.dead_letters


def test_connection_defaults_fill_omitted_policy_fields() -> None:
    defaults = connection_spec(
        policyDefaults={"maxRetries": 3, "delayLevels": ["7s"], "delayLadder": {"fixed": "5s"}}
    ).policy_defaults
    own = policy_spec(delayLadder={"fixed": "9s"}, maxRetries=0)
    for spec, retries, delay in ((policy_spec(), 3, 5), (own, 0, 9)):
        policy = spec.completed(defaults).to_policy("", 1)
        assert policy.max_retries == retries
        assert policy.ladder.rungs == (timedelta(seconds=delay),)
        assert policy.levels.rungs == (timedelta(seconds=7),)
    assert own.completed(None) is own


def test_ladder_has_at_most_a_thousand_rungs() -> None:
    assert len(policy_spec(delayLadder={"delays": ["1s"] * 1_000}).to_policy("", 1).ladder.rungs)
    with pytest.raises(InvalidSpecError, match=r"delayLadder\.delays: .* at most 1000 .* 1001"):
        policy_spec(delayLadder={"delays": ["1s"] * 1_001})


def test_spec_is_immutable() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        policy_spec().subscription = "other"  # type: ignore[misc]


def test_status_of_newer_operator_can_be_read() -> None:
    run = {"counts": {"matched": 3}}
    newer = {"phase": "Running", "run": {**run, "later": 1}, "fromTheFuture": 1}
    status = ReplayStatus.model_validate(newer)
    assert status.to_manifest() == {"phase": "Running", "run": run, "conditions": []}


@pytest.mark.parametrize("fields", [{}, {"naming": {}}, {"naming": {"scheme": None}}])
def test_topic_names_depend_on_the_policy_alone(fields: dict[str, Any]) -> None:
    topic = TopicName("shop", "prod", "orders")
    spec = policy_spec(**fields)
    assert spec.retry_topic == naming_of.retry_topic(topic, "fulfilment", Scheme.PULSAR)
    assert spec.dead_letter_topic == naming_of.dead_letter_topic(topic, "fulfilment", Scheme.PULSAR)


def test_connection_without_rules_allows_nothing() -> None:
    cases: tuple[dict[str, Any], ...] = ({}, {"allow": None}, {"allow": []})
    for fields in cases:
        assert connection_spec(**fields).permissions("shop", {}, "shop").rules == ()


@pytest.mark.parametrize("empty", [None, {}, {"size": None}, {"size": {}}])
def test_empty_object_equals_one_left_out(empty: dict[str, Any] | None) -> None:
    """Objects that server-side apply has emptied are null, or empty from Kubernetes 1.36 on."""
    for name in ("delayLadder", "outageBreaker", "retry", "deadLetter", "naming", "replay"):
        assert policy_spec(**{name: None if empty is None else {}}) == policy_spec()
    letters = policy_spec(deadLetter={"retention": empty, "backlogQuota": empty})
    assert letters == policy_spec()
    ladder = {"fixed": "5s", "exponential": {"initial": None}}
    assert policy_spec(delayLadder=ladder) == policy_spec(delayLadder={"fixed": "5s"})


def test_lifted_limit_differs_from_one_left_out() -> None:
    spec = policy_spec(deadLetter={"retention": {"time": "Unlimited"}}).dead_letter
    assert spec.ttl_seconds == 0
    assert spec.retention is not None
    assert spec.retention.to_broker() == {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}
    assert policy_spec().dead_letter.retention is None


def test_retention_is_rounded_up_for_the_broker() -> None:
    retention = {"time": "1m30s", "size": "1500k"}
    spec = policy_spec(deadLetter={"retention": retention}).dead_letter
    assert spec.retention is not None
    assert spec.retention.to_broker() == {"retentionTimeInMinutes": 2, "retentionSizeInMB": 2}


@pytest.mark.parametrize(
    ("model", "field"),
    [
        (model, field)
        for model in (ReplayStatus, ReplayRun, RunCounts)
        for field in sorted(model.model_fields)
    ],
)
def test_unreadable_status_field_is_omitted_alone(
    model: type[ReplayStatus | ReplayRun | RunCounts], field: str
) -> None:
    spoilt = model.model_fields[field].alias or field
    valid: dict[type, dict[str, object]] = {
        ReplayStatus: {"phase": "Running", "sparkApplication": "it"},
        ReplayRun: {"finished": True, "progress": "2/3"},
        RunCounts: {"matched": 3, "moved": 2},
    }
    read = valid[model]
    for value in ([{"no": "such"}], {"causes": [{}]}, object()):
        status = model.model_validate({**read, spoilt: value})
        kept = {name: content for name, content in read.items() if name != spoilt}
        assert status == model.model_validate(kept)


BEFORE = datetime(2026, 11, 21, 9, 0, tzinfo=UTC)
NOW = BEFORE + timedelta(minutes=5)


def ready(status: ConditionStatus, reason: str = "Provisioned") -> Condition:
    return Condition(type=READY, status=status, reason=reason, message="", observed_generation=1)


def test_new_condition_transitions_now() -> None:
    (merged,) = merge([], [ready(ConditionStatus.TRUE)], NOW)
    assert merged.last_transition_time == NOW


@pytest.mark.parametrize(
    ("status", "moment"), [(ConditionStatus.FALSE, BEFORE), (ConditionStatus.TRUE, NOW)]
)
def test_transition_time_changes_only_with_the_status(
    status: ConditionStatus, moment: datetime
) -> None:
    old = merge([], [ready(ConditionStatus.FALSE, "TopicNotFound")], BEFORE)
    (merged,) = merge(old, [ready(status, "BrokerUnreachable")], NOW)
    assert merged.reason == "BrokerUnreachable"
    assert merged.last_transition_time == moment


def test_transition_time_in_year_1_keeps_four_digits() -> None:
    read = Condition.model_validate(
        {
            "type": READY,
            "status": "True",
            "reason": "Provisioned",
            "message": "",
            "lastTransitionTime": "0001-01-01T00:00:00Z",
        }
    )
    assert read.to_manifest()["lastTransitionTime"] == "0001-01-01T00:00:00Z"


def test_merge_removes_conditions_without_a_new_value() -> None:
    waiting = Condition(
        type=RECONCILING, status=ConditionStatus.TRUE, reason="TopicNotFound", message="x"
    )
    old = merge([], [ready(ConditionStatus.FALSE), waiting], BEFORE)
    assert [c.type for c in merge(old, [ready(ConditionStatus.TRUE)], NOW)] == [READY]


def test_merge_cuts_the_last_of_too_many_warnings() -> None:
    warnings = [warning(StatusWarning(f"Warning{n}", "a warning")) for n in range(40)]
    merged = merge((), [ready(ConditionStatus.TRUE), *warnings], NOW)
    assert len(merged) == MAX_CONDITIONS
    assert [merged[0].type, merged[-1].type] == ["Ready", "Warning30"]


def test_condition_round_trips_through_its_manifest() -> None:
    (condition,) = merge([], [ready(ConditionStatus.UNKNOWN)], NOW)
    assert Condition.model_validate(condition.to_manifest()) == condition


def test_transition_time_is_written_in_utc_seconds() -> None:
    moment = datetime(2026, 11, 21, 10, 5, 3, 999, tzinfo=timezone(timedelta(hours=1)))
    (condition,) = merge([], [ready(ConditionStatus.TRUE)], moment)
    assert condition.to_manifest() == {
        "type": "Ready",
        "status": "True",
        "reason": "Provisioned",
        "message": "",
        "lastTransitionTime": "2026-11-21T09:05:03Z",
        "observedGeneration": 1,
    }


WARNINGS = Path(__file__).parents[3] / "docs" / "reference" / "warnings.md"


def test_errors_are_shown_where_their_reason_is() -> None:
    """An error stalls its object or is waited for; a log line has no condition."""
    stalled, waited = (
        {reason for reason in Reason if failed(reason.error("a", remedy="b"))[1].type == kind}
        for kind in (STALLED, RECONCILING)
    )
    assert stalled == {reason for reason in Reason if reason.shown is Shown.STALLED}
    assert Reason.INTERNAL_ERROR in waited
    assert all(Reason.of(reason.error("a", remedy="b")) is reason for reason in Reason)


def test_every_warning_condition_is_documented() -> None:
    rows = re.findall(r"^\| (`.*?`) \|", WARNINGS.read_text("utf-8"), re.MULTILINE)
    listed = {reason for row in rows for reason in re.findall(r"`(\w+)`", row)}
    warned = {str(reason) for reason in Reason if reason.shown is Shown.WARNING}
    # Conflicts stall the younger policy, and are a warning of the older one.
    # A run that waits for its approval is not ready, and needs attention.
    assert listed == warned | {"ResourceConflict", "NameCollision", "ApprovalRequired"}

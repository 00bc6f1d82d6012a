from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from redrive.api.connection import BrokerConnectionSpec, ReplayIdentity
from redrive.api.model import InvalidFieldsError, parse_spec
from redrive.api.policy_defaults import kept_scheme
from redrive.api.replay import ReplaySpec, ReplayStatus
from redrive.api.retrypolicy import RetryPolicySpec
from redrive.policy import naming as naming_of
from redrive.policy.ladder import LEVELS, PRESETS
from redrive.policy.model import SubscriptionType
from redrive.policy.naming import Scheme, TopicName
from redrive.policy.values import format_duration

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
                    "factor": st.floats(1.1, 100),
                    "max": delays,
                    "jitter": st.floats(0, 1),
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
        "subscriptionType": st.just("Key_Shared"),
        "ordering": st.sampled_from(["None", "PerKey"]),
        "consumerRoles": st.lists(words, max_size=3, unique=True),
        "naming": st.fixed_dictionaries({"scheme": st.sampled_from(list(Scheme))}),
        "adopt": st.booleans(),
        "chained": st.booleans(),
        "managementPolicy": st.sampled_from(["Manage", "Observe"]),
        "replayApprovalAbove": st.integers(0, 1_000),
        "replaySafety": st.sampled_from(["Idempotent", "ReconcileFirst", "Never"]),
        "retry": st.fixed_dictionaries(
            {"messageTTL": st.sampled_from(["0s", "11d", "10d1s"])},
            optional={"partitions": st.integers(1, 1_000)},
        ),
        "deadLetter": st.fixed_dictionaries(
            {
                "mode": st.sampled_from(["Keep", "Discard"]),
                "messageTTL": st.just("0s") | delays,
                "readerRoles": st.lists(words, max_size=3, unique=True),
                "sequenced": st.just(False),  # noqa: FBT003 - True needs other fields
            },
            optional={
                "partitions": st.integers(1, 1_000),
                "subscription": words,
                "retention": st.fixed_dictionaries(
                    {},
                    optional={
                        "time": st.sampled_from(["1m", "1h30m", "3650d"]),
                        "size": st.sampled_from(["8Gi", "1024Ti"]),
                    },
                ),
                "backlogQuota": st.fixed_dictionaries(
                    {"size": st.sampled_from(["1Mi", "2000k", "7Gi"])}
                ),
            },
        ),
    },
    optional=choices,
)
labels = st.dictionaries(words, words, max_size=2)
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
        "topics": st.lists(topics, max_size=3),
        "roles": st.lists(words, max_size=3, unique=True),
        "adopt": st.booleans(),
        "delete": st.booleans(),
    },
    optional={
        "namespaces": st.fixed_dictionaries({"names": st.lists(names, max_size=3)})
        | st.fixed_dictionaries({"selector": selectors})
    },
)
methods: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries({"token": tokens}) | st.just(
    {"none": {}}
)
identities = st.fixed_dictionaries({"role": words, "authentication": methods})
connections = st.fixed_dictionaries(
    {
        "serviceUrl": st.builds("pulsar://{}:{}".format, names, st.integers(1, 65_535)),
        "adminUrl": st.builds("https://{}:{}".format, names, st.integers(1, 65_535)),
        "authentication": methods,
        "redirectHosts": st.lists(words, max_size=3, unique=True),
        "allow": st.lists(rules, max_size=3),
    },
    optional={
        "replay": st.fixed_dictionaries({"role": words, "token": tokens}) | identities,
        "policyDefaults": st.fixed_dictionaries({}, optional=choices),
    },
)
letter_ids = st.builds("{}:{}:{}:{}".format, *[st.integers(0, 9)] * 2, *[st.integers(-1, 9)] * 2)
targets = st.fixed_dictionaries(
    {
        "target": st.sampled_from(["Retry", "Source"]),
        "guarantee": st.sampled_from(["ExactlyOnce", "AtLeastOnce"]),
        "dryRun": st.sampled_from([False]),
        "followFor": st.sampled_from(["30s", "2h"]),
    }
) | st.just(
    {
        "target": "Topic",
        "targetTopic": "persistent://shop/prod/checked",
        "guarantee": "ExactlyOnce",
    }
)
replays = st.fixed_dictionaries(
    {
        "policyRef": st.fixed_dictionaries({"name": names}),
        "dryRun": st.booleans(),
        "suspend": st.booleans(),
        "reconciled": st.booleans(),
        "batch": st.booleans(),
    },
    optional={
        "select": st.fixed_dictionaries(
            {"where": st.text(min_size=1, max_size=50)},
            optional={
                "ids": st.lists(letter_ids, min_size=1, max_size=3, unique=True),
                "keys": st.lists(st.text(min_size=1, max_size=9), min_size=1, unique=True),
                "since": st.just("2026-11-20T10:00:00.5+01:00"),
                "until": st.just("2026-11-20T09:00:01Z"),
                "limit": st.integers(1, 1_000),
            },
        ),
        "rateLimit": st.fixed_dictionaries({"messagesPerSecond": st.floats(0.1, 1_000_000)}),
        "maxReplays": st.integers(1, 9),
        "deadline": st.just("2h30m"),
        "ttlAfterFinished": st.just("0s"),
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
    return parse_spec(RetryPolicySpec, {"spec": MINIMAL | fields}).effective(None, None)


def connection_spec(**fields: object) -> BrokerConnectionSpec:
    spec = {
        "serviceUrl": "pulsar://pulsar:6650",
        "adminUrl": "http://pulsar:8080",
        "authentication": {"token": {"secretRef": {"name": "pulsar-admin", "key": "token"}}},
        "allow": [],
    }
    fields = {name: value for name, value in (spec | fields).items() if value is not None}
    return parse_spec(BrokerConnectionSpec, {"spec": fields})


@given(policies)
def test_retry_policy_round_trips(spec: dict[str, Any]) -> None:
    assert parse_spec(RetryPolicySpec, {"spec": spec}).to_manifest() == spec


@given(connections)
def test_broker_connection_round_trips(spec: dict[str, Any]) -> None:
    assert parse_spec(BrokerConnectionSpec, {"spec": spec}).to_manifest() == spec


@given(replays, targets)
def test_replay_round_trips(spec: dict[str, Any], target: dict[str, str]) -> None:
    whole = spec | target
    assert parse_spec(ReplaySpec, {"spec": whole}).to_manifest() == whole


def test_minimal_policy_has_the_defaults() -> None:
    policy = policy_spec().to_policy("shop/orders", 7)
    assert (policy.name, policy.generation) == ("shop/orders", 7)
    assert policy.subscription_type is SubscriptionType.SHARED
    assert policy.max_retries == 16
    assert policy.ladder.rungs == LEVELS


def test_policy_spec_fields_reach_the_consumer_policy() -> None:
    policy = policy_spec(
        subscriptionType="Key_Shared", maxRetries=0, delayLadder={"delays": ["1m30s", "10d"]}
    ).to_policy("shop/orders", 1)
    assert policy.subscription_type is SubscriptionType.KEY_SHARED
    assert policy.max_retries == 0
    assert policy.ladder.rungs == (timedelta(seconds=90), timedelta(days=10))


@pytest.mark.parametrize(
    ("ladder", "first"),
    [
        ({"preset": "tdmq"}, 1),
        ({"delays": ["3s", "1m"]}, 3),
        ({"fixed": "5s"}, 5),
        ({"exponential": {"initial": "2s", "max": "1m"}}, 2),
        (None, 1),
    ],
)
def test_ordering_per_key_accepts_any_ladder(ladder: dict[str, Any] | None, first: int) -> None:
    fields = {} if ladder is None else {"delayLadder": ladder}
    options = {"subscriptionType": "Key_Shared", **fields}
    policy = policy_spec(ordering="PerKey", **options).to_policy("shop/orders", 1)
    assert policy.ordered
    assert policy.ladder.delay(1) == timedelta(seconds=first)
    for ordering in ({}, {"ordering": "None"}):
        assert not policy_spec(**ordering, **options).to_policy("shop/orders", 1).ordered


def test_old_ordered_ladder_is_read_with_an_edit() -> None:
    old = policy_spec(subscriptionType="Key_Shared", delayLadder={"ordered": "5s"})
    policy = old.to_policy("shop/orders", 1)
    assert policy.ordered
    assert policy.ladder.rungs == (timedelta(seconds=5),)
    (edit,) = old.edits
    assert edit.endswith("by delayLadder.fixed: 5s, and give ordering: PerKey")
    with pytest.raises(InvalidFieldsError, match="use Key_Shared, or ordering None"):
        policy_spec(delayLadder={"ordered": "5s"})


def test_exponential_ladder_defaults_to_factor_2_without_jitter() -> None:
    options = {"exponential": {"initial": "1s", "max": "5s"}}
    ladder = policy_spec(delayLadder=options).to_policy("shop/orders", 1).ladder
    assert [rung.total_seconds() for rung in ladder.rungs] == [1, 2, 4, 5]
    assert ladder.jitter == 0


def test_naming_and_dead_letter_mode_follow_the_policy() -> None:
    naming = {"scheme": "tdmq-2.6.1", "deadLetterTopic": "persistent://shop/prod/dead"}
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


@pytest.mark.parametrize(
    ("own", "kept", "by_connection", "scheme"),
    [
        (None, None, None, "pulsar"),
        (None, None, "rocketmq", "rocketmq"),
        (None, "tdmq-2.7.2", "rocketmq", "tdmq-2.7.2"),
        (None, "tdmq-2.7.2", None, "tdmq-2.7.2"),
        ("pulsar", None, "rocketmq", "pulsar"),
    ],
)
def test_naming_scheme_is_of_policy_then_status_then_connection(
    own: str | None, kept: str | None, by_connection: str | None, scheme: str
) -> None:
    naming = {} if own is None else {"naming": {"scheme": own}}
    defaults = {} if by_connection is None else {"naming": {"scheme": by_connection}}
    written = parse_spec(RetryPolicySpec, {"spec": MINIMAL | naming})
    status = {} if kept is None else {"namingScheme": kept}
    spec = written.effective(
        connection_spec(policyDefaults=defaults).policy_defaults, kept_scheme(status)
    )
    expected = Scheme(scheme)
    assert spec.scheme is expected
    topic = TopicName("shop", "prod", "orders")
    assert spec.retry_topic == naming_of.retry_topic(topic, "fulfilment", expected)
    assert spec.dead_letter_topic == naming_of.dead_letter_topic(topic, "fulfilment", expected)
    assert spec.effective(None, Scheme.TDMQ_2_6_1) == spec


def test_naming_scheme_without_a_record_is_pulsar() -> None:
    assert kept_scheme({"retryTopic": "x"}) is Scheme.PULSAR
    assert kept_scheme({"retryTopic": "x", "namingScheme": "rocketmq"}) is Scheme.ROCKETMQ
    assert kept_scheme({"conditions": []}) is None


def test_topic_names_need_a_known_naming_scheme() -> None:
    written = parse_spec(RetryPolicySpec, {"spec": MINIMAL})
    with pytest.raises(LookupError, match="naming scheme"):
        assert written.retry_topic
    names = {"retryTopic": "persistent://shop/prod/again"}
    named = parse_spec(RetryPolicySpec, {"spec": MINIMAL | {"naming": names}})
    assert str(named.retry_topic) == names["retryTopic"]


def test_ladder_has_at_most_a_thousand_rungs() -> None:
    assert len(policy_spec(delayLadder={"delays": ["1s"] * 1_000}).to_policy("", 1).ladder.rungs)
    with pytest.raises(InvalidFieldsError, match=r"delayLadder\.delays: .* at most 1000 .* 1001"):
        policy_spec(delayLadder={"delays": ["1s"] * 1_001})


def test_spec_is_immutable() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        policy_spec().subscription = "other"  # type: ignore[misc]


def test_old_allow_lists_are_read_as_one_rule_with_an_edit() -> None:
    old = connection_spec(
        allow=None,
        allowedTopics=["persistent://shop/*/*"],
        allowedRoles=["shop-*"],
        allowedNamespaces=["shop", "other"],
    )
    (edit,) = old.edits
    before, written = edit.split(" by allow: ")
    assert before == "replace allowedTopics, allowedRoles, allowedNamespaces"
    new = connection_spec(allow=json.loads(written))
    assert new.rules == old.rules
    assert new.edits == ()
    topic = TopicName("shop", "prod", "orders")
    for namespace, allowed in (("shop", True), ("other", True), ("third", False)):
        assert old.permissions(namespace, {}, "shop").allows_role("shop-a", topic) is allowed
    assert old.permissions("shop", {}, "shop").allows_deletion(topic)
    assert not old.permissions("shop", {}, "shop").allows_adoption(topic)


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"allow": None}, "got 'none'; give allow"),
        ({"allow": None, "allowedTopics": []}, "got 'none'; give allow"),
        ({"allowedRoles": []}, "got 'both'; give allow, and take allowedTopics"),
    ],
)
def test_connection_needs_rules_or_old_lists_not_both(fields: dict[str, Any], shown: str) -> None:
    with pytest.raises(InvalidFieldsError, match=f"^spec: .*{shown}"):
        connection_spec(**fields)


def test_status_of_newer_operator_can_be_read() -> None:
    status = ReplayStatus.model_validate({"phase": "Running", "matched": 3, "fromTheFuture": 1})
    assert status.to_manifest() == {"phase": "Running", "matched": 3, "conditions": []}


def test_old_dead_letter_fields_are_read_with_edits() -> None:
    old = policy_spec(
        deadLetter={
            "enabled": False,
            "retention": {"megabytes": 2048},
            "backlogQuota": {"megabytes": 1024},
        }
    )
    new = policy_spec(
        deadLetter={
            "mode": "Discard",
            "retention": {"size": "2Gi"},
            "backlogQuota": {"size": "1Gi"},
        }
    )
    assert old.edits == (
        "replace deadLetter.enabled by deadLetter.mode: Discard",
        "replace deadLetter.retention.megabytes by deadLetter.retention.size: 2048Mi",
        "replace deadLetter.backlogQuota.megabytes by deadLetter.backlogQuota.size: 1024Mi",
    )
    assert new.edits == ()
    for spec in (old.dead_letter, new.dead_letter):
        assert not spec.keeps
        assert spec.retention is not None
        assert spec.retention.to_broker() == {
            "retentionTimeInMinutes": -1,
            "retentionSizeInMB": 2048,
        }
        assert spec.backlog_quota is not None
        assert spec.backlog_quota.bytes == 2**30


def test_old_default_of_dead_letters_needs_no_edit() -> None:
    assert policy_spec(deadLetter={"enabled": True}).edits == ()
    both = policy_spec(deadLetter={"enabled": True, "mode": "Discard"})
    assert not both.dead_letter.keeps
    assert both.edits == ()


def test_retention_is_rounded_up_for_the_broker() -> None:
    retention = {"time": "1m30s", "size": "1500k"}
    spec = policy_spec(deadLetter={"retention": retention}).dead_letter
    assert spec.retention is not None
    assert spec.retention.to_broker() == {"retentionTimeInMinutes": 2, "retentionSizeInMB": 2}


@pytest.mark.parametrize("both", [True, False])
def test_replay_identity_needs_exactly_one_credential_field(*, both: bool) -> None:
    token = {"secretRef": {"name": "replayer", "key": "token"}}
    fields = {"token": token, "authentication": {"none": {}}} if both else {}
    with pytest.raises(ValidationError, match="exactly one of authentication, token"):
        ReplayIdentity.model_validate({"role": "replayer", **fields})


def test_old_replay_token_field_is_read_with_an_edit() -> None:
    token = {"secretRef": {"name": "replayer", "key": "token"}}
    old = connection_spec(replay={"role": "replayer", "token": token})
    new = connection_spec(replay={"role": "replayer", "authentication": {"token": token}})
    assert old.replay is not None
    assert new.replay is not None
    assert old.replay.credentials == new.replay.credentials
    (edit,) = old.edits
    written = json.dumps({"token": token})
    assert edit == f"replace replay.token by replay.authentication: {written}"
    assert new.edits == ()


@pytest.mark.parametrize("field", sorted(ReplayStatus.model_fields))
def test_unreadable_status_field_is_omitted_alone(field: str) -> None:
    spoilt = ReplayStatus.model_fields[field].alias or field
    read = {"matched": 3, "moved": 2, "phase": "Running"}
    for value in ([{"no": "such"}], {"causes": [{}]}, object()):
        status = ReplayStatus.of({"status": {**read, spoilt: value}})
        kept = {name: content for name, content in read.items() if name != spoilt}
        assert status == ReplayStatus.model_validate(kept)

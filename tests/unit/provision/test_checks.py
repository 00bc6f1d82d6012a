"""Checks of a policy: admission, evidence of the broker, and claims of older policies."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from redrive.admin.model import NamespaceState, TopicSubscriptions
from redrive.api import Body
from redrive.api.permissions import NamespaceLimits, Permissions
from redrive.errors import OwnerConflictError, RedriveError
from redrive.kube.resources import Key
from redrive.policy.naming import TopicName
from redrive.provision.checks import (
    ADMISSION,
    PREFLIGHT,
    Checks,
    Evidence,
    has_other_partitioning,
    namespace_expires_subscriptions,
    prior_claim,
    rights_exceed_record,
    source_has_too_many_partitions,
)
from redrive.provision.desired import Observed, TopicRole, TopicState, desired
from redrive.provision.outcome import Outcome
from redrive.provision.request import Request

MakeBody = Callable[..., dict[str, Any]]
MakeRequest = Callable[..., Request]
SOURCE = "persistent://shop/prod/orders"


def first_violation(checks: Checks[Any], evidence: object) -> RedriveError | None:
    return next(checks.violations(evidence), None)


def test_policy_within_allowed_limits_is_admitted(policy: MakeBody, requested: MakeRequest) -> None:
    assert first_violation(ADMISSION, requested(policy())) is None


@pytest.mark.parametrize(
    ("changes", "reason", "value"),
    [
        (
            {"topic": "persistent://other/prod/orders"},
            "TopicNotAllowed",
            "'persistent://other/prod/orders'",
        ),
        (
            {"naming": {"retryTopic": "persistent://shop/prod/again"}},
            "TopicNotAllowed",
            "'persistent://shop/prod/again'",
        ),
        (
            {"naming": {"deadLetterTopic": "persistent://shop/prod/dead"}},
            "TopicNotAllowed",
            "'persistent://shop/prod/dead'",
        ),
        ({"consumerRoles": ["fulfilment", "root"]}, "RoleNotAllowed", "'root'"),
        ({"deadLetter": {"readerRoles": ["oncall"]}}, "RoleNotAllowed", "'oncall'"),
    ],
)
def test_policy_beyond_allowed_limits_is_refused(
    policy: MakeBody, requested: MakeRequest, changes: dict[str, Any], reason: str, value: str
) -> None:
    only = ["persistent://shop/*/orders*"]
    violation = first_violation(
        ADMISSION,
        requested(
            policy(**changes), allow=[{"name": "one", "topics": only, "roles": ["fulfilment"]}]
        ),
    )
    assert violation is not None
    assert violation.reason == reason
    assert f"got {value};" in str(violation)


def test_refusal_lists_only_first_allowed_values(policy: MakeBody, requested: MakeRequest) -> None:
    topics = [f"persistent://shop/prod/{'t' * 900}-{n}" for n in range(64)]
    roles = [f"{'r' * 200}-{n}" for n in range(64)]
    for rule, last in (
        ({"name": "one", "topics": topics}, topics[4]),
        ({"name": "one", "topics": ["persistent://shop/*/*"], "roles": roles}, roles[4]),
    ):
        violation = first_violation(ADMISSION, requested(policy(), allow=[rule]))
        assert violation is not None
        assert f"{last}, and 59 more)" in str(violation)
        assert len(str(violation)) < 6_000


@pytest.mark.parametrize(
    ("allowed", "kind", "topic"),
    [
        ([], "retry topic", f"{SOURCE}-eu-billing-RETRY"),
        ([f"{SOURCE}-eu-billing-RETRY"], "dead-letter topic", f"{SOURCE}-eu-billing-DLQ"),
        ([f"{SOURCE}-eu-billing-DLQ"], "retry topic", f"{SOURCE}-eu-billing-RETRY"),
    ],
)
def test_derived_topic_outside_rules_is_refused(
    policy: MakeBody, requested: MakeRequest, allowed: list[str], kind: str, topic: str
) -> None:
    body = policy(topic=SOURCE, subscription="eu-billing")
    violation = first_violation(
        ADMISSION, requested(body, allow=[{"name": "one", "topics": [SOURCE, *allowed]}])
    )
    assert violation is not None
    assert violation.reason == "TopicNotAllowed"
    assert f"may not use this {kind}" in str(violation)
    assert f"got '{topic}'; add it to a rule" in str(violation)


def test_derived_topics_within_pattern_are_admitted(
    policy: MakeBody, requested: MakeRequest
) -> None:
    rule = {"name": "one", "topics": [SOURCE, f"{SOURCE}-fulfilment-*"], "roles": ["fulfilment"]}
    narrow = requested(policy(topic=SOURCE), allow=[rule])
    assert first_violation(ADMISSION, narrow) is None


def test_ledger_needs_no_rule_or_role_of_its_own(policy: MakeBody, requested: MakeRequest) -> None:
    own = [f"{SOURCE}-fulfilment-RETRY", f"{SOURCE}-fulfilment-DLQ"]
    rules = [
        {
            "name": "one",
            "topics": [SOURCE, *own],
            "roles": ["fulfilment", "shop-oncall"],
            "deletion": "Allowed",
        },
    ]
    body = policy(deletionPolicy="Delete", deadLetter={"readerRoles": ["shop-oncall"]})
    request = requested(body, allow=rules)
    assert request.policy.ledger_topic not in request.spec.permitted_topics
    assert first_violation(ADMISSION, request) is None


def test_role_of_one_rule_gets_no_rights_on_other_topics(
    policy: MakeBody, requested: MakeRequest
) -> None:
    rules = [
        {"name": "one", "topics": ["persistent://shop/prod/*"], "roles": ["shop-*"]},
        {"name": "one", "topics": ["persistent://shop/payroll/*"], "roles": ["fulfilment"]},
    ]
    violation = first_violation(ADMISSION, requested(policy(), allow=rules))
    assert violation is not None
    assert violation.reason == "RoleNotAllowed"
    assert f"on {SOURCE}-fulfilment-RETRY (shop-*); got 'fulfilment'" in str(violation)
    source_only = [
        {"name": "one", "topics": [SOURCE], "roles": ["fulfilment"]},
        {"name": "one", "topics": [f"{SOURCE}-*"]},
    ]
    violation = first_violation(ADMISSION, requested(policy(), allow=source_only))
    assert violation is not None
    assert violation.reason == "RoleNotAllowed"


def test_rules_of_other_namespaces_are_not_applied_or_shown(
    policy: MakeBody, requested: MakeRequest
) -> None:
    rules = [
        {"name": "one", "topics": ["persistent://shop/other/*"], "roles": ["fulfilment"]},
        {
            "name": "one",
            "namespaces": {"names": ["payments"]},
            "topics": ["persistent://shop/prod/*"],
            "roles": ["fulfilment"],
        },
    ]
    violation = first_violation(ADMISSION, requested(policy(), allow=rules))
    assert violation is not None
    assert violation.reason == "TopicNotAllowed"
    assert "to namespace shop (persistent://shop/other/*); got" in str(violation)


def test_deletion_policy_without_delete_permission_is_refused(
    policy: MakeBody, requested: MakeRequest
) -> None:
    rule = {"name": "one", "topics": ["persistent://shop/*/*"], "roles": ["fulfilment"]}
    for choice, deletion, allowed in (
        ("Delete", "Never", False),
        ("DeleteIfEmpty", "Never", False),
        ("Retain", "Never", True),
        ("Delete", "Allowed", True),
    ):
        request = requested(policy(deletionPolicy=choice), allow=[rule | {"deletion": deletion}])
        violation = first_violation(ADMISSION, request)
        assert (violation is None) is allowed
        assert violation is None or violation.reason == "DeletionNotAllowed"


RULE = {"name": "one", "topics": ["persistent://shop/*/*"], "roles": ["*"]}


@pytest.mark.parametrize(
    ("asked", "limits", "shown"),
    [
        ({"retry": {"partitions": 65}}, {}, "spec.retry.partitions is more than the 64"),
        ({"deadLetter": {"partitions": 65}}, {}, "spec.deadLetter.partitions is more than the 64"),
        ({"retry": {"partitions": 65}}, {"limits": {"partitions": 65}}, None),
        ({"retry": {"partitions": 3}}, {"limits": {"partitions": 2}}, "than the 2 partitions"),
        ({"retry": {"partitions": 64}}, {"limits": {"runs": 1}}, None),
    ],
)
def test_partitions_beyond_limit_of_rule_are_refused(
    policy: MakeBody,
    requested: MakeRequest,
    asked: dict[str, Any],
    limits: dict[str, Any],
    shown: str | None,
) -> None:
    violation = first_violation(ADMISSION, requested(policy(**asked), allow=[RULE | limits]))
    if shown is None:
        assert violation is None
    else:
        assert violation is not None
        assert violation.reason == "LimitExceeded"
        assert shown in str(violation)


def test_highest_limit_of_several_rules_is_in_effect(
    policy: MakeBody, requested: MakeRequest
) -> None:
    other = RULE | {"name": "two", "topics": ["persistent://shop/a/b"], "limits": {"runs": 9}}
    rules = [RULE | {"limits": {"partitions": 100, "policies": 3}}, other]
    limits = requested(policy(), allow=rules).permissions.limits
    assert dict(limits) == {"policies": 100, "partitions": 100, "runs": 9}
    assert Permissions(()).limits == NamespaceLimits()


NO_SUBSCRIPTIONS = TopicSubscriptions((frozenset(),))


def buildable(
    body: Body,
    requested: Request,
    *,
    source: int,
    retry: int | None,
    config_map: Body | None = None,
) -> Evidence:
    state = None if retry is None else TopicState(retry, NO_SUBSCRIPTIONS, {}, {})
    topics = {} if state is None else {TopicRole.RETRY: state}
    observed = Observed(source, topics=topics, config_map=config_map)
    return Evidence(body, desired(requested, body, "here"), observed, requested)


@pytest.mark.parametrize(
    ("source", "retry", "refused"), [(64, None, False), (65, None, True), (65, 65, False)]
)
def test_source_with_more_partitions_than_limit_is_refused(
    policy: MakeBody, requested: MakeRequest, source: int, retry: int | None, *, refused: bool
) -> None:
    body = policy()
    evidence = buildable(body, requested(body), source=source, retry=retry)
    violation = source_has_too_many_partitions(evidence)
    assert (violation is not None) is refused
    if violation is not None:
        assert f"{SOURCE} has more than the 64 partitions" in str(violation)


@pytest.mark.parametrize(
    ("topic", "role"),
    [("{:01}", "{:0255}"), ("{:01}", '"' * 125 + "{}"), ("\U0001f600" * 200 + "{:03}", "{:01}")],
    ids=["long roles", "quoted characters", "characters of four bytes"],
)
def test_rights_that_fill_the_record_of_a_namespace_are_refused(
    policy: MakeBody, requested: MakeRequest, topic: str, role: str
) -> None:
    """Two hundred policies once made a record of 27 MB, which no client could read any more."""
    body = policy()
    request = requested(body)
    topics, roles = (1_000, 1) if len(topic) > 200 else (8, 256)
    granted = {role.format(n): frozenset({"produce"}) for n in range(roles)}
    evidence = buildable(body, request, source=0, retry=None)
    held = {f"{SOURCE}-{topic.format(n)}-RETRY": dict(granted) for n in range(topics)}
    full = dataclasses.replace(evidence.observed, namespace=NamespaceState(permissions=held))
    violation = rights_exceed_record(dataclasses.replace(evidence, observed=full))
    assert violation is not None
    assert violation.reason == "LimitExceeded"
    assert "the grants on topics of shop/prod would exceed 524288 bytes" in str(violation)

    for grant in evidence.desired.grants:
        held.setdefault(str(grant.topic), {})[grant.role] = grant.actions
    has_all = dataclasses.replace(full, namespace=NamespaceState(permissions=held))
    assert rights_exceed_record(dataclasses.replace(evidence, observed=has_all)) is None


class CountedGrants(dict[str, Any]):
    """Grants of a namespace that count how often all of them are read."""

    reads = 0

    def items(self) -> Any:  # noqa: ANN401  not exported
        self.reads += 1
        return super().items()


def test_policies_of_one_read_count_its_grants_once(
    policy: MakeBody, requested: MakeRequest
) -> None:
    """Each of a thousand new policies once counted the grants of all the others."""
    body, grants = policy(), CountedGrants({f"{SOURCE}-old-RETRY": {"old": frozenset({"consume"})}})
    evidence = buildable(body, requested(body), source=0, retry=None)
    observed = dataclasses.replace(evidence.observed, namespace=NamespaceState(permissions=grants))
    for _ in range(10):
        assert rights_exceed_record(dataclasses.replace(evidence, observed=observed)) is None
    assert grants.reads == 1


@pytest.mark.parametrize("role", [TopicRole.RETRY, TopicRole.DEAD_LETTER, TopicRole.LEDGER])
@pytest.mark.parametrize(
    ("mark", "allowed"),
    [
        (None, True),
        ("", True),
        ("here/shop/orders", True),
        ("here/shop/named", True),
        ("here/shop/other", False),
        ("here/elsewhere/named", False),
        ("there/shop/named", False),
        ("there/shop/orders", False),
        ("by hand", False),
        ("here//orders", False),
    ],
)
def test_topic_of_other_owner_is_refused_unless_named(
    policy: MakeBody, requested: MakeRequest, role: TopicRole, mark: str | None, *, allowed: bool
) -> None:
    body = policy(adoption="IfPresent")
    body["metadata"]["annotations"] = {"redrive.io/take-over-from": "named"}
    evidence = buildable(body, requested(body), source=0, retry=None)
    created = {"redrive.io/created": "true"}
    marks = created if mark is None else created | {"redrive.io/owner": mark}
    marked = TopicState(0, NO_SUBSCRIPTIONS, {}, marks)
    observed = dataclasses.replace(evidence.observed, topics={role: marked})
    evidence = dataclasses.replace(evidence, observed=observed)
    violation = first_violation(PREFLIGHT, evidence)
    assert (violation is None) is allowed
    if violation is not None:
        assert violation.reason == "OwnerConflict"
        is_near = mark is not None and "/shop/" in mark
        shown = f"redrive.io/owner={mark}" if is_near else "a RetryPolicy of another namespace"
        assert f"got '{shown}'" in str(violation)
        assert isinstance(violation, OwnerConflictError)
        assert violation.owner == (mark or "")
        ways = {
            "here/shop/other": "kubectl annotate retrypolicy --namespace=shop orders "
            "redrive.io/take-over-from=other",
        }
        removes = (
            "pulsar-admin topics remove-properties -k redrive.io/owner persistent://shop/prod/"
        )
        assert ways.get(str(mark), removes) in str(violation)


@pytest.mark.parametrize(
    ("source", "retry"), [(0, None), (4, None), (0, 0), (4, 4), (4, 2), (2, 4)]
)
def test_retry_topic_of_same_kind_is_adopted(
    policy: MakeBody, requested: MakeRequest, source: int, retry: int | None
) -> None:
    body = policy(adoption="IfPresent")
    evidence = buildable(body, requested(body), source=source, retry=retry)
    assert first_violation(PREFLIGHT, evidence) is None


@pytest.mark.parametrize(
    ("properties", "adopt", "allowed", "reason"),
    [
        ({}, False, True, "TopicExists"),
        ({"team": "a"}, False, True, "TopicExists"),
        ({}, True, False, "AdoptionNotAllowed"),
        ({}, True, True, None),
        ({"redrive.io/owner": "here/shop/orders"}, False, False, None),
        ({"redrive.io/created": "true"}, False, False, None),
        (None, False, False, None),
    ],
)
def test_existing_topic_is_adopted_only_if_permitted(  # noqa: PLR0913
    policy: MakeBody,
    requested: MakeRequest,
    properties: dict[str, str] | None,
    reason: str | None,
    *,
    adopt: bool,
    allowed: bool,
) -> None:
    body = policy(adoption="IfPresent" if adopt else "Never")
    rule = {
        "name": "one",
        "topics": ["persistent://shop/*/*"],
        "roles": ["fulfilment"],
        "adoption": "Allowed" if allowed else "Never",
    }
    request = requested(body, allow=[rule])
    evidence = buildable(body, request, source=0, retry=None)
    state = TopicState(0, NO_SUBSCRIPTIONS, {}, properties)
    observed = dataclasses.replace(evidence.observed, topics={TopicRole.DEAD_LETTER: state})
    violation = first_violation(PREFLIGHT, dataclasses.replace(evidence, observed=observed))
    assert (violation and violation.reason) == reason


def test_existing_topic_of_others_never_becomes_a_ledger(
    policy: MakeBody, requested: MakeRequest
) -> None:
    body = policy(adoption="IfPresent")
    evidence = buildable(body, requested(body), source=0, retry=None)
    state = TopicState(0, NO_SUBSCRIPTIONS, {}, {"team": "a"})
    observed = dataclasses.replace(evidence.observed, topics={TopicRole.LEDGER: state})
    violation = first_violation(PREFLIGHT, dataclasses.replace(evidence, observed=observed))
    assert violation is not None
    assert violation.reason == "TopicExists"
    assert "orders-fulfilment-DLQ-LEDGER exists" in str(violation)
    ledger = evidence.desired.policy.ledger_topic
    begun = dataclasses.replace(evidence.desired, creating=frozenset({str(ledger)}))
    bare = dataclasses.replace(state, properties={})
    unmarked = dataclasses.replace(evidence.observed, topics={TopicRole.LEDGER: bare})
    evidence = dataclasses.replace(evidence, desired=begun, observed=unmarked)
    assert first_violation(PREFLIGHT, evidence) is None


@pytest.mark.parametrize(
    ("partitions", "asks", "says", "remedy"),
    [
        (
            (4, 0),
            {},
            "4 partitions, as the source topic has; a broker cannot convert",
            "is drained",
        ),
        ((0, 4), {}, "no partitions, as the source topic has", "or set retry.partitions to 4"),
        (
            (0, 0),
            {"partitions": 2},
            "2 partitions, as requested",
            "or leave retry.partitions out",
        ),
    ],
)
def test_retry_topic_of_other_kind_is_refused(  # noqa: PLR0913 - each is a part of the case
    policy: MakeBody,
    requested: MakeRequest,
    *,
    partitions: tuple[int, int],
    asks: dict[str, int],
    says: str,
    remedy: str,
) -> None:
    source, retry = partitions
    body = policy(retry=asks)
    evidence = buildable(body, requested(body), source=source, retry=retry)
    violation = first_violation(PREFLIGHT, evidence)
    assert violation is not None
    assert violation.reason == "PartitionsDiffer"
    assert says in str(violation)
    assert f"got '{retry or 'no'} partitions'; delete it once it is drained" in str(violation)
    assert remedy in str(violation)


@pytest.mark.parametrize(
    ("asks", "partitions", "refused"),
    [({}, 0, False), ({}, 4, False), ({"partitions": 2}, 4, False), ({"partitions": 2}, 0, True)],
)
def test_dead_letter_topic_of_other_kind_is_refused(
    policy: MakeBody,
    requested: MakeRequest,
    *,
    asks: dict[str, int],
    partitions: int,
    refused: bool,
) -> None:
    body = policy(deadLetter=asks, adoption="IfPresent")
    evidence = buildable(body, requested(body), source=0, retry=None)
    state = TopicState(partitions, NO_SUBSCRIPTIONS, {}, {})
    evidence = dataclasses.replace(
        evidence,
        observed=dataclasses.replace(evidence.observed, topics={TopicRole.DEAD_LETTER: state}),
    )
    violation = first_violation(PREFLIGHT, evidence)
    assert (violation is not None) is refused
    assert has_other_partitioning(evidence.desired, evidence.observed) is refused
    if violation is not None:
        assert violation.reason == "PartitionsDiffer"
        assert "or leave deadLetter.partitions out" in str(violation)


def test_namespace_with_subscription_expiry_is_refused() -> None:
    topic = TopicName("shop", "prod", "orders")
    lasting = NamespaceState(frozenset(), frozenset(), {}, 0, {}, None)
    assert namespace_expires_subscriptions(topic, lasting) is None
    expiring = dataclasses.replace(lasting, subscription_expiry_minutes=5)
    violation = namespace_expires_subscriptions(topic, expiring)
    assert violation is not None
    assert violation.reason == "SubscriptionExpiry"
    assert "got 'subscriptionExpirationTime of 5 minutes'" in str(violation)
    assert "set-subscription-expiration-time shop/prod -t 0" in str(violation)


def test_foreign_config_map_is_refused(policy: MakeBody, requested: MakeRequest) -> None:
    body = policy()
    ours = desired(requested(body), body, "here").config_map
    theirs = {**ours, "metadata": {"name": "orders-redrive", "namespace": "shop"}}
    reborn = policy() | {"metadata": body["metadata"] | {"uid": "another"}}
    read = requested(body)
    for owner, config_map, allowed in (
        (body, ours, True),
        (body, theirs, False),
        (reborn, ours, False),
    ):
        evidence = buildable(owner, read, source=0, retry=None, config_map=config_map)
        violation = first_violation(PREFLIGHT, evidence)
        assert (violation is None) is allowed
        assert violation is None or violation.reason == "ConfigMapNotOurs"


def test_oldest_policy_of_subscription_has_priority(
    policy: MakeBody, requested: MakeRequest
) -> None:
    oldest, middle, youngest = (
        requested(policy(name, age=age)) for age, name in enumerate(["first", "second", "third"])
    )
    for winner, loser in itertools.combinations((oldest, middle, youngest), 2):
        assert prior_claim(winner, loser) is None
        violation = prior_claim(loser, winner)
        assert violation is not None
        assert violation.reason == "ResourceConflict"
        assert f"got 'RetryPolicy {winner.key}'" in str(violation)


@pytest.mark.parametrize("collides", [False, True])
def test_rival_of_another_namespace_is_not_named(
    policy: MakeBody, requested: MakeRequest, *, collides: bool
) -> None:
    tenant = {"topic": "persistent://shop/prod/orders-eu", "subscription": "billing"}
    own = {"topic": "persistent://shop/prod/orders", "subscription": "eu-billing"}
    body = policy("project-x", **tenant)
    body["metadata"]["namespace"] = "rivals"
    loser = requested(policy("b", age=2, **own if collides else tenant))
    violation = prior_claim(loser, dataclasses.replace(requested(body), is_proven=True))
    assert violation is not None
    assert violation.reason == ("NameCollision" if collides else "ResourceConflict")
    assert "got 'a RetryPolicy of another namespace'" in str(violation)
    assert violation.rival == Key("rivals", "project-x")
    fields = Outcome.failed(violation).fields
    assert fields == {"blockedBy": "another namespace"}
    words = {"rivals", "project-x"} | ({"orders-eu"} if collides else set())
    assert [word for word in words if word in str(violation)] == []


FOREIGN = st.from_regex("zq[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?", fullmatch=True)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(FOREIGN, FOREIGN, FOREIGN, st.booleans())
def test_no_generated_name_of_another_namespace_is_shown(  # noqa: PLR0913, PLR0917  fixtures
    policy: MakeBody,
    requested: MakeRequest,
    namespace: str,
    name: str,
    subscription: str,
    collides: bool,  # noqa: FBT001  generated
) -> None:
    """Names of the namespace and the policy, and of the subscription if only the names collide."""
    theirs = {"topic": "persistent://shop/prod/orders-eu", "subscription": subscription}
    own = {"topic": "persistent://shop/prod/orders", "subscription": f"eu-{subscription}"}
    body = policy(name, **theirs)
    body["metadata"]["namespace"] = namespace
    loser = requested(policy("b", age=2, **own if collides else theirs))
    violation = prior_claim(loser, dataclasses.replace(requested(body), is_proven=True))
    assert violation is not None
    shown = f"{violation} {Outcome.failed(violation).fields}".replace(subscription, "")
    assert namespace not in shown
    assert name not in shown
    assert not (collides and "orders-eu'" in shown)


def test_uid_decides_between_policies_of_same_age(policy: MakeBody, requested: MakeRequest) -> None:
    one, other = requested(policy("a")), requested(policy("b"))
    assert prior_claim(one, other) is None
    assert prior_claim(other, one) is not None


def test_names_that_collide_are_refused_for_younger_policy(
    policy: MakeBody, requested: MakeRequest
) -> None:
    first = requested(policy("a", topic="persistent://shop/prod/orders-eu", subscription="billing"))
    second = requested(
        policy("b", topic="persistent://shop/prod/orders", subscription="eu-billing")
    )
    violation = prior_claim(second, first)
    assert violation is not None
    assert violation.reason == "NameCollision"
    assert "shop/a" in str(violation)


@pytest.mark.parametrize("name", ["retryTopic", "deadLetterTopic"])
def test_source_topic_of_older_policy_is_no_derived_topic(
    policy: MakeBody, requested: MakeRequest, name: str
) -> None:
    source = "persistent://shop/prod/payments"
    payments = requested(policy("payments", topic=source, age=1))
    taking = policy("taking", naming={name: source}, age=2)
    violation = prior_claim(requested(taking), payments)
    assert violation is not None
    assert violation.reason == "NameCollision"
    assert f"the source topic of an older RetryPolicy, {source}" in str(violation)
    assert "got 'RetryPolicy shop/payments'" in str(violation)
    assert prior_claim(payments, requested(taking)) is None
    elsewhere = requested(taking, adminURL="http://elsewhere:8080")
    assert prior_claim(elsewhere, payments) is None


@pytest.mark.parametrize("name", ["retryTopic", "deadLetterTopic"])
def test_ledger_of_policy_is_never_topic_of_another(
    policy: MakeBody, requested: MakeRequest, name: str
) -> None:
    first = policy("first", age=1)
    ledger = str(requested(first).policy.ledger_topic)
    taking = policy("taking", subscription="billing", naming={name: ledger}, age=2)
    violation = prior_claim(requested(taking), requested(first))
    assert violation is not None
    assert violation.reason == "NameCollision"
    # Replays of the first may be configured later.
    assert prior_claim(requested(taking, replay=None), requested(first, replay=None)) is not None
    first["metadata"]["creationTimestamp"] = "2026-01-01T00:00:03Z"
    assert prior_claim(requested(taking), requested(first)) is None
    assert prior_claim(requested(first), requested(taking)) is not None


def test_dead_letter_topic_may_have_a_younger_policy(
    policy: MakeBody, requested: MakeRequest
) -> None:
    first = requested(policy("first", age=1))
    of_dead_letters = requested(policy("second", topic=str(first.spec.dead_letter_topic), age=2))
    assert prior_claim(of_dead_letters, first) is None
    assert prior_claim(first, of_dead_letters) is None


def test_two_subscriptions_of_a_topic_do_not_conflict(
    policy: MakeBody, requested: MakeRequest
) -> None:
    first = requested(policy("first", age=1))
    second = requested(policy("second", subscription="billing", age=2))
    assert prior_claim(second, first) is None


def test_policies_at_different_brokers_do_not_conflict(
    policy: MakeBody, requested: MakeRequest
) -> None:
    here = requested(policy("b"), adminURL="http://here:8080")
    same = requested(policy("a"), adminURL="http://HERE:8080/")
    elsewhere = requested(policy("a"), adminURL="http://there:8080")
    assert prior_claim(here, elsewhere) is None
    assert prior_claim(here, same) is not None

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from redrive.admin.model import NamespaceState, TopicSubscriptions
from redrive.api import Body
from redrive.policy.naming import TopicName
from redrive.provision.checks import (
    PREFLIGHT,
    PreflightFacts,
    is_of_the_other_kind,
    namespace_expires_subscriptions,
)
from redrive.provision.desired import Observed, TopicState, desired
from redrive.provision.request import Request

MakeBody = Callable[..., dict[str, Any]]
MakeRequest = Callable[..., Request]
NO_SUBSCRIPTIONS = TopicSubscriptions((frozenset(),))


def buildable(
    body: Body,
    requested: Request,
    *,
    source: int,
    retry: int | None,
    config_map: Body | None = None,
) -> PreflightFacts:
    state = None if retry is None else TopicState(retry, NO_SUBSCRIPTIONS, {}, {})
    observed = Observed(source, None, state, None, {}, {}, config_map)
    return PreflightFacts(body, desired(requested, body, "here"), observed, requested)


@pytest.mark.parametrize("topic", ["retry", "dead_letter", "ledger"])
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
def test_a_topic_of_another_policy_is_refused_unless_that_is_named_and_of_the_same_namespace(
    policy: MakeBody, requested: MakeRequest, topic: str, mark: str | None, *, allowed: bool
) -> None:
    body = policy(adopt=True)
    body["metadata"]["annotations"] = {"redrive.io/take-over-from": "named"}
    facts = buildable(body, requested(body), source=0, retry=None)
    created = {"redrive.io/created": "true"}
    marks = created if mark is None else created | {"redrive.io/owner": mark}
    marked = TopicState(0, NO_SUBSCRIPTIONS, {}, marks)
    there: dict[str, Any] = {topic: marked}
    observed = dataclasses.replace(facts.observed, **there)
    facts = dataclasses.replace(facts, observed=observed)
    violation = PREFLIGHT.first_violation(facts)
    assert (violation is None) is allowed
    if violation is not None:
        assert violation.reason == "OwnerConflict"
        assert f"got 'redrive.io/owner={mark}'" in str(violation)
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
def test_a_retry_topic_of_the_kind_of_its_source_is_adopted(
    policy: MakeBody, requested: MakeRequest, source: int, retry: int | None
) -> None:
    body = policy(adopt=True)
    facts = buildable(body, requested(body), source=source, retry=retry)
    assert PREFLIGHT.first_violation(facts) is None


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
def test_a_topic_that_others_created_is_adopted_only_if_policy_and_connection_say_so(  # noqa: PLR0913
    policy: MakeBody,
    requested: MakeRequest,
    properties: dict[str, str] | None,
    reason: str | None,
    *,
    adopt: bool,
    allowed: bool,
) -> None:
    body = policy(adopt=adopt)
    rule = {"topics": ["persistent://shop/*/*"], "roles": ["fulfilment"], "adopt": allowed}
    request = requested(body, allow=[rule])
    facts = buildable(body, request, source=0, retry=None)
    found = TopicState(0, NO_SUBSCRIPTIONS, {}, properties)
    observed = dataclasses.replace(facts.observed, dead_letter=found)
    violation = PREFLIGHT.first_violation(dataclasses.replace(facts, observed=observed))
    assert (violation and violation.reason) == reason


def test_a_topic_that_others_created_never_becomes_a_ledger(
    policy: MakeBody, requested: MakeRequest
) -> None:
    body = policy(adopt=True)
    facts = buildable(body, requested(body), source=0, retry=None)
    found = TopicState(0, NO_SUBSCRIPTIONS, {}, {"team": "a"})
    observed = dataclasses.replace(facts.observed, ledger=found)
    violation = PREFLIGHT.first_violation(dataclasses.replace(facts, observed=observed))
    assert violation is not None
    assert violation.reason == "TopicExists"
    assert "orders-fulfilment-DLQ-LEDGER exists" in str(violation)
    ledger = facts.desired.policy.ledger_topic
    begun = dataclasses.replace(facts.desired, creating=frozenset({str(ledger)}))
    unmarked = dataclasses.replace(facts.observed, ledger=dataclasses.replace(found, properties={}))
    facts = dataclasses.replace(facts, desired=begun, observed=unmarked)
    assert PREFLIGHT.first_violation(facts) is None


@pytest.mark.parametrize(
    ("partitions", "asks", "says", "remedy"),
    [
        ((4, 0), {}, "4 partitions, as the source topic has; a topic can't change", "is drained"),
        ((0, 4), {}, "no partitions, as the source topic has", "or set retry.partitions to 4"),
        (
            (0, 0),
            {"partitions": 2},
            "2 partitions, as asked for",
            "or leave retry.partitions out",
        ),
    ],
)
def test_a_retry_topic_of_the_other_kind_is_refused(  # noqa: PLR0913 - each is a part of the case
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
    facts = buildable(body, requested(body), source=source, retry=retry)
    violation = PREFLIGHT.first_violation(facts)
    assert violation is not None
    assert violation.reason == "PartitionsDiffer"
    assert says in str(violation)
    assert f"got '{retry or 'no'} partitions'; delete it once it is drained" in str(violation)
    assert remedy in str(violation)


@pytest.mark.parametrize(
    ("asks", "partitions", "refused"),
    [({}, 0, False), ({}, 4, False), ({"partitions": 2}, 4, False), ({"partitions": 2}, 0, True)],
)
def test_a_dead_letter_topic_without_the_partitions_asked_for_is_refused(
    policy: MakeBody,
    requested: MakeRequest,
    *,
    asks: dict[str, int],
    partitions: int,
    refused: bool,
) -> None:
    body = policy(deadLetter=asks, adopt=True)
    facts = buildable(body, requested(body), source=0, retry=None)
    there = TopicState(partitions, NO_SUBSCRIPTIONS, {}, {})
    facts = dataclasses.replace(
        facts, observed=dataclasses.replace(facts.observed, dead_letter=there)
    )
    violation = PREFLIGHT.first_violation(facts)
    assert (violation is not None) is refused
    assert is_of_the_other_kind(facts.desired, facts.observed) is refused
    if violation is not None:
        assert violation.reason == "PartitionsDiffer"
        assert "or leave deadLetter.partitions out" in str(violation)


def test_a_namespace_that_deletes_idle_subscriptions_is_refused() -> None:
    topic = TopicName("shop", "prod", "orders")
    lasting = NamespaceState(frozenset(), frozenset(), {}, 0, {}, None)
    assert namespace_expires_subscriptions(topic, lasting) is None
    expiring = dataclasses.replace(lasting, subscription_expiry_minutes=5)
    violation = namespace_expires_subscriptions(topic, expiring)
    assert violation is not None
    assert violation.reason == "SubscriptionExpiry"
    assert "got 'subscriptionExpirationTime of 5 minutes'" in str(violation)
    assert "set-subscription-expiration-time shop/prod -t 0" in str(violation)


def test_a_config_map_that_somebody_else_made_is_left_alone(
    policy: MakeBody, requested: MakeRequest
) -> None:
    body = policy()
    ours = desired(requested(body), body, "here").config_map
    theirs = {**ours, "metadata": {"name": "orders-redrive", "namespace": "shop"}}
    reborn = policy() | {"metadata": body["metadata"] | {"uid": "another"}}
    read = requested(body)
    for owner, found, allowed in ((body, ours, True), (body, theirs, False), (reborn, ours, False)):
        facts = buildable(owner, read, source=0, retry=None, config_map=found)
        violation = PREFLIGHT.first_violation(facts)
        assert (violation is None) is allowed
        assert violation is None or violation.reason == "ConfigMapNotOurs"

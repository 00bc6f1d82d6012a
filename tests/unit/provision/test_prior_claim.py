from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from redrive.provision.checks import prior_claim
from redrive.provision.request import Request

MakeBody = Callable[..., dict[str, Any]]
MakeRequest = Callable[..., Request]


def test_the_oldest_policy_of_a_subscription_keeps_it(
    policy: MakeBody, requested: MakeRequest
) -> None:
    oldest, middle, youngest = (
        requested(policy(name, age=age)) for age, name in enumerate(["first", "second", "third"])
    )
    assert prior_claim(oldest, [middle, youngest]) is None
    for loser, others in ((middle, [oldest, youngest]), (youngest, [middle, oldest])):
        violation = prior_claim(loser, others)
        assert violation is not None
        assert violation.reason == "ResourceConflict"
        assert "got 'RetryPolicy shop/first'" in str(violation)


def test_of_two_policies_made_in_one_second_the_uid_decides(
    policy: MakeBody, requested: MakeRequest
) -> None:
    one, other = requested(policy("a")), requested(policy("b"))
    assert prior_claim(one, [other]) is None
    assert prior_claim(other, [one]) is not None


def test_names_that_meet_for_different_subscriptions_are_a_collision(
    policy: MakeBody, requested: MakeRequest
) -> None:
    first = requested(policy("a", topic="persistent://shop/prod/orders-eu", subscription="billing"))
    second = requested(
        policy("b", topic="persistent://shop/prod/orders", subscription="eu-billing")
    )
    violation = prior_claim(second, [first])
    assert violation is not None
    assert violation.reason == "NameCollision"
    assert "shop/a" in str(violation)


@pytest.mark.parametrize("given", ["retryTopic", "deadLetterTopic"])
def test_the_source_topic_of_an_older_policy_is_never_taken_for_an_own_topic(
    policy: MakeBody, requested: MakeRequest, given: str
) -> None:
    source = "persistent://shop/prod/payments"
    payments = requested(policy("payments", topic=source, age=1))
    taking = policy("taking", naming={given: source}, age=2)
    violation = prior_claim(requested(taking), [payments])
    assert violation is not None
    assert violation.reason == "NameCollision"
    assert f"the source topic of an older RetryPolicy, {source}" in str(violation)
    assert "got 'RetryPolicy shop/payments'" in str(violation)
    assert prior_claim(payments, [requested(taking)]) is None
    elsewhere = requested(taking, adminUrl="http://elsewhere:8080")
    assert prior_claim(elsewhere, [payments]) is None


@pytest.mark.parametrize("given", ["retryTopic", "deadLetterTopic"])
def test_a_ledger_is_no_topic_of_another_policy_whichever_comes_first(
    policy: MakeBody, requested: MakeRequest, given: str
) -> None:
    first = policy("first", age=1)
    ledger = str(requested(first).policy.ledger_topic)
    taking = policy("taking", subscription="billing", naming={given: ledger}, age=2)
    found = prior_claim(requested(taking), [requested(first)])
    assert found is not None
    assert found.reason == "NameCollision"
    # Replays of the first may be configured later.
    assert prior_claim(requested(taking, replay=None), [requested(first, replay=None)]) is not None
    first["metadata"]["creationTimestamp"] = "2026-01-01T00:00:03Z"
    assert prior_claim(requested(taking), [requested(first)]) is None
    assert prior_claim(requested(first), [requested(taking)]) is not None


def test_dead_letters_may_have_a_younger_policy_of_their_own(
    policy: MakeBody, requested: MakeRequest
) -> None:
    first = requested(policy("first", age=1))
    of_dead_letters = requested(policy("second", topic=str(first.spec.dead_letter_topic), age=2))
    assert prior_claim(of_dead_letters, [first]) is None
    assert prior_claim(first, [of_dead_letters]) is None


def test_two_subscriptions_of_one_topic_are_no_rivals(
    policy: MakeBody, requested: MakeRequest
) -> None:
    first = requested(policy("first", age=1))
    second = requested(policy("second", subscription="billing", age=2))
    assert prior_claim(second, [first]) is None


def test_policies_at_different_brokers_are_no_rivals(
    policy: MakeBody, requested: MakeRequest
) -> None:
    here = requested(policy("b"), adminUrl="http://here:8080")
    same = requested(policy("a"), adminUrl="http://HERE:8080/")
    there = requested(policy("a"), adminUrl="http://there:8080")
    assert prior_claim(here, [there]) is None
    assert prior_claim(here, [same]) is not None

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from redrive.provision.checks import ADMISSION
from redrive.provision.request import Request

MakeBody = Callable[..., dict[str, Any]]
MakeRequest = Callable[..., Request]
SOURCE = "persistent://shop/prod/orders"


def test_a_policy_within_what_its_connection_allows_is_admissible(
    policy: MakeBody, requested: MakeRequest
) -> None:
    assert ADMISSION.first_violation(requested(policy())) is None


@pytest.mark.parametrize(
    ("changes", "reason", "found"),
    [
        ({"name": "a" * 246}, "InvalidSpec", "246"),
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
def test_a_policy_that_may_not_be_obeyed_is_refused(
    policy: MakeBody, requested: MakeRequest, changes: dict[str, Any], reason: str, found: str
) -> None:
    only = ["persistent://shop/*/orders*"]
    violation = ADMISSION.first_violation(
        requested(policy(**changes), allow=[{"topics": only, "roles": ["fulfilment"]}])
    )
    assert violation is not None
    assert violation.reason == reason
    assert f"got {found};" in str(violation)


def test_a_refusal_names_a_few_of_many_that_are_allowed(
    policy: MakeBody, requested: MakeRequest
) -> None:
    topics = [f"persistent://shop/prod/{'t' * 900}-{n}" for n in range(256)]
    roles = [f"{'r' * 200}-{n}" for n in range(256)]
    for rule, last in (
        ({"topics": topics}, topics[4]),
        ({"topics": ["persistent://shop/*/*"], "roles": roles}, roles[4]),
    ):
        found = ADMISSION.first_violation(requested(policy(), allow=[rule]))
        assert found is not None
        assert f"{last}, and 251 more)" in str(found)
        assert len(str(found)) < 6_000


@pytest.mark.parametrize(
    ("allowed", "kind", "found"),
    [
        ([], "retry topic", f"{SOURCE}-eu-billing-RETRY"),
        ([f"{SOURCE}-eu-billing-RETRY"], "dead-letter topic", f"{SOURCE}-eu-billing-DLQ"),
        ([f"{SOURCE}-eu-billing-DLQ"], "retry topic", f"{SOURCE}-eu-billing-RETRY"),
    ],
)
def test_a_subscription_does_not_lead_to_topics_that_are_not_allowed(
    policy: MakeBody, requested: MakeRequest, allowed: list[str], kind: str, found: str
) -> None:
    body = policy(topic=SOURCE, subscription="eu-billing")
    violation = ADMISSION.first_violation(requested(body, allow=[{"topics": [SOURCE, *allowed]}]))
    assert violation is not None
    assert violation.reason == "TopicNotAllowed"
    assert f"the {kind} that" in str(violation)
    assert f"got '{found}'; add it to a rule" in str(violation)


def test_derived_topics_may_be_allowed_by_a_pattern_of_their_own(
    policy: MakeBody, requested: MakeRequest
) -> None:
    rule = {"topics": [SOURCE, f"{SOURCE}-fulfilment-*"], "roles": ["fulfilment"]}
    narrow = requested(policy(topic=SOURCE), allow=[rule])
    assert ADMISSION.first_violation(narrow) is None


def test_a_ledger_is_permitted_with_its_dead_letter_topic_and_no_role_needs_rights_on_it(
    policy: MakeBody, requested: MakeRequest
) -> None:
    own = [f"{SOURCE}-fulfilment-RETRY", f"{SOURCE}-fulfilment-DLQ"]
    rules = [
        {"topics": [SOURCE, *own], "roles": ["fulfilment", "shop-oncall"], "delete": True},
    ]
    body = policy(deletionPolicy="Delete", deadLetter={"readerRoles": ["shop-oncall"]})
    request = requested(body, allow=rules)
    assert request.policy.ledger_topic not in request.spec.permitted_topics
    assert ADMISSION.first_violation(request) is None


def test_a_role_of_one_rule_gets_no_rights_on_a_topic_of_another(
    policy: MakeBody, requested: MakeRequest
) -> None:
    rules = [
        {"topics": ["persistent://shop/prod/*"], "roles": ["shop-*"]},
        {"topics": ["persistent://shop/payroll/*"], "roles": ["fulfilment"]},
    ]
    violation = ADMISSION.first_violation(requested(policy(), allow=rules))
    assert violation is not None
    assert violation.reason == "RoleNotAllowed"
    assert f"on {SOURCE}-fulfilment-RETRY (shop-*); got 'fulfilment'" in str(violation)
    source_only = [{"topics": [SOURCE], "roles": ["fulfilment"]}, {"topics": [f"{SOURCE}-*"]}]
    violation = ADMISSION.first_violation(requested(policy(), allow=source_only))
    assert violation is not None
    assert violation.reason == "RoleNotAllowed"


def test_what_is_allowed_to_another_namespace_is_neither_allowed_nor_shown(
    policy: MakeBody, requested: MakeRequest
) -> None:
    rules = [
        {"topics": ["persistent://shop/other/*"], "roles": ["fulfilment"]},
        {
            "namespaces": {"names": ["payments"]},
            "topics": ["persistent://shop/prod/*"],
            "roles": ["fulfilment"],
        },
    ]
    violation = ADMISSION.first_violation(requested(policy(), allow=rules))
    assert violation is not None
    assert violation.reason == "TopicNotAllowed"
    assert "to namespace shop (persistent://shop/other/*); got" in str(violation)


def test_topics_are_deleted_only_as_the_connection_allows(
    policy: MakeBody, requested: MakeRequest
) -> None:
    rule = {"topics": ["persistent://shop/*/*"], "roles": ["fulfilment"]}
    for choice, delete, allowed in (
        ("Delete", False, False),
        ("DeleteIfEmpty", False, False),
        ("Retain", False, True),
        ("Delete", True, True),
    ):
        request = requested(policy(deletionPolicy=choice), allow=[rule | {"delete": delete}])
        violation = ADMISSION.first_violation(request)
        assert (violation is None) is allowed
        assert violation is None or violation.reason == "DeletionNotAllowed"

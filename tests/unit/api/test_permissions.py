"""Permissions of namespaces by the rules of a connection."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.api.connection import BrokerConnectionSpec
from redrive.api.model import parse_spec
from redrive.api.permissions import LabelSelector, Permissions
from redrive.errors import InvalidSpecError, RedriveError
from redrive.policy.naming import TopicName
from redrive.policy.values import Patterns

ORDERS = TopicName("shop", "prod", "orders")
PAYROLL = TopicName("shop", "prod", "payroll")


def permissions(
    *rules: dict[str, Any], namespace: str = "shop", labels: Mapping[str, str] | None = None
) -> Permissions:
    """Permissions by the rules of a connection in `shop`."""
    pulsar = {
        "serviceURL": "pulsar://pulsar:6650",
        "adminURL": "http://pulsar:8080",
        "authentication": {"type": "None"},
    }
    named = [{**rule, "name": f"rule-{number}"} for number, rule in enumerate(rules)]
    spec = BrokerConnectionSpec.model_validate({"pulsar": pulsar, "allow": named})
    return spec.permissions(namespace, labels or {}, "shop")


@pytest.mark.parametrize(
    ("pattern", "topic", "allowed"),
    [
        ("persistent://shop/*/*", "persistent://shop/prod/orders", True),
        ("persistent://shop/*/*", "persistent://shopping/prod/orders", False),
        ("persistent://shop/prod/orders", "persistent://shop/prod/orders", True),
        ("persistent://shop/prod/orders", "persistent://shop/prod/orders-eu", False),
        ("persistent://shop/prod/orders*", "persistent://shop/prod/orders-eu", True),
        ("persistent://shop/*/orders", "persistent://shop/a/b", False),
        ("persistent://sh.p/prod/orders", "persistent://shop/prod/orders", False),
        ("persistent://shop/prod/[a-z]*", "persistent://shop/prod/orders", False),
    ],
)
def test_topic_pattern_matches_whole_name_and_no_slash(
    pattern: str, topic: str, *, allowed: bool
) -> None:
    rights = permissions({"name": "one", "topics": [pattern]})
    assert rights.allows_topic(TopicName.parse(topic)) is allowed


def test_namespace_in_patterns_is_that_of_the_object() -> None:
    rule = {
        "namespaces": {"names": ["shop", "billing"]},
        "topics": ["persistent://{namespace}/*/*"],
        "roles": ["{namespace}.*"],
    }
    rights, invoices = permissions(rule, namespace="billing"), TopicName("billing", "prod", "all")
    assert rights.allows_role("billing.clerk", invoices)
    assert not rights.allows_role("shop.clerk", invoices)
    assert not rights.allows_topic(ORDERS)
    assert permissions(rule).allows_topic(ORDERS)


def test_topic_wildcard_does_not_match_a_slash() -> None:
    rights = permissions({"name": "one", "topics": ["persistent://*/prod/orders"]})
    assert rights.allows_topic(ORDERS)
    assert not rights.allows_topic(TopicName("shop/evil", "prod", "orders"))


def test_one_matching_pattern_allows_and_an_empty_list_refuses() -> None:
    everything = {"name": "one", "topics": ["persistent://*/*/*"]}
    rights = permissions({**everything, "roles": ["fulfilment", "shop-*"]})
    assert rights.allows_role("fulfilment", ORDERS)
    assert rights.allows_role("shop-a", ORDERS)
    assert not rights.allows_role("fulfilment-2", ORDERS)
    assert not rights.allows_role("my-shop-a", ORDERS)
    assert not permissions(everything).allows_role("fulfilment", ORDERS)
    assert not permissions({"name": "one", "topics": []}).allows_topic(ORDERS)
    assert not permissions().allows_topic(ORDERS)


def test_pattern_with_many_stars_is_matched_quickly() -> None:
    rights = permissions(
        {
            "name": "one",
            "topics": ["persistent://shop/*/" + "*a" * 60 + "b"],
            "roles": ["*a" * 60 + "b"],
        }
    )
    assert not rights.allows_topic(TopicName("shop", "prod", "a" * 255))
    assert rights.allows_topic(TopicName("shop", "prod", "a" * 60 + "b"))
    assert not rights.allows_role("a" * 255, TopicName("shop", "prod", "a" * 60 + "b"))


def test_first_refused_role_is_returned_with_its_topic() -> None:
    rights = permissions(
        {"name": "one", "topics": [str(ORDERS), str(PAYROLL)], "roles": ["a", "b-*"]},
        {"name": "one", "topics": [str(ORDERS)], "roles": ["c"]},
    )
    assert rights.first_refused(["a", "b-1"], [ORDERS, PAYROLL]) is None
    assert rights.first_refused(["a", "c"], [ORDERS]) is None
    assert rights.first_refused(["a", "c", "d"], [ORDERS, PAYROLL]) == ("c", PAYROLL)
    assert rights.first_refused(["d", "c"], [ORDERS, PAYROLL]) == ("d", ORDERS)


def test_topic_patterns_are_matched_once_for_all_roles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"persistent://shop/prod/{number}-*" for number in range(63)]
    rule = {
        "name": "one",
        "topics": [*names, str(ORDERS)],
        "roles": [f"{number}-*" for number in range(64)],
    }
    rights = permissions(*[rule] * 64)
    compared = Counter[str]()
    match = Patterns.match

    def counted(patterns: Patterns, name: str) -> bool:
        compared[patterns.but] += 1
        return match(patterns, name)

    monkeypatch.setattr(Patterns, "match", counted)
    roles = [f"{number}-a" for number in range(64)]
    assert rights.first_refused(roles, [ORDERS]) is None
    assert rights.first_refused(["other"], [ORDERS]) == ("other", ORDERS)
    assert compared["/"] == 2 * 64
    assert compared["\n"] == len(roles) + 64


def test_rule_does_not_extend_to_topics_of_another() -> None:
    rights = permissions(
        {"name": "one", "topics": [str(ORDERS)], "roles": ["fulfilment"], "adoption": "Allowed"},
        {"name": "one", "topics": [str(PAYROLL)], "roles": ["accounting"], "deletion": "Allowed"},
    )
    assert rights.allows_role("fulfilment", ORDERS)
    assert rights.allows_role("accounting", PAYROLL)
    assert not rights.allows_role("fulfilment", PAYROLL)
    assert not rights.allows_role("accounting", ORDERS)
    assert (rights.allows_adoption(ORDERS), rights.allows_deletion(ORDERS)) == (True, False)
    assert (rights.allows_adoption(PAYROLL), rights.allows_deletion(PAYROLL)) == (False, True)


def test_rules_on_a_topic_are_combined() -> None:
    rights = permissions(
        {"name": "one", "topics": [str(ORDERS)], "roles": ["fulfilment"]},
        {
            "name": "one",
            "topics": ["persistent://shop/*/*"],
            "roles": ["accounting"],
            "adoption": "Allowed",
        },
    )
    assert rights.roles_on(ORDERS) == ("fulfilment", "accounting")
    assert rights.allows_adoption(ORDERS)
    assert rights.topics == (str(ORDERS), "persistent://shop/*/*")


RETRY = TopicName("shop", "prod", "orders-b-RETRY")
OWN = "persistent://shop/prod/orders-b-*"


@pytest.mark.parametrize(
    ("of_source", "of_own", "allowed"),
    [
        ([], [], True),
        (["b-*"], ["b-*"], True),
        (["b-*", "c"], ["b-*"], True),
        ([], ["b-*"], False),
        (["b-1"], ["b-*"], False),
        (["c"], ["b-*", "c"], False),
    ],
)
def test_schema_may_be_copied_to_topics_of_the_same_roles(
    of_source: list[str], of_own: list[str], *, allowed: bool
) -> None:
    rights = permissions(
        {"topics": [str(ORDERS)], "roles": of_source}, {"topics": [OWN], "roles": of_own}
    )
    assert rights.allows_schema_copy(ORDERS, RETRY) is allowed
    assert permissions({"topics": ["persistent://shop/*/*"]}).allows_schema_copy(ORDERS, RETRY)
    both = permissions(
        {"topics": ["persistent://shop/*/*"], "roles": ["b-*"]},
        {"topics": [OWN], "roles": ["thief"]},
    )
    assert not both.allows_schema_copy(ORDERS, RETRY)


ROLES = ("replayer", "replay-eu", "fulfilment", "shop.orders", "*")
RULES = st.lists(
    st.fixed_dictionaries({
        "namespaces": st.sampled_from([
            {"names": ["shop"]}, {"names": ["billing"]}, {"names": ["shop", "billing"]}, None,
        ]),
        "topics": st.lists(st.sampled_from([
            str(ORDERS), str(PAYROLL), "persistent://shop/prod/*", "persistent://*/*/orders",
            "persistent://{namespace}/prod/pay*", "persistent://shop/other/*",
        ]), min_size=1, max_size=3, unique=True),
        "roles": st.lists(st.sampled_from([
            "replayer", "replay*", "*", "{namespace}.*", "fulfilment", "Replayer",
        ]), max_size=3, unique=True),
    }),
    max_size=5,
)  # fmt: skip


def allowed_by(rules: list[dict[str, Any]], namespace: str, topic: TopicName, role: str) -> bool:
    """Return True if one rule for the namespace has both; the connection is in `shop`."""

    def has(patterns: list[str], name: str) -> bool:
        texts = [pattern.replace("{namespace}", namespace) for pattern in patterns]
        return any(re.fullmatch(re.escape(text).replace(r"\*", "[^/]*"), name) for text in texts)

    return any(
        namespace in (rule["namespaces"] or {"names": ["shop"]})["names"]
        and has(rule["topics"], str(topic))
        and has(rule["roles"], role)
        for rule in rules
    )


@given(
    RULES,
    st.sampled_from(["shop", "billing", "thief"]),
    st.sampled_from([ORDERS, PAYROLL]),
    st.sampled_from(ROLES),
)
def test_generated_rules_give_rights_to_their_own_namespace(
    rules: list[dict[str, Any]], namespace: str, topic: TopicName, role: str
) -> None:
    given_rules = [{k: v for k, v in rule.items() if v is not None} for rule in rules]
    try:
        rights = permissions(*given_rules, namespace=namespace)
    except RedriveError:  # no rule is for the namespace
        assert not allowed_by(rules, namespace, topic, role)
        return
    allowed = allowed_by(rules, namespace, topic, role)
    assert (rights.first_refused([role], [topic]) is None) is allowed


@given(RULES, st.sampled_from(["shop", "billing"]))
def test_schema_is_copied_only_where_each_role_may_see_it(
    rules: list[dict[str, Any]], namespace: str
) -> None:
    given_rules = [{k: v for k, v in rule.items() if v is not None} for rule in rules]
    with suppress(RedriveError):  # no rule is for the namespace
        rights = permissions(*given_rules, namespace=namespace)
        if rights.allows_schema_copy(ORDERS, PAYROLL):
            seeing = {r for r in ROLES if allowed_by(rules, namespace, PAYROLL, r)}
            assert all(allowed_by(rules, namespace, ORDERS, role) for role in seeing)


def test_rule_without_namespaces_covers_only_its_own() -> None:
    rule = {"name": "one", "topics": [str(ORDERS)]}
    assert permissions(rule).rules
    assert not permissions(rule, namespace="other").rules


def test_rule_with_namespaces_covers_exactly_those() -> None:
    rule = {"name": "one", "namespaces": {"names": ["other"]}, "topics": [str(ORDERS)]}
    assert permissions(rule, namespace="other").rules
    assert not permissions(rule, namespace="shop").rules
    assert not permissions(rule, namespace="other-2").rules
    nothing = {"name": "one", "namespaces": {"names": []}, "topics": [str(ORDERS)]}
    assert not permissions(nothing, namespace="shop").rules


@pytest.mark.parametrize(
    ("selector", "labels", "matches"),
    [
        ({}, {}, False),  # as one left out
        ({"matchLabels": {"team": "shop"}}, {"team": "shop", "a": "b"}, True),
        ({"matchLabels": {"team": "shop"}}, {"team": "other"}, False),
        ({"matchLabels": {"team": "shop"}}, {}, False),
        ({"matchLabels": {"team": ""}}, {}, False),
        ({"matchExpressions": [("team", "In", ["shop", "b"])]}, {"team": "shop"}, True),
        ({"matchExpressions": [("team", "In", ["shop"])]}, {}, False),
        ({"matchExpressions": [("team", "NotIn", ["shop"])]}, {"team": "shop"}, False),
        ({"matchExpressions": [("team", "NotIn", ["shop"])]}, {}, True),
        ({"matchExpressions": [("team", "Exists", [])]}, {"team": ""}, True),
        ({"matchExpressions": [("team", "Exists", [])]}, {}, False),
        ({"matchExpressions": [("team", "DoesNotExist", [])]}, {}, True),
        ({"matchExpressions": [("team", "DoesNotExist", [])]}, {"team": ""}, False),
        (
            {"matchLabels": {"a": "b"}, "matchExpressions": [("team", "Exists", [])]},
            {"a": "b"},
            False,
        ),
    ],
)
def test_label_selector_matches_as_in_kubernetes(
    selector: dict[str, Any], labels: dict[str, str], *, matches: bool
) -> None:
    expressions = [
        {"key": key, "operator": operator, "values": values}
        for key, operator, values in selector.get("matchExpressions", [])
    ]
    assert (
        LabelSelector.model_validate(selector | {"matchExpressions": expressions}).matches(labels)
        is matches
    )
    rule = {
        "name": "one",
        "namespaces": {"selector": selector | {"matchExpressions": expressions}},
        "topics": [str(ORDERS)],
    }
    assert bool(permissions(rule, namespace="any", labels=labels).rules) is matches


@pytest.mark.parametrize(
    ("operator", "values"), [("In", []), ("NotIn", []), ("Exists", ["a"]), ("DoesNotExist", ["a"])]
)
def test_expression_with_wrong_number_of_values_is_refused(
    operator: str, values: list[str]
) -> None:
    expression = {"key": "team", "operator": operator, "values": values}
    with pytest.raises(InvalidSpecError, match="add values, or remove them"):
        parse_spec(LabelSelector, {"spec": {"matchExpressions": [expression]}})


@pytest.mark.parametrize("pattern", ["persistent://*/*/*", "persistent://shop/prod/__*"])
@pytest.mark.parametrize("local", ["__change_events", "orders-s__transaction_pending_ack"])
def test_no_pattern_covers_a_system_topic(pattern: str, local: str) -> None:
    allowed = permissions(
        {
            "name": "one",
            "topics": [pattern],
            "roles": ["*"],
            "adoption": "Allowed",
            "deletion": "Allowed",
        }
    )
    topic = ORDERS.sibling(local)
    assert not allowed.allows_topic(topic)
    assert not allowed.allows_role("fulfilment", topic)
    assert not allowed.allows_adoption(topic)
    assert not allowed.allows_deletion(topic)

"""Policies that cannot be provisioned: they report why, change nothing, and recover once fixed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.integration.provision.conftest import MakeShop, Shop

Fields = dict[str, Any]
GONE = "http://127.0.0.1:1"
EMPTY = {"apiVersion": "v1", "kind": "ConfigMap"}


def token_of(secret: str) -> Fields:
    """The field of a connection that refers to *secret*."""
    return {
        "authentication": {
            "type": "Token",
            "token": {"secretRef": {"name": secret, "key": "token"}},
        }
    }


def filled(fields: Fields, shop: Shop) -> Fields:
    """Return *fields* with the tenant of the shop in the place of `{tenant}`."""
    written: Fields = json.loads(json.dumps(fields).replace("{tenant}", shop.tenant))
    return written


def nothing(_: Shop) -> None:
    """Prepare nothing."""


@dataclass(frozen=True)
class Case:
    """A policy that is refused; its subscription and its connection are named after the case.

    Args:
        reason: of the Ready condition.
        parts: of its message: the value, and the remedy.
        fix: removes the cause.
        stalls: True if the user has to act, False if the operator retries automatically.
        connection: fields that differ from a valid connection; None creates no connection.
        policy: fields that differ from a valid policy.
        prepare: runs before the policy is created.
    """

    reason: str
    parts: tuple[str, str]
    fix: Callable[[Shop], None]
    stalls: bool = False
    connection: Fields | None = field(default_factory=dict)
    policy: Fields = field(default_factory=dict)
    prepare: Callable[[Shop], None] = nothing


def make_tenant(shop: Shop) -> None:
    """Create the missing tenant with its namespace and topic."""
    tenant = f"{shop.tenant}-later"
    admins = {"adminRoles": [shop.role], "allowedClusters": ["standalone"]}
    shop.request("PUT", f"tenants/{tenant}", admins)
    shop.request("PUT", f"namespaces/{tenant}/prod")
    shop.create_topic(f"persistent://{tenant}/prod/orders")


def make_namespace(shop: Shop) -> None:
    """Create the missing namespace with its topic."""
    shop.request("PUT", f"namespaces/{shop.tenant}/later")
    shop.create_topic(shop.topic("orders", "later"))


def split_topics(shop: Shop) -> None:
    """Create a retry topic without the partitions of its source."""
    shop.create_topic(shop.topic("split"), 2)
    shop.create_topic(shop.topic("split-partitions-differ-RETRY"))


def delete_split_topic(shop: Shop) -> None:
    """Delete that retry topic."""
    path = f"persistent/{shop.tenant}/prod/split-partitions-differ-RETRY"
    shop.request("DELETE", path)


def make_expiring_namespace(shop: Shop) -> None:
    """Create a namespace that deletes idle subscriptions."""
    shop.request("PUT", f"namespaces/{shop.tenant}/expiring")
    shop.create_topic(shop.topic("orders", "expiring"))
    shop.request("POST", f"namespaces/{shop.tenant}/expiring/subscriptionExpirationTime", 5)


def keep_subscriptions(shop: Shop) -> None:
    """Disable the expiry of subscriptions in that namespace."""
    shop.request("POST", f"namespaces/{shop.tenant}/expiring/subscriptionExpirationTime", 0)


def rename_topics(shop: Shop) -> None:
    """Create the policy again: its names are immutable."""
    shop.delete("three-topics")
    shop.policy("three-topics", connectionRef={"name": "three-topics"}, subscription="three-topics")


CASES = {
    "no-connection": Case(
        "ConnectionNotFound",
        ("got '{namespace}/no-connection'", "create it"),
        lambda shop: shop.connection("no-connection"),
        connection=None,
    ),
    "no-secret": Case(
        "SecretNotFound",
        ("got '{namespace}/absent'", "create it"),
        lambda shop: shop.secret("absent", token=shop.token(shop.role)),
        connection=token_of("absent"),
    ),
    "no-key": Case(
        "SecretKeyNotFound",
        ("no key 'token'; got ['tokn']", "add the key"),
        lambda shop: shop.secret("keyless", token=shop.token(shop.role)),
        connection=token_of("keyless"),
        prepare=lambda shop: shop.secret("keyless", tokn=shop.token(shop.role)),
    ),
    "token-refused": Case(
        "AuthenticationFailed",
        ("401 and ", "use credentials that are valid"),
        lambda shop: shop.secret("refused", token=shop.token(shop.role)),
        stalls=True,
        connection=token_of("refused"),
        prepare=lambda shop: shop.secret("refused", token="no-such-token"),  # noqa: S106
    ),
    "no-rights": Case(
        "Forbidden",
        ("got '403 ", "use the token of a role that administers the tenant"),
        lambda shop: shop.secret("powerless", token=shop.token(shop.role)),
        stalls=True,
        connection=token_of("powerless"),
        prepare=lambda shop: shop.secret("powerless", token=shop.token("nobody")),
    ),
    "unreachable": Case(
        "BrokerUnreachable",
        (GONE, "check adminURL"),
        lambda shop: shop.connection("unreachable"),
        connection={"adminURL": GONE},
    ),
    "no-address": Case(
        "AdminUrlInvalid",
        ("got 'http://broker:99999'", "correct its host and port"),
        lambda shop: shop.connection("no-address"),
        stalls=True,
        connection={"adminURL": "http://broker:99999"},
    ),
    "no-tenant": Case(
        "TenantNotFound",
        ("got '{tenant}-later'", "create it"),
        make_tenant,
        connection={
            "allow": [{"name": "one", "topics": ["persistent://*/*/*"], "roles": ["fulfilment"]}]
        },
        policy={"topic": "persistent://{tenant}-later/prod/orders"},
    ),
    "no-namespace": Case(
        "NamespaceNotFound",
        ("got '{tenant}/later'", "create it"),
        make_namespace,
        policy={"topic": "persistent://{tenant}/later/orders"},
    ),
    "no-topic": Case(
        "TopicNotFound",
        ("got 'persistent://{tenant}/prod/later'", "create it"),
        lambda shop: shop.create_topic(shop.topic("later")),
        policy={"topic": "persistent://{tenant}/prod/later"},
    ),
    "topic-not-allowed": Case(
        "TopicNotAllowed",
        (
            "(persistent://elsewhere/*/*); got 'persistent://{tenant}/prod/orders'",
            "add it",
        ),
        lambda shop: shop.connection("topic-not-allowed"),
        stalls=True,
        connection={
            "allow": [
                {"name": "one", "topics": ["persistent://elsewhere/*/*"], "roles": ["fulfilment"]}
            ]
        },
    ),
    "derived-topic-not-allowed": Case(
        "TopicNotAllowed",
        (
            "got 'persistent://{tenant}/prod/orders-derived-topic-not-allowed-RETRY'",
            "add it",
        ),
        lambda shop: shop.connection("derived-topic-not-allowed"),
        stalls=True,
        connection={
            "allow": [
                {"name": "one", "topics": ["persistent://*/prod/orders"], "roles": ["fulfilment"]}
            ]
        },
    ),
    "given-name-not-allowed": Case(
        "TopicNotAllowed",
        ("got 'persistent://{tenant}/prod/own-given-name-not-allowed-RETRY'", "add it"),
        lambda shop: shop.connection("given-name-not-allowed"),
        stalls=True,
        connection={
            "allow": [
                {
                    "name": "one",
                    "topics": ["persistent://{tenant}/*/orders"],
                    "roles": ["fulfilment"],
                }
            ]
        },
        policy={
            "naming": {"retryTopic": "persistent://{tenant}/prod/own-given-name-not-allowed-RETRY"}
        },
    ),
    "three-topics": Case(
        "InvalidSpec",
        ("must be four different topics", "use another naming scheme"),
        rename_topics,
        stalls=True,
        policy={"naming": {"retryTopic": "persistent://{tenant}/prod/orders"}},
    ),
    "role-not-allowed": Case(
        "RoleNotAllowed",
        ("(fulfilment); got 'root'", "add it"),
        lambda shop: shop.connection("role-not-allowed", allow=[shop.rule("root")]),
        stalls=True,
        policy={"consumerRoles": ["root"]},
    ),
    "namespace-not-allowed": Case(
        "NamespaceNotAllowed",
        ("got '{namespace}'", "add the namespace to a rule of its spec.allow"),
        lambda shop: shop.connection("namespace-not-allowed"),
        stalls=True,
        connection={
            "allow": [{"name": "one", "namespaces": {"names": ["elsewhere"]}, "topics": []}]
        },
    ),
    "partitions-differ": Case(
        "PartitionsDiffer",
        ("2 partitions, as the source topic has", "got 'no partitions'; delete it"),
        delete_split_topic,
        stalls=True,
        policy={"topic": "persistent://{tenant}/prod/split"},
        prepare=split_topics,
    ),
    "subscriptions-expire": Case(
        "SubscriptionExpiry",
        (
            "got 'subscriptionExpirationTime of 5 minutes'",
            "set-subscription-expiration-time {tenant}/expiring -t 0",
        ),
        keep_subscriptions,
        stalls=True,
        policy={"topic": "persistent://{tenant}/expiring/orders"},
        prepare=make_expiring_namespace,
    ),
    "config-map-not-ours": Case(
        "ConfigMapNotOurs",
        ("got 'config-map-not-ours-redrive'", "delete or rename that ConfigMap"),
        lambda shop: shop.start_deletion("config-map-not-ours-redrive", "configmap"),
        stalls=True,
        prepare=lambda shop: shop.apply({"config-map-not-ours-redrive": EMPTY}),
    ),
}


@dataclass(frozen=True)
class Refused:
    """The refused policies of all cases, and the broker before and after."""

    shop: Shop
    before: Fields
    after: Fields
    policies: dict[str, Fields]


@pytest.fixture(scope="module")
def refused(make_shop: Callable[[], Shop]) -> Refused:
    """All cases at once: they are independent."""
    shop = make_shop()
    shop.create_topic(shop.topic("orders"))
    for name, case in CASES.items():
        case.prepare(shop)
        if case.connection is not None:
            shop.connection(name, **filled(case.connection, shop))
    before = shop.dump()
    shop.policies(
        {
            name: {
                "connectionRef": {"name": name},
                "subscription": name,
                **filled(case.policy, shop),
            }
            for name, case in CASES.items()
        }
    )
    policies = {name: shop.reaches(name, case.reason) for name, case in CASES.items()}
    return Refused(shop, before, shop.dump(), policies)


@pytest.mark.parametrize("name", CASES)
def test_refused_policy_reports_problem_value_and_remedy(refused: Refused, name: str) -> None:
    case, status = CASES[name], refused.policies[name]["status"]
    conditions = {condition["type"]: condition for condition in status["conditions"]}
    assert conditions.keys() == {"Ready", "Stalled" if case.stalls else "Reconciling"}
    assert {condition["reason"] for condition in conditions.values()} == {case.reason}
    assert conditions["Ready"]["status"] == "False"
    for part in case.parts:
        names = {"tenant": refused.shop.tenant, "namespace": refused.shop.namespace}
        assert part.format(**names) in conditions["Ready"]["message"]
    assert "retryTopic" not in status


def test_refused_policies_change_nothing_at_the_broker(refused: Refused) -> None:
    assert refused.after == refused.before
    tenants = refused.shop.request("GET", "tenants")
    assert f"{refused.shop.tenant}-later" not in tenants


def test_refusal_with_many_attempts_is_one_event(refused: Refused) -> None:
    assert refused.shop.event_reasons("no-topic") == [("Warning", "TopicNotFound")]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no-secret", "SecretNotFound"),
        ("no-key", "SecretKeyNotFound"),
        ("token-refused", "AuthenticationFailed"),
        ("no-rights", "Forbidden"),
        ("unreachable", "BrokerUnreachable"),
        ("topic-not-allowed", "TenantNotFound"),
        ("role-not-allowed", "Connected"),
    ],
)
def test_connection_of_a_refused_policy_has_its_own_reason(
    refused: Refused, name: str, reason: str
) -> None:
    refused.shop.reaches(name, reason, "brokerconnection")


@pytest.fixture(scope="module")
def fixed(refused: Refused) -> Shop:
    """The shop after the fixes of all cases, without a restart of the operator."""
    for case in CASES.values():
        case.fix(refused.shop)
    return refused.shop


@pytest.mark.parametrize("name", CASES)
def test_policy_becomes_ready_once_its_cause_is_fixed(fixed: Shop, name: str) -> None:
    assert fixed.ready(name)["status"]["retryTopic"].endswith(f"-{name}-RETRY")


def test_tokens_are_never_shown(fixed: Shop, operator_process: Path) -> None:
    text = operator_process.read_text()
    text += fixed.kubectl("get", "brokerconnections,retrypolicies,events,configmaps", "-oyaml")
    assert len(fixed.tokens) > len(CASES) / 2
    assert [token for token in fixed.tokens if token in text] == []


@pytest.mark.parametrize("limit", ["maxTopicsPerNamespace", "maxSubscriptionsPerTopic"])
def test_limit_of_the_pulsar_namespace_is_named(make_shop: Callable[[], Shop], limit: str) -> None:
    shop = make_shop()
    shop.create_topic(shop.topic("orders"))
    dead_letter = f"{shop.tenant}/prod/orders-fulfilment-DLQ"
    if limit == "maxSubscriptionsPerTopic":
        shop.create_topic(f"persistent://{dead_letter}")
        earliest = {"ledgerId": -1, "entryId": -1}
        shop.request("PUT", f"persistent/{dead_letter}/subscription/audit", earliest)
    shop.connection()
    shop.request("POST", f"namespaces/{shop.tenant}/prod/{limit}", 1)
    shop.policy(adoption="IfPresent")

    status = shop.reaches("orders", "LimitReached")["status"]

    conditions = {condition["type"]: condition for condition in status["conditions"]}
    assert f"raise {limit}" in conditions["Ready"]["message"]
    assert "Stalled" in conditions
    shop.request("POST", f"namespaces/{shop.tenant}/prod/{limit}", 0)
    shop.ready()


def test_namespace_without_the_label_is_not_permitted_anymore(make_shop: MakeShop) -> None:
    shop = make_shop()
    set_label(shop, "yes")
    shop.create_topic(shop.topic("orders"))
    selector = {"matchExpressions": [{"key": "redrive-test", "operator": "In", "values": ["yes"]}]}
    shop.connection(allow=[{**shop.rule("fulfilment"), "namespaces": {"selector": selector}}])
    shop.policy()
    shop.ready()
    set_label(shop, None)
    shop.reaches("orders", "NamespaceNotAllowed")


def set_label(shop: Shop, value: str | None) -> None:
    change = {"metadata": {"labels": {"redrive-test": value}}}
    shop.cluster.objects.patch("namespace", shop.namespace, change)

"""The schema of a source topic is copied to its retry and dead-letter topic, with changes."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.integration.provision.conftest import SECONDS, MakeShop, Shop

STRING = {"type": "STRING", "schema": "", "properties": {}}


@pytest.fixture(scope="module")
def typed(make_shop: MakeShop) -> Shop:
    """A shop for all tests here, each with a source topic of its own."""
    shop = make_shop()
    shop.connection()
    return shop


def record(*fields: str) -> dict[str, Any]:
    """A JSON schema; schemas with different fields are compatible."""
    written = [{"name": f, "type": ["null", "string"], "default": None} for f in fields]
    schema = json.dumps({"type": "record", "name": "Order", "fields": written})
    return {"type": "JSON", "schema": schema, "properties": {"team": "orders"}}


def add_schema(shop: Shop, name: str, schema: dict[str, Any]) -> None:
    """Add a schema to a topic, as its producer does."""
    shop.request("POST", f"schemas/{shop.tenant}/prod/{name}/schema", schema)


def schema_of(shop: Shop, name: str) -> dict[str, Any] | None:
    """The newest schema of a topic, in the form of `add_schema`."""
    answer = shop.broker.request("GET", f"/admin/v2/schemas/{shop.tenant}/prod/{name}/schema")
    if answer.status == 404:
        return None
    schema = json.loads(answer.body)
    return {"type": schema["type"], "schema": schema["data"], "properties": schema["properties"]}


def versions_of(shop: Shop, name: str) -> list[str]:
    """All versions of a topic's schema, the oldest first."""
    answer = shop.broker.request("GET", f"/admin/v2/schemas/{shop.tenant}/prod/{name}/schemas")
    return [version["data"] for version in json.loads(answer.body)["getSchemaResponses"]]


def wait_for_schema(shop: Shop, name: str, schema: dict[str, Any]) -> None:
    """Wait until both topics have the schema; check that they have all versions of the source."""
    deadline = time.monotonic() + SECONDS
    for end in ("RETRY", "DLQ"):
        while schema_of(shop, f"{name}-fulfilment-{end}") != schema:
            assert time.monotonic() < deadline, end
            time.sleep(0.2)
        assert versions_of(shop, f"{name}-fulfilment-{end}") == versions_of(shop, name)


@pytest.mark.parametrize("partitions", [0, 2])
def test_changes_of_the_source_schema_are_copied(typed: Shop, partitions: int) -> None:
    name = f"typed-{partitions}"
    typed.create_topic(typed.topic(name), partitions)
    add_schema(typed, name, record("id"))
    add_schema(typed, name, record("id", "country"))  # earlier messages have the former version
    typed.policy(name, topic=typed.topic(name))
    typed.ready(name)
    wait_for_schema(typed, name, record("id", "country"))
    for fields in (("id", "customer"), ("id", "customer", "city")):
        add_schema(typed, name, record(*fields))
    wait_for_schema(typed, name, record("id", "customer", "city"))
    typed.wait_for_events(name, "Repaired", "copied the source topic's JSON schema")


def test_schema_is_not_copied_for_roles_without_the_source(make_shop: MakeShop) -> None:
    """A chain of policies, each of which a rule allows, would show the schema to another role."""
    victim, attacker = make_shop(), make_shop()
    orders, retry = victim.topic("orders"), victim.topic("theirs-RETRY")
    for_attacker = {"namespaces": {"names": [attacker.namespace]}}
    topics = [victim.topic("theirs*"), victim.topic("orders-thief-*")]
    victim.connection(
        allow=[
            {"name": "source", **for_attacker, "topics": [orders]},
            {"name": "own", **for_attacker, "topics": topics, "roles": ["thief"]},
        ]
    )
    for name in ("orders", "theirs"):
        victim.create_topic(victim.topic(name))
    add_schema(victim, "orders", record("id", "salary"))
    through = {"connectionRef": {"name": "main", "namespace": victim.namespace}}
    steps: dict[str, dict[str, Any]] = {
        "plain": {"topic": orders, "subscription": "thief"},
        "first": {"topic": victim.topic("theirs"), "naming": {"retryTopic": retry}},
        "second": {"topic": orders, "naming": {"retryTopic": retry}, "consumerRoles": []},
    }
    for name, spec in steps.items():
        defaults = {**through, "subscription": f"thief-{name}", "consumerRoles": ["thief"]}
        attacker.policy(name, **(defaults | spec))
        if name == "second":
            attacker.take_over(name, "first")
        else:
            attacker.ready(name)
        if name == "first":
            attacker.delete(name)
    for name in ("plain", "second"):
        attacker.reaches_condition(name, "SchemaNotAllowed")
        status = attacker.get("retrypolicy", name)["status"]
        for topic in (status["retryTopic"], status["deadLetterTopic"]):
            assert schema_of(victim, topic.rpartition("/")[2]) is None


def test_topics_of_a_source_without_schema_have_none(typed: Shop) -> None:
    typed.create_topic(typed.topic("plain"))
    typed.policy("plain", topic=typed.topic("plain"))
    typed.ready("plain")
    for end in ("RETRY", "DLQ"):
        assert schema_of(typed, f"plain-fulfilment-{end}") is None


def test_refused_schema_is_reported_and_the_policy_is_ready(
    typed: Shop,
) -> None:
    retry = "odd-fulfilment-RETRY"
    for name in ("odd", retry):
        typed.create_topic(typed.topic(name))
    add_schema(typed, "odd", record("id"))
    add_schema(typed, retry, STRING)
    typed.policy("odd", topic=typed.topic("odd"), adoption="IfPresent")
    typed.ready("odd")
    message = typed.reaches_condition("odd", "SchemaRefused")["message"]
    assert f"could not be copied to {typed.topic(retry)}, so" in message
    assert "409" in message
    assert schema_of(typed, retry) == STRING
    assert schema_of(typed, "odd-fulfilment-DLQ") == record("id")
    assert typed.topics()[typed.topic(retry)]["subscriptions"] == ["fulfilment"]
    typed.request("DELETE", f"schemas/{typed.tenant}/prod/{retry}/schema?force=true")
    typed.policy("odd", topic=typed.topic("odd"), adoption="IfPresent", maxRetries=3)
    wait_for_schema(typed, "odd", record("id"))
    typed.ready("odd")
    conditions = typed.get("retrypolicy", "odd")["status"]["conditions"]
    # Brokers from 4.1 on deliver too early after the first rung, which causes a warning.
    assert {c["type"] for c in conditions} - {"RetriesEarly"} == {"Ready"}

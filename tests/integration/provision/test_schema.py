"""The schema of a source topic is copied to its retry and dead-letter topic, and followed."""

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
    """A JSON schema; all of them are compatible."""
    written = [{"name": f, "type": ["null", "string"], "default": None} for f in fields]
    schema = json.dumps({"type": "record", "name": "Order", "fields": written})
    return {"type": "JSON", "schema": schema, "properties": {"team": "orders"}}


def give(shop: Shop, name: str, schema: dict[str, Any]) -> None:
    """Have a topic take a schema, as its producer would."""
    shop.request("POST", f"schemas/{shop.tenant}/prod/{name}/schema", schema)


def schema_of(shop: Shop, name: str) -> dict[str, Any] | None:
    """The newest schema of a topic, in the form it was given."""
    answer = shop.broker.request("GET", f"/admin/v2/schemas/{shop.tenant}/prod/{name}/schema")
    if answer.status == 404:
        return None
    found = json.loads(answer.body)
    return {"type": found["type"], "schema": found["data"], "properties": found["properties"]}


def versions_of(shop: Shop, name: str) -> list[str]:
    """All versions of a topic's schema, the oldest first."""
    answer = shop.broker.request("GET", f"/admin/v2/schemas/{shop.tenant}/prod/{name}/schemas")
    return [version["data"] for version in json.loads(answer.body)["getSchemaResponses"]]


def follow(shop: Shop, name: str, schema: dict[str, Any]) -> None:
    """Wait until both topics have the schema, and all versions of the source's before it."""
    deadline = time.monotonic() + SECONDS
    for end in ("RETRY", "DLQ"):
        while schema_of(shop, f"{name}-fulfilment-{end}") != schema:
            assert time.monotonic() < deadline, end
            time.sleep(0.2)
        assert versions_of(shop, f"{name}-fulfilment-{end}") == versions_of(shop, name)


@pytest.mark.parametrize("partitions", [0, 2])
def test_the_schema_of_the_source_is_copied_and_followed(typed: Shop, partitions: int) -> None:
    name = f"typed-{partitions}"
    typed.create_topic(typed.topic(name), partitions)
    give(typed, name, record("id"))
    give(typed, name, record("id", "country"))  # messages of the version before wait still
    typed.policy(name, topic=typed.topic(name))
    typed.ready(name)
    follow(typed, name, record("id", "country"))
    for fields in (("id", "customer"), ("id", "customer", "city")):
        give(typed, name, record(*fields))
    follow(typed, name, record("id", "customer", "city"))
    typed.tells(name, "Repaired", "copied the source topic's JSON schema")


def test_topics_of_plain_bytes_stay_without_a_schema(typed: Shop) -> None:
    typed.create_topic(typed.topic("plain"))
    typed.policy("plain", topic=typed.topic("plain"))
    typed.ready("plain")
    for end in ("RETRY", "DLQ"):
        assert schema_of(typed, f"plain-fulfilment-{end}") is None


def test_a_schema_that_the_broker_refuses_is_told_and_the_policy_works_without(
    typed: Shop,
) -> None:
    retry = "odd-fulfilment-RETRY"
    for name in ("odd", retry):
        typed.create_topic(typed.topic(name))
    give(typed, "odd", record("id"))
    give(typed, retry, STRING)
    typed.policy("odd", topic=typed.topic("odd"), adoption="IfPresent")
    typed.ready("odd")
    told = typed.reaches_condition("odd", "SchemaRefused")["message"]
    assert f"could not be copied to {typed.topic(retry)}, so" in told
    assert "409" in told
    assert schema_of(typed, retry) == STRING
    assert schema_of(typed, "odd-fulfilment-DLQ") == record("id")
    assert typed.topics()[typed.topic(retry)]["subscriptions"] == ["fulfilment"]
    typed.request("DELETE", f"schemas/{typed.tenant}/prod/{retry}/schema?force=true")
    typed.policy("odd", topic=typed.topic("odd"), adoption="IfPresent", maxRetries=3)
    follow(typed, "odd", record("id"))
    typed.ready("odd")
    conditions = typed.get("retrypolicy", "odd")["status"]["conditions"]
    # Brokers from 4.1 on deliver after the first rung of this policy too early, which is warned of.
    assert {c["type"] for c in conditions} - {"RetriesEarly"} == {"Ready"}

"""Schemas of the retry and the dead-letter topic, and the sequences topic of a policy."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from redrive.policy import codec
from tests.integration.provision.conftest import SECONDS, MakeShop, Shop, rest_path
from tests.integration.provision.test_lifecycle import client, send
from tests.support.waiting import wait_until

STRING = {"type": "STRING", "schema": "", "properties": {}}
IN_ORDER = {"subscriptionType": "KeyShared", "ordering": "PerKey"}
SEQUENCED = {**IN_ORDER, "deadLetter": {"sequenced": True}}
BOTH = ["consume", "produce"]


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


@pytest.fixture(scope="module")
def shop(make_shop: MakeShop) -> Shop:
    """A shop for all tests here, each with a source topic of its own."""
    shop = make_shop()
    rule = {**shop.rule("fulfilment", "billing"), "adoption": "Allowed"}
    shop.connection(allow=[rule])
    return shop


def sequences_topic(shop: Shop, name: str) -> str:
    return shop.topic(f"{name}-fulfilment-DLQ-SEQUENCES")


def provision(shop: Shop, name: str, **spec: object) -> dict[str, Any]:
    """Return the status of a policy for its own source topic, once it is ready."""
    if shop.topic(name) not in shop.topics():
        shop.create_topic(shop.topic(name))
    shop.policy(name, topic=shop.topic(name), **spec)
    status: dict[str, Any] = shop.ready(name)["status"]
    return status


def rights(shop: Shop, topic: str) -> dict[str, list[str]]:
    auth = shop.request("GET", f"namespaces/{shop.tenant}/prod")["auth_policies"]
    return {role: sorted(may) for role, may in auth["destination_auth"].get(topic, {}).items()}


def wait_for_rights(shop: Shop, name: str, topic: str, expected: dict[str, list[str]]) -> None:
    """Wait until the topic exists with *expected* rights and its cursor, which is created last."""
    deadline = time.monotonic() + SECONDS
    while True:
        subscriptions = shop.topics().get(topic, {}).get("subscriptions")
        state = rights(shop, topic), subscriptions
        if state == (expected, ["__compaction"]):
            return
        assert time.monotonic() < deadline, state
        shop.request_reconcile(name)
        time.sleep(1)


def test_sequences_topic_is_compacted_and_only_for_consumers(shop: Shop) -> None:
    status = provision(shop, "made", **SEQUENCED)
    topic = sequences_topic(shop, "made")
    assert status["sequencesTopic"] == topic
    path = rest_path(topic)
    assert shop.topics()[topic]["partitions"] == 0
    assert shop.topics()[topic]["subscriptions"] == ["__compaction"]
    assert shop.request("GET", f"{path}/compactionThreshold") == 10 * 2**20
    assert shop.request("GET", f"{path}/messageTTL") == 0
    assert rights(shop, topic) == {"fulfilment": BOTH}
    data = shop.get("configmap", status["configMap"])["data"]
    policy = codec.decode(data["policy.json"])
    assert policy.sequenced
    assert str(policy.sequences_topic) == topic


def test_deleted_sequences_topic_and_rights_are_restored(shop: Shop) -> None:
    provision(shop, "drift", **SEQUENCED)
    topic = sequences_topic(shop, "drift")
    shop.request("DELETE", f"{rest_path(topic)}/permissions/fulfilment")
    wait_for_rights(shop, "drift", topic, {"fulfilment": BOTH})
    shop.request("DELETE", rest_path(topic))
    wait_for_rights(shop, "drift", topic, {"fulfilment": BOTH})


@pytest.mark.parametrize("deletion", ["Delete", "DeleteIfEmpty", "Retain", "RevokeGrants"])
def test_sequences_topic_is_deleted_with_dead_letter_topic(shop: Shop, deletion: str) -> None:
    name = f"gone-{deletion}".lower()
    provision(shop, name, **SEQUENCED, deletionPolicy=deletion)
    topic = sequences_topic(shop, name)
    if deletion == "DeleteIfEmpty":
        send(shop.broker, shop.topic(f"{name}-fulfilment-DLQ"))
    shop.delete(name)
    exists = topic in shop.topics()
    assert exists == (shop.topic(f"{name}-fulfilment-DLQ") in shop.topics())
    assert exists == (deletion != "Delete")
    kept = {"fulfilment": BOTH} if deletion == "Retain" else {}
    assert not exists or deletion == "DeleteIfEmpty" or rights(shop, topic) == kept


def test_connected_client_blocks_deletion_of_sequences_topic(shop: Shop) -> None:
    provision(shop, "used", **SEQUENCED, deletionPolicy="Delete")
    topic = sequences_topic(shop, "used")
    with client(shop.broker) as opened:
        opened.create_producer(topic)
        shop.start_deletion("used")
        condition = wait_until_in_use(shop, "used")
        assert topic in condition["message"]
        assert topic in shop.topics()
    # The policy is deleted later: a creation of its topics may still be in flight.
    wait_until(lambda: topic not in shop.request("GET", f"persistent/{shop.tenant}/prod"))


def wait_until_in_use(shop: Shop, name: str) -> dict[str, Any]:
    deadline = time.monotonic() + SECONDS
    while True:
        conditions = shop.get("retrypolicy", name)["status"]["conditions"]
        ready = next(dict(c) for c in conditions if c["type"] == "Ready")
        if ready["reason"] == "InUse":
            return ready
        assert time.monotonic() < deadline, ready
        time.sleep(0.1)


def test_unused_sequences_topic_is_deleted_with_the_policy(
    shop: Shop,
) -> None:
    provision(shop, "off", **SEQUENCED, deletionPolicy="Delete")
    topic = sequences_topic(shop, "off")
    status = provision(shop, "off", **IN_ORDER, deletionPolicy="Delete")
    assert "sequencesTopic" not in status
    written = json.loads(shop.get("configmap", "off-redrive")["data"]["policy.json"])
    assert "deadLetterSequenced" not in written
    assert rights(shop, topic) == {"fulfilment": BOTH}
    # Once enabled again for other consumers, only they have rights.
    again = {**SEQUENCED, "consumerRoles": ["billing"], "deletionPolicy": "Delete"}
    assert provision(shop, "off", **again)["sequencesTopic"] == topic
    assert rights(shop, topic) == {"billing": BOTH}
    provision(shop, "off", **IN_ORDER, deletionPolicy="Delete")
    shop.delete("off")
    assert topic not in shop.topics()


def test_existing_topic_does_not_become_a_sequences_topic(shop: Shop) -> None:
    shop.create_topic(shop.topic("taken"))
    shop.create_topic(sequences_topic(shop, "taken"))
    shop.policy("taken", topic=shop.topic("taken"), adoption="IfPresent", **SEQUENCED)
    conditions = shop.reaches("taken", "TopicExists")["status"]["conditions"]
    assert any(sequences_topic(shop, "taken") in c["message"] for c in conditions)
    assert rights(shop, sequences_topic(shop, "taken")) == {}

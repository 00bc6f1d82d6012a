"""The sequences topic of a policy with sequenced dead letters."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from redrive.policy import codec
from tests.integration.provision.conftest import SECONDS, MakeShop, Shop, rest_path
from tests.integration.provision.test_deletion import client, send
from tests.support.waiting import wait_until

IN_ORDER = {"subscriptionType": "KeyShared", "ordering": "PerKey"}
SEQUENCED = {**IN_ORDER, "deadLetter": {"sequenced": True}}
BOTH = ["consume", "produce"]


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

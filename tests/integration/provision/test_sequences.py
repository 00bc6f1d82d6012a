"""The topic of records of a policy that keeps the sequence of its dead letters."""

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


def records(shop: Shop, name: str) -> str:
    return shop.topic(f"{name}-fulfilment-DLQ-SEQUENCES")


def provision(shop: Shop, name: str, **spec: object) -> dict[str, Any]:
    """Have a policy ready for a topic of its own; return its status."""
    if shop.topic(name) not in shop.topics():
        shop.create_topic(shop.topic(name))
    shop.policy(name, topic=shop.topic(name), **spec)
    status: dict[str, Any] = shop.ready(name)["status"]
    return status


def rights(shop: Shop, topic: str) -> dict[str, list[str]]:
    auth = shop.request("GET", f"namespaces/{shop.tenant}/prod")["auth_policies"]
    return {role: sorted(may) for role, may in auth["destination_auth"].get(topic, {}).items()}


def until(shop: Shop, name: str, topic: str, expected: dict[str, list[str]]) -> None:
    """Wait until the topic is there again, with these rights and, made after them, its cursor."""
    deadline = time.monotonic() + SECONDS
    while True:
        subscriptions = shop.topics().get(topic, {}).get("subscriptions")
        found = rights(shop, topic), subscriptions
        if found == (expected, ["__compaction"]):
            return
        assert time.monotonic() < deadline, found
        shop.request_reconcile(name)
        time.sleep(1)


def test_records_have_a_compacted_topic_that_consumers_alone_may_use(shop: Shop) -> None:
    status = provision(shop, "made", **SEQUENCED)
    topic = records(shop, "made")
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


def test_what_is_taken_from_it_is_put_right(shop: Shop) -> None:
    provision(shop, "drift", **SEQUENCED)
    topic = records(shop, "drift")
    shop.request("DELETE", f"{rest_path(topic)}/permissions/fulfilment")
    until(shop, "drift", topic, {"fulfilment": BOTH})
    shop.request("DELETE", rest_path(topic))
    until(shop, "drift", topic, {"fulfilment": BOTH})


@pytest.mark.parametrize("deletion", ["Delete", "DeleteIfEmpty", "Retain", "RevokeGrants"])
def test_it_stays_and_goes_with_the_dead_letter_topic(shop: Shop, deletion: str) -> None:
    name = f"gone-{deletion}".lower()
    provision(shop, name, **SEQUENCED, deletionPolicy=deletion)
    topic = records(shop, name)
    if deletion == "DeleteIfEmpty":
        send(shop.broker, shop.topic(f"{name}-fulfilment-DLQ"))
    shop.delete(name)
    there = topic in shop.topics()
    assert there == (shop.topic(f"{name}-fulfilment-DLQ") in shop.topics())
    assert there == (deletion != "Delete")
    kept = {"fulfilment": BOTH} if deletion == "Retain" else {}
    assert not there or deletion == "DeleteIfEmpty" or rights(shop, topic) == kept


def test_a_consumer_that_is_connected_to_it_holds_its_deletion_up(shop: Shop) -> None:
    provision(shop, "used", **SEQUENCED, deletionPolicy="Delete")
    topic = records(shop, "used")
    with client(shop.broker) as opened:
        opened.create_producer(topic)
        shop.kubectl("delete", "retrypolicy", "used", "--wait=false")
        body = waits(shop, "used")
        assert topic in body["message"]
        assert topic in shop.topics()
    # The policy goes later: a creation of its topics may still be in flight.
    wait_until(lambda: topic not in shop.request("GET", f"persistent/{shop.tenant}/prod"))


def waits(shop: Shop, name: str) -> dict[str, Any]:
    deadline = time.monotonic() + SECONDS
    while True:
        conditions = shop.get("retrypolicy", name)["status"]["conditions"]
        found = next(dict(c) for c in conditions if c["type"] == "Ready")
        if found["reason"] == "InUse":
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def test_turned_off_it_stays_for_consumers_that_still_run_and_goes_with_the_policy(
    shop: Shop,
) -> None:
    provision(shop, "off", **SEQUENCED, deletionPolicy="Delete")
    topic = records(shop, "off")
    status = provision(shop, "off", **IN_ORDER, deletionPolicy="Delete")
    assert "sequencesTopic" not in status
    written = json.loads(shop.get("configmap", "off-redrive")["data"]["policy.json"])
    assert "deadLetterSequenced" not in written
    assert rights(shop, topic) == {"fulfilment": BOTH}
    # Turned on again for other consumers, it is theirs alone.
    again = {**SEQUENCED, "consumerRoles": ["billing"], "deletionPolicy": "Delete"}
    assert provision(shop, "off", **again)["sequencesTopic"] == topic
    assert rights(shop, topic) == {"billing": BOTH}
    provision(shop, "off", **IN_ORDER, deletionPolicy="Delete")
    shop.delete("off")
    assert topic not in shop.topics()


def test_a_topic_of_others_never_becomes_one_of_records(shop: Shop) -> None:
    shop.create_topic(shop.topic("taken"))
    shop.create_topic(records(shop, "taken"))
    shop.policy("taken", topic=shop.topic("taken"), adoption="IfPresent", **SEQUENCED)
    said = shop.reaches("taken", "TopicExists")["status"]["conditions"]
    assert any(records(shop, "taken") in c["message"] for c in said)
    assert rights(shop, records(shop, "taken")) == {}

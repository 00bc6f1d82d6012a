"""Settings of a Pulsar namespace that affect a policy: delayed delivery and replication."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from sandbox.pulsar import SUPERUSER, Broker
from tests.integration.provision.conftest import SECONDS, MakeShop, Shop, keeps_ticks, rest_path

OVER_AT_ONCE = "the broker may deliver each retry one tick early, and so a retry of 1s at once"
ELSEWHERE = "elsewhere"


@pytest.fixture
def client(broker: Broker) -> Iterator[pulsar.Client]:
    token = pulsar.AuthenticationToken(broker.token(SUPERUSER))
    client = pulsar.Client(broker.service_url, authentication=token)
    yield client
    client.close()


def delays(shop: Shop, topic: str, *, applied: bool = False) -> Any:  # noqa: ANN401 - JSON
    query = "?applied=true" if applied else ""
    return shop.request("GET", f"{rest_path(topic)}/delayedDelivery{query}")


def test_retry_delay_of_one_second_is_exact_where_ticks_are_set(
    shop: Shop, client: pulsar.Client
) -> None:
    shop.create_topic(shop.topic("orders"))
    shop.policy(delayLadder={"delays": ["1s", "5s", "10s"]})
    status = shop.ready()["status"]
    topic = status["retryTopic"]
    connection = shop.get("brokerconnection", "main")
    assert connection["status"]["brokerVersion"] == shop.broker.version
    exact = keeps_ticks(shop.broker)
    warnings = [c for c in status["conditions"] if c["type"] == "RetriesEarly"]
    assert [c["message"].split("; ")[0] for c in warnings] == [] if exact else [OVER_AT_ONCE]
    settings = {"active": True, "tickTime": 50, "maxDeliveryDelayInMillis": 0}
    assert delays(shop, topic) == (settings if exact else None)
    producer = client.create_producer(topic)
    consumer = client.subscribe(topic, "fulfilment", consumer_type=pulsar.ConsumerType.Shared)
    for _ in range(3):  # one at a time: the next message would wake a stalled broker
        sent = time.monotonic()
        producer.send(b"", deliver_after=timedelta(seconds=1))
        consumer.acknowledge(consumer.receive(timeout_millis=30_000))
        assert time.monotonic() - sent > (0.9 if exact else 0)

    shop.policy(delayLadder={"fixed": "1h"})
    status = shop.ready()["status"]
    assert "RetriesEarly" not in str(status["conditions"])
    assert delays(shop, topic, applied=True)["tickTime"] == 1_000
    shop.policy(delayLadder={"delays": ["1s", "5s", "10s"]})
    shop.ready()
    assert delays(shop, topic) == (settings if exact else None)


def test_limit_below_the_longest_delay_is_kept_with_a_warning(shop: Shop) -> None:
    shop.create_topic(shop.topic("orders"))
    limit = {"active": True, "tickTime": 1_000, "maxDeliveryDelayInMillis": 60_000}
    shop.request("POST", f"namespaces/{shop.tenant}/prod/delayedDelivery", limit)
    shop.policy()
    message = shop.reaches_condition("orders", "MaxDeliveryDelay")["message"]
    topic = shop.ready()["status"]["retryTopic"]
    assert "got a maxDeliveryDelay of 60 s" in message
    assert f"set-delayed-delivery --enable --maxDelay 2h {topic}" in message
    assert delays(shop, topic, applied=True)["maxDeliveryDelayInMillis"] == 60_000
    # The same change as by that command, which sets a tick too.
    raised = limit | {"maxDeliveryDelayInMillis": 7_200_000}
    shop.request("POST", f"{rest_path(topic)}/delayedDelivery", raised)
    shop.request_reconcile("orders")
    deadline = time.monotonic() + SECONDS
    while "MaxDeliveryDelay" in str(shop.get("retrypolicy", "orders")["status"]["conditions"]):
        assert time.monotonic() < deadline, "the warning stays"
        time.sleep(0.1)
    assert delays(shop, topic)["maxDeliveryDelayInMillis"] == 7_200_000


@pytest.fixture
def replicated(make_shop: MakeShop) -> Iterator[Shop]:
    """A shop whose Pulsar namespace is replicated to an unreachable cluster."""
    shop = make_shop()
    shop.connection()
    shop.create_topic(shop.topic("orders"))
    unreachable = {"serviceUrl": "http://127.0.0.1:1", "brokerServiceUrl": "pulsar://127.0.0.1:1"}
    shop.request("PUT", f"clusters/{ELSEWHERE}", unreachable)
    try:
        clusters = ["standalone", ELSEWHERE]
        admins = {"adminRoles": [shop.role], "allowedClusters": clusters}
        shop.request("POST", f"tenants/{shop.tenant}", admins)
        shop.request("POST", f"namespaces/{shop.tenant}/prod/replication", clusters)
        yield shop
    finally:
        shop.request("POST", f"namespaces/{shop.tenant}/prod/replication", ["standalone"])
        admins = {"adminRoles": [shop.role], "allowedClusters": ["standalone"]}
        shop.request("POST", f"tenants/{shop.tenant}", admins)
        shop.request("DELETE", f"clusters/{ELSEWHERE}")


def test_replicated_retry_topics_cause_warning_until_local(
    replicated: Shop,
) -> None:
    shop = replicated
    shop.policy()
    status = shop.ready()["status"]
    message = shop.reaches_condition("orders", "GeoReplicated")["message"]
    for topic in (status["retryTopic"], status["deadLetterTopic"]):
        assert f"{topic} to elsewhere+standalone" in message
        shop.request("POST", f"{rest_path(topic)}/replication", ["standalone"])
    shop.policy(maxRetries=3)
    status = shop.ready()["status"]
    assert status["effective"]["maxRetries"] == 3
    conditions = status["conditions"]
    # Brokers from 4.1 on deliver too early after the first rung, which causes a warning.
    assert {condition["type"] for condition in conditions} - {"RetriesEarly"} == {"Ready"}

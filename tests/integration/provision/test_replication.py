"""Namespaces that are replicated to other clusters, as one of the clusters shows them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.provision.conftest import MakeShop, Shop, rest_path

ELSEWHERE = "elsewhere"


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

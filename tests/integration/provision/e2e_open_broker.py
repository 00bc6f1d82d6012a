"""A connection and its policies at a development broker without authentication."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from sandbox.kubernetes import Cluster
from sandbox.pulsar import Broker
from tests.integration.provision.conftest import Shop, rest_path

pytestmark = pytest.mark.xdist_group("spark")  # which has such a broker


@pytest.fixture
def shop(
    open_broker: Broker, cluster: Cluster, operator_process: Path, kube_namespace: str
) -> Shop:
    assert operator_process.is_file()
    tenant = f"t-{secrets.token_hex(4)}"
    shop = Shop(open_broker, cluster, tenant=tenant, namespace=kube_namespace)
    shop.request("PUT", f"tenants/{tenant}", {"allowedClusters": ["standalone"]})
    shop.request("PUT", f"namespaces/{tenant}/prod")
    return shop


def test_policies_of_an_open_broker_are_provisioned_and_deleted(
    shop: Shop,
) -> None:
    shop.create_topic(shop.topic("orders"), 2)
    shop.connection(authentication={"type": "None"})
    assert shop.ready("main", "brokerconnection")["status"]["brokerVersion"] == shop.broker.version
    # Roles are granted even if the broker does not check them yet.
    for name, roles in (("open", []), ("orders", ["fulfilment"])):
        shop.policy(name, subscription=name, consumerRoles=roles, deletionPolicy="Delete")
        status = shop.ready(name)["status"]
        for topic, subscription in (
            (status["retryTopic"], name),
            (status["deadLetterTopic"], "redrive"),
        ):
            assert shop.request("GET", f"{rest_path(topic)}/subscriptions") == [subscription]
    shop.delete_all()
    assert set(shop.topics()) == {shop.topic("orders")} | {
        f"{shop.topic('orders')}-partition-{number}" for number in range(2)
    }

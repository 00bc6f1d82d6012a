"""Acknowledgements that a broker with settings other than the default stores."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pulsar
import pytest

from sandbox.kubernetes import Cluster
from sandbox.pulsar import SUPERUSER, Broker
from tests.integration.provision.conftest import Shop
from tests.support.brokers import own_broker
from tests.support.waiting import wait_until

LEDGER, LIMIT, MESSAGES = 10, 20, 60
SETTINGS = {
    "managedLedgerPersistIndividualAckAsLongArray": "true",
    "managedLedgerMaxUnackedRangesToPersist": LIMIT,
    "managedLedgerMaxEntriesPerLedger": LEDGER,
    "managedLedgerMinLedgerRolloverTimeMinutes": 0,
}


@pytest.fixture
def other(broker: Broker, tmp_path: Path) -> Iterator[Broker]:
    """A broker of this test, with these settings."""
    with own_broker(broker.version, tmp_path, SETTINGS) as other:
        yield other


@pytest.fixture
def shop(other: Broker, cluster: Cluster, operator_process: Path, kube_namespace: str) -> Shop:
    assert operator_process.is_file()
    tenant = f"t-{secrets.token_hex(4)}"
    shop = Shop(other, cluster, tenant=tenant, namespace=kube_namespace)
    roles = {"adminRoles": [shop.role], "allowedClusters": ["standalone"]}
    shop.request("PUT", f"tenants/{tenant}", roles)
    shop.request("PUT", f"namespaces/{tenant}/prod")
    shop.secret("pulsar-admin", token=shop.token(shop.role))
    shop.secret("super", token=shop.token(SUPERUSER))
    shop.connection()
    super_user = {"type": "Token", "token": {"secretRef": {"name": "super", "key": "token"}}}
    shop.connection("super", authentication=super_user)
    return shop


def poll_topics(shop: Shop, name: str) -> None:
    """Request a poll of the topics of a policy, and wait for its result."""

    def observed_at() -> object:
        return shop.get("retrypolicy", name)["status"].get("backlog", {}).get("observedTime")

    before = observed_at()
    shop.request_reconcile(name)
    wait_until(lambda: observed_at() != before)


def warnings(shop: Shop, name: str) -> list[str]:
    """The messages of `AckHoles`."""
    conditions = shop.get("retrypolicy", name)["status"]["conditions"]
    return [c["message"] for c in conditions if c["type"] == "AckHoles"]


def test_broker_with_few_stored_ack_ranges_causes_warning(shop: Shop, other: Broker) -> None:
    for name, connection in (("orders", "super"), ("returns", "main")):
        shop.create_topic(shop.topic(name))
        shop.policy(name, topic=shop.topic(name), connectionRef={"name": connection})
        shop.ready(name)
    client = pulsar.Client(
        other.service_url, authentication=pulsar.AuthenticationToken(other.token(SUPERUSER))
    )
    for name in ("orders", "returns"):
        retry = shop.topic(f"{name}-fulfilment-RETRY")
        producer = client.create_producer(retry, batching_enabled=False)
        for number in range(MESSAGES):
            producer.send(str(number).encode())
        consumer = client.subscribe(retry, "fulfilment", consumer_type=pulsar.ConsumerType.Shared)
        for message in [consumer.receive(30_000) for _ in range(MESSAGES)][1:]:
            consumer.acknowledge(message)
        consumer.close()
        producer.close()
    poll_topics(shop, "orders")
    wait_until(lambda: warnings(shop, "orders"))
    [message] = warnings(shop, "orders")
    assert "(managedLedgerPersistIndividualAckAsLongArray=true)" in message
    assert "until there are 20 (managedLedgerMaxUnackedRangesToPersist, configured" in message
    assert f"got {MESSAGES - 1};" in message
    poll_topics(shop, "returns")
    time.sleep(1)  # for the reconcile that would set the condition
    assert warnings(shop, "returns") == []  # its role can read only the defaults
    client.close()

"""Replays with another target than the retry topic, from `kubectl apply` to their end."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

import pulsar
import pytest

from redrive.policy.properties import RECONSUMETIMES
from sandbox.sandbox import Sandbox
from tests.integration.replay.test_replays import SECONDS, Shop


@pytest.fixture
def shop(installed: Sandbox) -> Iterator[Shop]:
    shop = Shop(installed)
    shop.declare()
    yield shop
    installed.cluster.objects.delete("namespace", shop.name)


def rights(shop: Shop, topic: str) -> dict[str, Any]:
    """Return what each role may do on a topic."""
    path = f"/admin/v2/persistent/{shop.name}/prod/{topic}/permissions"
    answer = shop.sandbox.pulsar.request("GET", path)
    answer.check("read the rights")
    found: dict[str, Any] = json.loads(answer.body)
    return found


@pytest.mark.timeout(3 * SECONDS)
def test_each_target_gets_its_messages_and_what_can_not_be_kept_is_refused(shop: Shop) -> None:
    """One policy, one Replay after the other."""
    shop.bury(4, "WarehouseDown")
    shop.bury(3, "JSONDecodeError")
    down = "cause_type = 'WarehouseDown'"
    shop.replay("at-least-once", down, target="Source")
    shop.reaches("at-least-once", "Pending", "TargetNotSubscribed")
    shop.kubectl("delete", "replay", "at-least-once")
    earliest = {"ledgerId": -1, "entryId": -1}
    shop.rest("PUT", f"persistent/{shop.name}/prod/orders/subscription/fulfilment", earliest)
    shop.replay("at-least-once", down, target="Source")
    refused = shop.reaches("at-least-once", "Pending", "TargetDoesNotDeduplicate")
    message = refused["Stalled"]["message"]
    assert f"set-deduplication-status --enable {shop.policy.topic}" in message
    assert "guarantee: AtLeastOnce" in message
    assert "replayer" not in rights(shop, "orders")
    shop.kubectl("delete", "replay", "at-least-once")

    shop.replay("at-least-once", down, target="Source", guarantee="AtLeastOnce")
    shop.reaches("at-least-once", "Completed")
    assert set(rights(shop, "orders")["replayer"]) == {"produce", "consume"}
    shop.rest("POST", f"persistent/{shop.name}/prod/orders/deduplicationEnabled", body=True)
    shop.replay("exactly-once", target="Source")
    shop.reaches("exactly-once", "Completed")

    received = _receive(shop, 7)
    assert len({each["id"] for each in received}) == 7
    assert {each[RECONSUMETIMES] for each in received} == {"0"}


@pytest.mark.timeout(SECONDS)
def test_no_replay_reaches_a_topic_that_is_not_its_own(shop: Shop) -> None:
    other = f"u-{secrets.token_hex(4)}"
    clusters = {"adminRoles": [f"{shop.name}-admin"], "allowedClusters": ["standalone"]}
    shop.rest("PUT", f"tenants/{other}", clusters)
    shop.rest("PUT", f"namespaces/{other}/prod")
    shop.rest("PUT", f"persistent/{other}/prod/orders")
    shop.rest("PUT", f"persistent/{shop.name}/prod/refunds")
    spec = {
        "connectionRef": {"name": "main"},
        "topic": f"persistent://{shop.name}/prod/refunds",
        "subscription": "accounts",
    }
    shop.apply("redrive.io/v1alpha1", "RetryPolicy", "refunds", spec=spec)
    shop.kubectl("wait", "--for=condition=Ready", "rp/refunds", "--timeout=180s")
    own = shop.policy
    attacks = [
        f"persistent://{other}/prod/orders",
        f"persistent://{shop.name}/prod/refunds-accounts-RETRY",
        f"persistent://{shop.name}/prod/refunds-accounts-DLQ",
        f"persistent://{shop.name}/prod/refunds-accounts-DLQ-LEDGER",
        str(own.dead_letter_topic),
        str(own.ledger_topic),
    ]
    for number, topic in enumerate(attacks):
        name = f"attack-{number}"
        shop.replay(name, target="Topic", targetTopic=topic, guarantee="AtLeastOnce")
        refused = shop.reaches(name, "Pending", "TargetNotAllowed")
        assert topic in refused["Stalled"]["message"]
        shop.kubectl("delete", "replay", name)
    assert shop.applications() == []
    with pytest.raises(Exception, match="not for one partition of it"):
        shop.replay("part", target="Topic", targetTopic=f"{own.retry_topic}-partition-0")


def _receive(shop: Shop, count: int) -> list[dict[str, str]]:
    """Return the properties of what is in the source topic."""
    client = shop.client()
    consumer = client.subscribe(str(shop.policy.topic), "fulfilment")
    found = [dict(consumer.receive(60_000).properties()) for _ in range(count)]
    with pytest.raises(pulsar.Timeout):
        consumer.receive(1_500)
    client.close()
    return found

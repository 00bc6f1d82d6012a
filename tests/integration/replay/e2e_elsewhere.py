"""Replays with another target than the retry topic, from `kubectl apply` to their end."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pulsar
import pytest

from redrive.policy.envelope import RECONSUMETIMES
from sandbox.sandbox import Sandbox
from tests.support.replay_shop import SECONDS, Shop
from tests.support.waiting import wait_until


@pytest.fixture
def shop(installed: Sandbox) -> Iterator[Shop]:
    shop = Shop(installed)
    shop.declare()
    yield shop
    installed.cluster.objects.delete("namespace", shop.name)


def rights(shop: Shop, topic: str) -> dict[str, Any]:
    """Return the rights of each role on a topic."""
    path = f"/admin/v2/persistent/{shop.name}/prod/{topic}/permissions"
    answer = shop.sandbox.pulsar.request("GET", path)
    answer.check("read the grants")
    actions: dict[str, Any] = json.loads(answer.body)
    return actions


@pytest.mark.timeout(3 * SECONDS)
def test_source_target_requires_subscription_and_guarantee(shop: Shop) -> None:
    """One policy, one Replay after the other."""
    shop.bury(4, "WarehouseDown")
    shop.bury(3, "JSONDecodeError")
    down: dict[str, Any] = {"select": {"causes": ["WarehouseDown"]}, "target": {"type": "Source"}}
    shop.replay("at-least-once", **down)
    shop.reaches("at-least-once", "Pending", "TargetNotSubscribed")
    shop.kubectl("delete", "replay", "at-least-once")
    earliest = {"ledgerId": -1, "entryId": -1}
    shop.rest("PUT", f"persistent/{shop.name}/prod/orders/subscription/fulfilment", earliest)
    shop.replay("at-least-once", **down)
    refused = shop.reaches("at-least-once", "Pending", "TargetDoesNotDeduplicate")
    message = refused["Stalled"]["message"]
    assert f"set-deduplication-status --enable {shop.policy.topic}" in message
    assert "guarantee: AtLeastOnce" in message
    assert "replayer" not in rights(shop, "orders")
    shop.kubectl("delete", "replay", "at-least-once")

    shop.replay("at-least-once", **down, guarantee="AtLeastOnce")
    shop.reaches("at-least-once", "Completed")
    wait_until(lambda: "replayer" not in rights(shop, "orders"), seconds=SECONDS)
    shop.rest("POST", f"persistent/{shop.name}/prod/orders/deduplicationEnabled", body=True)
    shop.replay("exactly-once", target={"type": "Source"})
    shop.reaches("exactly-once", "Completed")

    received = _receive(shop, 7)
    assert len({message["id"] for message in received}) == 7
    assert {message[RECONSUMETIMES] for message in received} == {"0"}


@pytest.mark.timeout(SECONDS)
def test_replay_to_a_foreign_topic_is_refused(shop: Shop) -> None:
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
    shop.apply("redrive.io/v1beta1", "RetryPolicy", "refunds", spec=spec)
    shop.wait_until_ready("refunds")
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
        shop.replay(name, target={"type": "Topic", "topic": topic}, guarantee="AtLeastOnce")
        refused = shop.reaches(name, "Pending", "TargetNotAllowed")
        assert topic in refused["Stalled"]["message"]
        shop.kubectl("delete", "replay", name)
    assert shop.applications() == []
    with pytest.raises(Exception, match="not to one partition of it"):
        shop.replay("part", target={"type": "Topic", "topic": f"{own.retry_topic}-partition-0"})


@pytest.mark.timeout(SECONDS)
def test_losing_target_is_refused_until_it_keeps_messages(shop: Shop) -> None:
    shop.bury(3, "WarehouseDown")
    at = f"persistent/{shop.name}/prod/checked"
    target = f"persistent://{shop.name}/prod/checked"
    earliest = {"ledgerId": -1, "entryId": -1}
    shop.rest("PUT", at)
    shop.rest("POST", f"{at}/deduplicationEnabled", body=True)
    client = shop.client()
    reader = client.create_reader(target, pulsar.MessageId.latest)
    shop.replay("reader", target={"type": "Topic", "topic": target})
    refused = shop.reaches("reader", "Pending", "TargetNotSubscribed")
    message = refused["Stalled"]["message"]
    assert "subscriptions of readers and of Pulsar itself do not count" in message
    shop.kubectl("delete", "replay", "reader")  # else it runs once the target keeps messages
    reader.close()
    client.close()
    shop.rest("PUT", f"{at}/subscription/checks", earliest)
    evicting = {"limitSize": 10**6, "limitTime": 10**6, "policy": "consumer_backlog_eviction"}
    for kind in ("destination_storage", "message_age"):
        for where in (at, f"namespaces/{shop.name}/prod"):
            query = f"backlogQuota?backlogQuotaType={kind}"
            with setting(shop, where, "backlogQuotaMap", query, evicting):
                refuses(shop, target, "TargetEvicts", kind)
    for where in (at, f"namespaces/{shop.name}/prod"):
        query, value = ("messageTTL?messageTTL=3599", None) if where == at else ("messageTTL", 3599)
        with setting(shop, where, "messageTTL", query, value):
            refuses(shop, target, "TargetExpires", "messageTTL of 3599 s")
    assert "replayer" not in rights(shop, "checked")
    assert shop.applications() == []


@contextmanager
def setting(shop: Shop, where: str, shown: str, query: str, value: object) -> Iterator[None]:
    """Have a setting, until the end of the block; the broker shows both a moment later."""

    def read() -> str:
        answer = shop.sandbox.pulsar.request("GET", f"/admin/v2/{where}/{shown}")
        answer.check(f"read {shown}")
        return answer.body

    before = read()
    shop.rest("POST", f"{where}/{query}", value)
    wait_until(lambda: read() != before)
    yield
    shop.rest("DELETE", f"{where}/{query}")
    wait_until(lambda: read() == before)


def refuses(shop: Shop, target: str, reason: str, got: str) -> None:
    """Check that a Replay to *target* waits for *reason*."""
    name = f"refused-{secrets.token_hex(3)}"
    shop.replay(name, target={"type": "Topic", "topic": target})
    assert got in shop.reaches(name, "Pending", reason)["Stalled"]["message"]
    shop.kubectl("delete", "replay", name)


@pytest.mark.timeout(2 * SECONDS)
def test_right_at_target_ends_with_a_deleted_replay(shop: Shop) -> None:
    shop.bury(200, "WarehouseDown")  # more than it moves in six minutes
    at = f"persistent/{shop.name}/prod/checked"
    target = f"persistent://{shop.name}/prod/checked"
    shop.rest("PUT", at)
    shop.rest("POST", f"{at}/deduplicationEnabled", body=True)
    shop.rest("PUT", f"{at}/subscription/checks", {"ledgerId": -1, "entryId": -1})
    shop.rest("POST", f"{at}/permissions/auditor", ["consume"])
    shop.replay(
        "slow",
        target={"type": "Topic", "topic": target},
        rateLimit={"messages": 1, "per": "2s"},
        ttlAfterFinished="1s",
    )
    wait_until(lambda: "replayer" in rights(shop, "checked"), seconds=SECONDS)
    uid = shop.sandbox.cluster.objects.get("replay", "slow", shop.name)["metadata"]["uid"]
    through = shop.sandbox.cluster.objects.get("brokerconnection", "main", shop.name)
    (record,) = through["status"]["targetRights"][uid]
    assert (record["topic"], record["role"]) == (target, "replayer")
    shop.reaches("slow", "Running")
    forge_status(shop, "slow")
    shop.kubectl("annotate", "replay", "slow", "redrive.io/reconcile-requested-at=now")
    shop.reaches("slow", "Running")
    assert "replayer" in rights(shop, "checked")
    shop.kubectl("delete", "replay", "slow", "--timeout=150s")
    assert rights(shop, "checked") == {"auditor": ["consume"]}
    shop.replay("rest")
    shop.reaches("rest", "Completed")


def forge_status(shop: Shop, name: str) -> None:
    """Write into the status of a Replay that it was not launched, and has ended long ago.

    So can its job where the chart's admission policies are not installed.
    """
    forged = {
        "phase": "Pending",
        "job": None,
        "completionTime": "2020-01-01T00:00:00Z",
    }
    shop.kubectl(
        "patch", "replay", name, "--subresource=status", "--type=merge",
        f"--patch={json.dumps({'status': forged})}",
    )  # fmt: skip


def test_no_field_names_a_topic_of_pulsars_own(shop: Shop) -> None:
    for local in ("__change_events", "%5F_change_events", "x__transaction_pending_ack"):
        topic = f"persistent://{shop.name}/prod/{local}"
        with pytest.raises(Exception, match="a system topic of Pulsar"):
            shop.replay("attack", target={"type": "Topic", "topic": topic}, guarantee="AtLeastOnce")
        for field in ("retryTopic", "deadLetterTopic"):
            spec = {
                "connectionRef": {"name": "main"},
                "topic": str(shop.policy.topic),
                "subscription": "accounts",
                "naming": {field: topic},
            }
            with pytest.raises(Exception, match="a system topic of Pulsar"):
                shop.apply("redrive.io/v1beta1", "RetryPolicy", "attack", spec=spec)


def _receive(shop: Shop, count: int) -> list[dict[str, str]]:
    """Return the properties of the messages in the source topic."""
    client = shop.client()
    consumer = client.subscribe(str(shop.policy.topic), "fulfilment")
    properties = [dict(consumer.receive(60_000).properties()) for _ in range(count)]
    with pytest.raises(pulsar.Timeout):
        consumer.receive(1_500)
    client.close()
    return properties

"""Status and metrics of a policy's topics, by the loop that polls their statistics.

The loop runs in the test, and polls a real broker several times a second. The operator is stopped
meanwhile: it would overwrite this status with its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pulsar
import pytest
from prometheus_client import REGISTRY

from redrive import Policy, RetryConsumer
from redrive.api.conditions import is_ready
from redrive.kube.context import Context, Settings
from redrive.kube.controller import Controller
from redrive.kube.resources import Key
from redrive.messages import id_text
from redrive.policy import codec
from redrive.policy.model import OutageLimits
from redrive.provision import health as polls
from redrive.provision.claims import Conflicts
from redrive.provision.health import Health
from redrive.provision.health_checks import THRESHOLDS, Thresholds
from redrive.provision.reconciler import OrphanedPolicies, PolicyReconciler
from sandbox import installation
from sandbox.pulsar import SUPERUSER, Broker
from sandbox.sandbox import Sandbox
from tests.integration.provision.conftest import rest_path
from tests.support.raw_entries import raw_producer

pytestmark = pytest.mark.xdist_group("own sandbox")

Shop = Any  # of the conftest

SECONDS = 180
SHARED = pulsar.ConsumerType.Shared
EARLIEST = {"ledgerId": -1, "entryId": -1}


@pytest.fixture(scope="module", autouse=True)
def _no_operator(sandbox: Sandbox, operator_process: Path) -> Iterator[None]:
    assert operator_process.is_file()
    sandbox.processes.stop(installation.OPERATOR)
    yield
    installation.start_operator(sandbox)


@pytest.fixture(autouse=True)
def _kubeconfig(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(sandbox.cluster.kubeconfig))


@pytest.fixture
def client(broker: Broker) -> Iterator[pulsar.Client]:
    client = pulsar.Client(
        broker.service_url,
        authentication=pulsar.AuthenticationToken(broker.token(SUPERUSER)),
        logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
    )
    with ExitStack() as closing:
        closing.callback(client.close)
        yield client


@dataclass(frozen=True)
class Ward:
    """A policy that is ready, and the loop that polls its topics."""

    shop: Shop
    ctx: Context
    health: Health

    async def shows(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the status of the policy, once *holds* returns True for it."""
        deadline = time.monotonic() + SECONDS
        while not (holds(status := self.status()) and status == self._written()):
            assert time.monotonic() < deadline, (status, self._written())
            await asyncio.sleep(0.05)
        return status

    def _written(self) -> dict[str, Any]:
        """The status in the API server."""
        return dict(self.shop.get("retrypolicy", "orders").get("status", {}))

    async def warns(self, reason: str) -> str:
        """Return the message of the condition *reason*, once it and its Event exist."""
        status = await self.shows(lambda status: reason in conditions(status))
        message = conditions(status)[reason]
        deadline = time.monotonic() + SECONDS
        # The same loop writes the Event right after the status.
        while ("Warning", reason, message) not in self.shop.events("orders"):
            assert time.monotonic() < deadline, f"no Event {reason}"
            await asyncio.sleep(0.05)
        return message

    async def is_over(self, reason: str) -> None:
        """Return once the condition *reason* is gone."""
        await self.shows(lambda status: reason not in conditions(status))

    def status(self) -> dict[str, Any]:
        """The status in the cache of the operator."""
        body = self.ctx.policies.get(Key(self.shop.namespace, "orders"))
        assert body is not None
        return dict(body.get("status") or {})


def conditions(status: dict[str, Any]) -> dict[str, str]:
    """Type → message."""
    return {c["type"]: c["message"] for c in status.get("conditions", [])}


@asynccontextmanager
async def ward(shop: Shop, limits: Thresholds = THRESHOLDS) -> AsyncIterator[Ward]:
    """Provision the policy `orders`, and poll its topics as often as a connection allows."""
    async with Context.open(Settings("here", (shop.namespace,), None, "", "")) as ctx:

        async def reconcile(key: Key) -> Any:  # noqa: ANN401 - passed on
            return await PolicyReconciler(ctx, claims, health, lost).reconcile(key)

        controller = Controller("RetryPolicy", reconcile)
        claims = Conflicts(ctx.policies, ctx.connections, controller.enqueue)
        lost = OrphanedPolicies(ctx.policies, ctx.clock)
        health = Health(ctx, controller.enqueue, interval=0.1, limits=limits)
        controller.enqueue(Key(shop.namespace, "orders"))
        watched = Ward(shop, ctx, health)
        try:
            await watched.shows(lambda status: "backlog" in status)
            yield watched
        finally:
            await health.stop()
            await controller.stop()
    await asyncio.sleep(0.1)  # TLS connections are closed in the background


@pytest.mark.parametrize("partitions", [0, 3])
async def test_status_and_metrics_show_backlogs_and_oldest_dead_letter(
    shop: Shop, client: pulsar.Client, partitions: int
) -> None:
    shop.create_topic(shop.topic("orders"), partitions)
    dead_letter = shop.topic("orders-fulfilment-DLQ")
    shop.create_topic(dead_letter, partitions)  # adopted as it is
    shop.policy(adoption="IfPresent")
    async with ward(shop) as watched:
        none = {"retry": 0, "retryDue": 0, "deadLetter": 0, "deadLettersLastHour": 0}
        assert figures(watched.status()) == none
        assert age(shop) == 0
        dead, waiting = (
            client.create_producer(topic)
            for topic in (dead_letter, shop.topic("orders-fulfilment-RETRY"))
        )
        # Of three partitions one stays empty.
        died = []
        for _ in range(2):
            before = now().replace(microsecond=0)  # the status has whole seconds
            dead.send(b"dead")
            died.append((before, now()))
            await asyncio.sleep(1.1)
        waiting.send(b"later", deliver_after=timedelta(hours=1))
        status = await watched.shows(lambda status: oldest(status) is not None)
        status = await watched.shows(
            lambda status: (
                {**figures(status), "oldestDeadLetterTime": ""}
                == {
                    "retry": 1,
                    "retryDue": 1,
                    "deadLetter": 2,
                    "deadLettersLastHour": 2,
                    "oldestDeadLetterTime": "",
                }
            )
        )
        first = oldest(status)
        assert first is not None
        assert died[0][0] <= first <= died[0][1]
        at_least = (now() - first).total_seconds() - 0.5
        assert at_least <= (age(shop) or 0) <= (now() - first).total_seconds() + 0.5
        assert backlog_metric(shop, "dead-letter") == 2
        assert backlog_metric(shop, "retry") == 1
        assert metric(shop, "redrive_dead_letters_total") == 2
        assert metric(shop, "redrive_dead_letter_bytes") == status["backlog"]["deadLetterBytes"] > 0
        assert (metric(shop, "redrive_oldest_retry_age_seconds") or 0) > 0
        # A broker counts as delayed the messages that it has read for a consumer.
        assert metric(shop, "redrive_due_messages", role="retry") == 1
        retries = client.subscribe(waiting.topic(), "fulfilment", consumer_type=SHARED)
        await becomes(lambda: metric(shop, "redrive_due_messages", role="retry") == 0)
        await watched.shows(lambda status: status["backlog"]["retryConsumers"] == 1)
        assert backlog_metric(shop, "retry") == 1
        retries.close()

        consumer = client.subscribe(dead_letter, "redrive", consumer_type=SHARED)
        messages = sorted(
            (consumer.receive(30_000) for _ in range(2)), key=lambda m: m.publish_timestamp()
        )
        consumer.acknowledge(messages[0])
        status = await watched.shows(lambda status: status["backlog"]["deadLetter"] == 1)
        second = oldest(status)
        assert second is not None
        assert died[1][0] <= second <= died[1][1]
        consumer.acknowledge(messages[1])
        status = await watched.shows(lambda status: status["backlog"]["deadLetter"] == 0)
        assert figures(status) | {"retryDue": 0} == {**none, "retry": 1, "deadLettersLastHour": 2}
        assert age(shop) == 0
        # Acknowledged as by a Replay; no other dead letter arrived.
        assert metric(shop, "redrive_dead_letters_total") == 2

        body = watched.ctx.policies.get(Key(shop.namespace, "orders"))
        assert body is not None
        watched.ctx.policies.drop(body)
        await becomes(lambda: age(shop) is None)
        assert backlog_metric(shop, "retry") is None


async def test_status_is_not_written_for_a_small_change(shop: Shop, client: pulsar.Client) -> None:
    shop.create_topic(shop.topic("orders"))
    shop.policy()
    async with ward(shop) as watched:

        async def shows_metric(count: int) -> None:
            deadline = time.monotonic() + SECONDS
            while backlog_metric(shop, "dead-letter") != count:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)

        producer = client.create_producer(shop.topic("orders-fulfilment-DLQ"))
        for _ in range(40):
            producer.send(b"dead")
        # A small number of new dead letters may cause no write.
        await watched.shows(lambda status: status["backlog"]["deadLetter"] >= 38)
        await shows_metric(40)
        before = shop.get("retrypolicy", "orders")["metadata"]["resourceVersion"]
        count = watched.status()["backlog"]["deadLetter"]
        producer.send(b"dead")
        await shows_metric(41)
        await asyncio.sleep(0.5)
        assert watched.status()["backlog"]["deadLetter"] == count
        assert shop.get("retrypolicy", "orders")["metadata"]["resourceVersion"] == before


async def test_foreign_subscription_is_reported_until_it_is_deleted(
    shop: Shop, client: pulsar.Client
) -> None:
    shop.create_topic(shop.topic("orders"))
    shop.policy()
    async with ward(shop) as watched:
        path = f"persistent/{shop.tenant}/prod/orders-fulfilment-RETRY/subscription/all-orders"
        reader = client.create_reader(
            shop.topic("orders-fulfilment-DLQ"), pulsar.MessageId.earliest
        )
        shop.request("PUT", path, EARLIEST)
        message = await watched.warns("ForeignSubscription")
        assert "got all-orders on orders-fulfilment-RETRY; exclude these topics" in message
        shop.request("DELETE", path)
        await watched.is_over("ForeignSubscription")
        reader.close()


def subscribed(shop: Shop, partitions: int = 0) -> str:
    """Create the source topic with the subscription of the policy; return the topic."""
    source: str = shop.topic("orders")
    shop.create_topic(source, partitions)
    shop.request("PUT", f"persistent/{shop.tenant}/prod/orders/subscription/fulfilment", EARLIEST)
    return source


async def test_unconsumed_retry_topic_is_reported_until_consumed(
    shop: Shop, client: pulsar.Client
) -> None:
    source, retry = subscribed(shop, 2), shop.topic("orders-fulfilment-RETRY")
    shop.policy()
    async with ward(shop) as watched:
        client.subscribe(source, "fulfilment", consumer_type=SHARED)
        assert "none on orders-fulfilment-RETRY" in await watched.warns("RetryTopicNotConsumed")
        client.subscribe(retry, "fulfilment", consumer_type=SHARED)
        await watched.is_over("RetryTopicNotConsumed")


@pytest.mark.parametrize("partitions", [0, 2])
async def test_ack_holes_are_reported_until_they_are_closed(
    shop: Shop, client: pulsar.Client, partitions: int
) -> None:
    shop.create_topic(shop.topic("orders"), partitions)
    shop.policy()
    retry = shop.topic("orders-fulfilment-RETRY")
    async with ward(shop, replace(THRESHOLDS, ack_share=4e-4, ack_share_cleared=2e-4)) as watched:
        first = f"{retry}-partition-0" if partitions else retry
        producer = client.create_producer(first)
        for number in range(9):
            producer.send(str(number).encode())
        consumer = client.subscribe(retry, "fulfilment", consumer_type=SHARED)
        messages = [consumer.receive(30_000) for _ in range(9)]
        for message in messages[1::2]:
            consumer.acknowledge(message)
        message = await watched.warns("AckHoles")
        assert "(managedLedgerMaxUnackedRangesToPersist, the default of its release)" in message
        assert "got 4; make the delays more similar" in message
        for message in messages[0::2]:
            consumer.acknowledge(message)
        await watched.is_over("AckHoles")


async def test_stranded_chunks_are_reported_until_an_unload(
    shop: Shop, client: pulsar.Client, broker: Broker
) -> None:
    source = subscribed(shop)
    path = f"persistent/{shop.tenant}/prod/orders"
    shop.policy()
    async with ward(shop) as watched:
        departing = client.subscribe(source, "fulfilment", consumer_type=SHARED)
        with raw_producer(broker, source) as producer:
            for index in range(2):
                producer.send_chunk("large", b"part", index, 3, 12)
            await becomes(lambda: deliveries_metric(shop, "source") == 2)
            remaining = client.subscribe(source, "fulfilment", consumer_type=SHARED)
            departing.close()
            message = await watched.warns("ChunksStranded")
            assert "got 2 chunks; reload the topic" in message
            assert message.endswith(f": pulsar-admin topics unload {source}")
            producer.send_chunk("large", b"part", 2, 3, 12)
        shop.request("PUT", f"{path}/unload")
        assert remaining.receive(30_000).data() == b"part" * 3
        await watched.is_over("ChunksStranded")


async def test_retry_storm_is_reported_until_retries_are_a_minority(
    shop: Shop, client: pulsar.Client
) -> None:
    source, retry = subscribed(shop), shop.topic("orders-fulfilment-RETRY")
    shop.policy()
    async with ward(shop) as watched:
        deliver(client, source, 40)
        deliver(client, retry, 70)
        message = await watched.warns("RetryStorm")
        assert "among" in message
        deliver(client, source, 60)
        await watched.is_over("RetryStorm")
        assert deliveries_metric(shop, "source") == 100
        assert deliveries_metric(shop, "retry") == 70


@pytest.mark.parametrize("partitions", [0, 2])
async def test_paused_consumers_are_reported_until_they_resume(
    shop: Shop, client: pulsar.Client, partitions: int
) -> None:
    source = subscribed(shop, partitions)
    shop.policy(outageBreaker={"mode": "Pause", "minMessages": 2, "maxProbeInterval": "1s"})
    async with ward(shop) as watched:
        policy = consumer_policy(shop)
        assert policy.outage_breaker == OutageLimits(
            min_messages=2, max_probe_interval=timedelta(seconds=1)
        )
        producer = client.create_producer(source)
        for _ in range(4):
            producer.send(b"x")
        with RetryConsumer(client, policy) as consumer:
            for _ in range(2):
                consumer.reconsume_later(consumer.receive(), cause=ConnectionError())
            message = await watched.warns("OutageSuspected")
            assert "got ConnectionError; fix the dependency" in message
            consumer.ignore_outages()
            await watched.is_over("OutageSuspected")


async def test_blocked_keys_are_shown_until_they_are_free(
    shop: Shop, client: pulsar.Client
) -> None:
    source = subscribed(shop)
    shop.policy(subscriptionType="KeyShared", ordering="PerKey")
    async with ward(shop) as watched:
        producer = client.create_producer(source)
        origin, _ = [producer.send(b"x", partition_key="ann@example.com") for _ in range(2)]
        with RetryConsumer(client, consumer_policy(shop)) as consumer:
            consumer.reconsume_later(consumer.receive(), delay=3_600, cause=TimeoutError())
            status = await watched.shows(lambda status: "blockedKeys" in status)
            [key] = status["blockedKeys"]
            assert (key["messageID"], key["cause"]) == (id_text(origin), "TimeoutError")
            assert "ann" not in str(status)
        await watched.shows(lambda status: "blockedKeys" not in status)


async def test_consumers_of_another_type_are_reported_until_they_end(
    shop: Shop, client: pulsar.Client
) -> None:
    source = subscribed(shop)
    shop.policy(subscriptionType="KeyShared")
    async with ward(shop) as watched:
        consumer = client.subscribe(source, "fulfilment", pulsar.ConsumerType.Shared)
        message = await watched.warns("SubscriptionTypeDiffers")
        assert "got Shared on orders, which should be Key_Shared" in message
        consumer.close()
        await watched.is_over("SubscriptionTypeDiffers")


async def test_topics_that_refuse_sends_are_reported(
    shop: Shop, client: pulsar.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polls, "SETTINGS_SECONDS", 0.0)
    shop.create_topic(shop.topic("orders"))
    retry, dead_letter = (shop.topic(f"orders-fulfilment-{kind}") for kind in ("RETRY", "DLQ"))
    shop.policy()
    async with ward(shop) as watched:
        shop.request("POST", f"namespaces/{shop.tenant}/prod/maxProducersPerTopic", 1)
        producer = client.create_producer(retry)
        message = await watched.warns("SendsRefused")
        assert "got orders-fulfilment-RETRY has maxProducersPerTopic=1 producers;" in message
        producer.close()
        await watched.is_over("SendsRefused")
        shop.request("POST", f"{rest_path(dead_letter)}/terminate")
        message = await watched.warns("SendsRefused")
        assert "got orders-fulfilment-DLQ is terminated;" in message


async def test_quotas_by_age_stop_no_topic_or_are_reported(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polls, "SETTINGS_SECONDS", 0.0)
    shop.create_topic(shop.topic("orders"))
    quota = {"limitTime": 60, "policy": "consumer_backlog_eviction"}
    path = f"namespaces/{shop.tenant}/prod/backlogQuota?backlogQuotaType=message_age"
    shop.request("POST", path, quota)
    shop.policy()
    dead_letter = rest_path(shop.topic("orders-fulfilment-DLQ"))
    async with ward(shop) as watched:
        await watched.shows(lambda status: is_ready({"status": status}))
        set_there = shop.request("GET", f"{dead_letter}/backlogQuotaMap")["message_age"]
        assert (set_there["limitTime"], set_there["policy"]) == (-1, "producer_exception")
        by_topic = f"{rest_path(shop.topic('orders-fulfilment-RETRY'))}/backlogQuota"
        shop.request(
            "POST",
            f"{by_topic}?backlogQuotaType=message_age",
            {**quota, "policy": "producer_exception"},
        )
        message = await watched.warns("SendsRefused")
        assert "got orders-fulfilment-RETRY has message_age=60 s, and delays of 2h;" in message


async def test_limits_of_single_topics_are_reported(
    shop: Shop, client: pulsar.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polls, "SETTINGS_SECONDS", 0.0)
    source = subscribed(shop)
    retry, dead_letter = (shop.topic(f"orders-fulfilment-{kind}") for kind in ("RETRY", "DLQ"))
    shop.policy()
    limits = {
        (retry, "maxProducers"): "orders-fulfilment-RETRY has maxProducersPerTopic=1 producers",
        (retry, "maxMessageSize"): "orders-fulfilment-RETRY has maxMessageSize=1,",
        (source, "maxConsumers"): "orders has maxConsumersPerTopic=1 and 1",
        (retry, "maxConsumersPerSubscription"): "-RETRY has maxConsumersPerSubscription=1 and 1",
        (dead_letter, "maxSubscriptionsPerTopic"): "-DLQ has maxSubscriptionsPerTopic=1 and 1",
    }
    async with ward(shop) as watched:
        client.create_producer(retry)
        for topic in (source, retry):
            client.subscribe(topic, "fulfilment", consumer_type=SHARED)
        for topic, limit in limits:
            shop.request("POST", f"{rest_path(topic)}/{limit}", 1)
        shop.request("POST", f"{rest_path(source)}/subscriptionTypesEnabled", ["Exclusive"])
        limits[source, "subscriptionTypesEnabled"] = "=Exclusive without Shared"
        await watched.shows(lambda status: all(text in str(status) for text in limits.values()))
        for topic, limit in limits:
            shop.request("DELETE", f"{rest_path(topic)}/{limit}")
        await watched.is_over("SendsRefused")
        await watched.is_over("ConsumersRefused")


async def test_terminated_ledger_is_reported(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polls, "SETTINGS_SECONDS", 0.0)
    shop.create_topic(shop.topic("orders"))
    token = {"secretRef": {"name": "pulsar-admin", "key": "token"}}
    replay = {"role": "replayer", "authentication": {"type": "Token", "token": token}}
    shop.connection(replay=replay)
    shop.policy()
    ledger = shop.topic("orders-fulfilment-DLQ-LEDGER")
    async with ward(shop) as watched:
        shop.request("POST", f"{rest_path(ledger)}/terminate")
        message = await watched.warns("SendsRefused")
        assert "got orders-fulfilment-DLQ-LEDGER is terminated;" in message


async def test_refusals_of_the_pulsar_namespace_are_reported(shop: Shop) -> None:
    shop.create_topic(shop.topic("orders"))
    types = f"namespaces/{shop.tenant}/prod/subscriptionTypesEnabled"
    shop.request("POST", types, ["Shared"])
    shop.request("POST", f"namespaces/{shop.tenant}/prod/encryptionRequired", body=True)
    shop.policy(subscriptionType="KeyShared")
    async with ward(shop) as watched:
        message = await watched.warns("SubscriptionTypeNotAllowed")
        assert "refuses consumers of type KeyShared on orders, unless" in message
        assert "got encryptionRequired=true" in await watched.warns("EncryptionRequired")


def consumer_policy(shop: Shop) -> Policy:
    """The policy in the ConfigMap for consumers."""
    return codec.decode(shop.get("configmap", "orders-redrive")["data"]["policy.json"])


def deliver(client: pulsar.Client, topic: str, count: int) -> None:
    """Send, receive and acknowledge *count* messages."""
    producer = client.create_producer(topic)
    for _ in range(count):
        producer.send_async(b"x", None)
    producer.flush()
    consumer = client.subscribe(topic, "fulfilment", consumer_type=SHARED)
    for _ in range(count):
        consumer.acknowledge(consumer.receive(30_000))
    consumer.close()
    producer.close()


def now() -> datetime:
    return datetime.now(UTC)  # noqa: TID251 - the measured time


def oldest(status: dict[str, Any]) -> datetime | None:
    """The time of the oldest dead letter in a policy's status."""
    written = status.get("backlog", {}).get("oldestDeadLetterTime")
    return None if written is None else datetime.fromisoformat(written)


def figures(status: dict[str, Any]) -> dict[str, Any]:
    """The numbers of messages in a policy's status, except of the source topic."""
    others = {"observedTime", "source", "sourceConsumers", "retryConsumers", "deadLetterBytes"}
    return {name: value for name, value in status["backlog"].items() if name not in others}


def labels(shop: Shop) -> dict[str, str]:
    """The labels of the policy's metrics."""
    return {
        "policy": "orders",
        "policy_namespace": shop.namespace,
        "source_topic": shop.topic("orders"),
        "subscription": "fulfilment",
    }


async def becomes(holds: Callable[[], bool]) -> None:
    """Wait until *holds* returns True."""
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def metric(shop: Shop, name: str, **more: str) -> float | None:
    """Return a sample of the policy."""
    return REGISTRY.get_sample_value(name, {**labels(shop), **more})


def age(shop: Shop) -> float | None:
    """The metric of the oldest dead letter's age."""
    return metric(shop, "redrive_oldest_dead_letter_age_seconds")


def backlog_metric(shop: Shop, role: str) -> float | None:
    """The metric of a topic's backlog."""
    return metric(shop, "redrive_backlog_messages", role=role)


def deliveries_metric(shop: Shop, role: str) -> float | None:
    """The metric of deliveries."""
    return metric(shop, "redrive_deliveries_total", role=role)

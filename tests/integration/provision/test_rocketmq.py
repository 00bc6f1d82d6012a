"""RocketMQRetryPolicies by the operator, at a real API server and a real RocketMQ with ACL 2.0."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from redrive.admin.rocketmq import Master, QueueCounts, RocketMQSession
from sandbox import builds
from sandbox.kubernetes import Cluster
from sandbox.pulsar import Broker
from sandbox.rocketmq import ADMIN, RocketMQ, at_master, create_user
from tests.integration.provision.conftest import Shop, redrive
from tests.support.documented import ROCKETMQ, ROOT, commands
from tests.support.rocketmq import send
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("rocketmq")

KIND = "rocketmqretrypolicy"


@pytest.fixture
def shop(
    broker: Broker, cluster: Cluster, operator_process: Path, rocketmq: RocketMQ
) -> Iterator[Shop]:
    """A Kubernetes namespace with a connection, and a topic `<namespace>-orders`."""
    assert operator_process.is_file()
    name = f"t-{secrets.token_hex(4)}"
    made = Shop(broker, cluster, tenant=name, namespace=name)
    cluster.objects.create_namespace(name)
    made.secret("rocketmq", secretKey=rocketmq.secret)
    key = {"user": ADMIN, "secretRef": {"name": "rocketmq", "key": "secretKey"}}
    rule = {"name": "one", "topics": ["{namespace}-*"], "groups": ["{namespace}-*"]}
    cluster_spec = {
        "nameServers": [rocketmq.name_server],
        "authentication": {"type": "AccessKey", "accessKey": key},
        "allow": [{**rule, "deletion": "Allowed"}],
    }
    made.apply({"main": redrive("BrokerConnection", {"rocketmq": cluster_spec})})
    at_master(rocketmq, lambda s, m: s.put_topic(m, f"{name}-orders", 1))
    yield made
    cluster.objects.delete("namespace", name)


def apply_policy(shop: Shop, **spec: object) -> None:
    names = {"topic": f"{shop.namespace}-orders", "group": f"{shop.namespace}-fulfilment"}
    body = {"connectionRef": {"name": "main"}, **names, **spec}
    shop.apply({"orders": redrive("RocketMQRetryPolicy", body)})


@pytest.fixture
def page(shop: Shop, rocketmq: RocketMQ, tmp_path: Path) -> str:
    """The output of the commands of the page RocketMQ, with a Super user.

    An end-to-end test creates the user by the page: its program takes ten seconds.
    """
    secret = at_master(rocketmq, lambda s, m: create_user(s, m, "redrive", "Super"))
    shop.secret("rocketmq-redrive", secretKey=secret)
    at_master(rocketmq, lambda s, m: s.put_topic(m, "orders", 1))
    for manifest in (ROOT / "examples/04-rocketmq").glob("*.yaml"):
        text = manifest.read_text("utf-8").replace(
            "namespace: shop", f"namespace: {shop.namespace}"
        )
        text = text.replace("rocketmq-namesrv.rocketmq.svc:9876", rocketmq.name_server)
        (tmp_path / manifest.name).write_text(text, "utf-8")
    _, block = commands(ROCKETMQ, "Apply a policy")
    return run(shop, block.text.replace("examples/04-rocketmq", str(tmp_path)))


def run(shop: Shop, script: str) -> str:
    """Run commands of the page in the namespace of the test; return their output."""
    script = script.replace("-n shop ", f"-n {shop.namespace} ")
    environment = {"PATH": f"{builds.kubernetes()}:{os.environ['PATH']}"}
    environment["KUBECONFIG"] = str(shop.cluster.kubeconfig)
    return subprocess.run(
        ["/bin/sh", "-euc", script], env=environment, check=True, text=True, stdout=subprocess.PIPE
    ).stdout


def test_page_provisions_a_group_whose_drift_is_repaired(
    shop: Shop, rocketmq: RocketMQ, page: str
) -> None:
    assert page.splitlines()[-1].split()[:5] == [
        "orders-fulfilment", "True", "Provisioned", "orders", "fulfilment"
    ]  # fmt: skip
    status = shop.get(KIND, "orders-fulfilment")["status"]
    assert status["masters"] == ["broker-a"]
    assert status["warnings"] == ["DeadLettersExpire", "NoOwnershipMark"]
    connection = shop.ready("rocketmq", "brokerconnection")
    assert connection["status"]["brokerVersion"] == "5.5.0"

    async def settings(session: RocketMQSession, master: Master) -> object:
        stored = await session.group(master, "fulfilment") or {}
        return stored.get("retryMaxTimes"), stored.get("groupRetryPolicy")

    delays = [1_000, 5_000, 15_000]
    wanted = 3, {"type": "CUSTOMIZED", "customizedRetryPolicy": {"next": delays}}
    assert at_master(rocketmq, settings) == wanted

    async def queues(session: RocketMQSession, master: Master) -> list[object]:
        return [await session.topic(master, status[t]) for t in ("retryTopic", "deadLetterTopic")]

    assert at_master(rocketmq, queues) == [QueueCounts(1, 1, 6)] * 2

    async def spoil(session: RocketMQSession, master: Master) -> None:
        stored = await session.group(master, "fulfilment") or {}
        await session.put_group(master, {**stored, "retryMaxTimes": 1, "consumeEnable": False})
        await session.delete_topic(master, status["deadLetterTopic"])

    at_master(rocketmq, spoil)  # the next poll of the operator repairs it
    wait_until(lambda: at_master(rocketmq, settings) == wanted)
    about = "involvedObject.kind=RocketMQRetryPolicy,reason=Repaired"
    wait_until(lambda: shop.objects("event", about))
    (event,) = shop.objects("event", about)
    assert f"created topic {status['deadLetterTopic']} with 1 queues" in event["message"]
    assert "set retryMaxTimes of group fulfilment" in event["message"]
    kept = at_master(rocketmq, lambda s, m: s.group(m, "fulfilment"))
    assert kept is not None
    assert kept["consumeEnable"] is False


def test_master_that_is_gone_is_named_until_it_is_removed(shop: Shop) -> None:
    apply_policy(shop)
    shop.reaches("orders", "Provisioned", KIND)
    recorded = json.dumps({"status": {"masters": ["broker-a", "broker-b"]}})
    patch = f"kubectl -n shop patch {KIND} orders --subresource=status --type=merge"
    run(shop, f"{patch} -p '{recorded}'")
    status = shop.reaches("orders", "BrokerUnreachable", KIND)["status"]
    (ready,) = [c for c in status["conditions"] if c["type"] == "Ready"]
    assert "the name servers list no master of a broker" in ready["message"]
    assert "got 'broker-b'" in ready["message"]
    assert status["masters"] == ["broker-a", "broker-b"]
    (block,) = commands(ROCKETMQ, "Objects at each master")
    run(shop, block.text.replace("orders-fulfilment", "orders"))
    shop.reaches("orders", "Provisioned", KIND)


def test_deletion_removes_group_and_keeps_dead_letters(shop: Shop, rocketmq: RocketMQ) -> None:
    apply_policy(shop, deletionPolicy="Delete")
    status = shop.reaches("orders", "Provisioned", KIND)["status"]
    dead = status["deadLetterTopic"]
    at_master(rocketmq, lambda s, m: send(s, m, dead))
    shop.annotate("orders", KIND, reconcile_requested_at="1")
    wait_until(lambda: shop.get(KIND, "orders")["status"]["deadLetters"] == 1)
    shop.delete("orders", KIND)

    async def present(session: RocketMQSession, master: Master) -> tuple[object, ...]:
        group = await session.group(master, f"{shop.namespace}-fulfilment")
        topics = status["retryTopic"], dead, f"{shop.namespace}-orders"
        return group, *[bool(await session.topic(master, topic)) for topic in topics]

    assert at_master(rocketmq, present) == (None, False, True, True)
    about, kept = "involvedObject.kind=RocketMQRetryPolicy", f"{dead} holds 1 messages"
    # The Event follows the removal of the finalizer.
    wait_until(lambda: any(kept in event["message"] for event in shop.objects("event", about)))


def test_group_outside_the_rules_is_refused(shop: Shop, rocketmq: RocketMQ) -> None:
    apply_policy(shop, group="of-another-team")
    shop.reaches("orders", "GroupNotAllowed", KIND)
    assert at_master(rocketmq, lambda s, m: s.group(m, "of-another-team")) is None

"""An Inspection and Replays of RocketMQ, with users and access keys by the commands of the page.

One Replay has the engine Spark, which a SparkApplication starts as in production.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sandbox import builds
from sandbox.rocketmq import CLUSTER, RocketMQ
from tests.support.documented import ROCKETMQ, ROOT, Block, commands
from tests.support.replay_shop import SECONDS, SPARK_APPLICATION, Shop, shop
from tests.support.rocketmq import install_mqadmin, send
from tests.support.waiting import wait_until

__all__ = ["shop"]
pytestmark = pytest.mark.xdist_group("rocketmq")


async def bury(cluster: RocketMQ, group: str, *retries: int) -> None:
    """Put dead letters of a group into the cluster, which has its topics; see `create_topics`."""
    async with cluster.admin.session() as session:
        (master,) = await session.masters()
        for count in retries:
            await send(session, master, f"%DLQ%{group}", retries=count)


async def create_topics(cluster: RocketMQ, group: str) -> None:
    """Create the topics of a group. The operator creates the ledger."""
    async with cluster.admin.session() as session:
        (master,) = await session.masters()
        for topic in (group, f"{group}-repair", f"%DLQ%{group}"):
            await session.put_topic(master, topic, 1)


def key_of(user: str, secret: str) -> dict[str, object]:
    reference = {"name": secret, "key": "secretKey"}
    return {"type": "AccessKey", "accessKey": {"user": user, "secretRef": reference}}


class Page:
    """Runs the commands of the page for the objects of a shop.

    Args:
        folder: for the program `mqadmin`.
    """

    def __init__(self, shop: Shop, cluster: RocketMQ, folder: Path) -> None:
        install_mqadmin(cluster, folder)
        self._environment = os.environ | {
            "KUBECONFIG": str(shop.sandbox.cluster.kubeconfig),
            "NAME_SERVER": cluster.name_server,
            "PATH": f"{folder}:{builds.kubernetes()}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "operator"),
        }
        self._names = {
            "-n shop ": f"-n {shop.name} ",
            "shop/rocketmq": f"{shop.name}/main",
            "orders-fulfilment": "orders",
            "orders-repair": f"{shop.name}-repair",
            "Topic:orders": f"Topic:{shop.name}",
            "fulfilment": shop.name,
            "DefaultCluster": CLUSTER,
            "broker-a:0:17": "broker-a:0:1",
            "kubectl redrive": f"{sys.executable} -m redrive",
        }

    def run(self, *blocks: Block) -> str:
        """Run commands, with a secret key of their own, and return their output."""
        script = "\n".join(block.text for block in blocks)
        for shown, real in self._names.items():
            script = script.replace(shown, real)
        ran = subprocess.run(
            ["/bin/sh", "-euc", script],
            env=self._environment | {"SECRET_KEY": secrets.token_hex(16)},
            check=False,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert ran.returncode == 0, ran.stdout
        return ran.stdout


def results_of(shop: Shop) -> list[dict[str, Any]]:
    policy = shop.sandbox.cluster.objects.get("rocketmqretrypolicy", "orders", shop.name)
    return list(policy["status"].get("replays") or ())


def connect(shop: Shop, name_server: str) -> None:
    """Make the connection of the page, and a policy, whose group also is its source topic."""
    group = shop.name
    cluster = {
        "nameServers": [name_server],
        "authentication": key_of("redrive", "rocketmq-redrive"),
        "allow": [{"name": "shop", "topics": [group, f"{group}-repair"], "groups": [group]}],
        "inspection": {"authentication": key_of("inspector", "rocketmq-inspector")},
        "replay": {"authentication": key_of("replayer", "rocketmq-replayer")},
    }
    shop.apply("redrive.io/v1beta1", "BrokerConnection", "main", spec={"rocketmq": cluster})
    spec = {"connectionRef": {"name": "main"}, "topic": group, "group": group}
    shop.apply("redrive.io/v1beta1", "RocketMQRetryPolicy", "orders", spec=spec)


@pytest.mark.timeout(4 * SECONDS)
async def test_page_reads_and_moves_dead_letters_of_rocketmq(
    shop: Shop, rocketmq: RocketMQ, tmp_path: Path
) -> None:
    group = shop.name
    await create_topics(rocketmq, group)
    await bury(rocketmq, group, 3, 4)
    page = Page(shop, rocketmq, tmp_path)
    page.run(commands(ROCKETMQ, "Apply a policy")[0])
    connect(shop, rocketmq.name_server)
    user, peek = commands(ROCKETMQ, "Read dead letters")
    peeked = page.run(user, peek)
    assert re.findall(r"^id +(\S+)", peeked, re.MULTILINE) == ["broker-a:0:1", "broker-a:0:0"]
    assert re.findall(r" attempts (\d)", peeked) == ["4", "3"]
    reference = {"kind": "RocketMQRetryPolicy", "name": "orders"}
    shop.inspect("now", policyRef=reference)
    access, every, one, selected = commands(ROCKETMQ, "Replay dead letters")
    planned = page.run(access, selected)
    assert re.search(r"^  to move +1 ", planned, re.MULTILINE), planned
    assert re.search(r"^  not selected +1$", planned, re.MULTILINE), planned
    for command in (one, every):
        assert "Complete: 1 moved" in page.run(command)
    await bury(rocketmq, group, 1, 6, 9)
    more = {"policyRef": reference, "target": {"type": "Source"}, "engine": "Spark"}
    shop.replay("selected", "reconsume_times > 5", **more)
    status = shop.reaches("selected", "Completed")
    counts = status["run"]["counts"]
    assert [counts[n] for n in ("scanned", "matched", "moved", "left")] == [3, 2, 2, 0]
    (application,) = shop.applications(SPARK_APPLICATION)
    assert application["metadata"]["name"] == status["sparkApplication"]
    async with rocketmq.admin.session() as session:
        (master,) = await session.masters()
        stored = [await session.count(master, topic, 1) for topic in (group, f"{group}-repair")]
    assert stored == [3, 1]
    shop.replay("grpc", policyRef=reference)
    elsewhere = {"type": "Topic", "topic": "of-another-tenant"}
    shop.replay("foreign", policyRef=reference, target=elsewhere)
    status = shop.inspection("now")
    assert (status["phase"], status["run"]["matched"]) == ("Completed", 2)
    assert [c["messages"] for c in status["run"]["causes"]] == [2]
    wait_until(lambda: len(results_of(shop)) == 3)
    assert [result["moved"] for result in results_of(shop)] == [2, 1, 1]
    wait_until(lambda: "Ready" in shop.status("grpc"))
    assert shop.status("grpc")["Ready"]["reason"] == "OtherBroker"
    wait_until(lambda: "Ready" in shop.status("foreign"))
    assert shop.status("foreign")["Ready"]["reason"] == "TargetNotAllowed"

"""An Inspection and a Replay of RocketMQ: operator, Jobs with access keys of their own, status."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest

from sandbox import builds
from sandbox.rocketmq import ADMIN, RocketMQ, allow, create_user
from tests.support.documented import ROCKETMQ, ROOT, Block, commands
from tests.support.replay_shop import SECONDS, Shop, shop
from tests.support.rocketmq import send
from tests.support.waiting import wait_until

__all__ = ["shop"]
pytestmark = pytest.mark.xdist_group("rocketmq")


async def buried(cluster: RocketMQ, group: str) -> str:
    """Put two dead letters of a group into the cluster; return the secret key of jobs.

    The operator creates the ledger.
    """
    async with cluster.admin.session() as session:
        (master,) = await session.masters()
        dead_letters = f"%DLQ%{group}"
        for topic in (group, f"{group}-repair", dead_letters):
            await session.put_topic(master, topic, 1)
        for retries in (3, 4):
            await send(session, master, dead_letters, retries=retries)
        secret = await create_user(session, master, f"{group}-jobs")
        every = ["Get", "Sub", "Pub"]
        rights = {f"Topic:{dead_letters}": ["Get", "Sub"], f"Group:{group}": ["Sub"]}
        for topic in (group, f"{group}-repair", f"redrive-ledger-{group}"):
            rights[f"Topic:{topic}"] = every
        await allow(session, master, f"{group}-jobs", rights)
        return secret


def key_of(user: str, secret: str) -> dict[str, object]:
    reference = {"name": secret, "key": "secretKey"}
    return {"type": "AccessKey", "accessKey": {"user": user, "secretRef": reference}}


def pasted(shop: Shop, secret: str, blocks: list[Block]) -> str:
    """Run the commands of a section of the page, and return their output."""
    script = "\n".join(block.text for block in blocks)
    for shown, real in (
        ("-n shop ", f"-n {shop.name} "),
        ("shop/rocketmq", f"{shop.name}/main"),
        ("orders-fulfilment", "orders"),
        ("orders-repair", f"{shop.name}-repair"),
        ("broker-a:0:17", "broker-a:0:1"),
        ("kubectl redrive", f"{sys.executable} -m redrive"),
    ):
        script = script.replace(shown, real)
    environment = os.environ | {
        "KUBECONFIG": str(shop.sandbox.cluster.kubeconfig),
        "PATH": f"{builds.kubernetes()}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "operator"),
        "SECRET_KEY": secret,
    }
    ran = subprocess.run(
        ["/bin/sh", "-euc", script],
        env=environment,
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


@pytest.mark.timeout(2 * SECONDS + 60)
async def test_dead_letters_of_rocketmq_are_read_and_moved(shop: Shop, rocketmq: RocketMQ) -> None:
    group = shop.name
    secret = await buried(rocketmq, group)
    shop.lend("Secret", "operator-key", stringData={"secretKey": rocketmq.secret})
    cluster = {
        "nameServers": [rocketmq.name_server],
        "authentication": key_of(ADMIN, "operator-key"),
        "allow": [{"name": "shop", "topics": [group, f"{group}-repair"], "groups": [group]}],
        "inspection": {"authentication": key_of(f"{group}-jobs", "rocketmq-inspector")},
        "replay": {"authentication": key_of(f"{group}-jobs", "rocketmq-replayer")},
    }
    shop.apply("redrive.io/v1beta1", "BrokerConnection", "main", spec={"rocketmq": cluster})
    spec = {"connectionRef": {"name": "main"}, "topic": group, "group": group}
    shop.apply("redrive.io/v1beta1", "RocketMQRetryPolicy", "orders", spec=spec)
    peeked = pasted(shop, secret, commands(ROCKETMQ, "Read dead letters"))
    assert re.findall(r"^id +(\S+)", peeked, re.MULTILINE) == ["broker-a:0:1", "broker-a:0:0"]
    assert re.findall(r" attempts (\d)", peeked) == ["4", "3"]
    reference = {"kind": "RocketMQRetryPolicy", "name": "orders"}
    shop.inspect("now", policyRef=reference)
    access, every, one, selected = commands(ROCKETMQ, "Replay dead letters")
    planned = pasted(shop, secret, [access, selected])
    assert re.search(r"^  to move +1 ", planned, re.MULTILINE), planned
    assert re.search(r"^  not selected +1$", planned, re.MULTILINE), planned
    for command in (one, every):
        assert "Complete: 1 moved" in pasted(shop, secret, [command])
    async with rocketmq.admin.session() as session:
        (master,) = await session.masters()
        stored = [await session.count(master, topic, 1) for topic in (group, f"{group}-repair")]
    assert stored == [1, 1]
    shop.replay("grpc", policyRef=reference)
    elsewhere = {"type": "Topic", "topic": "of-another-tenant"}
    shop.replay("foreign", policyRef=reference, target=elsewhere)
    status = shop.inspection("now")
    assert (status["phase"], status["run"]["matched"]) == ("Completed", 2)
    assert [c["messages"] for c in status["run"]["causes"]] == [2]
    wait_until(lambda: len(results_of(shop)) == 2)
    assert [result["moved"] for result in results_of(shop)] == [1, 1]
    wait_until(lambda: "Ready" in shop.status("grpc"))
    assert shop.status("grpc")["Ready"]["reason"] == "OtherBroker"
    wait_until(lambda: "Ready" in shop.status("foreign"))
    assert shop.status("foreign")["Ready"]["reason"] == "TargetNotAllowed"

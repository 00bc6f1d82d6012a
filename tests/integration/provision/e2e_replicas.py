"""Two operators of one release: if the leader dies, the other one takes over."""

from __future__ import annotations

import pytest

from sandbox import installation
from sandbox.sandbox import Sandbox
from tests.integration.provision.conftest import MakeShop, Shop
from tests.support.operator_replicas import NAMES, StartReplica, start_replica

pytestmark = pytest.mark.xdist_group("own sandbox")

__all__ = ["start_replica"]


@pytest.fixture
def shop(make_shop: MakeShop) -> Shop:
    return make_shop()


def test_killed_leader_is_replaced_by_its_standby(start_replica: StartReplica, shop: Shop) -> None:
    leader = start_replica(NAMES[0], "redrive serves")
    successor = start_replica(NAMES[1], "redrive is a standby")
    shop.create_topic(shop.topic("orders"))
    shop.connection()

    leader.process.kill()
    shop.policy()
    successor.takes_over()
    shop.ready()


def test_operator_restart_provisions_new_policies_only(
    make_shop: MakeShop, sandbox: Sandbox
) -> None:
    shop = make_shop()
    shop.connection()
    for name in ("orders", "others"):
        shop.create_topic(shop.topic(name))
    shop.policy(delayLadder={"fixed": "1m"})  # a delay of 1 s causes a warning at some brokers
    settled = shop.ready()
    shop.event_message("orders", "Provisioned")
    sandbox.processes.stop(installation.OPERATOR)
    shop.policy("others", topic=shop.topic("others"))
    installation.start_operator(sandbox)
    shop.ready("others")
    conditions = settled["status"]["conditions"]
    assert shop.get("retrypolicy", "orders")["status"]["conditions"] == conditions
    assert shop.event_reasons("orders") == [("Normal", "Provisioned")]

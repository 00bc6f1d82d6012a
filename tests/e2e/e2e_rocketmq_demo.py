"""The demo of RocketMQ: gRPC clients, a real proxy, operator and Jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from sandbox.demo.__main__ import rocketmq_story
from sandbox.demo.rocketmq import LADDER, RocketMQStory
from sandbox.demo.stage import NAMESPACE
from sandbox.rocketmq import NAME_SERVER, PROXY
from sandbox.sandbox import Sandbox

# The demo has its own time limits, whose messages name the missing step.
pytestmark = [pytest.mark.xdist_group("own sandbox"), pytest.mark.timeout(600)]
ORDERS = 10


@pytest.fixture
def story(installed: Sandbox) -> Iterator[RocketMQStory]:
    story = rocketmq_story(installed, ORDERS)
    yield story
    for name in ("consumer", PROXY, *story.cluster.brokers, NAME_SERVER):
        installed.processes.stop(name)


def test_orders_of_grpc_clients_end_where_the_demo_shows(
    story: RocketMQStory, capsys: pytest.CaptureFixture[str]
) -> None:
    """The retries follow the ladder of the policy; only malformed orders are dead letters."""
    account = story.play()
    assert account.faults == {}
    assert len(account.produced) == ORDERS
    assert account.dead == {"order-000000"}
    failures = len(LADDER) + 1
    outcomes = story.logs.outcomes()
    assert outcomes["WarehouseDown"] == 3 * failures
    assert outcomes["JSONDecodeError"] == 2 * failures
    shown = capsys.readouterr().out
    assert shown.count("then a dead letter") == 4
    assert "none recorded" in shown
    kubectl = story.sandbox.cluster.kubectl
    policy = json.loads(kubectl("get", "rmqpol/orders-fulfilment", "-n", NAMESPACE, "-o", "json"))
    (result,) = policy["status"]["replays"]
    assert (result["name"], result["moved"]) == ("after-the-outage", 4)

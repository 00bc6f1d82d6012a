"""A broker with many policies that is stopped and started again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from sandbox import pulsar
from sandbox.sandbox import Sandbox
from tests.integration.provision.conftest import SECONDS, MakeShop, Shop
from tests.support.installed_operator import metric
from tests.support.waiting import wait_until

POLICIES = 20
LONGEST_PAUSE = 5.0
"""The maximum of seconds between two probes of a connection."""
SHORTEST_PAUSE = LONGEST_PAUSE / 2


@pytest.fixture
def stop_broker(installed: Sandbox) -> Iterator[Callable[[], None]]:
    """A function that stops the broker. The broker is started again after the test."""

    def stop() -> None:
        installed.processes.stop(pulsar.NAME)

    yield stop
    installed.restart_broker()


def test_unreachable_broker_is_probed_until_policies_recover(
    make_shop: MakeShop, installed: Sandbox, stop_broker: Callable[[], None]
) -> None:
    shop = make_shop()
    shop.connection()
    names = [f"orders-{number}" for number in range(POLICIES)]
    for name in names:
        shop.create_topic(shop.topic(name))
    shop.policies({name: {"topic": shop.topic(name)} for name in names})
    wait_for_all(shop, "Provisioned")

    stop_broker()
    shop.policies({name: {"topic": shop.topic(name), "maxRetries": 5} for name in names})
    for kind in ("retrypolicy", "brokerconnection"):  # messages of the first failures are shorter
        wait_for_all(shop, "BrokerUnreachable", kind, "has not answered since 20")
    assert metric(installed, "redrive_breaker_open", connection_namespace=shop.namespace) == 1

    connections = shop.cluster.kubectl("get", "brokerconnections", "-A", "-oname").split()
    # Those of other tests too: until then their policies call the broker side by side.
    are_open = partial(metric, installed, "redrive_breaker_open")
    wait_until(lambda: are_open() == len(connections))
    calls, since = unanswered(installed), time.monotonic()
    shop.delete(names.pop())
    time.sleep(LONGEST_PAUSE)
    while (attempts := unanswered(installed) - calls) == 0:
        assert time.monotonic() - since < 180, "no probe"
        time.sleep(0.2)
    # All existing connections are probed, those of other tests too. Without the breaker each policy
    # would cause several calls.
    probes = 1 + (time.monotonic() - since) / SHORTEST_PAUSE
    assert attempts <= 2 * probes * len(connections)

    installed.restart_broker()
    wait_for_all(shop, "Provisioned")
    shop.ready("main", "brokerconnection")
    assert metric(installed, "redrive_breaker_open", connection_namespace=shop.namespace) == 0


def wait_for_all(shop: Shop, reason: str, kind: str = "retrypolicy", words: str = "") -> None:
    """Wait until the Ready conditions of all objects have *reason*, and *words* in the message."""
    deadline = time.monotonic() + SECONDS
    while True:
        conditions = ready_conditions(shop, kind)
        if all(c["reason"] == reason and words in c["message"] for c in conditions):
            return
        assert time.monotonic() < deadline, conditions
        time.sleep(0.2)


def ready_conditions(shop: Shop, kind: str) -> list[dict[str, Any]]:
    """The Ready condition of each object for its current generation, or one without a reason."""
    items = shop.cluster.objects.list(kind, shop.namespace)
    return [
        next(
            (
                condition
                for condition in item.get("status", {}).get("conditions", ())
                if condition["type"] == "Ready"
                and condition["observedGeneration"] == item["metadata"]["generation"]
            ),
            {"reason": None},
        )
        for item in items
    ]


def unanswered(sandbox: Sandbox) -> float:
    return metric(sandbox, "redrive_admin_calls_total", status="unreachable")

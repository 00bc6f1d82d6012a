"""A broker that is stopped and started again, as the operator of many policies sees it."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sandbox import installation, pulsar
from sandbox.sandbox import Sandbox
from tests.integration.provision.conftest import SECONDS, MakeShop, Shop

pytestmark = pytest.mark.xdist_group("own sandbox")

POLICIES = 20
LONGEST_PAUSE = 5.0
"""Seconds, at most, between two probes of a connection."""
SHORTEST_PAUSE = LONGEST_PAUSE / 2


@pytest.fixture
def away(installed: Sandbox) -> Iterator[Callable[[], None]]:
    """Has the broker go away; it is there again after the test."""

    def go() -> None:
        installed.processes.stop(pulsar.NAME)

    yield go
    installed.restart_broker()


def test_a_broker_that_is_away_is_left_alone_until_it_answers_and_then_all_recovers(
    make_shop: MakeShop, installed: Sandbox, away: Callable[[], None]
) -> None:
    shop = make_shop()
    shop.connection()
    names = [f"orders-{number}" for number in range(POLICIES)]
    for name in names:
        shop.create_topic(shop.topic(name))
    shop.policies({name: {"topic": shop.topic(name)} for name in names})
    wait_for_all(shop, "Provisioned")

    away()
    shop.policies({name: {"topic": shop.topic(name), "maxRetries": 5} for name in names})
    for kind in ("retrypolicy", "brokerconnection"):  # the first calls that failed say less
        wait_for_all(shop, "BrokerUnreachable", kind, "has not answered since 20")
    assert measured(installed, "redrive_breaker_open", connection_namespace=shop.namespace) == 1

    connections = shop.cluster.kubectl("get", "brokerconnections", "-A", "-oname").split()
    calls, since = unanswered(installed), time.monotonic()
    shop.delete(names.pop())
    time.sleep(LONGEST_PAUSE)
    while (made := unanswered(installed) - calls) == 0:
        assert time.monotonic() - since < 180, "it is not probed"
        time.sleep(0.2)
    # Probes of the connections there are, of which other tests may have left some. Each policy for
    # itself would call several times.
    probes = 1 + (time.monotonic() - since) / SHORTEST_PAUSE
    assert made <= 2 * probes * len(connections)

    installed.restart_broker()
    wait_for_all(shop, "Provisioned")
    shop.ready("main", "brokerconnection")
    assert measured(installed, "redrive_breaker_open", connection_namespace=shop.namespace) == 0


def wait_for_all(shop: Shop, reason: str, kind: str = "retrypolicy", words: str = "") -> None:
    """Wait until all are Ready, or not, for that reason, with these words in their messages."""
    deadline = time.monotonic() + SECONDS
    while True:
        found = ready_conditions(shop, kind)
        if all(each["reason"] == reason and words in each["message"] for each in found):
            return
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


def ready_conditions(shop: Shop, kind: str) -> list[dict[str, Any]]:
    """The Ready condition of each object, for its spec as it is; one without has no reason."""
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


def measured(sandbox: Sandbox, name: str, **labels: str) -> float:
    """The sum over what the operator tells of a metric with these labels."""
    with urllib.request.urlopen(f"{installation.endpoint(sandbox)}/metrics", timeout=60) as answer:  # noqa: S310
        families = list(text_string_to_metric_families(answer.read().decode()))
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def unanswered(sandbox: Sandbox) -> float:
    return measured(sandbox, "redrive_admin_calls_total", status="unreachable")

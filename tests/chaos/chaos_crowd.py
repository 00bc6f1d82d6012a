"""Connections, policies and Replays of a hostile namespace, and new policies of another one.

Hostile servers answer the connections. `bench_hostile.py` has thousands of objects, with an API
server in memory.
"""

from __future__ import annotations

import logging
import random
import re
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from sandbox import chart, installation
from sandbox.sandbox import Sandbox
from tests.chaos.hostile_queues import HostileQueueServer
from tests.chaos.hostile_servers import HostileBroker
from tests.integration.provision.conftest import MakeShop, Shop, redrive

CONNECTIONS, REPLAYS, NEW = 100, 50, 5
MOST_SECONDS = 20.0
"""Longest time until a new policy is provisioned, on a machine with other runs."""
SEED = 7
CLOSED = "http://127.0.0.1:1"
CONDITION = " OR ".join(f"cause_type = 'E{number:03}'" for number in range(160))
"""About 4 KB."""
_log = logging.getLogger(__name__)


def provisioned(shop: Shop, name: str) -> float:
    """Create a policy; return the seconds until it is ready."""
    shop.create_topic(shop.topic(name))
    began = time.monotonic()
    shop.policy(name, topic=shop.topic(name))
    shop.ready(name)
    return time.monotonic() - began


def late_turns(sandbox: Sandbox) -> dict[str, int]:
    """Return how often the event loop of the operator was late by more than some seconds."""
    with urllib.request.urlopen(f"{installation.endpoint(sandbox)}/metrics") as answer:  # noqa: S310
        text = answer.read().decode()
    buckets = re.findall(r'loop_delay_seconds_bucket\{le="([\d.]+|\+Inf)"\} (\d+)', text)
    counts = {name: int(float(count)) for name, count in buckets}
    return {name: counts["+Inf"] - counts[name] for name in ("0.5", "1.0", "2.5", "5.0")}


def crowd(shop: Shop, admin_url: str, queues: str) -> dict[str, dict[str, Any]]:
    """Return connections, each with a policy, and Replays of these; names → objects."""
    token = {"secretRef": {"name": "pulsar-admin", "key": "token"}}
    bodies: dict[str, dict[str, Any]] = {}
    for number in range(CONNECTIONS):
        name, through = f"c{number}", {"connectionRef": {"name": f"c{number}"}}
        if number % 3 == 2:
            allow = [{"name": "all", "topics": ["*"], "groups": ["*"]}]
            cluster = {"nameServers": [queues], "authentication": {"type": "None"}, "allow": allow}
            bodies[name] = redrive("BrokerConnection", {"rocketmq": cluster})
            spec = {**through, "topic": "orders", "group": name}
            bodies[f"p{number}"] = redrive("RocketMQRetryPolicy", spec)
            continue
        pulsar = {
            "serviceURL": shop.broker.service_url,
            "adminURL": (CLOSED, admin_url)[number % 3],
            "authentication": {"type": "Token", "token": token},
        }
        allowed: Any = {"pulsar": pulsar, "allow": [shop.rule("thief")]}
        bodies[name] = redrive("BrokerConnection", allowed)
        # They collide with each other.
        spec = {**through, "topic": shop.topic("orders"), "subscription": f"s{number % 7}"}
        bodies[f"p{number}"] = redrive("RetryPolicy", {**spec, "consumerRoles": ["thief"]})
    for number in range(REPLAYS):
        kind = "RocketMQRetryPolicy" if number % 3 == 2 else "RetryPolicy"
        run: dict[str, Any] = {"policyRef": {"kind": kind, "name": f"p{number}"}}
        if number % 3 != 2:
            run |= {"suspend": bool(number % 2), "select": {"where": CONDITION}}
        bodies[f"r{number}"] = redrive("Replay", run)
    return bodies


@pytest.mark.timeout(900)
def test_crowd_of_a_namespace_delays_no_new_policy(
    make_shop: MakeShop, operator_process: Path, installed: Sandbox
) -> None:
    victim, attacker = make_shop(), make_shop()
    chart.prepare_replays(attacker.cluster, attacker.namespace)
    for shop in (victim, attacker):
        shop.create_topic(shop.topic("orders"))
    victim.connection()
    alone = [provisioned(victim, f"alone-{number}") for number in range(NEW)]
    before = late_turns(installed)
    with (
        HostileBroker.serving(random.Random(SEED), victim.broker.admin_url) as broker,  # noqa: S311
        HostileQueueServer.serving(random.Random(SEED)) as server,  # noqa: S311
    ):
        attacker.apply(crowd(attacker, broker.url, server.address))
        beside = [provisioned(victim, f"beside-{number}") for number in range(2 * NEW)]
        answers, after = (broker.answers, server.answers), late_turns(installed)
        for kind in ("retrypolicy", "rocketmqretrypolicy"):
            for body in attacker.objects(kind):
                attacker.annotate(body["metadata"]["name"], kind, skip_cleanup="true")
        attacker.kubectl("delete", "retrypolicy,rocketmqretrypolicy,replay", "--all")
    _log.info(
        "a new policy is ready after %.1f to %.1f s alone, and %.1f to %.1f s beside the crowd",
        *(min(alone), max(alone), min(beside), max(beside)),
    )
    _log.info("the event loop was late by more than some seconds: %s, before: %s", after, before)
    assert max(beside) < MOST_SECONDS
    assert min(answers)
    assert "Traceback" not in operator_process.read_text()

"""A policy with messages in its topics, objects of other owners, and an operator to disturb."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any

import pulsar
import pytest

from redrive.provision.ownership import OWNER_UID
from sandbox import installation
from sandbox.pulsar import SUPERUSER
from sandbox.sandbox import Sandbox
from tests.chaos.proxy import Proxy, Trap, passing
from tests.integration.provision.conftest import MakeShop, Shop, make_shop, rest_path
from tests.integration.replay.conftest import (
    make_job,
    provision_policy,
    replay_api,
    replay_token,
)

__all__ = ["make_job", "make_shop", "provision_policy", "replay_api", "replay_token"]
pytest.register_assert_rewrite("tests.chaos.scene")

EARLIEST = {"ledgerId": -1, "entryId": -1}
WAITING, DEAD, FOREIGN = 4, 3, 2
SECONDS = 120


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("replays")
    group.addoption(
        "--rounds", type=int, default=1, help="how often each fault comes (default: %(default)s)"
    )
    group.addoption(
        "--messages", type=int, default=30_000, help="of each replay (default: %(default)s)"
    )


@pytest.fixture(scope="module")
def operator_process(installed: Sandbox) -> Path:
    """Return the log of the operator."""
    return installed.processes.log(installation.OPERATOR)


@dataclass(frozen=True)
class Harness:
    """An operator behind a proxy, and the expected objects at its broker.

    Args:
        proxy: between the operator and the broker.
        foreign: the initial state of objects of other owners.
        right: the result of `made` for an undisturbed policy.
    """

    shop: Shop
    sandbox: Sandbox
    proxy: Proxy
    foreign: dict[str, Any]
    right: dict[str, Any] = field(default_factory=dict)
    _killed: Event = field(default_factory=Event)

    def kill(self) -> None:
        """Kill the operator."""
        self.sandbox.processes.kill(installation.OPERATOR)
        self._killed.set()

    def restart(self) -> None:
        """Start an operator after the end of the one that another thread kills."""
        assert self._killed.wait(SECONDS), "not killed"
        self._killed.clear()
        log = self.sandbox.processes.log(installation.OPERATOR)
        before = log.stat().st_size
        self.sandbox.processes.again(installation.OPERATOR)
        self.sandbox.processes.wait_until(
            installation.OPERATOR,
            lambda: b"redrive serves" in log.read_bytes()[before:],
            seconds=SECONDS,
        )

    def source(self, name: str) -> None:
        """Create a source topic with a subscription, without which the broker would delete it."""
        self.shop.create_topic(self.shop.topic(name), 2)
        path = f"{rest_path(self.shop.topic(name))}/subscription/fulfilment"
        self.shop.request("PUT", path, EARLIEST)

    def ask(self, name: str, **spec: object) -> None:
        """Create or change a policy with a source topic of the same name."""
        self.shop.policy(name, topic=self.shop.topic(name), **spec)

    def made(self, name: str) -> dict[str, Any]:
        """Return all objects of the policy *name* at the broker, without its name and uid."""
        listed = self.shop.request("GET", f"persistent/{self.shop.tenant}/prod")
        listed += self.shop.request("GET", f"persistent/{self.shop.tenant}/prod/partitioned")
        prefix = self.shop.topic(name)
        own = [t for t in listed if t == prefix or t.startswith(f"{prefix}-")]
        states = {topic: state(self.shop, topic) for topic in sorted(own)}
        anonymous = re.sub(rf'("{OWNER_UID}": )"[^"]+"', r'\1"its"', json.dumps(states))
        written: dict[str, Any] = json.loads(anonymous.replace(name, "it"))
        return written

    def calls(self, about: str, cause: Callable[[], None], name: str) -> int:
        """Return the number of calls that match *about* until the policy *name* is Ready."""
        with self.proxy.trap(about, 0, passing) as counter:
            cause()
            self.shop.ready(name)
            return counter.count

    def is_intact(self) -> None:
        """Assert that no message is lost, and that objects of other owners are unchanged."""
        assert backlogs(self.shop) == {"kept-RETRY": WAITING, "kept-DLQ": DEAD, "others": FOREIGN}
        assert foreign(self.shop) == self.foreign


def state(shop: Shop, topic: str) -> dict[str, Any]:
    """Return the state of a topic at the broker."""
    path, values = rest_path(topic), {}
    for part in ("subscriptions", "partitions", "properties", "deduplicationEnabled", "messageTTL",
                 "inactiveTopicPolicies?applied=true", "delayedDelivery?applied=true",
                 "backlogQuotaMap"):  # fmt: skip
        if "-partition-" not in topic or part == "subscriptions":
            values[part] = shop.request("GET", f"{path}/{part}")
    values["subscriptions"].sort()
    policies = shop.request("GET", f"namespaces/{shop.tenant}/prod")
    values["grants"] = {
        role: sorted(actions)
        for role, actions in policies["auth_policies"]["destination_auth"].get(topic, {}).items()
    }
    return values


def foreign(shop: Shop) -> dict[str, Any]:
    """Return objects of other owners: a topic with its grants, and a role on redrive's topics."""
    policies = shop.request("GET", f"namespaces/{shop.tenant}/prod")
    grants = policies["auth_policies"]["destination_auth"].items()
    return {
        "topic": state(shop, shop.topic("others")),
        "auditor": {topic: roles["auditor"] for topic, roles in grants if "auditor" in roles},
        "tenant": shop.request("GET", f"tenants/{shop.tenant}"),
    }


def backlogs(shop: Shop) -> dict[str, int]:
    """Return the backlogs of the topics with messages."""
    counts = {}
    for name, topic, subscription in (
        ("kept-RETRY", "kept-fulfilment-RETRY", "fulfilment"),
        ("kept-DLQ", "kept-fulfilment-DLQ", "redrive"),
        ("others", "others", "others"),
    ):
        stats = shop.request("GET", f"{rest_path(shop.topic(topic))}/stats")
        counts[name] = stats["subscriptions"][subscription]["msgBacklog"]
    return counts


@pytest.fixture(scope="module")
def harness(make_shop: MakeShop, installed: Sandbox) -> Iterator[Harness]:
    shop = make_shop()
    installed.processes.stop(installation.OPERATOR)
    installation.start_operator(installed)  # by this run, which can then restart it
    with Proxy.before(shop.broker.admin_url) as proxy:
        shop.connection(adminURL=proxy.url)
        for name in ("kept", "others"):
            shop.create_topic(shop.topic(name))
        shop.request("PUT", f"{rest_path(shop.topic('kept'))}/subscription/fulfilment", EARLIEST)
        shop.policy("kept", topic=shop.topic("kept"))
        shop.ready("kept")
        path = rest_path(shop.topic("others"))
        shop.request("PUT", f"{path}/subscription/others", EARLIEST)
        shop.request("POST", f"{path}/permissions/fulfilment", ["consume"])
        retry = rest_path(shop.topic("kept-fulfilment-RETRY"))
        shop.request("POST", f"{retry}/permissions/auditor", ["consume"])
        send(shop)
        harness = Harness(shop, installed, proxy, foreign(shop))
        harness.source("at-peace")
        harness.ask("at-peace")
        shop.ready("at-peace")
        harness.right.update(harness.made("at-peace"))
        assert len(harness.right) == 3 + 2 * 2  # three topics, two of them with two partitions
        yield harness
        if not installed.processes.alive(installation.OPERATOR):
            installation.start_operator(installed)


def send(shop: Shop) -> None:
    """Send messages that must not be lost."""
    client = pulsar.Client(
        shop.broker.service_url,
        authentication=pulsar.AuthenticationToken(shop.broker.token(SUPERUSER)),
        logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
    )
    later = {"deliver_after": timedelta(hours=1)}
    for topic, count, how in (
        ("kept-fulfilment-RETRY", WAITING, later),
        ("kept-fulfilment-DLQ", DEAD, {}),
        ("others", FOREIGN, {}),
    ):
        producer = client.create_producer(shop.topic(topic))
        for number in range(count):
            producer.send(str(number).encode(), **how)
    client.close()


def wait_for(holds: Callable[[], bool], goal: str) -> None:
    """Wait until *holds* returns True; fail with *goal* after a time."""
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, goal
        time.sleep(0.2)


def springs(trap: Trap) -> None:
    """Wait until a call springs the trap; fail if none does."""
    assert trap.sprung.wait(SECONDS), f"call {trap.number} about {trap.about!r} never came"

"""Operators that are killed, restarted or limited to one namespace, and connections in use."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from sandbox import installation
from sandbox.sandbox import Sandbox
from tests.integration.provision.conftest import SECONDS, MakeShop, Shop
from tests.integration.provision.test_operator import DRIVERS, NEEDED, allowed
from tests.support.installed_operator import NAMES, StartReplica, namespaced_operator, start_replica

__all__ = ["start_replica"]

pytestmark = pytest.mark.xdist_group("own sandbox")

IN_USE = "redrive.io/in-use"


def test_killed_leader_is_replaced_by_its_standby(
    start_replica: StartReplica, make_shop: MakeShop
) -> None:
    shop = make_shop()
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


@pytest.fixture
def in_one_namespace(installed: Sandbox, make_shop: MakeShop) -> Iterator[tuple[Shop, str]]:
    """A shop whose operator has Roles in that namespace only, and the namespace of its release."""
    shop = make_shop()
    with namespaced_operator(installed, shop.namespace) as release_in:
        yield shop, release_in


def test_roles_in_the_served_namespaces_are_sufficient(
    in_one_namespace: tuple[Shop, str], installed: Sandbox, make_shop: MakeShop
) -> None:
    shop, release_in = in_one_namespace
    elsewhere = make_shop()
    for tenant in (elsewhere, shop):
        tenant.create_topic(tenant.topic("orders"))
        tenant.connection()
        tenant.policy()
    shop.ready()
    shop.ready("main", "brokerconnection")
    shop.delete("orders")
    assert "status" not in elsewhere.get("retrypolicy", "orders")
    cluster = installed.cluster
    served = allowed(cluster, release_in=release_in, namespace=shop.namespace)
    needed = {resource: set(verbs) for resource, verbs in NEEDED.items()}
    assert served == needed | {
        resource: {*NEEDED[resource], *verbs} for resource, verbs in DRIVERS.items()
    }
    beyond = allowed(cluster, release_in=release_in, namespace=elsewhere.namespace)
    assert beyond == {resource: set[str]() for resource in NEEDED}
    assert "Forbidden" not in installed.processes.log(release_in).read_text()


def finalizers(shop: Shop) -> list[str]:
    """The finalizers of the connection."""
    return list(shop.get("brokerconnection", "main")["metadata"].get("finalizers", []))


def protected(shop: Shop, *, used: bool = True) -> None:
    """Wait until the connection has the finalizer, or, if not *used*, has lost it."""
    deadline = time.monotonic() + SECONDS
    while (IN_USE in finalizers(shop)) is not used:
        assert time.monotonic() < deadline, finalizers(shop)
        time.sleep(0.1)


def gone(shop: Shop) -> None:
    """Wait until the connection is gone."""
    shop.wait_until_gone("main", "brokerconnection")


def ask_to_delete(shop: Shop) -> None:
    shop.start_deletion("main", "brokerconnection")


def test_connection_is_deleted_after_its_last_policy(shop: Shop, make_shop: MakeShop) -> None:
    other = make_shop()
    names = {"names": [shop.namespace, other.namespace]}
    shop.connection(allow=[{**shop.rule("fulfilment"), "namespaces": names}])
    for name in ("orders", "returns"):
        shop.create_topic(shop.topic(name))
    shop.ready("main", "brokerconnection")
    assert finalizers(shop) == []
    shop.policy(deletionPolicy="Delete")
    ref = {"name": "main", "namespace": shop.namespace}
    other.policy("hidden", connectionRef=ref, topic=shop.topic("returns"), deletionPolicy="Delete")
    topics = shop.ready()["status"]
    other.ready("hidden")
    protected(shop)

    ask_to_delete(shop)
    shop.reaches_condition("main", "DeletionBlocked", "brokerconnection")
    status = json.dumps(shop.get("brokerconnection", "main")["status"])
    assert "got RetryPolicy orders, 1 of other namespaces; delete them" in status
    assert "hidden" not in status
    # The policies still use it: a policy that is deleted deletes its topics.
    shop.policy(maxRetries=3, deletionPolicy="Delete")
    shop.ready()
    shop.delete("orders")
    assert topics["retryTopic"] not in shop.topics()
    assert shop.get("brokerconnection", "main")["metadata"]["deletionTimestamp"]
    other.delete("hidden")
    gone(shop)
    assert not [name for name in shop.topics() if name.endswith(("-RETRY", "-DLQ"))]


def test_connection_without_policies_loses_its_finalizer(shop: Shop) -> None:
    shop.create_topic(shop.topic("orders"))
    shop.policy()
    shop.ready()
    protected(shop)
    shop.delete("orders")
    protected(shop, used=False)


def test_connection_is_not_kept_by_policies_it_does_not_allow(
    shop: Shop, make_shop: MakeShop
) -> None:
    stranger = make_shop()
    stranger.policy(connectionRef={"name": "main", "namespace": shop.namespace})
    stranger.reaches("orders", "NamespaceNotAllowed")
    shop.ready("main", "brokerconnection")
    ask_to_delete(shop)
    gone(shop)
    stranger.reaches("orders", "ConnectionNotFound")


@pytest.mark.parametrize("first", ["brokerconnection", "retrypolicy", "secret", "all"])
def test_namespace_is_deleted_in_any_order_of_its_objects(shop: Shop, first: str) -> None:
    shop.create_topic(shop.topic("orders"))
    shop.policy(deletionPolicy="Delete")
    shop.ready()
    protected(shop)
    if first != "all":
        for body in shop.objects(first):
            shop.start_deletion(body["metadata"]["name"], first)
    shop.delete_namespace()
    assert not [name for name in shop.topics() if name.endswith(("-RETRY", "-DLQ"))]


def test_connection_deleted_during_a_restart_is_released(shop: Shop, sandbox: Sandbox) -> None:
    shop.create_topic(shop.topic("orders"))
    shop.policy()
    shop.ready()
    protected(shop)
    sandbox.processes.stop(installation.OPERATOR)
    ask_to_delete(shop)
    shop.delete("orders")
    metadata = shop.get("brokerconnection", "main")["metadata"]
    assert metadata["deletionTimestamp"]
    assert metadata["finalizers"] == [IN_USE]
    installation.start_operator(sandbox)
    gone(shop)

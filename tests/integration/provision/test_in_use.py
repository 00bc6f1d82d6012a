"""A connection that policies use, of whatever namespace, is deleted after the last of them."""

from __future__ import annotations

import json
import time

import pytest

from sandbox import installation
from sandbox.sandbox import Sandbox
from tests.integration.provision.conftest import SECONDS, MakeShop, Shop

pytestmark = pytest.mark.xdist_group("own sandbox")

IN_USE = "redrive.io/in-use"


def finalizers(shop: Shop) -> list[str]:
    """Those of the connection."""
    return list(shop.get("brokerconnection", "main")["metadata"].get("finalizers", []))


def protected(shop: Shop, *, used: bool = True) -> None:
    """Wait until the connection is held for its policies, or for none."""
    deadline = time.monotonic() + SECONDS
    while (IN_USE in finalizers(shop)) is not used:
        assert time.monotonic() < deadline, finalizers(shop)
        time.sleep(0.1)


def gone(shop: Shop) -> None:
    """Wait until the connection is gone."""
    shop.kubectl("wait", "brokerconnection/main", "--for=delete", f"--timeout={SECONDS}s")


def ask_to_delete(shop: Shop) -> None:
    shop.kubectl("delete", "brokerconnection", "main", "--wait=false")


def test_a_connection_stays_until_the_last_policy_of_any_namespace_is_gone(
    shop: Shop, make_shop: MakeShop
) -> None:
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
    shop.kubectl(
        "wait",
        "brokerconnection/main",
        "--for=condition=DeletionBlocked",
        f"--timeout={SECONDS}s",
    )
    said = json.dumps(shop.get("brokerconnection", "main")["status"])
    assert "got RetryPolicy orders, 1 of other namespaces; delete them" in said
    assert "hidden" not in said
    # It serves them as before: a policy that is deleted takes its topics with it.
    shop.policy(maxRetries=3, deletionPolicy="Delete")
    shop.ready()
    shop.delete("orders")
    assert topics["retryTopic"] not in shop.topics()
    assert shop.get("brokerconnection", "main")["metadata"]["deletionTimestamp"]
    other.delete("hidden")
    gone(shop)
    assert not [name for name in shop.topics() if name.endswith(("-RETRY", "-DLQ"))]


def test_what_no_policy_uses_any_more_is_held_by_nothing(shop: Shop) -> None:
    shop.create_topic(shop.topic("orders"))
    shop.policy()
    shop.ready()
    protected(shop)
    shop.delete("orders")
    protected(shop, used=False)


def test_nobody_keeps_a_connection_by_naming_it(shop: Shop, make_shop: MakeShop) -> None:
    stranger = make_shop()
    stranger.policy(connectionRef={"name": "main", "namespace": shop.namespace})
    stranger.reaches("orders", "NamespaceNotAllowed")
    shop.ready("main", "brokerconnection")
    ask_to_delete(shop)
    gone(shop)
    stranger.reaches("orders", "ConnectionNotFound")


@pytest.mark.parametrize("first", ["brokerconnection", "retrypolicy", "secret", "all"])
def test_a_namespace_goes_in_whatever_order_its_objects_do(shop: Shop, first: str) -> None:
    shop.create_topic(shop.topic("orders"))
    shop.policy(deletionPolicy="Delete")
    shop.ready()
    protected(shop)
    if first != "all":
        shop.kubectl("delete", first, "--all", "--wait=false")
    shop.cluster.kubectl("delete", "namespace", shop.namespace, f"--timeout={SECONDS}s")
    assert not [name for name in shop.topics() if name.endswith(("-RETRY", "-DLQ"))]


def test_an_operator_that_was_stopped_meanwhile_lets_it_go(shop: Shop, sandbox: Sandbox) -> None:
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

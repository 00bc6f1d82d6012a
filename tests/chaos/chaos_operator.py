"""The operator is killed after each call of a reconcile, and the next one completes it."""

from __future__ import annotations

from tests.chaos.conftest import Harness, springs
from tests.chaos.proxy import done_then, passing
from tests.integration.provision.conftest import rest_path


def test_killed_after_each_call_that_makes_a_policys_topics(harness: Harness) -> None:
    harness.source("made-by-one")
    calls = harness.calls("", lambda: harness.ask("made-by-one"), "made-by-one")
    assert harness.made("made-by-one") == harness.right
    assert calls > 10
    for number in range(1, calls + 1):
        name = f"made-by-two-{number:02}"
        harness.source(name)
        with harness.proxy.trap("", number, done_then(harness.kill)) as trap:
            harness.ask(name)
            springs(trap)
        harness.restart()
        harness.shop.ready(name)
        assert harness.made(name) == harness.right, f"after call {number}"
        harness.is_intact()
        harness.shop.kubectl("delete", "retrypolicy", name, "--timeout=30s")


def test_killed_after_each_call_that_repairs_a_policys_topics(harness: Harness) -> None:
    harness.source("repaired")
    harness.ask("repaired")
    harness.shop.ready("repaired")

    def break_it(retries: int) -> None:
        """Remove everything that holds no message, and cause a reconcile."""
        retry, dead = (
            rest_path(harness.shop.topic(f"repaired-fulfilment-{t}")) for t in ("RETRY", "DLQ")
        )
        harness.shop.request("DELETE", f"{retry}/permissions/fulfilment")
        harness.shop.request("POST", f"{retry}/messageTTL?messageTTL=60")
        harness.shop.request("DELETE", f"{dead}/permissions/fulfilment")
        harness.shop.request("DELETE", f"{dead}/subscription/redrive")
        harness.shop.kubectl("delete", "configmap", "repaired-redrive")
        harness.ask("repaired", maxRetries=retries)

    calls = harness.calls("", lambda: break_it(1), "repaired")
    assert harness.made("repaired") == harness.right
    assert calls > 5
    for number in range(1, calls + 1):
        with harness.proxy.trap("", number, done_then(harness.kill)) as trap:
            break_it(number + 1)
            springs(trap)
        harness.restart()
        harness.shop.ready("repaired")
        assert harness.made("repaired") == harness.right, f"after call {number}"
        assert harness.shop.get("configmap", "repaired-redrive")["data"]
        harness.is_intact()


def test_killed_after_each_call_of_a_deletion(harness: Harness) -> None:
    def provision(name: str) -> None:
        """Provision a policy with a created retry topic and an adopted dead-letter topic."""
        harness.source(name)
        harness.shop.create_topic(harness.shop.topic(f"{name}-fulfilment-DLQ"))
        harness.ask(name, deletionPolicy="Delete", adoption="IfPresent")
        harness.shop.ready(name)

    def gone(name: str) -> None:
        harness.shop.kubectl("wait", "--for=delete", f"retrypolicy/{name}", "--timeout=60s")

    def delete(name: str) -> None:
        harness.shop.kubectl("delete", "retrypolicy", name, "--wait=false")

    provision("ended-one")
    with harness.proxy.trap("", 0, passing) as counter:
        delete("ended-one")
        gone("ended-one")
        calls = counter.count
    right = harness.made("ended-one")
    assert len(right) == 1 + 2 + 1  # the source topic with its partitions, and the adopted topic
    assert calls > 5
    for number in range(1, calls + 1):
        name = f"ended-two-{number:02}"
        provision(name)
        with harness.proxy.trap("", number, done_then(harness.kill)) as trap:
            delete(name)
            springs(trap)
        harness.restart()
        gone(name)
        assert harness.made(name) == right, f"after call {number}"
        harness.is_intact()

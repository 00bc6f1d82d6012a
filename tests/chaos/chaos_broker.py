"""The broker refuses, hangs or is killed: policies converge, and other objects stay unchanged."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from sandbox import installation, pulsar
from tests.chaos.conftest import Harness, springs, wait_for
from tests.chaos.proxy import Fault, answering, done_but_not_told, hanging

FAULTS: dict[str, Fault] = {
    **{str(status): answering(status) for status in (409, 412, 429, 500)},
    "untold": done_but_not_told,
    "hanging": hanging,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_call_about_a_policys_topics_fails_once(harness: Harness, fault: str) -> None:
    """Fail all calls at once, one per policy: a waiting policy does not block the others."""
    first = f"{fault}-right"
    harness.source(first)
    calls = harness.calls(first, lambda: harness.ask(first), first)
    assert harness.made(first) == harness.right
    assert calls > 10
    names = [f"{fault}-{number:02}" for number in range(1, calls + 1)]
    for name in names:
        harness.source(name)
    with ExitStack() as traps:
        set_up = [
            traps.enter_context(harness.proxy.trap(f"/{name}", number, FAULTS[fault]))
            for number, name in enumerate(names, start=1)
        ]
        harness.shop.policies({name: {"topic": harness.shop.topic(name)} for name in names})
        for trap in set_up:
            springs(trap)
        for name in names:
            harness.shop.ready(name)
    for number, name in enumerate(names, start=1):
        assert harness.made(name) == harness.right, f"call {number} failed"
    harness.is_intact()
    harness.shop.kubectl("delete", "retrypolicy", first, *names, "--timeout=60s")


@pytest.mark.parametrize("fault", FAULTS)
def test_each_call_about_the_whole_namespace_fails_once(harness: Harness, fault: str) -> None:
    tenant = harness.shop.tenant
    abouts = (
        f"/namespaces/{tenant}/prod ",
        f"/persistent/{tenant}/prod ",
        f"/persistent/{tenant}/prod/partitioned ",
        "/grantPermissionsOnTopics",
    )
    for number, about in enumerate(abouts):
        name = f"ns-{fault}-{number}"
        harness.source(name)
        with harness.proxy.trap(about, 1, FAULTS[fault]) as trap:
            harness.ask(name)
            springs(trap)
        harness.shop.ready(name)
        assert harness.made(name) == harness.right
        harness.is_intact()
        harness.shop.kubectl("delete", "retrypolicy", name, "--timeout=30s")


def test_the_broker_is_killed_while_policies_are_made(harness: Harness) -> None:
    names = [f"crash-{number}" for number in range(10)]
    for name in names:
        harness.source(name)
    harness.shop.policies({name: {"topic": harness.shop.topic(name)} for name in names})
    wait_for(
        lambda: bool(harness.made(names[0]).keys() > {harness.shop.topic("it")}), "no topic made"
    )
    harness.sandbox.processes.kill(pulsar.NAME)
    harness.sandbox.restart_broker()
    for name in names:
        harness.shop.ready(name)
        assert harness.made(name) == harness.right
    harness.is_intact()


def test_revoked_token_that_is_replaced(harness: Harness) -> None:
    shop = harness.shop
    shop.secret("pulsar-admin", token="not-a-token-any-more")  # noqa: S106 - not a secret
    shop.policy("kept", topic=shop.topic("kept"), maxRetries=5)
    harness.source("comes")
    harness.ask("comes")
    for name in ("kept", "comes"):
        shop.reaches(name, "AuthenticationFailed")
    shop.reaches("main", "AuthenticationFailed", "brokerconnection")
    harness.is_intact()
    shop.secret("pulsar-admin", token=shop.token(shop.role))
    for name in ("kept", "comes"):
        shop.ready(name)
    shop.ready("main", "brokerconnection")
    assert harness.made("comes") == harness.right
    written = shop.get("configmap", "kept-redrive")["data"]["policy.json"]
    assert '"maxRetries": 5' in written
    harness.is_intact()
    assert harness.sandbox.processes.alive(installation.OPERATOR)

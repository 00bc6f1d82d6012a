"""The API server is killed, or its watches are cut: policies converge to their newest spec."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sandbox import installation, kubernetes
from sandbox.errors import SandboxError
from sandbox.sandbox import Sandbox
from tests.chaos.conftest import Harness, wait_for
from tests.chaos.proxy import Relay


def test_the_api_server_is_killed_while_policies_are_made(harness: Harness) -> None:
    names = [f"api-{number}" for number in range(10)]
    for name in names:
        harness.source(name)
    harness.shop.policies({name: {"topic": harness.shop.topic(name)} for name in names})
    wait_for(lambda: len(harness.made(names[0])) > 3, "no topic made")
    processes = harness.sandbox.processes
    processes.kill(kubernetes.API_SERVER)
    with pytest.raises(SandboxError):
        harness.shop.kubectl("get", "retrypolicies")
    kubernetes.start_api_server(harness.sandbox.cluster, processes)
    for name in names:
        harness.shop.ready(name)
        assert harness.made(name) == harness.right
    harness.is_intact()
    harness.shop.kubectl("delete", "retrypolicy", *names, "--timeout=60s")


def test_watches_are_cut_while_policies_come_change_and_go(harness: Harness) -> None:
    for name in ("comes", "changes", "goes"):
        harness.source(name)
    harness.sandbox.processes.stop(installation.OPERATOR)
    with Relay.before(harness.sandbox.cluster.port) as relay:
        beyond = replace(harness.sandbox.cluster, port=relay.port)
        sandbox = harness.sandbox
        installation.start_operator(
            Sandbox(sandbox.state, sandbox.processes, sandbox.pulsar, beyond)
        )
        for name in ("changes", "goes"):
            harness.ask(name)
        for name in ("changes", "goes"):
            harness.shop.ready(name)
        gone = harness.made("goes")

        relay.cut()
        harness.ask("comes")
        harness.ask("changes", maxRetries=7)
        harness.shop.kubectl("delete", "retrypolicy", "goes", "--wait=false")
        relay.accept()

        harness.shop.ready("comes")
        harness.shop.ready("changes")
        harness.shop.kubectl("wait", "--for=delete", "retrypolicy/goes", "--timeout=60s")
        written = harness.shop.get("configmap", "changes-redrive")["data"]["policy.json"]
        assert '"maxRetries": 7' in written
        assert harness.made("comes") == harness.made("changes") == harness.right
        assert harness.made("goes") == gone
        harness.is_intact()
        sandbox.processes.stop(installation.OPERATOR)
    installation.start_operator(harness.sandbox)

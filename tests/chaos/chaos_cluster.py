"""The API server goes away, or its watches do: what was asked meanwhile is done in the end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sandbox import installation, kubernetes
from sandbox.errors import SandboxError
from sandbox.sandbox import Sandbox
from tests.chaos.conftest import Scene, wait_for
from tests.chaos.relay import Relay


def test_the_api_server_is_killed_while_policies_are_made(scene: Scene) -> None:
    names = [f"api-{number}" for number in range(10)]
    for name in names:
        scene.source(name)
    scene.shop.policies({name: {"topic": scene.shop.topic(name)} for name in names})
    wait_for(lambda: len(scene.made(names[0])) > 3, "no topic made")
    processes = scene.sandbox.processes
    processes.kill(kubernetes.API_SERVER)
    with pytest.raises(SandboxError):
        scene.shop.kubectl("get", "retrypolicies")
    kubernetes.start_api_server(scene.sandbox.cluster, processes)
    for name in names:
        scene.shop.ready(name)
        assert scene.made(name) == scene.right
    scene.is_intact()
    scene.shop.kubectl("delete", "retrypolicy", *names, "--timeout=60s")


def test_watches_are_cut_while_policies_come_change_and_go(scene: Scene) -> None:
    for name in ("comes", "changes", "goes"):
        scene.source(name)
    scene.sandbox.processes.stop(installation.OPERATOR)
    with Relay.before(scene.sandbox.cluster.port) as relay:
        beyond = replace(scene.sandbox.cluster, port=relay.port)
        sandbox = scene.sandbox
        installation.start_operator(
            Sandbox(sandbox.state, sandbox.processes, sandbox.pulsar, beyond)
        )
        for name in ("changes", "goes"):
            scene.ask(name)
        for name in ("changes", "goes"):
            scene.shop.ready(name)
        gone = scene.made("goes")

        relay.cut()
        scene.ask("comes")
        scene.ask("changes", maxRetries=7)
        scene.shop.kubectl("delete", "retrypolicy", "goes", "--wait=false")
        relay.mend()

        scene.shop.ready("comes")
        scene.shop.ready("changes")
        scene.shop.kubectl("wait", "--for=delete", "retrypolicy/goes", "--timeout=60s")
        written = scene.shop.get("configmap", "changes-redrive")["data"]["policy.json"]
        assert '"maxRetries": 7' in written
        assert scene.made("comes") == scene.made("changes") == scene.right
        assert scene.made("goes") == gone
        scene.is_intact()
        sandbox.processes.stop(installation.OPERATOR)
    installation.start_operator(scene.sandbox)

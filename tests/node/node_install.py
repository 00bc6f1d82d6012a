"""The commands of the README and the installation guide, in the order of a new user."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import pytest

from sandbox.demo.shop import TENANT_ADMIN
from sandbox.pulsar import Broker
from tests.node.conftest import Node, User, left_in, make_restricted, remove_redrive
from tests.support.documented import INSTALL, QUICK_START, README, commands

SECONDS = 90


@pytest.fixture(scope="module")
def installed(user: User, node: Node, broker: Broker) -> Iterator[User]:
    (user.folder / "admin.token").write_text(broker.token(TENANT_ADMIN))
    user.follow(QUICK_START, "2. A tenant, a topic, and four roles")
    make_restricted(node, "redrive-system")
    try:
        yield user
    finally:
        remove_redrive(node)


def test_the_commands_of_the_readme_make_a_policy_ready(installed: User) -> None:
    shown = installed.follow(README, "Use it on your cluster")
    assert "orders-fulfilment   True" in shown


def test_operator_outside_of_the_cluster_has_its_own_rights(installed: User, node: Node) -> None:
    node.kubectl("scale", "deploy/redrive", "--replicas=0", "-n", "redrive-system")
    node.kubectl("wait", "--for=delete", "pod", "--all", "-n", "redrive-system", "--timeout=2m")
    node.kubectl("delete", "configmap/orders-fulfilment-redrive", "-n", "shop")
    (block,) = commands(INSTALL, "Run outside of the cluster")
    outside = subprocess.Popen(
        ["/bin/bash", "-euc", block.text], env=installed.environment, cwd=installed.folder
    )
    try:
        deadline = time.monotonic() + SECONDS
        # It creates missing objects again.
        while "orders-fulfilment-redrive" not in node.kubectl("get", "cm", "-n", "shop"):
            assert outside.poll() is None, "it ended"
            assert time.monotonic() < deadline, "it did nothing"
            time.sleep(1)
    finally:
        outside.terminate()
        outside.wait()


def test_finalizers_without_an_operator_are_removed_by_hand(installed: User, node: Node) -> None:
    """Run after the test above, when no operator runs."""
    held = "retrypolicy/orders-fulfilment", "brokerconnection/main"
    for name, finalizer in zip(held, ("redrive.io/cleanup", "redrive.io/in-use"), strict=True):
        # The operator sets this on a policy that is deleted with its topics.
        patch = f'{{"metadata":{{"finalizers":["{finalizer}"]}}}}'
        node.kubectl("patch", name, "-n", "shop", "--type=merge", "-p", patch)
        node.kubectl("delete", name, "-n", "shop", "--wait=false")
    assert len(node.kubectl("get", *held, "-n", "shop", "--output=name").split()) == len(held)
    installed.follow(INSTALL, "Delete a namespace of the list `namespaces`")
    for name in held:
        node.kubectl("wait", "--for=delete", name, "-n", "shop", "--timeout=30s")


def test_all_of_it_can_be_removed(installed: User, node: Node, broker: Broker) -> None:
    node.kubectl("scale", "deploy/redrive", "--replicas=2", "-n", "redrive-system")
    node.kubectl("rollout", "status", "deploy/redrive", "-n", "redrive-system", "--timeout=3m")
    examples = installed.folder / "examples" / "01-first-policy"
    for name in ("1-connection.yaml", "2-policy.yaml"):
        text = (examples / name).read_text("utf-8")
        text = text.replace("pulsar://localhost:6650", broker.service_url)
        text = text.replace("http://localhost:8080", broker.admin_url)
        node.kubectl("apply", "--filename", "-", input=text)
    installed.paste(
        "kubectl -n shop wait --for=condition=Ready rpol/orders-fulfilment --timeout=60s"
    )
    installed.follow(INSTALL, "Uninstall")
    assert left_in(node, "redrive-system") == set()
    assert "redrive.io" not in node.kubectl("get", "crds", "--output=name")

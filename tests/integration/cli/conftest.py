"""An API server without an operator, so that tests write the status of objects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from redrive.api.crds import crds
from redrive.cli.cluster import Cluster as Client
from redrive.cli.cluster import ClusterError
from redrive.cli.frame import ClusterFlags
from redrive.cli.main import main
from redrive.kube.resources import APPROVALS, CONNECTIONS, POLICIES, REPLAYS, Resource
from sandbox import kubernetes
from sandbox.kubernetes import Cluster
from sandbox.process import Processes
from tests.support.invalid_manifests import manifest

AT = "2026-11-27T01:00:00Z"
COMMANDS = "commands at an API server"
"""The group of the modules that share the API server, one after the other."""


def put(client: Client, kind: Resource, name: str, status: dict[str, Any], **spec: Any) -> None:  # noqa: ANN401
    """Create an object, or change its status."""
    body = manifest(kind.kind, **spec)
    body["metadata"] = {"name": name, "namespace": client.namespace}
    with suppress(ClusterError):
        client.create(kind, body)
    path = f"{kind.path(client.namespace, name)}/status"
    client.request("PATCH", path, {"status": status})


@dataclass
class Shop:
    """A namespace with a connection and two policies, whose status this test writes."""

    cluster: Cluster
    client: Client
    capsys: pytest.CaptureFixture[str]

    @property
    def name(self) -> str:
        return self.client.namespace

    def put(self, kind: Resource, name: str, status: dict[str, Any], **spec: Any) -> None:  # noqa: ANN401
        """Create an object, or change its status."""
        put(self.client, kind, name, status, **spec)

    def run(self, *arguments: str, code: int = 0) -> str:
        """Run a command in this process; return standard output, or standard error of a failure."""
        assert main([*arguments, "-n", self.name]) == code
        captured = self.capsys.readouterr()
        return captured.out if code in {0, 3} else captured.err

    def annotations(self, name: str) -> dict[str, str]:
        body = self.client.get(POLICIES, self.name, name)
        return dict(body["metadata"].get("annotations") or {})


def condition(kind: str, status: str, reason: str, message: str = "text") -> dict[str, str]:
    times = {"lastTransitionTime": AT}
    return {"type": kind, "status": status, "reason": reason, "message": message, **times}


@pytest.fixture(scope="package")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """An API server without an operator, which would write the same statuses."""
    state = tmp_path_factory.mktemp("api")
    processes = Processes(state)
    try:
        cluster = kubernetes.start(state, processes)
        cluster.define(yaml.safe_dump_all(crds()))
        cluster.objects.create_namespace("shop")
        yield cluster
    finally:
        for name in reversed(processes.names()):
            processes.kill(name)


@pytest.fixture(scope="module")
def client(api_server: Cluster) -> Iterator[Client]:
    """A client for the namespace `shop`. All objects are deleted after the module."""
    client = Client(ClusterFlags(namespace="shop", kubeconfig=str(api_server.kubeconfig)))
    yield client
    for kind in (APPROVALS, REPLAYS, POLICIES, CONNECTIONS):
        for body in client.list(kind, None):
            client.delete(kind, body)


@pytest.fixture
def shop(
    api_server: Cluster,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Shop:
    monkeypatch.setenv("KUBECONFIG", str(api_server.kubeconfig))
    return Shop(api_server, client, capsys)

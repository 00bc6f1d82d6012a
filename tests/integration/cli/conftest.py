"""An API server without an operator, so that tests write the status of objects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from redrive.api.crds import crds
from redrive.cli.cluster import Cluster as Client
from redrive.cli.cluster import ClusterError
from redrive.cli.frame import ClusterFlags
from redrive.cli.main import main
from redrive.kube.resources import (
    APPROVALS,
    CONNECTIONS,
    INSPECTIONS,
    POLICIES,
    REPLAYS,
    Resource,
)
from sandbox.kubernetes import Cluster
from tests.support.manifests import manifest
from tests.support.waiting import wait_until

AT = "2026-11-27T01:00:00Z"
KINDS = (APPROVALS, REPLAYS, INSPECTIONS, POLICIES, CONNECTIONS)


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
def api_server(control_plane: Cluster) -> Cluster:
    """An API server without an operator, which would write the same statuses.

    Objects of earlier modules are gone: commands show those of all namespaces.
    """
    control_plane.define(crds())
    control_plane.objects.create_namespace("shop")
    client = Client(ClusterFlags(kubeconfig=str(control_plane.kubeconfig)))
    wait_until(lambda: not any(client.list(kind, None) for kind in KINDS))
    return control_plane


@pytest.fixture(scope="module")
def client(api_server: Cluster) -> Iterator[Client]:
    """A client for the namespace `shop`. All objects are deleted after the module."""
    client = Client(ClusterFlags(namespace="shop", kubeconfig=str(api_server.kubeconfig)))
    yield client
    for kind in KINDS:
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

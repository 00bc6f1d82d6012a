"""A team of the example repositories, with namespaces and a tenant of its own."""

from __future__ import annotations

import re
import secrets
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from release import CHECKOUT
from sandbox import builds
from sandbox.kubernetes import Cluster
from sandbox.pulsar import Broker

EXAMPLES = CHECKOUT / "examples" / "gitops"
Body = dict[str, Any]


@dataclass(frozen=True)
class Team:
    """Kubernetes namespaces and a tenant, in place of those that the examples name."""

    broker: Broker
    cluster: Cluster
    name: str

    @property
    def platform(self) -> str:
        """The namespace of the connection."""
        return f"{self.name}-platform"

    def render(self, path: Path) -> list[Body]:
        """Return the objects of a folder, for this team and this broker."""
        kubectl = str(builds.kubernetes() / "kubectl")
        built = subprocess.run(
            [kubectl, "kustomize", str(path)], check=True, capture_output=True, text=True
        ).stdout
        return [body for body in yaml.safe_load_all(self.adapt(built)) if body]

    def adapt(self, text: str) -> str:
        """Return a text of the examples with the names of this team, and this broker."""
        for word, replacement in (
            (r"\bplatform\b", self.platform),
            (r"\bshop\b", self.name),
            ("pulsar://pulsar.example:6650", self.broker.service_url),
            ("http://pulsar.example:8080", self.broker.admin_url),
        ):
            text = re.sub(word, replacement, text)
        return text

    def get(self, body: Body) -> Body:
        """Return an object as it is."""
        metadata = body["metadata"]
        kind = body["kind"].lower()
        return self.cluster.objects.get(kind, metadata["name"], metadata.get("namespace"))


@pytest.fixture
def team(broker: Broker, cluster: Cluster, operator_process: Path) -> Iterator[Team]:
    """A team with the topic and the Secrets that are not in Git."""
    assert operator_process.is_file()
    team = Team(broker, cluster, f"t-{secrets.token_hex(4)}")
    admin = f"{team.name}-admin"
    tenant = {"adminRoles": [admin], "allowedClusters": ["standalone"]}
    broker.request("PUT", f"/admin/v2/tenants/{team.name}", tenant).check("tenant")
    broker.request("PUT", f"/admin/v2/namespaces/{team.name}/prod").check("namespace")
    broker.request("PUT", f"/admin/v2/persistent/{team.name}/prod/orders").check("topic")
    cluster.objects.create_namespace(team.platform)
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "pulsar-admin"}}
    cluster.objects.create(
        {**secret, "stringData": {"token": broker.token(admin)}}, namespace=team.platform
    )
    yield team
    for namespace in (team.name, team.platform):
        cluster.kubectl("delete", "namespace", namespace, "--wait=false", "--ignore-not-found")

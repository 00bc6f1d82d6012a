"""Namespaces of tests, at Kubernetes and at Pulsar."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from redrive.policy.naming import TopicName
from sandbox.kubernetes import Cluster
from sandbox.pulsar import Broker


@dataclass(frozen=True)
class PolicyNamespace:
    """Pulsar namespace for the policies of one test.

    Attributes:
        name: ``tenant/namespace``.
        suffix: of the names of source topics; empty if the test has the namespace alone.
        topics: those that are unloaded after the test.
    """

    name: str
    suffix: str
    topics: list[TopicName] = field(default_factory=list)

    def source(self, topic: str) -> TopicName:
        """Return the source topic with this name before its suffix."""
        return TopicName.parse(f"persistent://{self.name}/{topic}{self.suffix}")


def grant_all(broker: Broker, role: str, rights: Mapping[TopicName, Sequence[str]]) -> None:
    """Let *role* do exactly these actions on these topics of one Pulsar namespace, by one call."""
    grants = [
        {"topic": str(topic), "role": role, "actions": actions} for topic, actions in rights.items()
    ]
    path = "/admin/v2/namespaces/grantPermissionsOnTopics"
    broker.request("POST", path, grants).check(f"grant {rights}")


@contextmanager
def new_namespace(cluster: Cluster) -> Iterator[str]:
    """Create a Kubernetes namespace with a name of its own; its deletion is not awaited."""
    name = f"t-{secrets.token_hex(4)}"
    cluster.objects.create_namespace(name)
    yield name
    cluster.objects.delete("namespace", name)

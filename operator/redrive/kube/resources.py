"""The kinds of Kubernetes objects that redrive reads or writes, and how one object is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from redrive.api import GROUP, VERSION
from redrive.api.launcher_name import LauncherName

Body = Mapping[str, Any]
"""A Kubernetes object as the API server gives it."""


class Key(NamedTuple):
    """An object of a known kind: its namespace and name."""

    namespace: str
    name: str

    @classmethod
    def of(cls, body: Body) -> Key:
        """Identify *body*."""
        return cls(body["metadata"]["namespace"], body["metadata"]["name"])

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class Resource:
    """A kind of objects; the core group is "".

    Attributes:
        selector: the label selector by which the API server chooses the objects that redrive lists
            and watches; empty for all.
        fields: the field selector, likewise.
    """

    group: str
    version: str
    plural: str
    kind: str
    selector: str = ""
    fields: str = ""

    @property
    def api_version(self) -> str:
        """Return what a manifest writes as `apiVersion`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def address(self) -> tuple[str, str, str]:
        """Return group, version and plural, by which a watch knows it."""
        return self.group, self.version, self.plural

    def path(self, namespace: str | None = None, name: str | None = None) -> str:
        """Return the URL path of one object, of a namespace's objects, or of all.

        What lies in no namespace, such as a Namespace, has an empty one.
        """
        root = f"/apis/{self.group}" if self.group else "/api"
        within = f"/namespaces/{namespace}" if namespace else ""
        one = f"/{name}" if name is not None else ""
        return f"{root}/{self.version}{within}/{self.plural}{one}"


MANAGED = ("app.kubernetes.io/managed-by", "redrive")
"""The label, and its value, of what redrive makes: a cluster may hold thousands of others' objects.
"""

TOPIC_OWNER = "redrive.io/owner"
"""A property of a topic: which policy of which Kubernetes cluster keeps it, as
`cluster/namespace/name`."""

CONNECTIONS = Resource(GROUP, VERSION, "pulsarconnections", "PulsarConnection")
POLICIES = Resource(GROUP, VERSION, "retrypolicies", "RetryPolicy")
REPLAYS = Resource(GROUP, VERSION, "replays", "Replay")
SPARK_APPLICATIONS = Resource(
    "sparkoperator.k8s.io",
    "v1beta2",
    "sparkapplications",
    "SparkApplication",
    selector="=".join(MANAGED),
)
APACHE_SPARK_APPLICATIONS = Resource(
    "spark.apache.org",
    "v1",
    "sparkapplications",
    "SparkApplication",
    selector="=".join(MANAGED),
)
SECRETS = Resource("", "v1", "secrets", "Secret")
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap", selector="=".join(MANAGED))
EVENTS = Resource("", "v1", "events", "Event")
PODS = Resource("", "v1", "pods", "Pod")
NAMESPACES = Resource("", "v1", "namespaces", "Namespace")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
APPLICATIONS: Mapping[LauncherName, Resource] = {
    LauncherName.KUBEFLOW: SPARK_APPLICATIONS,
    LauncherName.APACHE: APACHE_SPARK_APPLICATIONS,
}
"""What each Spark operator runs. Both kinds have one name: always name the group."""


def owner_reference(resource: Resource, owner: Body) -> dict[str, Any]:
    """Return the entry that makes *owner* the controller of another object of its namespace."""
    return {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
    }


def is_owned_by(body: Body, owner: Body) -> bool:
    """Whether *owner* is among the owners of *body*: the same object, not one of its name."""
    owners = body["metadata"].get("ownerReferences", [])
    return any(reference["uid"] == owner["metadata"]["uid"] for reference in owners)

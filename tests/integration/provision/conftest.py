"""A tenant with a role that administers it, and a Kubernetes namespace whose policies use it."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from redrive.provision.desired import BUCKETS_SINCE
from sandbox.errors import SandboxError
from sandbox.kubernetes import Cluster
from sandbox.pulsar import Broker
from tests.support.manifests import changed
from tests.support.waiting import pauses

SECONDS = 180
UNREACHABLE = "BrokerUnreachable"
# Of a slow broker, and of a policy that the operator sees before the connection made before it.
PASSING = frozenset({UNREACHABLE, "ConnectionNotFound"})


@dataclass(frozen=True)
class Shop:
    """A tenant of the broker, and a Kubernetes namespace, of one test or module.

    Args:
        tenant: its role `<tenant>-admin` administers it; the operator is given that token only.
        namespace: in Kubernetes.
    """

    broker: Broker
    cluster: Cluster
    tenant: str
    namespace: str
    tokens: list[str] = field(default_factory=list)

    @property
    def role(self) -> str:
        """The role of the operator at the broker."""
        return f"{self.tenant}-admin"

    def topic(self, name: str, namespace: str = "prod") -> str:
        """The full name of a topic of the tenant."""
        return f"persistent://{self.tenant}/{namespace}/{name}"

    def create_topic(self, topic: str, partitions: int = 0) -> None:
        """Create a topic as the super-user."""
        path = f"{rest_path(topic)}/partitions" if partitions else rest_path(topic)
        self.request("PUT", path, partitions or None)

    def request(self, method: str, path: str, body: object = None) -> Any:  # noqa: ANN401 - JSON
        """Return the answer of the broker to the super-user; fail if it is an error."""
        answer = self.broker.request(method, f"/admin/v2/{path}", body)
        answer.check(f"{method} {path}")
        return json.loads(answer.body) if answer.body else None

    def token(self, role: str) -> str:
        """Return a token of *role*, and record it: a test can check that it is not shown."""
        token = self.broker.token(role)
        self.tokens.append(token)
        return token

    def secret(self, name: str, **data: str) -> None:
        """Make or change a Secret."""
        self.tokens.extend(data.values())
        self.apply({name: {"apiVersion": "v1", "kind": "Secret", "stringData": data}})

    def connection(self, name: str = "main", **spec: object) -> None:
        """Make or change a BrokerConnection that allows all topics of the tenant.

        A field of *spec* that is None is left out.
        """
        token = {"secretRef": {"name": "pulsar-admin", "key": "token"}}
        defaults: dict[str, object] = {
            "pulsar": {
                "serviceURL": self.broker.service_url,
                "adminURL": self.broker.admin_url,
                "authentication": {"type": "Token", "token": token},
            },
            "allow": [self.rule("fulfilment")],
        }
        self.apply({name: redrive("BrokerConnection", changed(defaults, **spec))})

    def rule(self, *roles: str) -> dict[str, object]:
        """A rule of a connection that allows all topics of the tenant, adoption and deletion."""
        topics = [f"persistent://{self.tenant}/*/*"]
        return {
            "name": "one",
            "topics": topics,
            "roles": roles,
            "adoption": "Allowed",
            "deletion": "Allowed",
        }

    def policy(self, name: str = "orders", **spec: object) -> None:
        """Make or change a RetryPolicy, for subscription `fulfilment` of topic `orders`."""
        self.policies({name: spec})

    def policies(self, specs: Mapping[str, Mapping[str, object]]) -> None:
        """Make or change many RetryPolicies at once: name → fields other than the defaults."""
        defaults: dict[str, object] = {
            "connectionRef": {"name": "main"},
            "topic": self.topic("orders"),
            "subscription": "fulfilment",
            "consumerRoles": ["fulfilment"],
        }
        self.apply(
            {name: redrive("RetryPolicy", {**defaults, **spec}) for name, spec in specs.items()}
        )

    def apply(self, bodies: Mapping[str, dict[str, Any]]) -> None:
        """Make or change objects of the namespace, by name."""
        for name, body in bodies.items():
            metadata = {"name": name, "namespace": self.namespace}
            self.cluster.objects.apply(body | {"metadata": metadata})

    def kubectl(self, *arguments: str) -> str:
        """Run kubectl in the namespace."""
        return self.cluster.kubectl(f"--namespace={self.namespace}", *arguments)

    def take_over(self, name: str, former: str) -> None:
        """Run the command that the conflict of a RetryPolicy with *former* gives as its remedy."""
        (message,) = {
            c["message"]
            for c in self.reaches(name, "OwnerConflict")["status"]["conditions"]
            if c["type"] == "Ready"
        }
        command = message.rpartition("run: kubectl ")[2].split()
        assert command[-1] == f"redrive.io/take-over-from={former}"
        self.cluster.kubectl(*command)
        self.ready(name)

    def ready(self, name: str = "orders", kind: str = "retrypolicy") -> dict[str, Any]:
        """Return the object, once its Ready condition is True for the current generation."""
        return self.reaches(name, "Provisioned" if kind == "retrypolicy" else "Connected", kind)

    def reaches(self, name: str, reason: str, kind: str = "retrypolicy") -> dict[str, Any]:
        """Return the object, once its Ready condition has *reason* for the current generation."""
        for _ in pauses(SECONDS):
            body = self.get(kind, name)
            status = body.get("status", {})
            reasons = [c["reason"] for c in status.get("conditions", []) if c["type"] == "Ready"]
            current = status.get("observedGeneration") == body["metadata"]["generation"]
            if current and reasons == [reason]:
                return body
        pytest.fail(f"{kind} {name} is not {reason}: {status}")

    def reaches_condition(
        self, name: str, condition: str, kind: str = "retrypolicy"
    ) -> dict[str, Any]:
        """Return a condition of an object, once it is True."""
        for _ in pauses(SECONDS):
            status = self.get(kind, name).get("status", {})
            for current in status.get("conditions", []):
                if (current["type"], current["status"]) == (condition, "True"):
                    return dict(current)
        pytest.fail(f"{name} has no condition {condition}: {status}")

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        """The current condition *kind* of a RetryPolicy."""
        conditions = self.get("retrypolicy", name)["status"]["conditions"]
        return next(dict(c) for c in conditions if c["type"] == kind)

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """Return the current object."""
        return self.cluster.objects.get(kind, name, self.namespace)

    def events(self, name: str) -> list[tuple[str, str, str]]:
        """Type, reason and message of the Events about a RetryPolicy, in no order."""
        about = f"involvedObject.kind=RetryPolicy,involvedObject.name={name}"
        written = self.objects("event", about)
        return [(e["type"], e["reason"], e["message"]) for e in written]

    def request_reconcile(self, name: str) -> None:
        """Request a reconcile of a RetryPolicy."""
        self.annotate(name, reconcile_requested_at=f"{time.time()}")

    def annotate(self, name: str, kind: str = "retrypolicy", **annotations: str | None) -> None:
        """Set annotations of redrive, written with `_` for `-`; None removes one."""
        names = {f"redrive.io/{n.replace('_', '-')}": value for n, value in annotations.items()}
        change = {"metadata": {"annotations": names}}
        self.cluster.objects.patch(kind, name, change, self.namespace)

    def delete(self, name: str, kind: str = "retrypolicy") -> None:
        """Delete an object, and wait until it is gone."""
        self.start_deletion(name, kind)
        self.wait_until_gone(name, kind)

    def delete_all(self, kind: str = "retrypolicy") -> None:
        """Delete all objects of a kind, and wait until they are gone."""
        names = [body["metadata"]["name"] for body in self.objects(kind)]
        for name in names:
            self.start_deletion(name, kind)
        for name in names:
            self.wait_until_gone(name, kind)

    def start_deletion(self, name: str, kind: str = "retrypolicy") -> None:
        """Delete an object without waiting for its finalizers."""
        self.cluster.objects.delete(kind, name, self.namespace)

    def wait_until_gone(self, name: str, kind: str = "retrypolicy") -> None:
        """Wait until an object is gone."""
        for _ in pauses(SECONDS):
            if not self.objects(kind, f"metadata.name={name}"):
                return
        pytest.fail(f"{kind} {name} is not deleted: {self.get(kind, name)}")

    def objects(self, kind: str, fields: str = "") -> list[dict[str, Any]]:
        """Return the objects of a kind that match a field selector."""
        return self.cluster.objects.list(kind, self.namespace, fields)

    def delete_namespace(self) -> None:
        """Delete the Kubernetes namespace with its objects, and wait until it is gone."""
        objects = self.cluster.objects
        objects.delete("namespace", self.namespace)
        for _ in pauses(SECONDS):
            if not objects.list("namespace", fields=f"metadata.name={self.namespace}"):
                return
        pytest.fail(f"not deleted: {objects.get('namespace', self.namespace)}")

    def let_a_second_pass(self) -> None:
        """Ensure that later objects are younger than existing ones: ages are whole seconds."""
        time.sleep(1.0)

    def event_reasons(self, name: str) -> list[tuple[str, str]]:
        """Type and reason of these Events, without those that a slow machine causes."""
        return [event[:2] for event in self.events(name) if event[1] not in PASSING]

    def event_message(self, name: str, reason: str) -> str:
        """Return the message of the only Event of *reason* about a RetryPolicy, once it exists."""
        for _ in pauses(SECONDS):
            if messages := self._event_messages(name, reason):
                (message,) = messages
                return message
        pytest.fail(f"no Event {reason} about {name}")

    def wait_for_events(self, name: str, reason: str, *parts: str) -> None:
        """Wait until the Events of *reason* about a RetryPolicy contain all *parts*."""
        for _ in pauses(SECONDS):
            messages = "; ".join(self._event_messages(name, reason))
            if all(part in messages for part in parts):
                return
        pytest.fail(messages)

    def _event_messages(self, name: str, reason: str) -> list[str]:
        return [event[2] for event in self.events(name) if event[1] == reason]

    def dump(self) -> dict[str, Any]:
        """The tenant at the broker: its topics, subscriptions, policies and permissions."""
        return {
            "tenant": self.request("GET", f"tenants/{self.tenant}"),
            "namespaces": {
                name: self._dump_namespace(name)
                for name in self.request("GET", f"namespaces/{self.tenant}")
            },
        }

    def topics(self, namespace: str = "prod") -> dict[str, Any]:
        """The topics of a Pulsar namespace by name, without system topics."""
        topics = self._dump_namespace(f"{self.tenant}/{namespace}")["topics"]
        return {name: state for name, state in topics.items() if "/__" not in name}

    def _dump_namespace(self, name: str) -> dict[str, Any]:
        partitioned = self.request("GET", f"persistent/{name}/partitioned")
        topics = self.request("GET", f"persistent/{name}?includeSystemTopic=true")
        return {
            "policies": self.request("GET", f"namespaces/{name}"),
            "topics": {topic: self._dump_topic(topic) for topic in [*topics, *partitioned]},
        }

    def _dump_topic(self, topic: str) -> dict[str, Any]:
        path = rest_path(topic)
        state = {"subscriptions": sorted(self.request("GET", f"{path}/subscriptions"))}
        if re.search(r"-partition-\d+$", topic):
            return state  # the other fields are those of the partitioned topic
        return state | {
            "partitions": self.request("GET", f"{path}/partitions")["partitions"],
            "deduplication": self.request("GET", f"{path}/deduplicationEnabled"),
            "properties": self.request("GET", f"{path}/properties") or {},
        }


def redrive(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    """An object of redrive's API without its name."""
    return {"apiVersion": "redrive.io/v1beta1", "kind": kind, "spec": spec}


def keeps_ticks(broker: Broker) -> bool:
    """Return True if redrive sets the tick of delays on topics of this broker."""
    return tuple(map(int, broker.version.split("."))) < BUCKETS_SINCE


def rest_path(topic: str) -> str:
    """The path of a topic in the admin API."""
    return f"persistent/{quote(topic.removeprefix('persistent://'))}"


MakeShop = Callable[[], Shop]


@pytest.fixture(scope="module")
def make_shop(broker: Broker, cluster: Cluster, operator_process: Path) -> Iterator[MakeShop]:
    """A factory of shops. Their Kubernetes namespaces are deleted after the module, unawaited."""
    assert operator_process.is_file()
    namespaces = []

    def make() -> Shop:
        name = f"t-{secrets.token_hex(4)}"
        shop = Shop(broker, cluster, tenant=name, namespace=name)
        clusters = ["standalone"]
        shop.request(
            "PUT", f"tenants/{name}", {"adminRoles": [shop.role], "allowedClusters": clusters}
        )
        shop.request("PUT", f"namespaces/{name}/prod")
        cluster.objects.create_namespace(name)
        namespaces.append(name)
        shop.secret("pulsar-admin", token=shop.token(shop.role))
        return shop

    yield make
    for name in namespaces:
        end(cluster, name)


def end(cluster: Cluster, namespace: str) -> None:
    """Delete a Kubernetes namespace unless a test has deleted it, without waiting."""
    with suppress(SandboxError):
        cluster.objects.delete("namespace", namespace)


@pytest.fixture
def shop(make_shop: MakeShop) -> Iterator[Shop]:
    """A shop for one test, with a connection. After it the operator polls its topics no more."""
    shop = make_shop()
    shop.connection()
    yield shop
    end(shop.cluster, shop.namespace)

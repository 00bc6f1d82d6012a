"""A tenant with replays: its objects in Kubernetes and its topics at a real broker."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any

import pulsar
import pytest
import yaml

from redrive.api import Body
from redrive.kube.resources import REQUESTED_BY
from redrive.policy.envelope import CAUSE_TYPE
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from sandbox import chart, installation
from sandbox.pulsar import SUPERUSER
from sandbox.sandbox import Sandbox
from tests.support.manifests import changed
from tests.support.topics import drain
from tests.support.waiting import wait_until

SECONDS = 180  # a Spark of a few seconds takes minutes on a machine that is busy
SPARK_APPLICATION = "sparkapplication.sparkoperator.k8s.io"


class Shop:
    """A Kubernetes namespace and a tenant, of one test."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.name = f"t-{secrets.token_hex(4)}"
        self.policy = Policy(TopicName(self.name, "prod", "orders"), "fulfilment")
        admin = f"{self.name}-admin"
        clusters = {"adminRoles": [admin], "allowedClusters": ["standalone"]}
        self.rest("PUT", f"tenants/{self.name}", clusters)
        self.rest("PUT", f"namespaces/{self.name}/prod")
        self.rest("PUT", f"persistent/{self.name}/prod/orders/partitions", 2)
        sandbox.cluster.objects.create_namespace(self.name)
        chart.prepare_replays(sandbox.cluster, self.name)
        self.tokens = {
            secret: sandbox.pulsar.token(role)
            for secret, role in (
                ("pulsar-admin", admin),
                ("pulsar-replayer", "replayer"),
                ("pulsar-inspector", "inspector"),
            )
        }
        for secret, token in self.tokens.items():
            self.lend("Secret", secret, stringData={"token": token})

    def rest(self, method: str, path: str, body: object = None) -> None:
        """Ask the broker as its super-user."""
        self.sandbox.pulsar.request(method, f"/admin/v2/{path}", body).check(f"{method} {path}")

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl in the namespace."""
        return self.sandbox.cluster.kubectl(f"--namespace={self.name}", *arguments, input=stdin)

    def apply(self, version: str, kind: str, name: str, **body: object) -> None:
        """Make or change one object."""
        metadata = {"name": name, "namespace": self.name}
        manifest = {"apiVersion": version, "kind": kind, "metadata": metadata, **body}
        self.sandbox.cluster.objects.apply(manifest)

    def lend(self, kind: str, name: str, **body: object) -> None:
        """Make or change an object that the connection may have mounted into jobs."""
        usable = {"redrive.io/usable-by": f"{self.name}/main"}
        metadata = {"name": name, "namespace": self.name, "annotations": usable}
        manifest = {"apiVersion": "v1", "kind": kind, "metadata": metadata, **body}
        self.sandbox.cluster.objects.apply(manifest)

    def declare(self, **changes: object) -> None:
        """Make or change the connection, and make the policy `orders`."""
        secret = {name: {"secretRef": {"name": name, "key": "token"}} for name in self.tokens}
        connection = {
            "pulsar": {
                "serviceURL": self.sandbox.pulsar.service_url,
                "adminURL": self.sandbox.pulsar.admin_url,
                "authentication": {"type": "Token", "token": secret["pulsar-admin"]},
            },
            "allow": [
                {
                    "name": "shop",
                    "topics": [f"persistent://{self.name}/*/*"],
                    "roles": ["fulfilment", "replayer"],
                    "deletion": "Allowed",
                }
            ],
            "replay": {
                "role": "replayer",
                "authentication": {"type": "Token", "token": secret["pulsar-replayer"]},
            },
        }
        spec = changed(connection, **changes)
        self.apply("redrive.io/v1beta1", "BrokerConnection", "main", spec=spec)
        policy = {
            "connectionRef": {"name": "main"},
            "topic": str(self.policy.topic),
            "subscription": "fulfilment",
            "consumerRoles": ["fulfilment"],
        }
        self.apply("redrive.io/v1beta1", "RetryPolicy", "orders", spec=policy)
        self.wait_until_ready("orders")

    def wait_until_ready(self, policy: str) -> None:
        """Wait until the operator has provisioned a policy in its present form."""

        def is_ready() -> bool:
            body = self.sandbox.cluster.objects.get("retrypolicy", policy, self.name)
            ready = shown(body).get("Ready", {})
            generation = body["metadata"]["generation"]
            return (ready.get("status"), ready.get("observedGeneration")) == ("True", generation)

        wait_until(is_ready, SECONDS)

    def replay(self, name: str, where: str | None = None, **more: object) -> None:
        """Make a Replay of the policy, with engine Job.

        With *where*, an SQL condition, either engine starts a Spark.
        """
        select = {} if where is None else {"select": {"where": where}}
        spec = {"policyRef": {"name": "orders"}, "engine": "Job", **select, **more}
        self.apply("redrive.io/v1beta1", "Replay", name, spec=spec)

    def declare_inspection(self, **more: object) -> None:
        """Make or change connection and policy as `declare` does, with a role for Inspections."""
        token = {"secretRef": {"name": "pulsar-inspector", "key": "token"}}
        authentication = {"type": "Token", "token": token}
        self.declare(inspection={"role": "inspector", "authentication": authentication, **more})

    def inspect(self, name: str, author: str = "", **spec: object) -> None:
        """Make or change an Inspection of the policy, which names its *author* if one is given."""
        metadata: dict[str, Any] = {"name": name, "namespace": self.name}
        if author:
            metadata["annotations"] = {REQUESTED_BY: author}
        spec = {"policyRef": {"name": "orders"}, **spec}
        manifest = {"apiVersion": "redrive.io/v1beta1", "kind": "Inspection", "metadata": metadata}
        self.sandbox.cluster.objects.apply(manifest | {"spec": spec})

    def inspection(self, name: str, reason: str = "") -> dict[str, Any]:
        """Wait until an Inspection has ended, or its Ready condition has *reason*."""

        def status() -> dict[str, Any]:
            return shown(self.sandbox.cluster.objects.get("inspection", name, self.name))

        def is_reached() -> bool:
            now = status()
            ready = now.get("Ready", {}).get("reason")
            return ready == reason if reason else "completionTime" in now

        wait_until(is_reached, SECONDS)
        return status()

    def status(self, name: str) -> dict[str, Any]:
        """Return the status of a Replay, with each condition under its type."""
        return shown(self.sandbox.cluster.objects.get("replay", name, self.name))

    def reaches(self, name: str, phase: str, reason: str | None = None) -> dict[str, Any]:
        """Wait until a Replay is in *phase*, and its Ready condition has *reason*."""
        deadline = time.monotonic() + SECONDS
        while True:
            status = self.status(name)
            if status.get("phase") == phase and reason in {None, status["Ready"]["reason"]}:
                return status
            assert time.monotonic() < deadline, f"{name} is not {phase} but {status}"
            time.sleep(0.3)

    def launched(self, name: str) -> dict[str, Any]:
        """Wait until a Replay has its application."""
        wait_until(lambda: self.status(name).keys() & {"job", "sparkApplication"})
        return self.status(name)

    def fails(self, name: str) -> dict[str, str]:
        """Wait until the job of a Replay has failed, and return the failure in its status."""
        deadline = time.monotonic() + SECONDS
        while (failure := self.status(name).get("run", {}).get("failure")) is None:
            assert time.monotonic() < deadline, f"the job of {name} does not fail"
            time.sleep(0.3)
        return dict(failure)

    def job_template(self, template: dict[str, Any]) -> None:
        """Write a job template of the name of the shop into the file of the operator."""
        file = installation.job_templates(self.sandbox) / "templates.yaml"
        templates = yaml.safe_load(file.read_text()) or {}
        file.write_text(yaml.safe_dump({**templates, self.name: template}))

    def client(self) -> pulsar.Client:
        """Return a client that may do everything."""
        token = pulsar.AuthenticationToken(self.sandbox.pulsar.token(SUPERUSER))
        quiet = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
        return pulsar.Client(self.sandbox.pulsar.service_url, authentication=token, logger=quiet)

    def bury(self, count: int, cause: str, topic: TopicName | None = None) -> None:
        """Lay messages into the dead-letter topic, or another one."""
        client = self.client()
        producer = client.create_producer(str(topic or self.policy.dead_letter_topic))
        for _ in range(count):
            properties = {"id": secrets.token_hex(4), CAUSE_TYPE: cause}
            producer.send(b"order", properties=properties)
        client.close()

    def replayed(self, topic: TopicName | None = None) -> list[str]:
        """Return the cause of each message in the retry topic, or another one, in order."""
        client = self.client()
        causes: dict[str, list[str]] = {}
        topic = topic or self.policy.retry_topic
        for message in drain(self.sandbox.pulsar, client, topic, "fulfilment"):
            properties = message.properties()
            causes.setdefault(properties["id"], []).append(properties[CAUSE_TYPE])
        client.close()
        assert all(len(copies) == 1 for copies in causes.values())
        return sorted(copies[0] for copies in causes.values())

    def applications(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the objects of *kinds* in the namespace, by default those of both engines."""
        objects = self.sandbox.cluster.objects
        return [
            application
            for kind in kinds or ("job", SPARK_APPLICATION)
            for application in objects.list(kind, self.name)
        ]


@pytest.fixture
def shop(installed: Sandbox) -> Iterator[Shop]:
    shop = Shop(installed)
    yield shop
    installed.cluster.objects.delete("namespace", shop.name)


def shown(replay: Body) -> dict[str, Any]:
    """Return the status of a Replay, with each condition under its type."""
    status = replay.get("status", {})
    return {**status, **{c["type"]: c for c in status.get("conditions", [])}}


def check_no_token_leaked(shop: Shop) -> None:
    """Check that no log and no object of the namespace has a token."""
    texts = [path.read_text() for path in (shop.sandbox.state / "spark" / shop.name).glob("*.log")]
    texts.append(shop.sandbox.processes.log(installation.OPERATOR).read_text())
    texts.append(
        shop.kubectl(
            "get",
            "sparkapp,sparkapplications.spark.apache.org,job,replay,bconn,rpol,event",
            "-o",
            "yaml",
        )
    )
    assert len(texts) >= 3
    for token in shop.tokens.values():
        assert not any(token in text for text in texts)

"""The shop of the demo, with a topic of orders, before redrive is used.

Called by `story`. It sets up objects that belong to the shop and not to redrive: the tenant, the
topic with its subscription, the roles with their rights, and the two programs of the example.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sandbox import CHECKOUT
from sandbox.demo.stage import NAMESPACE
from sandbox.sandbox import Sandbox

EXAMPLE = CHECKOUT / "examples" / "01-first-policy"
TOPIC = "shop/prod/orders"
SUBSCRIPTION = "fulfilment"
PARTITIONS = 3
TENANT_ADMIN, PRODUCER, CONSUMER, REPLAYER = "redrive", "web-shop", "fulfilment", "replayer"


def open_shop(sandbox: Sandbox) -> None:
    """Create the tenant, the topic, the rights, and the Secrets with the roles' tokens."""
    broker = sandbox.pulsar
    broker.create_namespace("shop", "prod")
    for method, path, body in (
        ("POST", "tenants/shop", {"adminRoles": [TENANT_ADMIN], "allowedClusters": ["standalone"]}),
        ("PUT", f"persistent/{TOPIC}/partitions", PARTITIONS),
        ("PUT", f"persistent/{TOPIC}/subscription/{SUBSCRIPTION}", None),
        ("POST", f"persistent/{TOPIC}/permissions/{PRODUCER}", ["produce"]),
        ("POST", f"persistent/{TOPIC}/permissions/{CONSUMER}", ["consume"]),
    ):
        broker.request(method, f"/admin/v2/{path}", body).check(f"{method} {path}")
    sandbox.cluster.kubectl("create", "namespace", NAMESPACE)
    for secret, role in (("pulsar-admin", TENANT_ADMIN), ("pulsar-replayer", REPLAYER)):
        token = broker.token_file(role)
        sandbox.cluster.kubectl(
            "create", "secret", "generic", secret, f"--from-file=token={token}", "-n", NAMESPACE
        )
    sandbox.cluster.kubectl(
        "annotate", "secret", "pulsar-replayer", f"redrive.io/usable-by={NAMESPACE}/main",
        "-n", NAMESPACE,
    )  # fmt: skip


def manifest(sandbox: Sandbox, name: str) -> str:
    """Return a manifest of the example with the broker addresses of this sandbox."""
    text = (EXAMPLE / name).read_text(encoding="utf-8")
    return text.replace("pulsar://localhost:6650", sandbox.pulsar.service_url).replace(
        "http://localhost:8080", sandbox.pulsar.admin_url
    )


def start_consumer(sandbox: Sandbox, *, log: Path, warehouse: Path) -> None:
    """Start the example's consumer with the token of its role and the policy of its ConfigMap."""
    # A pod would mount this file from the ConfigMap.
    policy = sandbox.state / "policy.json"
    config_map = sandbox.cluster.kubectl(
        "get", "configmap", "orders-fulfilment-redrive", "-n", NAMESPACE, "-o", "json"
    )
    policy.write_text(json.loads(config_map)["data"]["policy.json"], encoding="utf-8")
    command = [sys.executable, str(EXAMPLE / "consumer.py"), f"--log={log}"]
    sandbox.processes.start(
        "consumer",
        [*command, f"--warehouse={warehouse}"],
        env={**_client(sandbox, CONSUMER), "REDRIVE_POLICY": str(policy)},
    )


def start_producer(sandbox: Sandbox, *, log: Path, orders: int) -> None:
    """Start the example's producer, which ends after *orders* messages."""
    command = [sys.executable, str(EXAMPLE / "producer.py"), f"--log={log}", f"--count={orders}"]
    sandbox.processes.start("producer", command, env=_client(sandbox, PRODUCER))


def subscriptions(sandbox: Sandbox, topic: str) -> list[str]:
    """Return the subscriptions of *topic*, `tenant/namespace/name`."""
    answer = sandbox.pulsar.request("GET", f"/admin/v2/persistent/{topic}/subscriptions")
    answer.check(f"list the subscriptions of {topic}")
    return sorted(json.loads(answer.body))


def backlog(sandbox: Sandbox, topic: str, subscription: str) -> int:
    """Return the number of unacknowledged messages of *topic*, `tenant/namespace/name`."""
    path = f"/admin/v2/persistent/{topic}"
    partitions = sandbox.pulsar.request("GET", f"{path}/partitions")
    partitions.check(f"count the partitions of {topic}")
    kind = "partitioned-stats" if json.loads(partitions.body)["partitions"] else "stats"
    # The default backlog includes messages that were acknowledged one by one.
    stats = sandbox.pulsar.request("GET", f"{path}/{kind}?getPreciseBacklog=true")
    stats.check(f"count the backlog of {topic}")
    return int(json.loads(stats.body)["subscriptions"][subscription]["msgBacklog"])


def _client(sandbox: Sandbox, role: str) -> dict[str, str]:
    return {
        "PULSAR_URL": sandbox.pulsar.service_url,
        "PULSAR_TOKEN_FILE": str(sandbox.pulsar.token_file(role)),
        "PYTHONPATH": str(EXAMPLE.parents[1] / "operator"),
    }

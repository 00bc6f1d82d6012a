"""Development without Kubernetes: `redrive provision`, `policy` and `rights` at a real broker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pulsar
import pytest
import yaml
from click.testing import CliRunner, Result

from redrive import PolicyFile, RetryConsumer
from redrive.cli import develop
from redrive.cli.adopt import adopt
from redrive.errors import OwnerConflictError
from redrive.kube.resources import TOPIC_OWNER
from redrive.lint.checks import lint
from redrive.lint.manifests import Manifests
from sandbox import SOURCE_ROOT
from sandbox.pulsar import Broker
from tests.support.documented import DEVELOP, commands, shows, steps
from tests.support.waiting import wait_until

POLICY = """\
apiVersion: redrive.io/v1beta1
kind: RetryPolicy
metadata: {{name: orders}}
spec:
  connectionRef: {{name: main}}
  topic: persistent://{namespace}/orders
  subscription: fulfilment
  consumerRoles: [worker]
  maxRetries: 1
  delayLadder: {{fixed: 1s}}
"""


@pytest.fixture
def manifest(broker: Broker, pulsar_namespace: str, tmp_path: Path) -> Path:
    """A policy in a file, and its source topic at the broker."""
    path = f"/admin/v2/persistent/{pulsar_namespace}/orders"
    broker.request("PUT", f"{path}/partitions", 2).check("create the source topic")
    broker.request("PUT", f"{path}/subscription/fulfilment").check("subscribe")
    file = tmp_path / "policy.yaml"
    file.write_text(POLICY.format(namespace=pulsar_namespace), "utf-8")
    return file


def run(broker: Broker, name: str, file: Path, *arguments: str) -> Result:
    """Run a command as the super-user, with the broker's address."""
    token = str(broker.token_file("superuser"))
    options = ["--admin-url", broker.admin_url, "--token-file", token]
    command = getattr(develop, name)
    return CliRunner().invoke(command, [str(file), *options, *arguments], catch_exceptions=False)


def topics(broker: Broker, namespace: str) -> set[str]:
    """Return the local names of the partitioned topics of *namespace*."""
    answer = broker.request("GET", f"/admin/v2/persistent/{namespace}/partitioned")
    return {name.rpartition("/")[2] for name in json.loads(answer.body)}


def test_provisioned_topics_serve_a_consumer_of_the_policy_file(
    broker: Broker, pulsar_namespace: str, manifest: Path, tmp_path: Path
) -> None:
    dry = run(broker, "provision", manifest, "--dry-run")
    assert "would have created" in dry.stdout
    assert topics(broker, pulsar_namespace) == {"orders"}
    made = run(broker, "provision", manifest)
    assert f"created persistent://{pulsar_namespace}/orders-fulfilment-RETRY" in made.stdout
    assert f"created persistent://{pulsar_namespace}/orders-fulfilment-DLQ" in made.stdout
    assert run(broker, "provision", manifest).stdout == "RetryPolicy default/orders\n  unchanged\n"

    file = tmp_path / "policy.json"
    printed = CliRunner().invoke(develop.policy, [str(manifest)], catch_exceptions=False)
    file.write_text(printed.stdout, "utf-8")
    token = pulsar.AuthenticationToken(broker.token("superuser"))
    client = pulsar.Client(broker.service_url, authentication=token)
    try:
        source = f"persistent://{pulsar_namespace}/orders"
        with RetryConsumer(client, PolicyFile(file)) as consumer:
            client.create_producer(source).send(b"poison")
            attempts = []

            def fail(message: pulsar.Message) -> None:
                attempts.append(message.data())
                if len(attempts) > 1:
                    consumer.stop()
                raise ValueError

            consumer.run(fail)
        reader = client.subscribe(
            f"persistent://{pulsar_namespace}/orders-fulfilment-DLQ", "redrive"
        )
        assert reader.receive(timeout_millis=30_000).data() == b"poison"
    finally:
        client.close()
    assert attempts == [b"poison"] * 2


def test_rights_show_the_missing_ones(
    broker: Broker, pulsar_namespace: str, manifest: Path
) -> None:
    before = run(broker, "rights", manifest).stdout
    assert "orders-fulfilment-RETRY   missing: consume, produce" in before
    run(broker, "provision", manifest)
    after = run(broker, "rights", manifest).stdout
    assert "missing" not in after
    assert (
        f"worker  produce           persistent://{pulsar_namespace}/orders-fulfilment-DLQ" in after
    )
    path = f"/admin/v2/persistent/{pulsar_namespace}/orders-fulfilment-DLQ/permissions/worker"
    broker.request("DELETE", path).check("revoke")
    wait_until(lambda: "missing: produce" in run(broker, "rights", manifest).stdout)


def test_topics_of_an_operator_are_refused(
    broker: Broker, pulsar_namespace: str, manifest: Path
) -> None:
    path = f"/admin/v2/persistent/{pulsar_namespace}/orders-fulfilment-RETRY"
    broker.request("PUT", f"{path}/partitions", 2).check("create the retry topic")
    mark = {TOPIC_OWNER: "prod-eu/shop/orders"}
    broker.request("PUT", f"{path}/properties", mark).check("mark the retry topic")
    with pytest.raises(OwnerConflictError, match="-RETRY belongs to another RetryPolicy"):
        run(broker, "provision", manifest)
    assert topics(broker, pulsar_namespace) == {"orders", "orders-fulfilment-RETRY"}


def test_adopted_topics_are_those_that_the_operator_would_name(
    broker: Broker, pulsar_namespace: str, manifest: Path, tmp_path: Path
) -> None:
    root = f"/admin/v2/persistent/{pulsar_namespace}"
    for topic, subscription in (("mail", "send"), ("plain", "read")):
        broker.request("PUT", f"{root}/{topic}").check("create a topic")
        broker.request("PUT", f"{root}/{topic}/subscription/{subscription}").check("subscribe")
    broker.request("PUT", f"{root}/orders-fulfilment-RETRY/partitions", 3).check("create")
    broker.request("PUT", f"{root}/send-dlq").check("create")
    broker.request("PUT", f"{root}/send-dlq/subscription/oncall").check("subscribe")
    roles = f"{root}/orders-fulfilment-RETRY/permissions/worker"
    broker.request("POST", roles, ["produce", "consume"]).check("grant")

    options = ["--admin-url", broker.admin_url, "--token-file", str(broker.token_file("superuser"))]
    result = CliRunner().invoke(adopt, [pulsar_namespace, *options], catch_exceptions=False)
    mail, orders = (body["spec"] for body in yaml.safe_load_all(result.stdout))
    tenant = f"persistent://{pulsar_namespace}"
    assert mail == {
        "connectionRef": {"name": "main"},
        "topic": f"{tenant}/mail",
        "subscription": "send",
        "adoption": "IfPresent",
        "naming": {"scheme": "SubscriptionLower"},
        "deadLetter": {"subscription": "oncall"},
    }
    assert (orders["retry"], orders["consumerRoles"]) == ({"partitions": 3}, ["worker"])

    printed = tmp_path / "adopted.yaml"
    printed.write_text(result.stdout, "utf-8")
    assert lint(Manifests.read([str(printed)]), datetime(2026, 1, 1, tzinfo=UTC)) == []
    assert "as owner of" in run(broker, "provision", printed).stdout
    again = CliRunner().invoke(adopt, [pulsar_namespace, *options], catch_exceptions=False)
    assert again.stdout == ""
    assert again.stderr == f"no topic of {pulsar_namespace} has a name by a scheme\n"
    assert manifest.is_file()


@pytest.fixture
def folder(broker: Broker, pulsar_namespace: str, manifest: Path) -> Path:
    """The folder of a developer: `policy.yaml`, a token and a consumer."""
    folder = manifest.parent
    text = manifest.read_text("utf-8").replace("{name: orders}", "{name: orders-fulfilment}")
    manifest.write_text(text.replace("[worker]", "[fulfilment]"), "utf-8")
    (folder / "admin.token").write_text(broker.token("superuser"), "ascii")
    (folder / "consumer.py").write_text(CONSUMER, "utf-8")
    source = f"persistent://{pulsar_namespace}/orders"
    token = pulsar.AuthenticationToken(broker.token("superuser"))
    with closing(pulsar.Client(broker.service_url, authentication=token)) as client:
        client.create_producer(source).send(b"an order")
    return folder


CONSUMER = """
import os, pulsar
from redrive import PolicyFile, RetryConsumer

token = pulsar.AuthenticationToken(open("admin.token").read())
client = pulsar.Client(os.environ["URL"], authentication=token)
with RetryConsumer(client, PolicyFile()) as consumer:
    def handle(message):
        print("handled", message.data().decode())
        consumer.stop()
    consumer.run(handle)
"""


def test_commands_of_the_page_lead_to_a_consumer(
    broker: Broker, pulsar_namespace: str, folder: Path
) -> None:
    """From topics to a handled message, rights and policies for topics that exist."""

    def paste(script: str) -> str:
        for shown, real in (
            ("http://localhost:8080", broker.admin_url),
            ("shop/prod", pulsar_namespace),
            ("python3", sys.executable),
        ):
            script = script.replace(shown, real)
        program = f'redrive() {{ "{sys.executable}" -m redrive "$@"; }}\n'
        done = subprocess.run(
            ["/bin/bash", "-euc", program + script],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(SOURCE_ROOT), "URL": broker.service_url},
            check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    [create], [consume] = (
        commands(DEVELOP, "Create the topics"),
        commands(DEVELOP, "Run a consumer"),
    )
    created = paste(create.text)
    assert created.index("would have created") < created.index("\n  created ")
    assert "handled an order\n" in paste(consume.text)
    [rights] = steps(DEVELOP, "Check rights")
    retry = (
        f"/admin/v2/persistent/{pulsar_namespace}/orders-fulfilment-RETRY/permissions/fulfilment"
    )
    broker.request("POST", retry, ["produce"]).check("take consume")
    expected = rights.output.replace("shop/prod", pulsar_namespace)
    expected = expected.replace("shop/orders", "default/orders")
    wait_until(lambda: shows(expected, paste(rights.command)))
    [adopt] = commands(DEVELOP, "Write policies for topics that exist")
    assert "has a name by a scheme" in paste(adopt.text)
    assert (folder / "policies.yaml").read_text("utf-8") == ""

"""Policies that are paused, policies that only observe, and topics of deleted policies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pulsar
import pytest
import yaml
from click.testing import CliRunner

from redrive.cli.diff import diff
from redrive.policy import codec
from sandbox.pulsar import SUPERUSER, Broker
from sandbox.sandbox import Sandbox
from tests.integration.provision.conftest import SECONDS, MakeShop, Shop, rest_path

EARLIEST = {"ledgerId": -1, "entryId": -1}


@pytest.fixture(scope="module")
def calm(make_shop: MakeShop) -> Shop:
    """A shop for all tests here."""
    shop = make_shop()
    shop.connection()
    return shop


def retries(shop: Shop, name: str) -> int:
    """The maximum number of retries in the ConfigMap of a policy."""
    written = shop.get("configmap", f"{name}-redrive")["data"]["policy.json"]
    return codec.decode(written).max_retries


def test_paused_policy_writes_nothing_until_resumed(calm: Shop) -> None:
    calm.create_topic(calm.topic("paused"))
    topic = calm.topic("paused")
    calm.policy("paused", topic=topic, maxRetries=3)
    calm.ready("paused")
    calm.annotate("paused", paused="true")
    calm.reaches_condition("paused", "Paused")
    calm.ready("paused")
    before = calm.dump()
    calm.policy("paused", topic=topic, maxRetries=5, consumerRoles=[], deletionPolicy="Delete")
    calm.reaches("paused", "Paused")
    assert calm.dump() == before
    assert retries(calm, "paused") == 3
    calm.annotate("paused", paused=None)
    status = calm.ready("paused")["status"]
    assert "Paused" not in {c["type"] for c in status["conditions"]}
    assert (status["effective"]["maxRetries"], retries(calm, "paused")) == (5, 5)
    assert calm.dump() != before
    calm.annotate("paused", paused="true")
    after = calm.dump()
    calm.delete("paused")
    assert calm.dump() == after
    assert "it was paused, so nothing was changed" in calm.event_message("paused", "Retained")


def test_observing_policy_plans_changes_and_applies_none(calm: Shop) -> None:
    topic = calm.topic("seen")
    calm.create_topic(topic, 2)
    before = calm.dump()
    observe = {"managementPolicy": "Observe"}
    calm.policy("seen", topic=topic, **observe)
    status = calm.reaches("seen", "Observed")["status"]
    retry = calm.topic("seen-fulfilment-RETRY")
    assert status["plannedChanges"][0] == f"created {retry} with 2 partitions"
    assert status["plannedChanges"][-1] == "created ConfigMap seen-redrive"
    assert "granted consume+produce" in " ".join(status["plannedChanges"])
    drift = calm.reaches_condition("seen", "DriftDetected")["message"]
    assert f"with managementPolicy Manage redrive would have created {retry}" in drift
    assert calm.dump() == before
    assert calm.objects("configmap", "metadata.name=seen-redrive") == []
    calm.policy("seen", topic=topic)
    assert "plannedChanges" not in calm.ready("seen")["status"]
    after = calm.dump()
    calm.policy("seen", topic=topic, deletionPolicy="Delete", **observe)
    status = calm.reaches("seen", "Observed")["status"]
    assert status["plannedChanges"] == ["updated ConfigMap seen-redrive"]  # of the new generation
    calm.policy("seen", topic=topic, deletionPolicy="Delete", consumerRoles=[], **observe)
    status = calm.reaches("seen", "Observed")["status"]
    assert "revoked consume+produce" in " ".join(status["plannedChanges"])
    calm.delete("seen")
    assert calm.dump() == after


def test_diff_observes_a_new_policy_and_deletes_it(
    calm: Shop, sandbox: Sandbox, tmp_path: Path
) -> None:
    topic = calm.topic("new")
    calm.create_topic(topic)
    before = calm.dump()
    file = tmp_path / "policy.yaml"
    spec = {"connectionRef": {"name": "main"}, "topic": topic, "subscription": "fulfilment"}
    policy = {
        "apiVersion": "redrive.io/v1beta1",
        "kind": "RetryPolicy",
        "metadata": {"name": "new"},
        "spec": spec,
    }
    file.write_text(yaml.safe_dump(policy), "utf-8")
    flags = ["-n", calm.namespace, "--kubeconfig", str(sandbox.cluster.kubeconfig)]
    result = CliRunner().invoke(diff, [str(file), "--observe", *flags], standalone_mode=False)
    assert (result.return_value, result.stderr) == (1, "")
    assert f"+broker: created {calm.topic('new-fulfilment-RETRY')}" in result.stdout
    assert calm.dump() == before
    calm.wait_until_gone("new")


@pytest.fixture(scope="module")
def doomed(make_shop: MakeShop) -> Shop:
    """A shop for most tests here, each with a source topic of its own; its policies delete."""
    shop = make_shop()
    shop.connection(policyDefaults={"deletionPolicy": "Delete"})
    return shop


def topics(shop: Shop, source: str) -> set[str]:
    """The suffixes of the derived topics of a source that exist."""
    names = (name.rsplit("/", 1)[1] for name in shop.topics())
    return {n.rsplit("-", 1)[1] for n in names if n.startswith(f"{source}-fulfilment-")}


def provision(shop: Shop, source: str, partitions: int = 0, **spec: object) -> None:
    """Create a source topic and its policy, and wait until it is ready."""
    shop.create_topic(shop.topic(source), partitions)
    shop.policy(source, topic=shop.topic(source), **spec)
    shop.ready(source)


@contextmanager
def client(broker: Broker) -> Iterator[pulsar.Client]:
    opened = pulsar.Client(
        broker.service_url,
        authentication=pulsar.AuthenticationToken(broker.token(SUPERUSER)),
        logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
    )
    try:
        yield opened
    finally:
        opened.close()


def send(broker: Broker, topic: str) -> None:
    with client(broker) as opened:
        opened.create_producer(topic).send(b"a message")


@pytest.mark.parametrize("partitions", [0, 2])
def test_delete_removes_created_topics_with_their_messages(doomed: Shop, partitions: int) -> None:
    name = f"made-{partitions}"
    provision(doomed, name, partitions)
    send(doomed.broker, doomed.topic(f"{name}-fulfilment-DLQ"))
    doomed.delete(name)
    assert topics(doomed, name) == set()
    assert doomed.topic(name) in doomed.topics()
    message = doomed.event_message(name, "Deleted")
    for end in ("RETRY", "DLQ"):
        assert f"deleted {doomed.topic(f'{name}-fulfilment-{end}')}" in message
    assert "Retained" not in {event[1] for event in doomed.events(name)}


def test_delete_removes_only_own_changes_from_adopted_topics(
    doomed: Shop,
) -> None:
    retry, dead_letter = (doomed.topic(f"before-fulfilment-{end}") for end in ("RETRY", "DLQ"))
    for topic in (retry, dead_letter):
        doomed.create_topic(topic)
    doomed.request("PUT", f"{rest_path(retry)}/subscription/fulfilment", EARLIEST)
    doomed.request("POST", f"{rest_path(retry)}/permissions/fulfilment", ["consume"])
    doomed.request("POST", f"{rest_path(retry)}/permissions/somebody", ["produce"])
    send(doomed.broker, retry)
    provision(doomed, "before", adoption="IfPresent")
    doomed.delete("before")
    remaining = doomed.topics()
    assert remaining[retry]["subscriptions"] == ["fulfilment"]
    assert remaining[dead_letter]["subscriptions"] == []
    policies = doomed.request("GET", f"namespaces/{doomed.tenant}/prod")["auth_policies"]
    rights = policies["destination_auth"]
    assert rights[retry] == {"fulfilment": ["consume"], "somebody": ["produce"]}
    assert rights.get(dead_letter, {}) == {}
    assert f"{retry} existed before" in doomed.event_message("before", "Retained")
    for topic in (retry, dead_letter):
        assert set(remaining[topic]["properties"].values()) == {""}


def test_delete_if_empty_retains_topics_with_messages(doomed: Shop) -> None:
    provision(doomed, "full", deletionPolicy="DeleteIfEmpty")
    dead_letter = doomed.topic("full-fulfilment-DLQ")
    send(doomed.broker, dead_letter)
    before = doomed.topics()[dead_letter]
    doomed.delete("full")
    assert topics(doomed, "full") == {"DLQ"}
    assert doomed.topics()[dead_letter] == before
    problem = f"{dead_letter} holds messages (1 for redrive)"
    assert problem in doomed.event_message("full", "Retained")
    assert "full-fulfilment-RETRY" in doomed.event_message("full", "Deleted")


def test_deletion_waits_until_consumers_disconnect(doomed: Shop) -> None:
    provision(doomed, "used")
    retry = doomed.topic("used-fulfilment-RETRY")
    with client(doomed.broker) as opened:
        opened.subscribe(retry, "fulfilment", consumer_type=pulsar.ConsumerType.Shared)
        doomed.start_deletion("used")
        waits = ready_condition(doomed, "used", "InUse")
        assert f"got '{retry}: 1 consumers, 0 producers'; stop these clients" in waits["message"]
        assert topics(doomed, "used") == {"RETRY", "DLQ"}
    doomed.wait_until_gone("used")
    assert topics(doomed, "used") == set()


def test_deleted_policy_with_a_successor_retains_its_topics(doomed: Shop) -> None:
    provision(doomed, "shared")
    doomed.let_a_second_pass()
    doomed.policy("heir", topic=doomed.topic("shared"))
    doomed.reaches("heir", "ResourceConflict")
    doomed.delete("shared")
    doomed.take_over("heir", "shared")
    assert topics(doomed, "shared") == {"RETRY", "DLQ"}
    message = doomed.event_message("shared", "Retained")
    assert f"is needed by RetryPolicy {doomed.namespace}/heir" in message
    doomed.delete("heir")  # its topics are still marked as created by redrive
    assert topics(doomed, "shared") == set()


def test_blocked_deletion_shows_reason_and_can_be_skipped(doomed: Shop) -> None:
    doomed.connection("going", policyDefaults={"deletionPolicy": "Delete"})
    provision(doomed, "stuck", connectionRef={"name": "going"})
    doomed.connection(
        "going", adminURL="http://127.0.0.1:1", policyDefaults={"deletionPolicy": "Delete"}
    )
    doomed.reaches("stuck", "BrokerUnreachable")
    doomed.start_deletion("stuck")
    condition = ready_condition(doomed, "stuck", "BrokerUnreachable", "being deleted since")
    assert "redrive.io/skip-cleanup=true" in condition["message"]
    doomed.annotate("stuck", skip_cleanup="true")
    doomed.wait_until_gone("stuck")
    assert topics(doomed, "stuck") == {"RETRY", "DLQ"}
    assert "skips the cleanup" in doomed.event_message("stuck", "CleanupAbandoned")


def test_deleted_namespace_with_its_connection_deletes_topics(
    make_shop: Callable[[], Shop],
) -> None:
    shop = make_shop()
    shop.connection()
    for number in range(3):
        provision(shop, f"orders-{number}", deletionPolicy="Delete")
    shop.delete_namespace()
    assert set(shop.topics()) == {shop.topic(f"orders-{number}") for number in range(3)}


def test_policy_that_retains_has_no_finalizer(doomed: Shop) -> None:
    provision(doomed, "kept", deletionPolicy="Retain")
    assert "finalizers" not in doomed.get("retrypolicy", "kept")["metadata"]
    doomed.policy("kept", topic=doomed.topic("kept"), deletionPolicy="Delete")
    doomed.ready("kept")
    assert doomed.get("retrypolicy", "kept")["metadata"]["finalizers"] == ["redrive.io/cleanup"]
    doomed.policy("kept", topic=doomed.topic("kept"), deletionPolicy="Retain")
    doomed.ready("kept")
    doomed.delete("kept")
    assert topics(doomed, "kept") == {"RETRY", "DLQ"}


def ready_condition(shop: Shop, name: str, reason: str, part: str = "") -> dict[str, Any]:
    """Return the Ready condition, once it has *reason* and its message contains *part*."""
    deadline = time.monotonic() + SECONDS
    while True:
        conditions = shop.get("retrypolicy", name)["status"]["conditions"]
        ready = next(dict(c) for c in conditions if c["type"] == "Ready")
        if ready["reason"] == reason and part in ready["message"]:
            return ready
        assert time.monotonic() < deadline, ready
        time.sleep(0.1)

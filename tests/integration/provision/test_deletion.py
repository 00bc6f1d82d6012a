"""What becomes of topics when their policy is deleted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pulsar
import pytest

from sandbox.pulsar import SUPERUSER, Broker
from tests.integration.provision.conftest import SECONDS, MakeShop, Shop, rest_path

EARLIEST = {"ledgerId": -1, "entryId": -1}


@pytest.fixture(scope="module")
def doomed(make_shop: MakeShop) -> Shop:
    """A shop for most tests here, each with a source topic of its own; its policies delete."""
    shop = make_shop()
    shop.connection(policyDefaults={"deletionPolicy": "Delete"})
    return shop


def topics(shop: Shop, source: str) -> set[str]:
    """The retry and dead-letter topic of a source that there are."""
    found = (name.rsplit("/", 1)[1] for name in shop.topics())
    return {n.rsplit("-", 1)[1] for n in found if n.startswith(f"{source}-fulfilment-")}


def provision(shop: Shop, source: str, partitions: int = 0, **spec: object) -> None:
    """Have a policy ready for a topic of its own."""
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
def test_delete_takes_the_topics_that_redrive_made_with_all_they_hold(
    doomed: Shop, partitions: int
) -> None:
    name = f"made-{partitions}"
    provision(doomed, name, partitions)
    send(doomed.broker, doomed.topic(f"{name}-fulfilment-DLQ"))
    doomed.delete(name)
    assert topics(doomed, name) == set()
    assert doomed.topic(name) in doomed.topics()
    told = doomed.told(name, "Deleted")
    for end in ("RETRY", "DLQ"):
        assert f"deleted {doomed.topic(f'{name}-fulfilment-{end}')}" in told
    assert "Retained" not in {event[1] for event in doomed.events(name)}


def test_from_what_was_there_before_delete_takes_what_redrive_added_and_nothing_else(
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
    left = doomed.topics()
    assert left[retry]["subscriptions"] == ["fulfilment"]
    assert left[dead_letter]["subscriptions"] == []
    policies = doomed.request("GET", f"namespaces/{doomed.tenant}/prod")["auth_policies"]
    rights = policies["destination_auth"]
    assert rights[retry] == {"fulfilment": ["consume"], "somebody": ["produce"]}
    assert rights.get(dead_letter, {}) == {}
    assert f"{retry} was there before" in doomed.told("before", "Retained")
    for topic in (retry, dead_letter):
        assert set(left[topic]["properties"].values()) == {""}


def test_delete_if_empty_leaves_what_holds_messages_and_says_so(doomed: Shop) -> None:
    provision(doomed, "full", deletionPolicy="DeleteIfEmpty")
    dead_letter = doomed.topic("full-fulfilment-DLQ")
    send(doomed.broker, dead_letter)
    before = doomed.topics()[dead_letter]
    doomed.delete("full")
    assert topics(doomed, "full") == {"DLQ"}
    assert doomed.topics()[dead_letter] == before
    said = f"{dead_letter} holds messages (1 for redrive)"
    assert said in doomed.told("full", "Retained")
    assert "full-fulfilment-RETRY" in doomed.told("full", "Deleted")


def test_a_deletion_waits_for_consumers_to_go(doomed: Shop) -> None:
    provision(doomed, "used")
    retry = doomed.topic("used-fulfilment-RETRY")
    with client(doomed.broker) as opened:
        opened.subscribe(retry, "fulfilment", consumer_type=pulsar.ConsumerType.Shared)
        doomed.kubectl("delete", "retrypolicy", "used", "--wait=false")
        waits = ready_condition(doomed, "used", "InUse")
        assert f"got '{retry}: 1 consumers, 0 producers'; stop them" in waits["message"]
        assert topics(doomed, "used") == {"RETRY", "DLQ"}
    doomed.kubectl("wait", "--for=delete", "retrypolicy/used", f"--timeout={SECONDS}s")
    assert topics(doomed, "used") == set()


def test_a_policy_that_another_waits_for_leaves_it_all_there_is(doomed: Shop) -> None:
    provision(doomed, "shared")
    doomed.let_a_second_pass()
    doomed.policy("heir", topic=doomed.topic("shared"))
    doomed.reaches("heir", "ResourceConflict")
    doomed.delete("shared")
    doomed.take_over("heir", "shared")
    assert topics(doomed, "shared") == {"RETRY", "DLQ"}
    assert f"is needed by RetryPolicy {doomed.namespace}/heir" in doomed.told("shared", "Retained")
    doomed.delete("heir")  # it knows what redrive made
    assert topics(doomed, "shared") == set()


def test_a_deletion_that_gets_no_further_says_why_and_an_annotation_ends_it(doomed: Shop) -> None:
    doomed.connection("going", policyDefaults={"deletionPolicy": "Delete"})
    provision(doomed, "stuck", connectionRef={"name": "going"})
    doomed.connection(
        "going", adminURL="http://127.0.0.1:1", policyDefaults={"deletionPolicy": "Delete"}
    )
    doomed.reaches("stuck", "BrokerUnreachable")
    doomed.kubectl("delete", "retrypolicy", "stuck", "--wait=false")
    said = ready_condition(doomed, "stuck", "BrokerUnreachable", "being deleted since")["message"]
    assert "redrive.io/skip-cleanup=true" in said
    doomed.kubectl("annotate", "retrypolicy", "stuck", "redrive.io/skip-cleanup=true")
    doomed.kubectl("wait", "--for=delete", "retrypolicy/stuck", f"--timeout={SECONDS}s")
    assert topics(doomed, "stuck") == {"RETRY", "DLQ"}
    assert "has it go" in doomed.told("stuck", "CleanupAbandoned")


def test_a_namespace_goes_with_its_connection_and_takes_the_topics_along(
    make_shop: Callable[[], Shop],
) -> None:
    shop = make_shop()
    shop.connection()
    for number in range(3):
        provision(shop, f"orders-{number}", deletionPolicy="Delete")
    shop.kubectl("delete", "namespace", shop.namespace, f"--timeout={SECONDS}s")
    assert set(shop.topics()) == {shop.topic(f"orders-{number}") for number in range(3)}


def test_a_policy_that_retains_holds_up_nothing(doomed: Shop) -> None:
    provision(doomed, "kept", deletionPolicy="Retain")
    assert "finalizers" not in doomed.get("retrypolicy", "kept")["metadata"]
    doomed.policy("kept", topic=doomed.topic("kept"), deletionPolicy="Delete")
    doomed.ready("kept")
    assert doomed.get("retrypolicy", "kept")["metadata"]["finalizers"] == ["redrive.io/cleanup"]
    doomed.policy("kept", topic=doomed.topic("kept"), deletionPolicy="Retain")
    doomed.ready("kept")
    doomed.delete("kept")
    assert topics(doomed, "kept") == {"RETRY", "DLQ"}


def ready_condition(shop: Shop, name: str, reason: str, says: str = "") -> dict[str, Any]:
    """The Ready condition, once it has *reason* and *says* that."""
    deadline = time.monotonic() + SECONDS
    while True:
        conditions = shop.get("retrypolicy", name)["status"]["conditions"]
        found = next(dict(c) for c in conditions if c["type"] == "Ready")
        if found["reason"] == reason and says in found["message"]:
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.1)

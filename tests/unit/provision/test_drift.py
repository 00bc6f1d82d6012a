from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from redrive.admin.model import NamespaceState
from redrive.policy.naming import TopicName
from redrive.provision import drift
from redrive.provision.desired import Desired, desired
from redrive.provision.facts import Request

MakeBody = Callable[..., dict[str, Any]]
MakeRequest = Callable[..., Request]

ORDERS = "persistent://shop/prod/orders"
RETRY, DEAD_LETTER = f"{ORDERS}-fulfilment-RETRY", f"{ORDERS}-fulfilment-DLQ"
BOTH, PRODUCE, CONSUME = frozenset({"produce", "consume"}), frozenset({"produce"}), frozenset[str]()
PERMISSIONS = {
    RETRY: {"fulfilment": BOTH, "replayer": PRODUCE},
    DEAD_LETTER: {"fulfilment": PRODUCE, "replayer": frozenset({"consume"})},
}


@pytest.fixture
def wanted(policy: MakeBody, requested: MakeRequest) -> Desired:
    body = policy()
    return desired(requested(body), body, "here")


def namespace(source: int = 0, retry: int = 0) -> NamespaceState:
    """A namespace with all that the policy needs; the topics have so many partitions."""
    counts = {ORDERS: source, RETRY: retry, DEAD_LETTER: 0}
    partitions = {f"{t}-partition-{i}" for t, count in counts.items() for i in range(count)}
    return NamespaceState(
        unpartitioned=frozenset({t for t, count in counts.items() if not count} | partitions),
        partitioned=frozenset(t for t, count in counts.items() if count),
        permissions=PERMISSIONS,
        subscription_expiry_minutes=0,
        backlog_quotas={},
        delayed_delivery=None,
    )


def test_a_topic_has_the_partitions_that_are_there() -> None:
    state = namespace(source=12)
    assert state.partitions(TopicName("shop", "prod", "orders")) == 12
    assert state.partitions(TopicName("shop", "prod", "orders-fulfilment-RETRY")) == 0
    assert state.partitions(TopicName("shop", "prod", "missing")) == 0


@pytest.mark.parametrize(("source", "retry"), [(0, 0), (3, 3), (3, 5)])
def test_nothing_is_amiss_where_all_is_there(wanted: Desired, source: int, retry: int) -> None:
    assert not drift.is_at_broker(wanted, namespace(source, retry))


@pytest.mark.parametrize("missing", [ORDERS, RETRY, DEAD_LETTER])
def test_a_missing_topic_is_amiss(wanted: Desired, missing: str) -> None:
    state = namespace()
    rest = dataclasses.replace(state, unpartitioned=state.unpartitioned - {missing})
    assert drift.is_at_broker(wanted, rest)


def test_without_dead_letters_nobody_misses_their_topic(
    policy: MakeBody, requested: MakeRequest
) -> None:
    body = policy(deadLetter={"enabled": False})
    discards = desired(requested(body), body, "here")
    state = namespace()
    rest = dataclasses.replace(state, unpartitioned=state.unpartitioned - {DEAD_LETTER})
    assert not drift.is_at_broker(discards, rest)


@pytest.mark.parametrize(("source", "retry"), [(4, 3), (3, 0)])
def test_a_source_topic_that_has_grown_is_amiss(wanted: Desired, source: int, retry: int) -> None:
    assert drift.is_at_broker(wanted, namespace(source, retry))


@pytest.mark.parametrize(
    "permissions",
    [
        {},
        PERMISSIONS | {RETRY: {"fulfilment": BOTH}},
        PERMISSIONS | {RETRY: {"fulfilment": PRODUCE, "replayer": PRODUCE}},
    ],
)
def test_a_missing_right_is_amiss(wanted: Desired, permissions: dict[str, Any]) -> None:
    assert drift.is_at_broker(wanted, dataclasses.replace(namespace(), permissions=permissions))


def test_more_rights_than_needed_are_not_amiss(wanted: Desired) -> None:
    more = PERMISSIONS | {DEAD_LETTER: {"fulfilment": BOTH, "replayer": BOTH, "auditor": BOTH}}
    assert not drift.is_at_broker(wanted, dataclasses.replace(namespace(), permissions=more))


def test_a_namespace_that_begins_to_expire_subscriptions_is_amiss(wanted: Desired) -> None:
    expiring = dataclasses.replace(namespace(), subscription_expiry_minutes=5)
    assert drift.is_at_broker(wanted, expiring)


def test_a_config_map_is_amiss_when_missing_changed_or_without_the_label(wanted: Desired) -> None:
    ours = wanted.config_map
    assert not drift.is_in_config_map(wanted, ours)
    assert not drift.is_in_config_map(wanted, {**ours, "data": {**ours["data"], "note": "mine"}})
    assert drift.is_in_config_map(wanted, None)
    assert drift.is_in_config_map(wanted, {**ours, "data": {"policy.json": "{}"}})
    assert drift.is_in_config_map(wanted, {**ours, "metadata": {"name": "orders-redrive"}})

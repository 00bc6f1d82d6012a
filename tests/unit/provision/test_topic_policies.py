from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from redrive.admin.model import NamespaceState
from redrive.admin.policies import KeepsBacklog, Ttl
from redrive.provision.desired import delay_policy, policies_in_force
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.reconcile_harness import reconcile_harness

BY_SIZE = {"limitSize": 5, "policy": "consumer_backlog_eviction"}
BY_AGE = {"limitTime": 60, "policy": "producer_exception"}
Quotas = dict[str, Any]


@pytest.mark.parametrize(
    ("of_topic", "of_namespace", "in_force"),
    [
        (None, {}, {}),
        (None, {"message_age": BY_AGE}, {"message_age": BY_AGE}),
        ({}, {"message_age": BY_AGE}, {"message_age": BY_AGE}),
        ({"message_age": BY_AGE}, {"message_age": {}}, {"message_age": BY_AGE}),
        (
            {"destination_storage": BY_SIZE},
            {"message_age": BY_AGE},
            {"destination_storage": BY_SIZE, "message_age": BY_AGE},
        ),
    ],
)
def test_backlog_quotas_that_a_topic_lacks_are_those_of_its_namespace(
    of_topic: Quotas | None, of_namespace: Quotas, in_force: Quotas
) -> None:
    namespace = NamespaceState(frozenset(), frozenset(), {}, 0, of_namespace, None)
    found = {KeepsBacklog.read: of_topic, Ttl.read: 60}
    assert policies_in_force(found, namespace) == {KeepsBacklog.read: in_force, Ttl.read: 60}


@pytest.mark.parametrize(
    ("shortest", "release", "policy"),
    [
        (1, (4, 0, 8), "delayed delivery within 50 ms"),
        (5, (4, 0), "delayed delivery within 250 ms"),
        (20, (4, 0, 8), "delayed delivery within 1000 ms"),
        (864_000, (3, 3, 1), "delayed delivery within 1000 ms"),
        (1, (4, 1, 0), "delayedDelivery active True"),
        (1, (4, 2, 4), "delayedDelivery active True"),
        (1, (), "delayedDelivery active True"),
    ],
)
def test_the_tick_is_a_small_part_of_the_shortest_delay_where_a_broker_can_keep_it(
    shortest: int, release: tuple[int, ...], policy: str
) -> None:
    assert str(delay_policy(timedelta(seconds=shortest), release)) == policy


IDLE = {"inactiveTopicDeleteMode": "delete_when_subscriptions_caught_up",
        "maxInactiveDurationSeconds": 86_400, "deleteWhileInactive": True}  # fmt: skip


@pytest.mark.parametrize(("release", "tick"), [("4.0.8", 50), ("4.2.4", 700)])
async def test_new_topics_keep_broker_values_that_do_not_matter(
    connection: dict[str, Any], policy: Callable[..., dict[str, Any]], release: str, tick: int
) -> None:
    async with reconcile_harness(connection, policy(), FakeKubernetes()) as harness:
        harness.broker.version = release
        harness.broker.in_force |= {
            "inactiveTopicPolicies": IDLE,
            "delayedDelivery": {
                "active": False, "tickTime": 700, "maxDeliveryDelayInMillis": 60_000,
            },
        }  # fmt: skip
        await harness.reconcile()
        topics = harness.broker.namespaces["shop/prod"].topics
        new = {
            name: topic.policies
            for name, topic in topics.items()
            if name.startswith("orders-fulfilment")
        }
        assert len(new) == 3
        for policies in new.values():
            assert policies["inactiveTopicPolicies"] == IDLE | {"deleteWhileInactive": False}
        assert new["orders-fulfilment-RETRY"]["delayedDelivery"] == {
            "active": True, "tickTime": tick, "maxDeliveryDelayInMillis": 60_000,
        }  # fmt: skip
        writes = len(harness.broker.writes)
        await harness.reconcile()
        assert len(harness.broker.writes) == writes


def test_no_read_has_the_broker_write_its_default_quota_into_the_namespace() -> None:
    assert "applied" not in KeepsBacklog.read

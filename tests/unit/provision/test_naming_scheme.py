"""Names that a policy leaves to its connection: as at first, whatever the connection says later."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any, cast

import pytest

from redrive.api.conditions import find
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.client import UnavailableError
from redrive.kube.resources import Key, Resource
from redrive.provision.claims import Conflicts
from tests.support.fake_admin import Topic
from tests.unit.provision.test_faults import Shop, deleted, shop
from tests.unit.provision.test_passing_on import Operator

MakeBody = Callable[..., dict[str, Any]]
SHORT = {"fulfilment-RETRY", "fulfilment-DLQ", "fulfilment-DLQ-LEDGER"}
SOURCE = "orders"


def names(connection: dict[str, Any], scheme: str | None) -> None:
    """Have the connection name topics by *scheme*."""
    connection["policyDefaults"] = {} if scheme is None else {"naming": {"scheme": scheme}}


def own(made: Shop) -> set[str]:
    """The topics beside the source."""
    return made.topics.keys() - {SOURCE, "others"}


def written_for_consumers(made: Shop) -> dict[str, Any]:
    (data,) = made.config_maps.values()
    return cast("dict[str, Any]", json.loads(data["policy.json"]))


async def test_the_scheme_of_the_connection_names_new_policies_and_never_renames_old_ones(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    names(connection, "tdmq-2.7.2")
    async with shop(connection, policy(deletionPolicy="Delete")) as made:
        operator = Operator(made)
        assert await operator.reconcile() == "Provisioned"
        assert own(made) == SHORT
        assert made.stored["status"]["namingScheme"] == "tdmq-2.7.2"
        assert made.stored["status"]["deletionPolicy"] == "Delete"
        assert find(made.stored, "NamingSchemeKept") is None

        for later in ("rocketmq", None):
            names(connection, later)
            assert await operator.reconcile(maxRetries=len(later or "")) == "Provisioned"
            assert own(made) == SHORT
            assert find(made.stored, "NamingSchemeKept") is not None
            found = written_for_consumers(made)
            assert found["retryTopic"] == "persistent://shop/prod/fulfilment-RETRY"
            assert found["maxRetries"] == len(later or "")
        assert await operator.reconcile(naming={"scheme": "tdmq-2.7.2"}) == "Provisioned"
        assert find(made.stored, "NamingSchemeKept") is None

        made.kubernetes.add(resources.POLICIES, deleted(made.stored))
        await made.finalize()
        assert own(made) == set()


@pytest.mark.parametrize("partitions", [0, 2])
async def test_a_crash_before_the_first_topic_is_ready_does_not_change_its_name(
    connection: dict[str, Any], policy: MakeBody, partitions: int
) -> None:
    names(connection, "tdmq-2.7.2")
    async with shop(connection, policy()) as made:
        made.topics[SOURCE] = Topic(partitions, {})
        operator = Operator(made)

        def dies(verb: str, resource: Resource, _: Key) -> None:
            if verb == "create" and resource is resources.CONFIG_MAPS:
                raise UnavailableError("the API server is gone", remedy="wait")

        before, made.kubernetes.before = made.kubernetes.before, dies
        assert await operator.reconcile() == UnavailableError.reason
        made.kubernetes.before = before
        assert "retryTopic" not in made.stored["status"]
        names(connection, "rocketmq")
        assert await operator.reconcile() == "Provisioned"
        assert own(made) == SHORT


async def test_what_is_not_provisioned_yet_follows_the_connection(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    names(connection, "tdmq-2.7.2")
    async with shop(connection, policy(managementPolicy="Observe")) as made:
        operator = Operator(made)
        assert await operator.reconcile() == "Observed"
        assert "fulfilment-RETRY" in str(made.stored["status"]["plannedChanges"])
        names(connection, "tdmq-2.6.1")
        assert await operator.reconcile(managementPolicy="Manage") == "Provisioned"
        assert "fulfilment-retry" in own(made)


async def test_a_policy_that_holds_a_default_of_the_schema_from_before_works_unchanged(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    stored = {
        "subscriptionType": "Shared",
        "naming": {"scheme": "pulsar"},
        "adopt": False,
        "chained": False,
        "retry": {"messageTTL": "0s"},
        "deadLetter": {"messageTTL": "0s", "readerRoles": []},
        "managementPolicy": "Manage",
    }
    async with shop(connection, policy()) as made:
        operator = Operator(made)
        assert await operator.reconcile() == "Provisioned"
        topics, file = copy.deepcopy(made.topics), written_for_consumers(made)
        del made.stored["status"]["namingScheme"]
        names(connection, "rocketmq")
        edits: tuple[dict[str, Any], ...] = (stored, {"naming": {}})
        for changes in edits:  # as it was written, and written without
            assert await operator.reconcile(**changes) == "Provisioned"
            assert made.topics == topics
            assert written_for_consumers(made) == file | {
                "generation": made.stored["metadata"]["generation"]
            }


def test_claims_know_the_scheme_of_each_connection_and_what_policies_keep(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    def through(name: str, generation: int, scheme: str | None) -> dict[str, Any]:
        spec = copy.deepcopy(connection)
        names(spec, scheme)
        metadata = {"namespace": "shop", "name": name, "uid": name, "generation": generation}
        return {"metadata": metadata | {"resourceVersion": str(generation)}, "spec": spec}

    short = policy("short", connectionRef={"name": "short"})
    other = policy("other", topic="persistent://shop/prod/returns", connectionRef={"name": "long"})
    policies = Cache([short, other])
    connections = Cache([through("short", 1, "tdmq-2.7.2"), through("long", 1, None)])
    woken: set[Key] = set()
    conflicts = Conflicts(policies, connections, woken.add)
    keys = Key("shop", "short"), Key("shop", "other")
    assert conflicts.rivals(keys[0]) == set()
    connections.put(through("long", 2, "tdmq-2.7.2"))
    assert woken == {keys[0]}  # the policies of a connection are reconciled anyway
    assert conflicts.rivals(keys[0]) == {keys[1]}
    policies.put({**short, "status": {"namingScheme": "rocketmq"}})
    assert conflicts.rivals(keys[0]) == conflicts.rivals(keys[1]) == set()

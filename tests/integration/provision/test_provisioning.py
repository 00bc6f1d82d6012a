from __future__ import annotations

from contextlib import closing
from typing import Any

import pulsar
import pytest

from redrive.policy import codec
from redrive.policy.ladder import Ladder
from redrive.policy.model import Policy
from sandbox.pulsar import SUPERUSER
from sandbox.sandbox import Sandbox
from tests.integration.provision.conftest import Shop, rest_path
from tests.support.installed_operator import metric
from tests.support.waiting import wait_until

READ_SECONDS = 0.5
"""The interval between reads of the broker."""
CONSUMER = {"orders-fulfilment-RETRY": {"consume", "produce"}, "orders-fulfilment-DLQ": {"produce"}}
REPLAYER = {
    "orders-fulfilment-RETRY": {"consume", "produce"},  # the job searches it for moved messages
    "orders-fulfilment-DLQ": {"consume"},
    "orders-fulfilment-DLQ-LEDGER": {"consume", "produce"},
}
CREDENTIALS = {
    "type": "Token",
    "token": {"secretRef": {"name": "pulsar-replayer", "key": "token"}},
}
REPLAY = {"role": "replayer", "authentication": CREDENTIALS}


def permissions(shop: Shop) -> dict[str, dict[str, set[str]]]:
    """Role → topic → actions."""
    policies = shop.request("GET", f"namespaces/{shop.tenant}/prod")
    actions_by_role: dict[str, dict[str, set[str]]] = {}
    for topic, roles in policies["auth_policies"]["destination_auth"].items():
        for role, actions in roles.items():
            actions_by_role.setdefault(role, {})[topic.rsplit("/", 1)[1]] = set(actions)
    return actions_by_role


@pytest.mark.parametrize("partitions", [0, 3])
def test_ready_policy_has_topics_subscriptions_rights_config_map(
    shop: Shop, partitions: int
) -> None:
    shop.connection(replay=REPLAY)
    shop.create_topic(shop.topic("orders"), partitions)
    shop.policy(maxRetries=3)
    status = shop.ready()["status"]

    retry, dead_letter = status["retryTopic"], status["deadLetterTopic"]
    assert retry == shop.topic("orders-fulfilment-RETRY")
    assert dead_letter == shop.topic("orders-fulfilment-DLQ")
    topics = shop.dump()["namespaces"][f"{shop.tenant}/prod"]["topics"]
    assert topics[retry]["partitions"] == partitions
    assert topics[retry]["subscriptions"] == ["fulfilment"]
    assert topics[retry]["deduplication"] is True
    assert topics[dead_letter]["deduplication"] is True
    assert topics[dead_letter]["partitions"] == 0
    assert topics[dead_letter]["subscriptions"] == ["redrive"]
    assert topics[shop.topic("orders")]["subscriptions"] == []
    assert permissions(shop) == {"fulfilment": CONSUMER, "replayer": REPLAYER}

    data = shop.get("configmap", status["configMap"])["data"]
    policy = codec.decode(data["policy.json"])
    assert (policy.max_retries, str(policy.topic)) == (3, shop.topic("orders"))
    shop.event_message("orders", "Provisioned")
    assert ("Normal", "Provisioned") in [event[:2] for event in shop.events("orders")]


def test_changed_spec_reaches_status_and_consumers(shop: Shop) -> None:
    shop.create_topic(shop.topic("orders"))
    shop.policy(maxRetries=3)
    shop.ready()
    shop.policy(maxRetries=5)
    after = shop.ready()
    assert after["metadata"]["generation"] == 2
    assert {c["observedGeneration"] for c in after["status"]["conditions"]} == {2}
    written = shop.get("configmap", "orders-redrive")["data"]["policy.json"]
    assert codec.decode(written).max_retries == 5


def test_existing_topics_are_adopted_with_rights_of_others(shop: Shop) -> None:
    retry = shop.topic("orders-fulfilment-RETRY")
    for topic in (shop.topic("orders"), retry):
        shop.create_topic(topic, 2)
    path = f"persistent/{shop.tenant}/prod/orders-fulfilment-RETRY"
    shop.request("PUT", f"{path}/subscription/others", {"ledgerId": -1, "entryId": -1})
    shop.request("POST", f"{path}/permissions/fulfilment", ["functions", "consume"])
    shop.request("POST", f"{path}/permissions/auditor", ["consume"])
    shop.policy(adoption="IfPresent")
    shop.ready()
    assert permissions(shop) == {
        "fulfilment": CONSUMER | {"orders-fulfilment-RETRY": {"consume", "produce", "functions"}},
        "auditor": {"orders-fulfilment-RETRY": {"consume"}},
    }
    state = shop.dump()["namespaces"][f"{shop.tenant}/prod"]["topics"][retry]
    assert state["subscriptions"] == ["fulfilment", "others"]
    assert state["deduplication"] is True


def test_retry_topic_partitions_follow_spec_and_never_shrink(shop: Shop) -> None:
    shop.create_topic(shop.topic("orders"), 2)
    retry = shop.topic("orders-fulfilment-RETRY")
    shop.policy(retry={"partitions": 3})
    shop.ready()
    assert shop.topics()[retry]["partitions"] == 3
    shop.policy(retry={"partitions": 5})
    shop.ready()
    topics = shop.topics()
    assert topics[retry]["partitions"] == 5
    for index in range(5):
        assert topics[f"{retry}-partition-{index}"]["subscriptions"] == ["fulfilment"]
    shop.policy(retry={})
    shop.ready()
    condition = shop.reaches_condition("orders", "PartitionsNeverShrink")
    assert "should have 2 partitions, and a topic cannot shrink; got 5" in condition["message"]
    assert shop.topics()[retry]["partitions"] == 5


def test_retry_topic_grows_with_its_source(shop: Shop) -> None:
    source, retry = shop.topic("orders"), shop.topic("orders-fulfilment-RETRY")
    shop.create_topic(source, 2)
    shop.policy()
    shop.ready()
    shop.request("POST", f"persistent/{shop.tenant}/prod/orders/partitions", 4)
    wait_until(lambda: any(event[1] == "Repaired" for event in shop.events("orders")))
    assert shop.request("GET", f"{rest_path(retry)}/partitions")["partitions"] == 4
    grown = f"{rest_path(retry)}-partition-3/subscriptions"
    wait_until(lambda: shop.request("GET", grown) == ["fulfilment"], every=READ_SECONDS)


def test_topic_with_the_name_of_a_partition_is_named(shop: Shop) -> None:
    """A client that names a partition has the broker create a topic, where that is allowed."""
    namespace = f"{shop.tenant}/prod"
    creation = {"allowAutoTopicCreation": True, "topicType": "non-partitioned"}
    shop.request("POST", f"namespaces/{namespace}/autoTopicCreation", creation)
    stray = f"{shop.topic('orders-fulfilment-RETRY')}-partition-3"
    superuser = pulsar.AuthenticationToken(shop.broker.token(SUPERUSER))
    with closing(pulsar.Client(shop.broker.service_url, authentication=superuser)) as client:
        client.create_producer(stray)
    shop.connection()
    shop.create_topic(shop.topic("orders"), 2)
    shop.policy()
    refused = shop.reaches("orders", "StrayPartition")
    assert f"got '{stray}'; process or move its messages and delete it" in message(refused)
    shop.request("DELETE", rest_path(stray))
    shop.request_reconcile("orders")
    assert shop.ready()["status"]["retryTopic"] == stray.removesuffix("-partition-3")


def test_deleted_topic_subscription_and_rights_are_restored(shop: Shop) -> None:
    shop.create_topic(shop.topic("orders"))
    shop.policy()
    shop.ready()
    before = shop.topics(), permissions(shop)
    path = f"persistent/{shop.tenant}/prod/orders-fulfilment"
    shop.request("DELETE", f"{path}-RETRY/permissions/fulfilment")
    shop.request("DELETE", f"{path}-RETRY/subscription/fulfilment")
    shop.request("DELETE", f"{path}-DLQ?force=true")
    shop.wait_for_events(
        "orders",
        "Repaired",
        f"created {shop.topic('orders-fulfilment-DLQ')}",
        "granted consume+produce on orders-fulfilment-RETRY to fulfilment",
        "created subscription fulfilment on orders-fulfilment-RETRY",
    )
    wait_until(lambda: (shop.topics(), permissions(shop)) == before, every=READ_SECONDS)


def test_deleted_partition_and_its_subscription_are_restored(
    shop: Shop, installed: Sandbox
) -> None:
    shop.create_topic(shop.topic("orders"), 3)
    shop.policy()
    shop.ready()
    before = shop.topics()
    subscriptions, partitions = (
        repairs(installed, kind) for kind in ("CreateSubscription", "RestorePartitions")
    )
    path = f"persistent/{shop.tenant}/prod/orders-fulfilment-RETRY"
    shop.request("DELETE", f"{path}-partition-1/subscription/fulfilment")
    assert shop.event_message("orders", "Repaired") == (
        "created subscription fulfilment on orders-fulfilment-RETRY"
    )
    wait_until(lambda: shop.topics() == before, every=READ_SECONDS)
    shop.request("DELETE", f"{path}-partition-2")
    event = f"recreated missing partitions of {shop.topic('orders-fulfilment-RETRY')}: 2; "
    wait_until(lambda: any(text.startswith(event) for _, _, text in shop.events("orders")))
    wait_until(lambda: shop.topics() == before, every=READ_SECONDS)
    # At least: other tests of the run have repairs as well.
    wait_until(lambda: repairs(installed, "CreateSubscription") >= subscriptions + 2)
    wait_until(lambda: repairs(installed, "RestorePartitions") >= partitions + 1)


def repairs(sandbox: Sandbox, kind: str) -> float:
    """The number of repairs of a kind, by the metrics of the operator."""
    return metric(sandbox, "redrive_drift_repairs_total", kind=kind)


def test_deleted_or_changed_config_map_is_restored_at_once(shop: Shop) -> None:
    shop.create_topic(shop.topic("orders"))
    shop.policy()
    shop.ready()
    before = shop.get("configmap", "orders-redrive")
    objects = shop.cluster.objects
    changes: tuple[dict[str, Any] | None, ...] = (
        None,
        {"data": {"policy.json": "{}"}},
        {"metadata": {"labels": {"app.kubernetes.io/managed-by": None}}},
        {"metadata": {"labels": {"redrive.io/policy": None}}},
    )
    for change in changes:
        if change is None:
            objects.delete("configmap", "orders-redrive", shop.namespace)
        else:
            objects.patch("configmap", "orders-redrive", change, shop.namespace)
        # A list, which would restore it too, comes every 300 s: that is later.
        wait_until(lambda: config_map(shop) == (before["data"], before["metadata"]["labels"]))


def config_map(shop: Shop) -> tuple[dict[str, str], dict[str, str]] | None:
    """Data and labels of the ConfigMap of policy `orders`."""
    named = shop.objects("configmap", "metadata.name=orders-redrive")
    return (named[0]["data"], named[0]["metadata"].get("labels", {})) if named else None


def test_names_with_reserved_url_characters_are_kept(shop: Shop) -> None:
    name, subscription = "größe 100%+#?".replace(" ", ""), "a+b%41"
    shop.request("PUT", f"persistent/{shop.tenant}/prod/gr%C3%B6%C3%9Fe100%25%2B%23%3F")
    shop.policy(topic=shop.topic(name), subscription=subscription)
    status = shop.ready()["status"]
    path = f"persistent/{shop.tenant}/prod/gr%C3%B6%C3%9Fe100%25%2B%23%3F-a%2Bb%2541-RETRY"
    assert shop.request("GET", f"{path}/subscriptions") == [subscription]
    assert status["retryTopic"] == shop.topic(f"{name}-{subscription}-RETRY")


def test_deleted_policy_retains_its_topics_with_an_event(shop: Shop) -> None:
    shop.create_topic(shop.topic("orders"))
    shop.policy()
    shop.ready()
    before = shop.dump()
    shop.delete("orders")
    assert shop.dump() == before
    assert shop.topic("orders-fulfilment-DLQ") in shop.event_message("orders", "Retained")
    shop.wait_until_gone("orders-redrive", "configmap")


def test_namespace_is_deleted_with_its_policies_without_a_broker(shop: Shop) -> None:
    shop.create_topic(shop.topic("orders"))
    shop.policy()
    shop.ready()
    shop.connection(adminURL="http://127.0.0.1:1")
    shop.policy("unready", topic=shop.topic("other"))
    shop.reaches("unready", "BrokerUnreachable")
    shop.delete_namespace()


def test_younger_policy_takes_over_from_a_deleted_older_one(shop: Shop) -> None:
    shop.create_topic(shop.topic("orders"))
    shop.policy("older")
    shop.ready("older")
    before = shop.dump()
    shop.let_a_second_pass()
    shop.policy("younger", consumerRoles=[])
    refused = shop.reaches("younger", "ResourceConflict")
    assert "older" in message(refused)
    assert shop.dump() == before
    shop.delete("older")
    shop.take_over("younger", "older")
    assert unmarked(shop.dump()) == unmarked(before)


def test_conflicting_policy_is_ready_while_the_older_is_invalid(shop: Shop) -> None:
    shop.create_topic(shop.topic("orders"))
    shop.policy("older", consumerRoles=["root"])
    shop.reaches("older", "RoleNotAllowed")
    shop.let_a_second_pass()
    shop.policy("younger")
    shop.ready("younger")
    shop.policy("older", consumerRoles=[])
    assert "younger" in message(shop.reaches("older", "ResourceConflict"))
    contested = shop.reaches_condition("younger", "ResourceConflict")
    assert f"RetryPolicy {shop.namespace}/older" in contested["message"]
    shop.delete("younger")
    shop.take_over("older", "younger")


def test_policies_of_one_subscription_conflict_despite_naming(shop: Shop) -> None:
    shop.create_topic(shop.topic("orders"))
    shop.policy("older")
    shop.ready("older")
    shop.let_a_second_pass()
    shop.policy("younger", naming={"scheme": "SubscriptionUpper"})
    shop.reaches("younger", "ResourceConflict")
    contested = shop.reaches_condition("older", "ResourceConflict")
    assert f"RetryPolicy {shop.namespace}/younger" in contested["message"]


@pytest.mark.parametrize(
    ("naming", "retry", "dead_letter"),
    [
        ({"scheme": "SubscriptionUpper"}, "fulfilment-RETRY", "fulfilment-DLQ"),
        ({"scheme": "SubscriptionLower"}, "fulfilment-retry", "fulfilment-dlq"),
        ({"scheme": "RocketMQ"}, "%RETRY%fulfilment", "%DLQ%fulfilment"),
        ({"retryTopic": "again"}, "again", "orders-fulfilment-DLQ"),
        ({"scheme": "SubscriptionUpper", "deadLetterTopic": "dead"}, "fulfilment-RETRY", "dead"),
    ],
)
def test_topics_are_named_by_the_naming_of_the_policy(
    shop: Shop, naming: dict[str, str], retry: str, dead_letter: str
) -> None:
    shop.create_topic(shop.topic("orders"))
    full_names = {k: v if k == "scheme" else shop.topic(v) for k, v in naming.items()}
    shop.policy(naming=full_names)
    status = shop.ready()["status"]
    assert status["retryTopic"] == shop.topic(retry)
    assert status["deadLetterTopic"] == shop.topic(dead_letter)
    topics = shop.topics()
    assert topics.keys() == {shop.topic(name) for name in ("orders", retry, dead_letter)}
    assert topics[shop.topic(retry)]["subscriptions"] == ["fulfilment"]
    assert permissions(shop) == {
        "fulfilment": {retry: {"consume", "produce"}, dead_letter: {"produce"}}
    }
    written = shop.get("configmap", status["configMap"])["data"]["policy.json"]
    policy = codec.decode(written)
    assert str(policy.retry_topic) == shop.topic(retry)
    assert str(policy.dead_letter_topic) == shop.topic(dead_letter)


def test_discarding_policy_has_no_dead_letter_topic(
    shop: Shop,
) -> None:
    shop.connection(replay=REPLAY)
    shop.create_topic(shop.topic("orders"))
    shop.policy(deadLetter={"mode": "Discard"})
    status = shop.ready()["status"]
    assert "deadLetterTopic" not in status
    assert shop.topics().keys() == {shop.topic("orders"), shop.topic("orders-fulfilment-RETRY")}
    assert permissions(shop) == {"fulfilment": {"orders-fulfilment-RETRY": {"consume", "produce"}}}
    written = shop.get("configmap", status["configMap"])["data"]["policy.json"]
    assert not codec.decode(written).dead_letters
    shop.policy(deadLetter={"mode": "Keep"})
    assert shop.ready()["status"]["deadLetterTopic"] == shop.topic("orders-fulfilment-DLQ")


def test_dead_letter_topic_has_partitions_and_subscription(shop: Shop) -> None:
    shop.create_topic(shop.topic("orders"))
    dead_letter = shop.topic("orders-fulfilment-DLQ")
    for partitions in (2, 3):
        shop.policy(deadLetter={"partitions": partitions, "subscription": "triage"})
        shop.ready()
        topics = shop.topics()
        assert topics[dead_letter]["partitions"] == partitions
        for index in range(partitions):
            assert topics[f"{dead_letter}-partition-{index}"]["subscriptions"] == ["triage"]
    shop.policy(deadLetter={"partitions": 2, "subscription": "triage"})
    message = shop.reaches_condition("orders", "PartitionsNeverShrink")["message"]
    assert f"{dead_letter} should have 2 partitions" in message
    assert shop.topics()[dead_letter]["partitions"] == 3


def test_dead_letter_retention_with_a_quota_is_provisioned(shop: Shop) -> None:
    shop.create_topic(shop.topic("orders"))
    # More than the default quota of this broker, 10 GiB.
    for retention in ({"size": "12Gi"}, {"time": "1m"}, {"size": "12Gi", "time": "1h"}):
        shop.policy(deadLetter={"retention": retention, "backlogQuota": {"size": "11Gi"}})
        shop.ready()


def test_changed_policy_defaults_reach_existing_policies(
    shop: Shop,
) -> None:
    shop.create_topic(shop.topic("orders"))
    exponential = {"initial": "1s", "max": "5s", "jitterPercent": 50}
    shop.policy(delayLadder={"exponential": exponential})
    for retries in (3, 4):
        shop.connection(policyDefaults={"maxRetries": retries, "delayLevels": ["7s", "9s"]})
        wait_until(lambda: consumers_policy(shop).max_retries == retries)  # noqa: B023 - now
    policy = consumers_policy(shop)
    assert policy.ladder == Ladder.from_exponential("1s", 2, "5s", 0.5)
    assert policy.levels == Ladder.from_delays(["7s", "9s"])


def test_policies_with_equal_derived_names_share_no_topic(shop: Shop) -> None:
    for name in ("orders", "orders-eu"):
        shop.create_topic(shop.topic(name))
    shop.policy("a", topic=shop.topic("orders-eu"), subscription="billing")
    shop.ready("a")
    before = shop.dump()
    shop.let_a_second_pass()
    shop.policy("b", subscription="eu-billing")
    assert f"RetryPolicy {shop.namespace}/a" in message(shop.reaches("b", "NameCollision"))
    assert shop.dump() == before
    collision = shop.reaches_condition("a", "NameCollision")
    assert f"RetryPolicy {shop.namespace}/b" in collision["message"]
    wait_until(lambda: ("Warning", "NameCollision", collision["message"]) in shop.events("a"))
    shop.ready("a")
    shop.delete("b")
    wait_until(lambda: "NameCollision" not in conditions(shop, "a"))


def test_younger_policy_with_equal_names_takes_over_the_topics(shop: Shop) -> None:
    for name in ("orders", "returns"):
        shop.create_topic(shop.topic(name))
    short = {"scheme": "SubscriptionUpper"}
    shop.policy("older", naming=short)
    shop.ready("older")
    before = shop.dump()
    shop.let_a_second_pass()
    shop.policy("younger", topic=shop.topic("returns"), naming=short)
    shop.reaches("younger", "NameCollision")
    shop.delete("older")
    shop.take_over("younger", "older")
    assert unmarked(shop.dump()) == unmarked(before)


def test_descending_ladder_is_applied_with_a_warning(shop: Shop) -> None:
    shop.create_topic(shop.topic("orders"))
    shop.policy(delayLadder={"delays": ["10s", "2s"]})
    shop.ready()
    shop.event_message("orders", "LadderDescends")
    warnings = [reason for kind, reason in shop.event_reasons("orders") if kind == "Warning"]
    assert warnings == ["LadderDescends"]


def unmarked(dump: Any) -> Any:  # noqa: ANN401 - JSON
    """The dump of the broker without the properties of topics, which name their owners."""
    if not isinstance(dump, dict):
        return dump
    return {key: unmarked(value) for key, value in dump.items() if key != "properties"}


def consumers_policy(shop: Shop) -> Policy:
    """The policy `orders` as consumers load it; an update may not be written yet."""
    shop.ready()
    return codec.decode(shop.get("configmap", "orders-redrive")["data"]["policy.json"])


def conditions(shop: Shop, name: str) -> set[str]:
    """The types of the conditions that a RetryPolicy has."""
    return {c["type"] for c in shop.get("retrypolicy", name)["status"]["conditions"]}


def message(body: dict[str, Any]) -> str:
    """The message of the Ready condition."""
    conditions = {c["type"]: c for c in body["status"]["conditions"]}
    written: str = conditions["Ready"]["message"]
    return written

from __future__ import annotations

import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from redrive.policy import codec
from redrive.policy.ladder import Ladder
from redrive.policy.model import Policy
from sandbox import installation
from sandbox.sandbox import Sandbox
from tests.integration.provision.conftest import SECONDS, Shop
from tests.support.awake_time import awake_time
from tests.support.waiting import wait_until

READ_SECONDS = 0.5
"""The interval between reads of all topics, each of which is dozens of requests."""
CONSUMER = {"orders-fulfilment-RETRY": {"consume", "produce"}, "orders-fulfilment-DLQ": {"produce"}}
REPLAYER = {
    "orders-fulfilment-RETRY": {"consume", "produce"},  # what it has moved is looked for there
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
    found: dict[str, dict[str, set[str]]] = {}
    for topic, roles in policies["auth_policies"]["destination_auth"].items():
        for role, actions in roles.items():
            found.setdefault(role, {})[topic.rsplit("/", 1)[1]] = set(actions)
    return found


@pytest.mark.parametrize("partitions", [0, 3])
def test_a_policy_becomes_ready_with_topics_subscriptions_rights_and_a_config_map(
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
    shop.told("orders", "Provisioned")
    assert ("Normal", "Provisioned") in [event[:2] for event in shop.events("orders")]


def test_the_status_speaks_of_the_latest_spec_and_consumers_get_it(shop: Shop) -> None:
    shop.create_topic(shop.topic("orders"))
    shop.policy(maxRetries=3)
    shop.ready()
    shop.policy(maxRetries=5)
    after = shop.ready()
    assert after["metadata"]["generation"] == 2
    assert {c["observedGeneration"] for c in after["status"]["conditions"]} == {2}
    written = shop.get("configmap", "orders-redrive")["data"]["policy.json"]
    assert codec.decode(written).max_retries == 5


def test_what_exists_is_adopted_and_rights_that_others_granted_are_kept(shop: Shop) -> None:
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


def test_a_retry_topic_has_the_partitions_asked_for_and_never_fewer(shop: Shop) -> None:
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
    caution = shop.reaches_condition("orders", "PartitionsNeverShrink")
    assert "should have 2 partitions, and no topic can shrink; got 5" in caution["message"]
    assert shop.topics()[retry]["partitions"] == 5


def test_a_retry_topic_follows_its_source_when_that_grows(shop: Shop) -> None:
    source, retry = shop.topic("orders"), shop.topic("orders-fulfilment-RETRY")
    shop.create_topic(source, 2)
    shop.policy()
    shop.ready()
    shop.request("POST", f"persistent/{shop.tenant}/prod/orders/partitions", 4)
    grown = f"{retry}-partition-3"
    wait_until(lambda: shop.topics()[retry]["partitions"] == 4, every=READ_SECONDS)
    wait_until(lambda: shop.topics()[grown]["subscriptions"] == ["fulfilment"], every=READ_SECONDS)
    wait_until(lambda: any(event[1] == "Repaired" for event in shop.events("orders")))


def test_what_somebody_takes_away_is_put_back_and_an_event_says_so(shop: Shop) -> None:
    shop.create_topic(shop.topic("orders"))
    shop.policy()
    shop.ready()
    before = shop.topics(), permissions(shop)
    path = f"persistent/{shop.tenant}/prod/orders-fulfilment"
    shop.request("DELETE", f"{path}-RETRY/permissions/fulfilment")
    shop.request("DELETE", f"{path}-RETRY/subscription/fulfilment")
    shop.request("DELETE", f"{path}-DLQ?force=true")
    wait_until(lambda: (shop.topics(), permissions(shop)) == before, every=READ_SECONDS)
    shop.tells(
        "orders",
        "Repaired",
        f"created {shop.topic('orders-fulfilment-DLQ')}",
        "granted consume+produce on orders-fulfilment-RETRY to fulfilment",
        "created subscription fulfilment on orders-fulfilment-RETRY",
    )


def test_what_one_partition_lacks_is_put_back_and_an_event_and_a_metric_say_so(
    shop: Shop, installed: Sandbox
) -> None:
    shop.create_topic(shop.topic("orders"), 3)
    shop.policy()
    shop.ready()
    before, counted = shop.topics(), repairs(installed)
    path = f"persistent/{shop.tenant}/prod/orders-fulfilment-RETRY"
    shop.request("DELETE", f"{path}-partition-1/subscription/fulfilment")
    wait_until(lambda: shop.topics() == before, every=READ_SECONDS)
    assert shop.told("orders", "Repaired") == (
        "created subscription fulfilment on orders-fulfilment-RETRY"
    )
    shop.request("DELETE", f"{path}-partition-2")
    wait_until(lambda: shop.topics() == before, every=READ_SECONDS)
    anew = f"created missing partitions of {shop.topic('orders-fulfilment-RETRY')} again: 2; "
    wait_until(lambda: any(event[2].startswith(anew) for event in shop.events("orders")))
    after = repairs(installed)
    assert after["CreateSubscription"] >= counted.get("CreateSubscription", 0) + 2
    assert after["RestorePartitions"] >= counted.get("RestorePartitions", 0) + 1


def repairs(sandbox: Sandbox) -> dict[str, float]:
    """How many steps of each kind the operator counts as repairs."""
    url = f"{installation.endpoint(sandbox)}/metrics"
    with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310  our own, of http
        shown = answer.read().decode()
    found = re.findall(r'^redrive_drift_repairs_total\{kind="(\w+)"\} (\S+)$', shown, re.MULTILINE)
    return {kind: float(count) for kind, count in found}


def test_a_config_map_that_is_deleted_or_changed_is_put_right_at_once(shop: Shop) -> None:
    shop.create_topic(shop.topic("orders"))
    shop.policy()
    shop.ready()
    before = shop.get("configmap", "orders-redrive")
    for harm in (
        ("delete", "configmap", "orders-redrive"),
        ("patch", "configmap", "orders-redrive", "--patch", '{"data": {"policy.json": "{}"}}'),
        ("label", "configmap", "orders-redrive", "app.kubernetes.io/managed-by-"),
    ):
        shop.kubectl(*harm)
        with awake_time() as passed:
            wait_until(lambda: config_map(shop) == (before["data"], before["metadata"]["labels"]))
            assert passed() < 60  # a list, which would show it too, comes every 300 s


def config_map(shop: Shop) -> tuple[dict[str, str], dict[str, str]] | None:
    """Data and labels of the ConfigMap of policy `orders`."""
    maps = shop.cluster.objects.list("configmap", shop.namespace)
    named = [body for body in maps if body["metadata"]["name"] == "orders-redrive"]
    return (named[0]["data"], named[0]["metadata"].get("labels", {})) if named else None


def test_names_that_a_url_would_distort_arrive_as_they_are(shop: Shop) -> None:
    name, subscription = "größe 100%+#?".replace(" ", ""), "a+b%41"
    shop.request("PUT", f"persistent/{shop.tenant}/prod/gr%C3%B6%C3%9Fe100%25%2B%23%3F")
    shop.policy(topic=shop.topic(name), subscription=subscription)
    status = shop.ready()["status"]
    path = f"persistent/{shop.tenant}/prod/gr%C3%B6%C3%9Fe100%25%2B%23%3F-a%2Bb%2541-RETRY"
    assert shop.request("GET", f"{path}/subscriptions") == [subscription]
    assert status["retryTopic"] == shop.topic(f"{name}-{subscription}-RETRY")


def test_a_deleted_policy_leaves_the_broker_as_it_is_and_an_event_says_so(shop: Shop) -> None:
    shop.create_topic(shop.topic("orders"))
    shop.policy()
    shop.ready()
    before = shop.dump()
    shop.delete("orders")
    assert shop.dump() == before
    assert shop.topic("orders-fulfilment-DLQ") in shop.told("orders", "Retained")
    shop.kubectl("wait", "--for=delete", "configmap/orders-redrive", f"--timeout={SECONDS}s")


def test_a_deletion_needs_no_broker_and_a_namespace_goes_with_its_policies(shop: Shop) -> None:
    shop.create_topic(shop.topic("orders"))
    shop.policy()
    shop.ready()
    shop.connection(adminURL="http://127.0.0.1:1")
    shop.policy("unready", topic=shop.topic("other"))
    shop.reaches("unready", "BrokerUnreachable")
    shop.kubectl("delete", "namespace", shop.namespace, f"--timeout={SECONDS}s")


def test_the_older_policy_keeps_a_subscription_and_the_younger_takes_over(shop: Shop) -> None:
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


def test_of_two_policies_one_is_ready_whatever_becomes_of_the_older(shop: Shop) -> None:
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


def test_two_policies_of_one_subscription_conflict_under_any_names(shop: Shop) -> None:
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
def test_topics_are_named_as_the_policy_says(
    shop: Shop, naming: dict[str, str], retry: str, dead_letter: str
) -> None:
    shop.create_topic(shop.topic("orders"))
    given = {k: v if k == "scheme" else shop.topic(v) for k, v in naming.items()}
    shop.policy(naming=given)
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


def test_a_policy_that_discards_has_no_dead_letter_topic_and_tells_its_consumers(
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


def test_dead_letters_have_the_partitions_and_the_one_subscription_asked_for(shop: Shop) -> None:
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


def test_dead_letters_are_retained_beside_a_quota(shop: Shop) -> None:
    shop.create_topic(shop.topic("orders"))
    # More than the default quota of this broker too, 10 GiB.
    for retention in ({"size": "12Gi"}, {"time": "1m"}, {"size": "12Gi", "time": "1h"}):
        shop.policy(deadLetter={"retention": retention, "backlogQuota": {"size": "11Gi"}})
        shop.ready()


def test_what_policies_leave_out_their_connection_says_and_a_change_reaches_them(
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


def test_policies_whose_derived_names_meet_do_not_share_a_topic(shop: Shop) -> None:
    for name in ("orders", "orders-eu"):
        shop.create_topic(shop.topic(name))
    shop.policy("a", topic=shop.topic("orders-eu"), subscription="billing")
    shop.ready("a")
    before = shop.dump()
    shop.let_a_second_pass()
    shop.policy("b", subscription="eu-billing")
    assert f"RetryPolicy {shop.namespace}/a" in message(shop.reaches("b", "NameCollision"))
    assert shop.dump() == before
    named = shop.reaches_condition("a", "NameCollision")
    assert f"RetryPolicy {shop.namespace}/b" in named["message"]
    wait_until(lambda: ("Warning", "NameCollision", named["message"]) in shop.events("a"))
    shop.ready("a")
    shop.delete("b")
    wait_until(lambda: "NameCollision" not in conditions(shop, "a"))


def test_the_younger_of_two_whose_names_met_takes_over_and_nothing_is_deleted(shop: Shop) -> None:
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


def test_a_descending_ladder_is_obeyed_with_a_warning(shop: Shop) -> None:
    shop.create_topic(shop.topic("orders"))
    shop.policy(delayLadder={"delays": ["10s", "2s"]})
    shop.ready()
    shop.told("orders", "LadderDescends")
    warnings = [reason for kind, reason in shop.event_reasons("orders") if kind == "Warning"]
    assert warnings == ["LadderDescends"]


def test_rights_of_many_policies_are_granted_in_few_calls(
    shop: Shop, operator_process: Path
) -> None:
    names = [f"orders-{number}" for number in range(20)]
    for name in names:
        shop.create_topic(shop.topic(name))
    shop.kubectl("delete", "brokerconnection", "main")
    shop.policies({name: {"topic": shop.topic(name)} for name in names})
    shop.connection()  # now all of them can go on
    shop.kubectl("wait", "retrypolicy", "--all", "--for=condition=Ready", f"--timeout={SECONDS}s")
    pattern = rf"rights in {shop.tenant}/prod: set for (\d+) policies"
    calls = [int(policies) for policies in re.findall(pattern, operator_process.read_text())]
    assert sum(calls) == len(names)
    assert len(calls) < len(names) / 2
    assert len(permissions(shop)["fulfilment"]) == 2 * len(names)


def unmarked(dump: Any) -> Any:  # noqa: ANN401 - JSON
    """What the broker has, without the properties of topics, which tell whose they are."""
    if not isinstance(dump, dict):
        return dump
    return {key: unmarked(value) for key, value in dump.items() if key != "properties"}


def consumers_policy(shop: Shop) -> Policy:
    """What consumers of the policy `orders` load; the operator may not have written it yet."""
    shop.ready()
    return codec.decode(shop.get("configmap", "orders-redrive")["data"]["policy.json"])


def conditions(shop: Shop, name: str) -> set[str]:
    """The types of the conditions that a RetryPolicy has."""
    return {c["type"] for c in shop.get("retrypolicy", name)["status"]["conditions"]}


def message(body: dict[str, Any]) -> str:
    """What the Ready condition says."""
    conditions = {c["type"]: c for c in body["status"]["conditions"]}
    written: str = conditions["Ready"]["message"]
    return written

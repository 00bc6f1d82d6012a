from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.errors import InvalidSpecError
from redrive.policy import naming
from redrive.policy.model import Policy
from redrive.policy.naming import Scheme, TopicName

topics = st.from_type(TopicName)
ORDERS = TopicName("shop", "prod", "orders")


@given(topics)
def test_topic_name_round_trips(topic: TopicName) -> None:
    assert TopicName.parse(str(topic)) == topic
    assert TopicName.parse_whole(str(topic)) == topic


def test_origins_are_all_that_lead_to_a_name() -> None:
    topic = TopicName("shop", "prod", "orders-eu")
    for derive in (naming.retry_topic, naming.dead_letter_topic):
        origins = list(naming.origins(derive(topic, "billing")))
        assert origins == [
            (topic.sibling("orders"), "eu-billing"),
            (topic, "billing"),
        ]
    assert list(naming.origins(topic)) == []
    assert list(naming.origins(topic.sibling("-RETRY"))) == []


def test_derived_names_equal_those_of_pulsar_clients() -> None:
    assert str(naming.retry_topic(ORDERS, "billing")) == (
        "persistent://shop/prod/orders-billing-RETRY"
    )
    assert str(naming.dead_letter_topic(ORDERS, "billing")) == (
        "persistent://shop/prod/orders-billing-DLQ"
    )


@pytest.mark.parametrize(
    ("scheme", "retry", "dead_letter"),
    [
        ("Pulsar", "orders-billing-RETRY", "orders-billing-DLQ"),
        ("SubscriptionUpper", "billing-RETRY", "billing-DLQ"),
        ("SubscriptionLower", "billing-retry", "billing-dlq"),
        ("RocketMQ", "%RETRY%billing", "%DLQ%billing"),
    ],
)
def test_scheme_names_topics_as_its_system_does(scheme: str, retry: str, dead_letter: str) -> None:
    chosen = Scheme(scheme)
    assert naming.retry_topic(ORDERS, "billing", chosen) == ORDERS.sibling(retry)
    assert naming.dead_letter_topic(ORDERS, "billing", chosen) == ORDERS.sibling(dead_letter)


@pytest.mark.parametrize("scheme", Scheme)
def test_derived_topics_are_recognized_in_all_schemes(scheme: Scheme) -> None:
    dead_letter = naming.dead_letter_topic(ORDERS, "billing", scheme)
    retry = naming.retry_topic(ORDERS, "billing", scheme)
    assert naming.is_derived(retry)
    assert naming.is_derived(dead_letter.partition(3))
    assert naming.is_derived(naming.ledger_topic(dead_letter))
    assert naming.is_derived(naming.sequences_topic(dead_letter))


@pytest.mark.parametrize("local", ["orders", "general-LEDGER", "DLQ", "RETRY-orders", "a%RETRY%b"])
def test_other_topics_are_not_derived(local: str) -> None:
    assert not naming.is_derived(ORDERS.sibling(local))


def test_braces_in_names_are_not_substituted() -> None:
    topic = naming.retry_topic(ORDERS.sibling("{subscription}"), "{topic}")
    assert topic.local == "{subscription}-{topic}-RETRY"


@given(topics, st.integers(0, 1_000))
def test_derived_name_omits_the_partition_suffix(topic: TopicName, index: int) -> None:
    for derive in (naming.retry_topic, naming.dead_letter_topic):
        assert derive(topic.partition(index), "s") == derive(topic, "s")


@given(topics, st.integers(0, 1_000))
def test_partition_is_refused_as_a_whole_topic(topic: TopicName, index: int) -> None:
    partition = topic.partition(index)
    assert partition.without_partition() == topic
    assert TopicName.parse(str(partition)) == partition
    with pytest.raises(InvalidSpecError, match="not to one partition"):
        TopicName.parse_whole(str(partition))


@given(st.from_type(Policy))
def test_derived_topics_are_distinct_in_the_source_namespace(policy: Policy) -> None:
    names = {policy.topic, policy.retry_topic, policy.dead_letter_topic}
    assert len(names) == 3
    assert {name.namespace_name for name in names} == {policy.topic.namespace_name}
    assert {TopicName.parse_whole(str(name)) for name in names} == names


@given(topics, st.permutations(["a", "b", "a-b", "b-a", "a.b"]))
def test_subscriptions_of_a_topic_have_distinct_topics(
    topic: TopicName, subscriptions: list[str]
) -> None:
    one, other = subscriptions[:2]
    assert naming.retry_topic(topic, one) != naming.retry_topic(topic, other)
    assert naming.dead_letter_topic(topic, one) != naming.dead_letter_topic(topic, other)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "orders",
        "shop/prod/orders",
        "persistent://shop/prod",
        "persistent://shop/prod/",
        "persistent://shop//orders",
        "persistent://shop/prod/cluster/orders",
        "non-persistent://shop/prod/orders",
        "PERSISTENT://shop/prod/orders",
        " persistent://shop/prod/orders",
        "persistent://shop/prod/orders\n",
        "persistent://shop/prod/or ders",
        "persistent://shop/prod/or\x00ders",
        "persistent://sh op/prod/orders",
        "persistent://shöp/prod/orders",
        "persistent://shop/prod/" + "o" * 256,
        "persistent://../prod/orders",
        "persistent://shop/./orders",
        "persistent://shop/prod/.",
        "persistent://shop/prod/..",
    ],
)
def test_invalid_topic_name_is_refused_with_its_value(text: str) -> None:
    with pytest.raises(InvalidSpecError) as refusal:
        TopicName.parse(text)
    assert f"got {text[:128]!r}" in str(refusal.value)
    assert "use the full name of a persistent topic" in str(refusal.value)


def test_partition_refusal_names_its_topic() -> None:
    with pytest.raises(InvalidSpecError, match=r"use the topic itself: persistent://a/b/c$"):
        TopicName.parse_whole("persistent://a/b/c-partition-12")


@pytest.mark.parametrize(
    "name", ["", "a/b", "a b", "a\tb", "a\u00a0b", "a\x7fb", "a\n", "s" * 256, ".", ".."]
)
def test_invalid_subscription_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidSpecError, match="a subscription must have 1 to 255 characters"):
        naming.check_subscription(name)


@pytest.mark.parametrize("name", ["s", "s" * 255, "a.b-c_d", ".a", "...", "größe", "%RETRY%"])
def test_valid_subscription_name_is_kept_unchanged(name: str) -> None:
    assert naming.check_subscription(name) == name


SYSTEM_NAMES = [
    "__change_events",
    "__change_events-partition-0",
    "__transaction_buffer_snapshot",
    "__transaction_buffer_snapshot_segments",
    "__transaction_buffer_snapshot_indexes",
    "__transaction_log_0",
    "__consumer_offsets",
    "__transaction_pending_ack",
    "orders-fulfilment__transaction_pending_ack",
    "orders-fulfilment__transaction_pending_ack-partition-2",
    "%5F%5Fchange_events",
    "_%5fchange_events",
    "%255F_change_events",
    "orders__%74ransaction_pending_ack",
]


@pytest.mark.parametrize("local", SYSTEM_NAMES)
def test_system_topic_is_refused_in_any_spelling(local: str) -> None:
    topic = ORDERS.sibling(local)
    assert topic.is_system
    with pytest.raises(InvalidSpecError):
        TopicName.parse_whole(str(topic))


@pytest.mark.parametrize(
    ("topic", "is_system"),
    [
        ("persistent://pulsar/system/transaction_coordinator_assign-partition-0", True),
        ("persistent://pulsar/system/resource-usage", True),
        ("persistent://pulsar/broker-1:8080/healthcheck", True),
        ("persistent://pulsar/broker-1:8080/orders", False),
        ("persistent://shop/system/healthcheck", False),
        ("persistent://shop/__prod/orders", False),
        ("persistent://shop/prod/_orders", False),
        ("persistent://shop/prod/orders__change_events", False),
        ("persistent://shop/prod/%RETRY%__fulfilment", False),
        ("persistent://shop/prod/100%", False),
    ],
)
def test_system_topic_is_distinguished_from_application_topics(
    topic: str, *, is_system: bool
) -> None:
    assert TopicName.parse(topic).is_system is is_system


@pytest.mark.parametrize("scheme", Scheme)
@pytest.mark.parametrize("subscription", ["__compaction", "x__transaction_pending_ack"])
def test_policy_derived_system_topic_is_refused(scheme: Scheme, subscription: str) -> None:
    retry = naming.retry_topic(ORDERS, subscription, scheme)
    dead_letters = naming.dead_letter_topic(ORDERS, subscription, scheme)
    with pytest.raises(InvalidSpecError, match="belongs to Pulsar"):
        Policy(ORDERS, subscription, retry_topic=retry, dead_letter_topic=dead_letters)

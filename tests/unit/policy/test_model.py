"""Policies: their values, and their encoding."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redrive.errors import InvalidSpecError
from redrive.policy import codec
from redrive.policy.ladder import LEVELS, Ladder
from redrive.policy.model import OutageLimits, OutcomeWindow, Policy, SubscriptionType
from redrive.policy.naming import TopicName

ORDERS = TopicName("shop", "prod", "orders")


def test_policy_has_the_documented_defaults() -> None:
    policy = Policy(topic=ORDERS, subscription="billing")
    assert policy.max_retries == 16
    assert policy.ladder.rungs == LEVELS
    assert policy.levels.rungs == LEVELS
    assert policy.subscription_type is SubscriptionType.SHARED
    assert policy.dead_letters
    assert policy.retry_topic == ORDERS.sibling("orders-billing-RETRY")
    assert policy.dead_letter_topic == ORDERS.sibling("orders-billing-DLQ")


def test_explicit_topic_name_replaces_only_its_default() -> None:
    policy = Policy(ORDERS, "billing", retry_topic=ORDERS.sibling("again"))
    assert policy.retry_topic == ORDERS.sibling("again")
    assert policy.dead_letter_topic == ORDERS.sibling("orders-billing-DLQ")


@pytest.mark.parametrize(
    ("topic", "message"),
    [
        (TopicName("shop", "test", "again"), "tenant and namespace of their source topic"),
        (TopicName("other", "prod", "again"), "tenant and namespace of their source topic"),
        (ORDERS.partition(3), "not to one partition"),
        (ORDERS, "must be four different topics"),
        (ORDERS.sibling("orders-billing-DLQ"), "must be four different topics"),
        (ORDERS.sibling("orders-billing-DLQ-LEDGER"), "must be four different topics"),
    ],
)
def test_invalid_retry_topic_is_refused(topic: TopicName, message: str) -> None:
    with pytest.raises(InvalidSpecError, match=message):
        Policy(ORDERS, "billing", retry_topic=topic)


def test_source_topic_equal_to_its_ledger_is_refused() -> None:
    with pytest.raises(InvalidSpecError, match="must be four different topics"):
        Policy(ORDERS.sibling("dead-LEDGER"), "billing", dead_letter_topic=ORDERS.sibling("dead"))


@pytest.mark.parametrize("count", [0, 1, 1_000])
def test_max_retries_from_0_to_1000_is_accepted(count: int) -> None:
    assert Policy(ORDERS, "billing", max_retries=count).max_retries == count


@pytest.mark.parametrize("count", [-1, 1_001])
def test_max_retries_out_of_range_is_refused(count: int) -> None:
    with pytest.raises(InvalidSpecError, match=f"from 0 to 1000; got {count}; choose"):
        Policy(ORDERS, "billing", max_retries=count)


@pytest.mark.parametrize("text", ["shared", "KEY_SHARED", ""])
def test_unknown_subscription_type_is_refused_with_known_ones(text: str) -> None:
    with pytest.raises(
        InvalidSpecError,
        match=f"got '{text}'; use one of Shared, KeyShared, Exclusive, Failover",
    ):
        SubscriptionType.parse(text)


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("ladder", ["10s"], r"Ladder\.from_delays\("),
        ("levels", None, r"Ladder\.from_delays\("),
        ("subscription_type", "key_shared", "SubscriptionType.KEY_SHARED"),
        ("subscription_type", "KeyShared", "SubscriptionType.KEY_SHARED"),
        ("max_retries", "3", "whole number"),
        ("max_retries", 3.0, "whole number"),
        ("max_retries", True, "whole number"),
        ("generation", "1", "whole number"),
        ("ordered", "no", "True or False"),
        ("dead_letters", 1, "True or False"),
        ("sequenced", None, "True or False"),
        ("ignore_outages", "yes", "True or False"),
        ("dead_letter_now", ["4711:3:0"], "origins, such as"),
        ("dead_letter_subscription", None, "its name"),
        ("topic", None, "persistent://tenant"),
        ("subscription", 3, "its name"),
        ("name", None, "namespace/name"),
        ("outage_breaker", {"window": 100}, "OutageLimits"),
        ("dead_letter_now", ["4711:3:0"], "origins"),
    ],
)
def test_policy_field_of_another_type_is_refused(field: str, value: object, remedy: str) -> None:
    fields: dict[str, Any] = {"topic": ORDERS, "subscription": "billing", field: value}
    with pytest.raises(InvalidSpecError, match=f"^{field} of a policy must be .*got .*{remedy}"):
        Policy(**fields)


def test_origin_that_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidSpecError, match="an origin in dead_letter_now of a policy must"):
        Policy(ORDERS, "billing", dead_letter_now=frozenset({5}))  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["window", "min_messages", "failure_percent"])
@pytest.mark.parametrize("value", ["10", True, 1.5])
def test_outage_limit_of_another_type_is_refused(field: str, value: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidSpecError, match="must be of type int; got"):
        OutageLimits(**{field: value})


@pytest.mark.parametrize("rungs", ["10s", 10, None])
def test_ladder_that_is_no_list_is_refused(rungs: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidSpecError, match=r"must be a list; got .*Ladder\.from_delays"):
        Ladder(rungs)
    with pytest.raises(InvalidSpecError, match="must be a list; got"):
        Ladder.from_delays(rungs)


@pytest.mark.parametrize("jitter", ["0.5", True])
def test_jitter_that_is_no_number_is_refused(jitter: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidSpecError, match="must be from 0 to 1; got"):
        Ladder([1], jitter=jitter)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Ladder.from_delays([10]),  # type: ignore[list-item]
        lambda: Ladder.from_fixed(5),  # type: ignore[arg-type]
        lambda: Ladder.from_preset(None),  # type: ignore[arg-type]
        lambda: Ladder.from_exponential("1s", "2", "10s"),  # type: ignore[arg-type]
        lambda: Ladder.from_exponential("1s", 2, 10),  # type: ignore[arg-type]
        lambda: TopicName.parse(None),  # type: ignore[arg-type]
        lambda: SubscriptionType.parse(5),  # type: ignore[arg-type]
    ],
)
def test_text_of_another_type_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidSpecError, match="; got "):
        make()


def test_only_shared_subscriptions_honour_delays() -> None:
    assert [kind.value for kind in SubscriptionType if kind.honours_delays] == [
        "Shared", "KeyShared",
    ]  # fmt: skip


def test_ordered_policy_needs_a_key_shared_subscription() -> None:
    assert Policy(ORDERS, "s", SubscriptionType.KEY_SHARED, ordered=True).ordered
    with pytest.raises(InvalidSpecError, match="got 'Shared'; use KeyShared"):
        Policy(ORDERS, "s", ordered=True)


def test_policy_of_a_single_partition_is_refused() -> None:
    with pytest.raises(InvalidSpecError, match="not to one partition"):
        Policy(ORDERS.partition(0), "billing")


def test_topic_object_is_validated_by_the_policy() -> None:
    with pytest.raises(InvalidSpecError, match="a topic must be written"):
        Policy(TopicName("shop", "prod/orders", "x"), "billing")


def test_derived_topic_name_over_255_characters_is_refused() -> None:
    fits = 255 - len("orders--RETRY")
    assert len(Policy(ORDERS, "s" * fits).retry_topic.local) == 255
    with pytest.raises(InvalidSpecError, match=r"exceed 255 characters; .* a shorter subscription"):
        Policy(ORDERS, "s" * (fits + 1))


def test_policy_accepts_topics_as_strings() -> None:
    text = "persistent://shop/prod/orders"
    named = f"{text}-late"
    policy = Policy(text, "billing", retry_topic=named, ladder=Ladder([1, timedelta(minutes=1)]))
    parsed = Policy(
        TopicName.parse_whole(text), "billing", retry_topic=TopicName.parse_whole(named),
        ladder=Ladder.from_delays(["1s", "1m"]),
    )  # fmt: skip
    assert policy == parsed
    assert hash(policy) == hash(parsed)
    assert policy.retry_topic.local == "orders-late"
    assert dataclasses.replace(policy, topic=f"{text}-2").topic.local == "orders-2"


@pytest.mark.parametrize(
    "topic", ["orders", 3, b"persistent://shop/prod/orders", "a/b/c-partition-1"]
)
def test_policy_of_an_invalid_topic_is_refused(topic: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidSpecError, match="; got "):
        Policy(topic, "billing")


@pytest.mark.parametrize("change", [{"ordered": False}, {"dead_letters": False}])
def test_sequenced_policy_must_be_ordered_and_keep_dead_letters(
    change: dict[str, bool],
) -> None:
    kind = SubscriptionType.KEY_SHARED
    whole = {"ordered": True, "sequenced": True}
    assert Policy(ORDERS, "billing", subscription_type=kind, **whole).sequenced  # type: ignore[arg-type]
    with pytest.raises(InvalidSpecError, match="requires an ordered policy"):
        Policy(ORDERS, "billing", subscription_type=kind, **whole | change)  # type: ignore[arg-type]


LIMITS = OutageLimits()
outcomes = st.lists(st.none() | st.tuples(st.sampled_from("abc"), st.sampled_from("123456")))
limits = st.integers(1, 30).flatmap(
    lambda window: st.builds(
        OutageLimits,
        window=st.just(window),
        min_messages=st.integers(1, window),
        failure_percent=st.integers(1, 100),
    )
)


@given(limits, outcomes, st.sampled_from("abc"))
def test_outage_needs_a_share_of_outcomes_and_many_messages(
    limits: OutageLimits, outcomes: list[tuple[str, str] | None], cause: str
) -> None:
    window = OutcomeWindow(limits.window)
    for outcome in outcomes:
        window.add(outcome)
    latest = outcomes[-limits.window :]
    failures = [outcome for outcome in latest if outcome is not None and outcome[0] == cause]
    assert window.is_outage(cause, limits) == (
        len(set(failures)) >= limits.min_messages
        and len(failures) * 100 >= limits.failure_percent * len(latest)
    )


@given(st.integers(0, 10_000))
@settings(max_examples=20)
def test_one_failure_in_twenty_is_no_outage(seed: int) -> None:
    luck, window = random.Random(seed), OutcomeWindow(LIMITS.window)  # noqa: S311 - a simulation
    for number in range(5_000):
        window.add(("cause", f"{number}") if luck.random() < 0.05 else None)
        assert not window.is_outage("cause", LIMITS)


def test_outage_is_detected_within_fifty_failures() -> None:
    window = OutcomeWindow(LIMITS.window)
    for _ in range(1_000):
        window.add(None)
    for number in range(50):
        assert not window.is_outage("cause", LIMITS)
        window.add(("cause", f"{number}"))
    assert window.is_outage("cause", LIMITS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("window", 0), ("window", 10_001), ("min_messages", 0), ("min_messages", 101),
        ("failure_percent", 0), ("failure_percent", 101), ("max_probe_interval", timedelta()),
        ("max_probe_interval", timedelta(hours=2)), ("max_pause", timedelta(days=8)),
    ],
)  # fmt: skip
def test_outage_limits_out_of_range_are_refused(field: str, value: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidSpecError, match="outage breaker"):
        OutageLimits(**{field: value})


POLICY = Policy(TopicName("shop", "prod", "orders"), "billing", name="shop/orders", generation=2)
READ = [
    "version", "name", "generation", "topic", "subscription", "subscriptionType", "maxRetries",
    "delays", "retryTopic", "deadLetterTopic",
]  # fmt: skip
ADDED = ["ordered", "jitter", "delayLevels", "deadLetterEnabled", "deadLetterSubscription"]
OPTIONAL = ["outageBreaker", "ignoreOutages", "deadLetterNow", "deadLetterSequenced"]
unknown_keys = st.text().filter(lambda key: key not in READ + ADDED + OPTIONAL)

policies = st.from_type(Policy)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def document(policy: Policy = POLICY) -> dict[str, Any]:
    written: dict[str, Any] = json.loads(codec.encode(policy))
    return written


@given(policies)
def test_policy_round_trips(policy: Policy) -> None:
    text = codec.encode(policy)
    assert codec.decode(text) == policy
    assert codec.encode(codec.decode(text)) == text


def test_policy_is_encoded_as_documented() -> None:
    written = document(codec.decode(codec.encode(POLICY)))
    assert written | {"delays": None, "delayLevels": None} == {
        "version": 1,
        "name": "shop/orders",
        "generation": 2,
        "topic": "persistent://shop/prod/orders",
        "subscription": "billing",
        "subscriptionType": "Shared",
        "maxRetries": 16,
        "delays": None,
        "jitter": 0.0,
        "ordered": False,
        "delayLevels": None,
        "retryTopic": "persistent://shop/prod/orders-billing-RETRY",
        "deadLetterEnabled": True,
        "deadLetterTopic": "persistent://shop/prod/orders-billing-DLQ",
        "deadLetterSubscription": "redrive",
    }
    assert written["delays"][:5] == ["1s", "5s", "10s", "30s", "1m"]
    assert written["delayLevels"][:5] == ["1s", "5s", "10s", "30s", "1m"]


def test_outage_breaker_is_encoded_if_set() -> None:
    written = document(replace(POLICY, outage_breaker=OutageLimits(), ignore_outages=True))
    assert written["ignoreOutages"] is True
    assert written["outageBreaker"] == {
        "minMessages": 10,
        "failurePercent": 50,
        "window": 100,
        "maxProbeInterval": "30s",
        "maxPause": "6h",
        "countNotRetryable": True,
    }


def test_policy_file_without_later_keys_keeps_its_meaning() -> None:
    before = {key: value for key, value in document().items() if key not in ADDED}
    assert codec.decode(json.dumps(before)) == POLICY


@given(st.sampled_from(READ + ADDED), json_values)
def test_policy_value_of_another_type_is_refused(key: str, value: Any) -> None:  # noqa: ANN401
    changed = document()
    if type(value) is type(changed[key]):
        value = None
    changed[key] = value
    with pytest.raises(InvalidSpecError):
        codec.decode(json.dumps(changed))


@pytest.mark.parametrize("key", READ)
def test_missing_policy_value_is_refused(key: str) -> None:
    changed = document()
    del changed[key]
    with pytest.raises(InvalidSpecError, match="got None"):
        codec.decode(json.dumps(changed))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        *(
            ("version", version, f"version 1; got {version!r}; upgrade")
            for version in (True, 1.0, "1", None, 2, 0)
        ),
        *(
            (key, True, f"{key} in a policy file must be of type int; got True")
            for key in ("maxRetries", "generation")
        ),
        ("delays", ["1s", 5], "delays in a policy file must be a list of strings; got 5"),
        ("maxRetries", 1_001, "; got "),
        ("delays", [], "; got "),
        ("delays", ["0s"], "; got "),
        ("jitter", 1.5, "; got "),
        ("delayLevels", [], "; got "),
        ("retryTopic", "persistent://shop/prod/orders", "; got "),
        ("deadLetterTopic", "persistent://shop/test/orders-DLQ", "; got "),
        ("topic", "persistent://shop/prod/orders-partition-1", "; got "),
        ("subscription", "a/b", "; got "),
        ("subscriptionType", "exclusive", "; got "),
    ],
)
def test_invalid_policy_value_is_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(InvalidSpecError, match=message):
        codec.decode(json.dumps(document() | {key: value}))


@given(st.dictionaries(unknown_keys, json_values))
def test_unknown_policy_keys_are_ignored(added: dict[str, Any]) -> None:
    assert codec.decode(json.dumps(document() | added)) == POLICY


DEEP = pytest.param("[" * 100_000, id="deep")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "1", '"x"', "{} {}", DEEP])
def test_policy_file_other_than_json_object_is_refused(text: str) -> None:
    with pytest.raises(InvalidSpecError, match="a policy file"):
        codec.decode(text)


@given(st.text(max_size=100))
def test_policy_file_of_any_text_is_refused_cleanly(text: str) -> None:
    with pytest.raises(InvalidSpecError):
        codec.decode(text)

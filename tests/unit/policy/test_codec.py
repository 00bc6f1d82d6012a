from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.errors import InvalidSpecError
from redrive.policy import codec
from redrive.policy.model import OutageLimits, Policy
from redrive.policy.naming import TopicName

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

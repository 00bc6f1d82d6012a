"""Serialized form of a `Policy`: the `policy.json` that the operator gives to consumers.

Within a version keys are only added, and a reader ignores unknown keys. A change of meaning needs a
new version, which older readers refuse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from redrive.errors import InvalidSpecError
from redrive.policy.ladder import LEVELS, Ladder
from redrive.policy.model import OutageLimits, Policy, SubscriptionType
from redrive.policy.naming import DEAD_LETTER_SUBSCRIPTION, TopicName
from redrive.policy.values import format_duration, parse_duration

VERSION = 1
_T = TypeVar("_T")


def encode(policy: Policy) -> str:
    """Encode *policy* as JSON; equal policies give equal text."""
    document: dict[str, Any] = {
        "version": VERSION,
        "name": policy.name,
        "generation": policy.generation,
        "topic": str(policy.topic),
        "subscription": policy.subscription,
        "subscriptionType": policy.subscription_type.value,
        "maxRetries": policy.max_retries,
        "delays": [format_duration(rung) for rung in policy.ladder.rungs],
        "jitter": float(policy.ladder.jitter),
        "ordered": policy.ordered,
        "delayLevels": [format_duration(rung) for rung in policy.levels.rungs],
        "retryTopic": str(policy.retry_topic),
        "deadLetterEnabled": policy.dead_letters,
        "deadLetterTopic": str(policy.dead_letter_topic),
        "deadLetterSubscription": policy.dead_letter_subscription,
    }
    # Only if set: otherwise an upgrade would rewrite every ConfigMap.
    if policy.outage_breaker is not None:
        document["outageBreaker"] = _outage_breaker(policy.outage_breaker)
    if policy.ignore_outages:
        document["ignoreOutages"] = True
    if policy.dead_letter_now:
        document["deadLetterNow"] = sorted(policy.dead_letter_now)
    if policy.sequenced:
        document["deadLetterSequenced"] = True
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def decode(text: str) -> Policy:
    """Decode the text of `encode`.

    Raises:
        InvalidSpecError: *text* is not such a document, has another version, or a value is out of
            bounds.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: deeply nested lists
        raise InvalidSpecError(
            "a policy file must be JSON", got=str(error), remedy=_REMEDY
        ) from error
    version = document.get("version") if isinstance(document, dict) else type(document).__name__
    # JSON's true and 1.0 equal 1 in Python, but are not versions.
    if type(version) is not int or version != VERSION:
        raise InvalidSpecError(
            f"a policy file must be an object with version {VERSION}",
            got=version,
            remedy="upgrade the library that reads the file, or the operator that wrote it",
        )
    # Keys that were added to the version later may be missing.
    document = _ADDED | document
    return Policy(
        topic=_topic(document, "topic"),
        subscription=_value(document, "subscription", str),
        subscription_type=SubscriptionType.parse(_value(document, "subscriptionType", str)),
        max_retries=_value(document, "maxRetries", int),
        ladder=Ladder.from_delays(_strings(document, "delays"), _value(document, "jitter", float)),
        ordered=_value(document, "ordered", bool),
        levels=Ladder.from_delays(_strings(document, "delayLevels")),
        dead_letters=_value(document, "deadLetterEnabled", bool),
        retry_topic=_topic(document, "retryTopic"),
        dead_letter_topic=_topic(document, "deadLetterTopic"),
        dead_letter_subscription=_value(document, "deadLetterSubscription", str),
        name=_value(document, "name", str),
        generation=_value(document, "generation", int),
        outage_breaker=_read_outage_breaker(document["outageBreaker"]),
        ignore_outages=_value(document, "ignoreOutages", bool),
        dead_letter_now=frozenset(_strings(document, "deadLetterNow")),
        sequenced=_value(document, "deadLetterSequenced", bool),
    )


_REMEDY = "use the file of the ConfigMap that the operator created"
_ADDED: Mapping[str, Any] = {
    "jitter": 0.0,
    "ordered": False,
    "delayLevels": [format_duration(rung) for rung in LEVELS],
    "deadLetterEnabled": True,
    "deadLetterSubscription": DEAD_LETTER_SUBSCRIPTION,
    "outageBreaker": None,
    "ignoreOutages": False,
    "deadLetterNow": [],
    "deadLetterSequenced": False,
}


def _outage_breaker(limits: OutageLimits) -> dict[str, object]:
    return {
        "minMessages": limits.min_messages,
        "failurePercent": limits.failure_percent,
        "window": limits.window,
        "maxProbeInterval": format_duration(limits.max_probe_interval),
        "maxPause": format_duration(limits.max_pause),
        "countNotRetryable": limits.count_not_retryable,
    }


def _read_outage_breaker(document: object) -> OutageLimits | None:
    if document is None:
        return None
    if not isinstance(document, dict):
        raise InvalidSpecError(
            "outageBreaker in a policy file must be an object", got=document, remedy=_REMEDY
        )
    return OutageLimits(
        min_messages=_value(document, "minMessages", int),
        failure_percent=_value(document, "failurePercent", int),
        window=_value(document, "window", int),
        max_probe_interval=parse_duration(_value(document, "maxProbeInterval", str)),
        max_pause=parse_duration(_value(document, "maxPause", str)),
        count_not_retryable=_value(document, "countNotRetryable", bool),
    )


def _value(document: Mapping[str, Any], key: str, kind: type[_T]) -> _T:
    value = document.get(key)
    # JSON's true is an int in Python, but is not a number here.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise InvalidSpecError(
            f"{key} in a policy file must be of type {kind.__name__}", got=value, remedy=_REMEDY
        )
    return value


def _topic(document: Mapping[str, Any], key: str) -> TopicName:
    return TopicName.parse_whole(_value(document, key, str))


def _strings(document: Mapping[str, Any], key: str) -> list[str]:
    values: list[Any] = _value(document, key, list)
    for value in values:
        if not isinstance(value, str):
            raise InvalidSpecError(
                f"{key} in a policy file must be a list of strings", got=value, remedy=_REMEDY
            )
    return values

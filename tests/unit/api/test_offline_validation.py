"""What editors and offline validators refuse: they read the schema of the CRDs, and know no CEL."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from redrive.api.crds import KINDS, structural
from tests.support.invalid_manifests import REFUSED, VALID, bad_input

SCHEMAS = {kind.kind: structural(kind.spec) for kind in KINDS}
TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
}
SAYS_NOTHING = {"type", "description", "default"}
PLACEHOLDER = re.compile(r"\{(tenant|namespace|other)\}")
"""In cases for a whole installation stands what is filled in there."""

ONLY_BY_CEL = {
    "a Spark property of a Replay that mounts a Secret",
    "a Spark property of a connection that runs a program",
    "a Spark property permitted to Replays that names their ServiceAccount",
    "a dead-letter topic at another tenant's",
    "a dead-letter topic of another tenant",
    "a delay beyond ten days",
    "a delay level that is too long",
    "a dry run that is followed",
    "a fixed delay of nothing",
    "a header in an address",
    "a ladder that ends before it begins",
    "a pause for an outage that hardly ends",
    "a probe of an outage that comes too seldom",
    "a retention that ends before a broker counts",
    "a retention that is not more than the quota",
    "a retention that is too small to be counted",
    "a retry topic in another namespace",
    "a rung of nothing",
    "a rung that is too long in words",
    "a rung that is too long",
    "a selection that ends before it begins",
    "a sequence of dead letters that are disabled",
    "a sequence of dead letters that are discarded",
    "a sequence of dead letters without an order",
    "a service URL of another kind",
    "a service address of another protocol",
    "a single partition in other digits",
    "a single partition",
    "a subscription of Pulsar's own on the dead-letter topic, __compaction",
    "a subscription of Pulsar's own, x__transaction_pending_ack",
    "a subscription that leads elsewhere",
    "a subscription that leads nowhere",
    "a subscription with a no-break space",
    "a system topic, change events, as the target of a Replay",
    "a system topic, change events, in spec.naming.retryTopic",
    "a system topic, pending acks, in spec.naming.deadLetterTopic",
    "a system topic, percent-encoded twice, as the target of a Replay",
    "a system topic, percent-encoded, in spec.topic",
    "a target Topic without a topic",
    "a target of others that is followed",
    "a time to live that drops retries before their time",
    "a time to live that is too long",
    "a topic for a target that has one",
    "a topic of Pulsar's own tenant, healthcheck",
    "a topic of Pulsar's own tenant, transaction_coordinator_assign",
    "a topic whose name leads elsewhere",
    "a topic whose namespace leads elsewhere",
    "a topic whose tenant leads elsewhere",
    "an admin URL with a password",
    "an admin address with a password",
    "an exponential ladder that ends before it begins",
    "an exponential ladder with a delay of nothing",
    "an expression without values",
    "an issuer with a password",
    "an ordered policy of a shared subscription",
    "an outage breaker that never trips",
    "bounds of a dynamic allocation that cross",
    "one partition as a target",
    "retries that expire before they are due",
    "rules beside what they replace",
}
"""What no schema can say: numbers in durations and sizes, two fields together, what a pattern would
have to exclude, and what must not be repeated because it may hold a secret."""


def is_valid(schema: Mapping[str, Any], value: Any) -> bool:  # noqa: ANN401 - as it is written
    """Whether a validator of JSON Schema lets *value* pass, which has no unknown fields either."""
    if not isinstance(value, TYPES[schema["type"]]):
        return False
    if isinstance(value, bool) and schema["type"] != "boolean":
        return False
    known = KEYWORDS.keys() | SAYS_NOTHING
    assert not {key for key in schema.keys() - known if not key.startswith("x-kubernetes-")}
    return all(KEYWORDS[key](said, value) for key, said in schema.items() if key in KEYWORDS)


def are_valid(fields: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    """Whether all that *value* holds is a valid field."""
    return value.keys() <= fields.keys() and all(
        is_valid(fields[name], each) for name, each in value.items()
    )


def measured(value: Any) -> float:  # noqa: ANN401 - as it is written
    """Return what bounds are about: a number, or the size of what is none."""
    return value if isinstance(value, int | float) else len(value)


KEYWORDS: dict[str, Callable[[Any, Any], bool]] = {
    "enum": lambda said, value: value in said,
    "pattern": lambda said, value: re.search(said, value, re.ASCII) is not None,
    **dict.fromkeys(
        ("minimum", "minLength", "minItems", "minProperties"),
        lambda said, value: measured(value) >= said,
    ),
    **dict.fromkeys(
        ("maximum", "maxLength", "maxItems", "maxProperties"),
        lambda said, value: measured(value) <= said,
    ),
    "required": lambda said, value: value.keys() >= set(said),
    "items": lambda said, value: all(is_valid(said, each) for each in value),
    "additionalProperties": lambda said, value: all(is_valid(said, v) for v in value.values()),
    "properties": are_valid,
}


def refused_at_admission() -> list[dict[str, Any]]:
    """The cases that an API server refuses, without those that are right before they are filled."""
    cases = [*REFUSED, *(case for cases in bad_input().values() for case in cases)]
    return [
        case
        for case in cases
        if case.get("path", "").startswith("spec") and not PLACEHOLDER.search(str(case["spec"]))
    ]


@pytest.mark.parametrize("kind", VALID)
def test_what_is_valid_is_valid_offline(kind: str) -> None:
    assert is_valid(SCHEMAS[kind], VALID[kind])


def test_what_is_refused_at_admission_is_refused_offline_but_for_what_only_cel_can_say() -> None:
    cases = refused_at_admission()
    passes = {
        case["case"]
        for case in cases
        if is_valid(SCHEMAS[case["kind"]], VALID[case["kind"]] | case["spec"])
    }
    assert passes == ONLY_BY_CEL
    assert len(cases) > 2 * len(passes)

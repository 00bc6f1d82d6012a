"""CRDs: their schemas, offline validation, and manifests that are refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from redrive.api import crds
from redrive.api.crds import KINDS, structural
from redrive.api.model import ApiModel, parse_spec
from redrive.api.retrypolicy import RetryPolicySpec
from redrive.errors import InvalidSpecError
from tests.support.manifests import REFUSED, VALID, bad_input

COMMITTED = Path(__file__).parents[3] / "crds"


def schemas() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every node of every schema, with its path."""
    for crd in crds.crds():
        (version,) = crd["spec"]["versions"]
        yield from nodes(crd["spec"]["names"]["kind"], version["schema"]["openAPIV3Schema"])


def nodes(path: str, schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from nodes(f"{path}.{name}", field)
    if "items" in schema:
        yield from nodes(f"{path}[]", schema["items"])
    if "additionalProperties" in schema:
        yield from nodes(f"{path}[]", schema["additionalProperties"])


def test_committed_crds_equal_the_generated_ones(tmp_path: Path) -> None:
    crds.write(tmp_path)
    generated = {file.name: file.read_text(encoding="utf-8") for file in tmp_path.iterdir()}
    committed = {file.name: file.read_text(encoding="utf-8") for file in COMMITTED.iterdir()}
    assert generated == committed, "run: python -m redrive.api.crds crds"


def test_every_field_is_described() -> None:
    undescribed = [
        path
        for path, schema in schemas()
        if "description" not in schema
        and not path.endswith(("metadata", "metadata.name", "[]"))  # the list is described
    ]
    assert undescribed == []


def test_schemas_are_structural_and_closed() -> None:
    forbidden = {"$ref", "anyOf", "oneOf", "title"}
    for path, schema in schemas():
        assert schema["type"], path
        assert not forbidden & schema.keys(), path
        assert schema.get("additionalProperties") is not False, path
        preserves = "x-kubernetes-preserve-unknown-fields" in schema
        assert preserves is path.endswith(".status.internal"), path


def test_schema_defaults_add_no_values() -> None:
    defaults = {path: schema["default"] for path, schema in schemas() if "default" in schema}
    assert defaults == {}


def test_every_spec_field_is_bounded() -> None:
    for path, schema in schemas():
        if ".spec" not in path:
            continue
        bound = {"string": "maxLength", "array": "maxItems", "integer": "maximum"}
        assert "enum" in schema or bound.get(schema["type"], "type") in schema, path


def test_every_kind_has_category_and_only_approvals_no_status() -> None:
    for crd in crds.crds():
        assert crd["spec"]["names"]["categories"] == ["redrive"]
        subresources = crd["spec"]["versions"][0].get("subresources")
        is_approval = crd["spec"]["names"]["kind"] == "ReplayApproval"
        assert subresources == (None if is_approval else {"status": {}})


def test_field_without_description_is_refused() -> None:
    class Undescribed(ApiModel):
        mystery: str

    with pytest.raises(TypeError, match="mystery"):
        structural(Undescribed)


def test_unordered_lists_are_sets() -> None:
    sets = {
        path.removesuffix("[]")
        for path, schema in schemas()
        if schema.get("x-kubernetes-list-type") == "set"
    }
    assert sets == {
        *(f"{kind.kind}.status.warnings" for kind in KINDS if kind.status),
        "BrokerConnection.spec.pulsar.redirectHosts",
        "BrokerConnection.spec.rocketmq.brokerHosts",
        *(
            f"BrokerConnection.spec.rocketmq.allow[].{field}"
            for field in (
                "topics",
                "groups",
                "namespaces.names",
                "namespaces.selector.matchExpressions[].values",
            )
        ),
        "BrokerConnection.spec.allow[].topics",
        "BrokerConnection.spec.allow[].roles",
        "BrokerConnection.spec.allow[].namespaces.names",
        "BrokerConnection.spec.allow[].namespaces.selector.matchExpressions[].values",
        "BrokerConnection.spec.replay.require",
        "BrokerConnection.spec.inspection.masking.show",
        "BrokerConnection.spec.rocketmq.inspection.masking.show",
        "Replay.spec.confirmations",
        "Replay.spec.select.ids",
        "Replay.spec.select.keys",
        "Replay.spec.select.causes",
        "Replay.spec.select.fingerprints",
        *(f"Inspection.spec.select.{name}" for name in ("ids", "keys", "causes", "fingerprints")),
        "RetryPolicy.spec.consumerRoles",
        "RetryPolicy.spec.deadLetter.readerRoles",
    }


def test_every_list_has_a_type() -> None:
    """Server-side apply merges lists by it; teams edit entries of maps by name."""
    lists = {
        path.removesuffix("[]"): schema["x-kubernetes-list-type"]
        for path, schema in schemas()
        if schema["type"] == "array"
    }
    maps = {path for path, list_type in lists.items() if list_type == "map"}
    assert maps >= {"BrokerConnection.spec.allow", "BrokerConnection.status.allow"}
    assert lists["RetryPolicy.spec.delayLevels"] == "atomic"
    assert set(lists.values()) == {"atomic", "map", "set"}


def test_fields_follow_the_conventions_of_kubernetes() -> None:
    for path, schema in schemas():
        name = path.rpartition(".")[2]
        assert not re.search(r"(Url|Id|Ttl|Tls|Ca)$", name), path
        assert schema["type"] != "number", path
        if schema["type"] == "integer":
            assert schema["format"] in {"int32", "int64"}, path
        if name.endswith("Time"):
            assert schema.get("format") == "date-time", path
        for word in schema.get("enum", ()):
            assert re.fullmatch(r"[A-Z][A-Za-z0-9]*", word), (path, word)


def test_conditions_are_bounded_like_those_of_kubernetes() -> None:
    by_path = dict(schemas())
    for kind in KINDS:
        if kind.status is None:
            continue
        conditions = by_path[f"{kind.kind}.status.conditions"]
        assert conditions["maxItems"] == 32
        assert conditions["x-kubernetes-list-map-keys"] == ["type"]
        fields = conditions["items"]["properties"]
        assert fields["reason"]["pattern"] == "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"
        assert fields["type"]["maxLength"] == 316
        assert "pattern" in fields["type"]
        assert fields["lastTransitionTime"]["format"] == "date-time"


def test_crd_files_have_no_anchors() -> None:
    for file in COMMITTED.iterdir():
        events = yaml.parse(file.read_text(encoding="utf-8"), yaml.SafeLoader)
        assert not any(getattr(event, "anchor", None) for event in events), file.name


SCHEMAS = {kind.kind: structural(kind.spec) for kind in KINDS}
TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
}
SAYS_NOTHING = {"type", "description", "nullable"}
PLACEHOLDER = re.compile(r"\{(tenant|namespace|other)\}")
"""Placeholders in cases that need an installation."""

ONLY_BY_CEL = {
    "a group of the broker",
    "a source topic that holds records of Replays",
    "a target of Pulsar for a policy of RocketMQ",
    "a target of RocketMQ for a policy of Pulsar",
    "a target that holds records of Replays",
    "a target that is a topic of the broker",
    "ids of Pulsar for an Inspection of RocketMQ",
    "ids of RocketMQ for a policy of Pulsar",
    "one role for Replays and Inspections",
    "an Inspection that runs for days",
    "an audit by Spark",
    "an audit of RocketMQ",
    "an audit that follows messages",
    "an audit with a selection",
    "an Inspection with two results",
    "a destination that is no folder",
    "roles that are too long together",
    "readers that are too long together",
    "a default job template that is not permitted",
    "a connection to two brokers",
    "a connection with two kinds of credentials",
    "a connection without credentials",
    "a dead-letter topic at another tenant's",
    "a dead-letter topic of another tenant",
    "a deadline at once",
    "a delay beyond ten days",
    "a delay level that is too long",
    "a deletion at once",
    "a dry run that is followed",
    "a fixed delay of nothing",
    "a header in an address",
    "a ladder that chooses twice",
    "a ladder that ends before it begins",
    "a pause for an outage that hardly ends",
    "a probe of an outage that comes too seldom",
    "a rate in long periods",
    "a retention that ends before a broker counts",
    "a retention that is not more than the quota",
    "a retention that is too small to be counted",
    "a retry topic in another namespace",
    "a rule that chooses namespaces twice",
    "a rung of nothing",
    "a rung that is too long",
    "a rung that is too long in words",
    "a selection that ends before it begins",
    "a sequence of dead letters that are discarded",
    "a sequence of dead letters without an order",
    "a service URL of another kind",
    "a service address of another protocol",
    "a single partition",
    "a single partition in other digits",
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
    "a time to live of nothing",
    "a time to live that drops retries before their time",
    "a time to live that is too long",
    "a token of two origins",
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
    "an outcome that is followed for no time",
    "an outage breaker that never trips",
    "credentials without those of their type",
    "one partition as a target",
    "retries that expire before they are due",
    "rules of Pulsar beside RocketMQ",
    "two ladders at once",
}
"""Rules beyond a schema: numbers in durations and sizes, relations of two fields, exclusions in
patterns, and values that are not shown because they may hold a secret."""


def is_valid(schema: Mapping[str, Any], value: Any) -> bool:  # noqa: ANN401 - as it is written
    """Return True if *value* passes a validator of JSON Schema and has no unknown fields."""
    if value is None:
        return schema.get("nullable") is True
    if not isinstance(value, TYPES[schema["type"]]):
        return False
    if isinstance(value, bool) and schema["type"] != "boolean":
        return False
    keywords = KEYWORDS.keys() | SAYS_NOTHING
    assert not {key for key in schema.keys() - keywords if not key.startswith("x-kubernetes-")}
    return all(KEYWORDS[key](bound, value) for key, bound in schema.items() if key in KEYWORDS)


def are_valid(fields: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    """Return True if each field of *value* is known and valid."""
    return value.keys() <= fields.keys() and all(
        is_valid(fields[name], content) for name, content in value.items()
    )


def measured(value: Any) -> float:  # noqa: ANN401 - as it is written
    """Return the number that bounds apply to: *value* itself, or its length."""
    return value if isinstance(value, int | float) else len(value)


def is_date(text: str) -> bool:
    """Return True if *text* begins with a day that exists."""
    try:
        date.fromisoformat(text[:10])
    except ValueError:
        return False
    return True


KEYWORDS: dict[str, Callable[[Any, Any], bool]] = {
    "format": lambda bound, value: bound != "date-time" or is_date(value),
    "enum": lambda bound, value: value in bound,
    "pattern": lambda bound, value: re.search(bound, value, re.ASCII) is not None,
    **dict.fromkeys(
        ("minimum", "minLength", "minItems", "minProperties"),
        lambda bound, value: measured(value) >= bound,
    ),
    **dict.fromkeys(
        ("maximum", "maxLength", "maxItems", "maxProperties"),
        lambda bound, value: measured(value) <= bound,
    ),
    "required": lambda bound, value: value.keys() >= set(bound),
    "items": lambda bound, value: all(is_valid(bound, item) for item in value),
    "additionalProperties": lambda bound, value: all(is_valid(bound, v) for v in value.values()),
    "properties": are_valid,
}


def refused_at_admission() -> list[dict[str, Any]]:
    """The cases that an API server refuses, without those with placeholders."""
    cases = [*REFUSED, *(case for cases in bad_input().values() for case in cases)]
    return [
        case
        for case in cases
        if case.get("path", "").startswith("spec") and not PLACEHOLDER.search(str(case["spec"]))
    ]


@pytest.mark.parametrize("kind", VALID)
def test_valid_spec_passes_offline_validation(kind: str) -> None:
    assert is_valid(SCHEMAS[kind], VALID[kind])


def test_offline_validation_accepts_only_what_cel_refuses() -> None:
    cases = refused_at_admission()
    passes = {
        case["case"]
        for case in cases
        if is_valid(SCHEMAS[case["kind"]], VALID[case["kind"]] | case["spec"])
    }
    assert passes == ONLY_BY_CEL
    assert len(cases) > 2 * len(passes)


SPECS = {kind.kind: kind.spec for kind in KINDS}


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused["case"])
def test_invalid_value_is_refused_with_path_value_and_remedy(refused: dict[str, Any]) -> None:
    spec = VALID[refused["kind"]] | refused["spec"]
    with pytest.raises(InvalidSpecError) as refusal:
        parse_spec(SPECS[refused["kind"]], {"spec": spec})
    for words in [refused["path"] + ":", *refused["says"]]:
        assert words in str(refusal.value)
    assert refused.get("never", "\0") not in str(refusal.value)


@pytest.mark.parametrize("kind", VALID)
def test_smallest_spec_is_valid(kind: str) -> None:
    spec = parse_spec(SPECS[kind], {"spec": VALID[kind]})
    assert parse_spec(SPECS[kind], {"spec": spec.to_manifest()}) == spec


def test_all_errors_of_a_spec_are_reported_together() -> None:
    with pytest.raises(InvalidSpecError) as refusal:
        parse_spec(RetryPolicySpec, {"spec": {"topic": "x", "maxRetries": -1}})
    for path in ("spec.connectionRef", "spec.topic", "spec.subscription", "spec.maxRetries"):
        assert f"{path}: " in str(refusal.value)


def test_object_without_spec_lists_its_missing_fields() -> None:
    with pytest.raises(InvalidSpecError, match=r"spec\.topic: is missing"):
        parse_spec(RetryPolicySpec, {})


def test_token_in_wrong_field_is_not_shown() -> None:
    valid = VALID["BrokerConnection"]
    misplaced = {"authentication": {"type": "Token", "token": "eyJ.secret.token"}}
    spec = valid | {"pulsar": valid["pulsar"] | misplaced}
    with pytest.raises(InvalidSpecError) as refusal:
        parse_spec(SPECS["BrokerConnection"], {"spec": spec})
    assert "spec.pulsar.authentication.token" in str(refusal.value)
    assert "secret.token" not in str(refusal.value)


def test_unknown_field_is_named_without_its_value() -> None:
    spec = VALID["BrokerConnection"] | {"password": "hunter2"}
    with pytest.raises(InvalidSpecError, match=r"spec\.password: is not a known field") as refusal:
        parse_spec(SPECS["BrokerConnection"], {"spec": spec})
    assert "hunter2" not in str(refusal.value)

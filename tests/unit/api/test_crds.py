from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from redrive.api import crds
from redrive.api.crds import structural
from redrive.api.model import ApiModel

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


def test_the_committed_crds_are_the_generated_ones(tmp_path: Path) -> None:
    crds.write(tmp_path)
    generated = {file.name: file.read_text(encoding="utf-8") for file in tmp_path.iterdir()}
    committed = {file.name: file.read_text(encoding="utf-8") for file in COMMITTED.iterdir()}
    assert generated == committed, "run: python -m redrive.api.crds crds"


def test_every_field_is_described() -> None:
    undescribed = [
        path
        for path, schema in schemas()
        if "description" not in schema
        and not path.endswith(("metadata", "[]"))  # the list is described
    ]
    assert undescribed == []


def test_schemas_are_structural_and_closed() -> None:
    forbidden = {"$ref", "anyOf", "oneOf", "title"}
    for path, schema in schemas():
        assert schema["type"], path
        assert not forbidden & schema.keys(), path
        assert schema.get("additionalProperties") is not False, path
        assert "x-kubernetes-preserve-unknown-fields" not in schema, path


def test_nothing_is_written_into_an_object_that_its_user_has_left_out() -> None:
    said = {path: schema["default"] for path, schema in schemas() if "default" in schema}
    parts = ("naming", "retry", "deadLetter")
    assert said == {f"RetryPolicy.spec.{part}": {} for part in parts}


def test_whatever_a_user_may_write_is_bounded() -> None:
    for path, schema in schemas():
        if ".spec" not in path:
            continue
        bound = {"string": "maxLength", "array": "maxItems", "integer": "maximum"}
        assert "enum" in schema or bound.get(schema["type"], "type") in schema, path


def test_status_is_a_subresource_and_all_kinds_are_in_the_category() -> None:
    for crd in crds.crds():
        assert crd["spec"]["names"]["categories"] == ["redrive"]
        assert crd["spec"]["versions"][0]["subresources"] == {"status": {}}


def test_a_field_without_description_can_not_be_generated() -> None:
    class Undescribed(ApiModel):
        mystery: str

    with pytest.raises(TypeError, match="mystery"):
        structural(Undescribed)


def test_lists_whose_order_says_nothing_are_sets() -> None:
    sets = {
        path.removesuffix("[]")
        for path, schema in schemas()
        if schema.get("x-kubernetes-list-type") == "set"
    }
    assert sets == {
        "BrokerConnection.spec.redirectHosts",
        "BrokerConnection.spec.allow[].topics",
        "BrokerConnection.spec.allow[].roles",
        "BrokerConnection.spec.allow[].namespaces.names",
        "BrokerConnection.spec.allow[].namespaces.selector.matchExpressions[].values",
        "Replay.spec.confirmations",
        "Replay.spec.select.ids",
        "Replay.spec.select.keys",
        "BrokerConnection.spec.job.imagePullSecrets",
        "BrokerConnection.spec.job.overrides.images",
        "BrokerConnection.spec.job.overrides.sparkConf",
        "RetryPolicy.spec.consumerRoles",
        "RetryPolicy.spec.deadLetter.readerRoles",
    }

"""JSON Schemas of the kinds: valid themselves, and as strict as kubeconform with `-strict`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator, FormatChecker

from release import CHECKOUT
from release.json_schemas import GENERATED
from tests.support.invalid_manifests import VALID, manifest

EXAMPLES = sorted((CHECKOUT / "examples").rglob("*.yaml"))
FILES = {kind.kind: file for file, kind in GENERATED.items()}


def validator(kind: str) -> Draft7Validator:
    """Return the validator of *kind*, with the published schema."""
    schema = json.loads(FILES[kind].read_text("utf-8"))
    return Draft7Validator(schema, format_checker=FormatChecker())


def objects(file: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of redrive in *file*."""
    for body in yaml.safe_load_all(file.read_text("utf-8")):
        if body["kind"] in FILES and body["apiVersion"].startswith("redrive.io/"):
            yield body


@pytest.mark.parametrize("kind", FILES)
def test_schema_is_valid_and_accepts_the_smallest_object(kind: str) -> None:
    schema = validator(kind)
    Draft7Validator.check_schema(schema.schema)
    schema.validate(manifest(kind))
    assert set(FILES) == set(VALID)


def test_examples_are_valid() -> None:
    bodies = [body for file in EXAMPLES for body in objects(file)]
    assert {body["kind"] for body in bodies} == set(FILES)
    for body in bodies:
        validator(body["kind"]).validate(body)


@pytest.mark.parametrize(
    "fields",
    [
        {"maxretries": 3},
        {"maxRetries": "3"},
        {"maxRetries": None},
        {"topic": "orders"},
        {"subscriptionType": "Exclusive"},
        {"deadLetter": {"ttl": "30d"}},
        {"consumerRoles": ["a", "a"]},
    ],
    ids=str,
)
def test_wrong_field_is_refused(fields: dict[str, Any]) -> None:
    assert not validator("RetryPolicy").is_valid(manifest("RetryPolicy", **fields))


def test_empty_optional_object_is_accepted() -> None:
    validator("RetryPolicy").validate(manifest("RetryPolicy", deadLetter=None, retry={}))

"""The API reference: fields, defaults, examples, and the manifests behind them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from redrive.api.crds import KINDS, Kind, structural
from redrive.api.model import parse_spec
from release.api_reference import (
    ApiField,
    all_fields,
    example_of,
    manifests,
    page_of,
    render,
)


def described(text: str, **schema: object) -> ApiField:
    """Return an optional field with a description."""
    return ApiField("spec.a.b", {"type": "string", "description": text, **schema}, False)  # noqa: FBT003


@pytest.mark.parametrize(
    ("text", "default", "meaning"),
    [
        ("A word. Defaults to Never.", "Never", "A word."),
        ("A word. Left out: 16. Example: `3`.", "16", "A word."),
        (
            "A size. Defaults to 1.5 of it, else none. More.",
            "1.5 of it, else none",
            "A size. More.",
        ),
        ("A word without a default.", "", "A word without a default."),
    ],
)
def test_default_is_read_from_the_description(text: str, default: str, meaning: str) -> None:
    field = described(text)
    assert (field.default, field.meaning) == (default, meaning)


def test_limits_show_bounds_values_and_pattern() -> None:
    number = {"type": "integer", "format": "int32", "minimum": 1, "maximum": 9}
    words = {"type": "array", "items": {"type": "string", "enum": ["A", "B"]}, "maxItems": 2}
    assert described("", **number).limits == "1 to 9"
    assert (
        described("", pattern="^a|b$", maxLength=3).limits
        == "at most 3 characters; pattern `^a|b$`"
    )
    sorted_words = described("", **words, **{"x-kubernetes-list-type": "set"})
    assert sorted_words.limits == "at most 2 items; each `A`, `B`"
    assert sorted_words.type == "set of strings"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_every_field_of_a_spec_has_an_example(kind: Kind) -> None:
    bodies = manifests(kind)
    fields = all_fields(structural(kind.spec), "spec")
    assert [field.path for field in fields if example_of(field, bodies) is None] == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_example_manifests_are_valid(kind: Kind) -> None:
    for body in manifests(kind):
        assert body["kind"] == kind.kind
        assert parse_spec(kind.spec, body)


def defaults_of(schema: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and description of each field whose model has a default."""
    for model in (schema, *schema.get("$defs", {}).values()):
        for name, field in model.get("properties", {}).items():
            if field.get("default") not in (None, [], {}) and "description" in field:
                yield f"{model['title']}.{name}", " ".join(field["description"].split())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_description_states_the_default_of_the_model(kind: Kind) -> None:
    defaults = defaults_of(kind.spec.model_json_schema(by_alias=True))
    assert [name for name, text in defaults if not described(text).default] == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_page_names_every_field_of_its_kind(kind: Kind) -> None:
    page = page_of(kind).read_text("utf-8")
    assert page == render(kind)
    for part in ("spec", "status"):
        if model := getattr(kind, part):
            for field in all_fields(structural(model), part):
                assert f"`{field.path.rpartition('.')[2]}`" in page, field.path

"""Generated references: of the API, of the Python API, and JSON Schemas of the kinds."""

from __future__ import annotations

import json
import pydoc
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator, FormatChecker

import redrive
from redrive import middleware, testing
from redrive.api.crds import KINDS, Kind, structural
from redrive.api.model import parse_spec
from redrive.delivery.assembly import RetryOptions
from redrive.delivery.consumers.broadcast import BroadcastOptions
from redrive.delivery.retry_producer import ProducerOptions
from release import CHECKOUT, python_reference
from release.api_reference import (
    ApiField,
    all_fields,
    example_of,
    manifests,
    page_of,
    render,
)
from release.json_schemas import GENERATED
from tests.support.manifests import VALID, manifest
from tests.unit.test_docs import LINK


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


def test_field_that_an_optional_object_needs_is_required() -> None:
    """A rule of the API requires it, because the object may be empty."""
    (kind,) = (kind for kind in KINDS if kind.kind == "BrokerConnection")
    fields = {field.path: field for field in all_fields(structural(kind.spec), "spec")}
    assert fields["spec.pulsar.serviceURL"].is_required
    assert not fields["spec.pulsar.tls"].is_required


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


Pages = Mapping[str, str]
CONSUMERS = "reference/python/consumers.md"


@pytest.fixture(scope="module")
def pages() -> Pages:
    return python_reference.render()


def section(page: str, heading: str) -> str:
    """Return the text below a heading."""
    (text,) = page.split(f"\n## {heading}\n")[1:]
    return text.split("\n## ")[0]


@pytest.mark.parametrize(
    ("module", "public"),
    [
        ("redrive", redrive.__all__),
        ("redrive.middleware", middleware.__all__),
        ("redrive.testing", testing.__all__),
        ("redrive.prometheus", ["HandlerMetrics", "count", "follow"]),
        ("redrive.opentelemetry", ["Tracing", "follow"]),
    ],
)
def test_each_public_name_is_described_once(module: str, public: list[str], pages: Pages) -> None:
    parts = [part for part in python_reference.parts() if part.module == module]
    shared = {"Done"} if module == "redrive.middleware" else set()  # the same as redrive.Done
    assert sorted(name for part in parts for name in part.values) == sorted(set(public) - shared)
    for part in parts:
        page = pages[f"reference/python/{part.page}"]
        for name in part.values:
            assert len(section(page, name).split()) > 4, name


def test_links_of_the_reference_have_targets(pages: Pages) -> None:
    anchors = {
        f"{place}#{line.lstrip('# ').replace('.', '').lower()}"
        for place, text in pages.items()
        for line in text.splitlines()
        if line.startswith("#")
    }
    links = 0
    for place, text in pages.items():
        for link in LINK.findall(text):
            page, hash_sign, anchor = link.partition("#")
            if hash_sign and (page.startswith("python/") or "/" not in page):
                target = str(PurePosixPath(place).parent / page) if page else place
                assert f"{target}#{anchor}" in anchors, f"{place}: {link}"
                links += 1
    assert links > 100


def test_signature_has_options_and_values_of_constants(pages: Pages) -> None:
    consumer = section(pages[CONSUMERS], "RetryConsumer")
    assert "\n    ack_timeout: float | timedelta | None = ...,\n" in consumer
    assert "\n    timeout: float | timedelta | None = timedelta(seconds=60),\n" in consumer
    policy = section(pages["reference/python/policies.md"], "Policy")
    assert "\n    max_retries: int = 16,\n" in policy
    assert "\n    topic: naming.TopicName | str,\n" in policy


@pytest.mark.parametrize(
    ("made", "options"),
    [
        (redrive.RetryConsumer, RetryOptions),
        (redrive.BroadcastConsumer, BroadcastOptions),
        (redrive.RetryProducer, ProducerOptions),
    ],
    ids=lambda value: value.__name__,
)
def test_help_describes_every_option(made: type, options: type) -> None:
    text = pydoc.plain(pydoc.render_doc(made))
    assert [name for name in options.__annotations__ if f"{name}:" not in text] == []


def test_sections_of_a_docstring_become_tables(pages: Pages) -> None:
    receive = section(pages[CONSUMERS], "RetryConsumer").split("### RetryConsumer.receive\n")[1]
    assert "| error | meaning |\n|---|---|\n| [`ConsumerStoppedError`](errors.md#" in receive


def test_inherited_members_are_described_at_their_base(pages: Pages) -> None:
    tests = section(pages["reference/python/tests-without-a-broker.md"], "InMemoryConsumer")
    assert "Base: [`RetryConsumer`](consumers.md#retryconsumer)." in tests
    assert "### InMemoryConsumer.dead_letters" in tests
    assert "### InMemoryConsumer.reconsume_later" not in tests


def test_example_in_a_docstring_is_a_block_of_code() -> None:
    blocks = list(
        python_reference.blocks_of(
            "Do it.\n\n    do(it)\n\nRaises:\n    OSError: no.\n        It.\n"
        )
    )
    assert blocks[:2] == ["Do it.", "```python\ndo(it)\n```"]
    assert blocks[2] == "| error | meaning |\n|---|---|\n| `OSError` | no. It. |"

"""The API reference: one page per kind, from its model and `examples/03-every-field`.

`python -m release` writes `docs/reference/api/`. Descriptions come from the docstrings of the
models: a sentence that begins with "Defaults to" or "Left out:" is the default of a field, one that
begins with "Example:" its example. Other examples are the values that the manifests have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from redrive.api import API_VERSION
from redrive.api.crds import IS_REQUIRED, KINDS, Column, Kind, structural
from release import CHECKOUT

PAGES = CHECKOUT / "docs" / "reference" / "api"
EXAMPLES = CHECKOUT / "examples" / "03-every-field"
LONGEST = 60
"""Characters of an example in a table; a longer one is only in the manifest."""
Schema = Mapping[str, Any]
_DEFAULT = re.compile(r"(?:^|(?<=[.:] ))(?:Defaults to|Left out:) (.+?)[.](?= [A-Z`]|$)")
_EXAMPLES = re.compile(r"(?:^|(?<=[.:] ))Examples?: (.+?)[.](?= [A-Z`]|$)")
_BESIDE = re.compile(rf"`(\w+)` {IS_REQUIRED}")


_INTRODUCTION = """API version `{version}`; names for `kubectl`: {names}.
`kubectl explain {kind}.spec --recursive` lists the same fields.

Generated from the models by `python -m release`.

- Absent, `null` and `{{}}` mean the same for an optional object.
- Nothing adds defaults to a stored object: the operator applies them when it reads it.
- The name of an object has at most 63 characters."""


@dataclass(frozen=True)
class ApiField:
    """One field of a kind, as the reference shows it.

    Attributes:
        path: from `spec` or `status` on; `[]` stands for each item of a list.
        is_required: the object that has the field must have it.
    """

    path: str
    schema: Schema
    is_required: bool

    @property
    def inner(self) -> Schema:
        """Return the schema of the object, or of the objects in the list; itself for others."""
        inner: Schema = self.schema.get("items", self.schema)
        return inner

    @property
    def inner_path(self) -> str:
        """Return the path of the section with the fields of the object."""
        return f"{self.path}[]" if self.schema["type"] == "array" else self.path

    @property
    def type(self) -> str:
        """Return the type in words."""
        return _type(self.schema)

    @property
    def default(self) -> str:
        """Return the default; empty if the field is required or has none."""
        match = _DEFAULT.search(self.schema["description"])
        return "" if match is None else match[1]

    @property
    def limits(self) -> str:
        """Return bounds, values and the pattern of the value."""
        return "; ".join(_limits(self.schema))

    @property
    def meaning(self) -> str:
        """Return the description without default and example."""
        text = _DEFAULT.sub("", self.schema["description"])
        return " ".join(_EXAMPLES.sub("", " ".join(text.split())).split())


def _type(schema: Schema) -> str:
    match schema:
        case {"type": "array", "items": items}:
            kinds = {"set": "set of", "map": "list by name of", "atomic": "list of"}
            return f"{kinds[schema['x-kubernetes-list-type']]} {_plural(_type(items))}"
        case {"type": "object", "additionalProperties": values}:
            return f"map of {_plural(_type(values))}"
        case {"format": str() as form, "type": "string"}:
            return f"string ({form})"
        case {"format": str() as form}:
            return form
        case _:
            return str(schema["type"])


def _plural(name: str) -> str:
    word, _, rest = name.partition(" ")
    return f"{word}s {rest}".strip()


def _limits(schema: Schema) -> Iterator[str]:
    if "enum" in schema:
        yield ", ".join(f"`{word}`" for word in schema["enum"])
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is not None or most is not None:
        yield " to ".join(str(bound) for bound in (least, most) if bound is not None)
    for name, unit in (("Items", "items"), ("Length", "characters"), ("Properties", "entries")):
        if (count := schema.get(f"max{name}")) is not None and "enum" not in schema:
            yield f"at most {count} {unit}"
    if "pattern" in schema and schema.get("format") != "date-time":
        yield f"pattern `{schema['pattern']}`"
    if (items := schema.get("items")) is not None and "properties" not in items:
        yield from (f"each {limit}" for limit in _limits(items))


def required_of(schema: Schema) -> list[str]:
    """Return the fields that an object must have; an optional one has a rule for each."""
    messages = (rule["message"] for rule in schema.get("x-kubernetes-validations", ()))
    beside = (match[1] for match in map(_BESIDE.match, messages) if match)
    return [*schema.get("required", ()), *beside]


def fields_of(schema: Schema, path: str) -> Iterator[ApiField]:
    """Yield the fields of the object at *path*, without those of inner objects."""
    required = required_of(schema)
    for name, field in schema.get("properties", {}).items():
        yield ApiField(f"{path}.{name}", field, name in required)


def all_fields(schema: Schema, path: str) -> Iterator[ApiField]:
    """Yield the fields at *path* and of all inner objects, each before its own."""
    for field in fields_of(schema, path):
        yield field
        yield from all_fields(field.inner, field.inner_path)


def manifests(kind: Kind) -> list[dict[str, Any]]:
    """Return the example manifests of a kind, which together have every field of its spec."""
    return list(yaml.safe_load_all(_example_file(kind).read_text("utf-8")))


def _example_file(kind: Kind) -> Path:
    return EXAMPLES / f"{kind.kind.lower()}.yaml"


def example_of(field: ApiField, bodies: list[dict[str, Any]]) -> object:
    """Return the first value of *field* in manifests; None if none has it."""
    steps = field.path.replace("[]", ".[]").split(".")
    values = (value for body in bodies for value in _at(body, steps))
    return next(values, None)


def _at(value: Any, steps: list[str]) -> Iterator[Any]:  # noqa: ANN401  a part of a manifest
    if not steps:
        yield value
    elif steps[0] == "[]":
        for item in value:
            yield from _at(item, steps[1:])
    elif steps[0] in value:
        yield from _at(value[steps[0]], steps[1:])


def page_of(kind: Kind) -> Path:
    """Return the file with the reference of a kind."""
    return PAGES / f"{kind.kind.lower()}.md"


def render(kind: Kind) -> str:
    """Return the page of one kind."""
    bodies = manifests(kind)
    names = ", ".join(f"`{name}`" for name in (kind.plural, *kind.short_names))
    parts = [
        f"# {kind.kind}",
        kind.description,
        _INTRODUCTION.format(names=names, kind=kind.kind.lower(), version=API_VERSION),
        "## Example",
        "Together, these manifests have every field. Most objects need few of them.",
        f"```yaml\n{_example_file(kind).read_text('utf-8')}```",
        *_columns(kind.columns),
        *_sections(structural(kind.spec), "spec", bodies),
    ]
    if kind.status is not None:
        parts += _sections(structural(kind.status), "status", [])
    return "\n\n".join(parts) + "\n"


def _columns(columns: tuple[Column, ...]) -> Iterator[str]:
    rows = [
        f"| {column.name} | `{column.path}` | {'`-o wide` only' if column.wide else 'always'} | "
        f"{_cell(column.description)} |"
        for column in columns
    ]
    yield "## Columns of kubectl get"
    yield "\n".join(["| column | field | shown | meaning |", "|---|---|---|---|", *rows])


def _sections(schema: Schema, path: str, bodies: list[dict[str, Any]]) -> Iterator[str]:
    level = "##" if "." not in path else "###"
    yield f"{level} {path}"
    yield str(schema["description"])
    fields = list(fields_of(schema, path))
    has_examples = bool(bodies)
    head = ["field", "type", "default", "limits", "meaning"] + ["example"] * has_examples
    rows = [
        "| " + " | ".join(map(_cell, _row(field, bodies)[: len(head)])) + " |" for field in fields
    ]
    yield "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows])
    messages = [rule["message"] for rule in schema.get("x-kubernetes-validations", ())]
    if others := [message for message in messages if not _BESIDE.match(message)]:
        yield "Rules:"
        yield "\n".join(f"- {message}" for message in dict.fromkeys(others))
    for field in fields:
        if "properties" in field.inner:
            yield from _sections(field.inner, field.inner_path, bodies)


def _row(field: ApiField, bodies: list[dict[str, Any]]) -> list[str]:
    name = field.path.rpartition(".")[2]
    linked = f"[`{name}`](#{anchor(field.inner_path)})" if "properties" in field.inner else ""
    default = "required" if field.is_required else field.default or "none"
    if field.path.startswith("status."):
        default = "" if field.is_required else field.default
    return [linked or f"`{name}`", field.type, default, field.limits, field.meaning,
            _example(field, bodies)]  # fmt: skip


def _example(field: ApiField, bodies: list[dict[str, Any]]) -> str:
    stated = _EXAMPLES.search(field.schema["description"])
    if stated is not None:
        return stated[1]
    value = example_of(field, bodies)
    if value is None or isinstance(value, dict) or "properties" in field.inner:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"`{text}`" if len(text) <= LONGEST else ""


def anchor(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


GENERATED = {page_of(kind): kind for kind in KINDS}

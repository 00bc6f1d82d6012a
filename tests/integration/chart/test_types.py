"""Types of the rendered fields: texts that look like numbers stay texts, and integers integers."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from sandbox import chart

SCHEMA = json.loads((chart.CHART / "values.schema.json").read_text("utf-8"))
FIXED: dict[str, Any] = {
    "crds": {"install": False},
    "extraObjects": [],
    "livenessProbe": {"successThreshold": 1},
    "namespaces": ["12"],
    "prometheusRule": {"alerts": {}},
    "replay": {"namespaces": ["12"]},
    "serviceMonitor": {"enabled": False},
}
"""Values that others exclude or determine, and of objects that are not the chart's."""


@dataclass
class Values:
    """Values for all that the schema of the chart describes.

    Attributes:
        texts: formats of texts, the preferred first. Their numbers differ.
        most: the highest integer.
    """

    texts: tuple[str, ...]
    most: int
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(101))

    def all(self) -> dict[str, Any]:
        """Return the values of the chart."""
        return merged(self._mapping(SCHEMA), FIXED)

    def _value(self, schema: dict[str, Any]) -> Any:  # noqa: ANN401  any JSON
        """Return a value that *schema* admits; None if no text does."""
        if "$ref" in schema:
            return self._value(SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]])
        if "const" in schema or "enum" in schema:
            return schema["const"] if "const" in schema else schema["enum"][0]
        kind = schema.get("type", "anyOf" if "anyOf" in schema else "null")
        makers: dict[str, Callable[[dict[str, Any]], Any]] = {
            "anyOf": lambda schema: self._value(schema["anyOf"][0]),
            "array": self._list,
            "boolean": lambda _: True,
            "integer": lambda schema: min(self.most, schema.get("maximum", self.most)),
            "object": lambda schema: self._mapping(schema) or None,
            "string": self._text,
        }
        maker = makers.get(kind if isinstance(kind, str) else kind[0])
        return maker and maker(schema)

    def _list(self, schema: dict[str, Any]) -> list[Any] | None:
        item = self._value(schema.get("items", {}))
        return None if item is None else [item]

    def _text(self, schema: dict[str, Any]) -> str | None:
        texts = (text.format(next(self._numbers)) for text in self.texts)
        pattern = re.compile(schema.get("pattern", ""))
        return next((text for text in texts if pattern.search(text)), None)

    def _mapping(self, schema: dict[str, Any]) -> dict[str, Any]:
        fields = {name: self._value(body) for name, body in schema.get("properties", {}).items()}
        if isinstance(others := schema.get("additionalProperties"), dict):
            fields["any"] = self._value(others)
        return {name: value for name, value in fields.items() if value is not None}


def merged(values: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Return *values* with those of *others*, which have priority; `{}` replaces a mapping."""
    changes = {
        name: merged(values.get(name, {}), value) if isinstance(value, dict) and value else value
        for name, value in others.items()
    }
    return values | changes


def types(body: Any, path: str) -> Iterator[str]:  # noqa: ANN401  any JSON
    """Yield path and type of each scalar; a key that a value names counts by its type."""
    if isinstance(body, dict):
        for key, value in body.items():
            is_named = not isinstance(key, str) or re.fullmatch("a?[0-9]+", key)
            yield from types(value, f"{path}.{type(key).__name__ if is_named else key}")
    elif isinstance(body, list):
        for item in body:
            yield from types(item, f"{path}[]")
    else:
        yield f"{path}: {type(body).__name__}"


def types_of_rendered(values: Values, release: str, namespace: str) -> Counter[str]:
    """Count the types of all scalars of the rendered chart by their paths."""
    bodies = chart.render(values.all(), release=release, namespace=namespace)
    return Counter(line for body in bodies for line in types(body, body["kind"]))


def test_texts_like_numbers_render_as_texts() -> None:
    """Namespaces and releases are often named after a commit or the number of a pull request."""
    plain = types_of_rendered(Values(("a{}",), most=3), "a2024", "a77")
    numeric = types_of_rendered(Values(("{}", "true"), most=2_000_000), "2024", "77")
    assert sorted(numeric - plain) == []
    assert numeric == plain

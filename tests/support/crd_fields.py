"""The leaf fields of a CustomResourceDefinition, and specs that hold valid values of each.

What may stand in a field is read from the CRD: enumerations, bounds, patterns, which fields exclude
each other, and what CEL compares with the object before. The model of the kind tells which of the
candidates its other rules let pass; `tests/integration/api` holds model and API server to the same.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import re
import string
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from redrive.api import Body
from redrive.api.crds import KINDS
from redrive.api.model import parse_spec
from redrive.errors import InvalidSpecError

CRDS = Path(__file__).parents[2] / "crds"
ITEM = "[]"
"""A step of a path: any item of a list."""
_ALPHABET = string.ascii_letters + string.digits + "-._:/+"
_SAMPLES = 80
_SHORT, _LONG = 4, 40
_TRIES = 400
_FILLED = 8
"""Of so many values one is filled in beside a field: of two fields all pairs are tried."""
Schema = Mapping[str, Any]


@dataclass(frozen=True)
class SpecField:
    """A field that holds no fields of its own: a scalar, a list of scalars, or a map.

    Attributes:
        steps: the path to it.
        required: whether an object that has what it lies in has the field too.
        immutable: whether a rule compares it, or what it lies in, with the object before.
    """

    steps: tuple[str, ...]
    schema: Schema
    required: bool
    immutable: bool

    def of(self, spec: Any) -> Any:  # noqa: ANN401 - whatever stands there
        """Return its value in *spec*; None where it has none."""
        for step in self.steps:
            if not spec:
                return None
            spec = spec[0] if step == ITEM else spec.get(step)
        return spec

    def __str__(self) -> str:
        return ".".join(self.steps).replace(f".{ITEM}", ITEM)


@dataclass(frozen=True)
class SpecFields:
    """The fields of one kind, and how values of them are found.

    Args:
        kind: for example `RetryPolicy`.
        given: path → values of fields for which any value of the right form is not enough, because
            they name something that has to be there.
    """

    kind: str
    given: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @functools.cached_property
    def schema(self) -> Schema:
        """The schema of the spec."""
        for file in CRDS.glob("*.yaml"):
            crd = yaml.safe_load(file.read_text(encoding="utf-8"))
            if crd["spec"]["names"]["kind"] == self.kind:
                (version,) = crd["spec"]["versions"]
                found: Schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
                return found
        raise LookupError(self.kind)

    @functools.cached_property
    def all(self) -> tuple[SpecField, ...]:
        """Each leaf, in the order of the CRD."""
        return tuple(_leaves(self.schema, (), required=True, immutable=False))

    def specs(self, leaf: SpecField, base: Body, most: int) -> list[Body]:
        """Up to *most* valid specs that are *base* but for *leaf*, in which all differ.

        What the field excludes is left out, and what it needs beside it is filled in.
        """
        found: list[Body] = []
        values = [leaf.of(base)]
        for value in itertools.islice(self._values(leaf), _TRIES):
            if value in values:
                continue
            specs = (self._with(base, leaf, value, choice) for choice in range(_FILLED**2))
            if (spec := next(filter(self.is_valid, specs), None)) is not None:
                found.append(spec)
                values.append(value)
            if len(found) == most:
                break
        return found

    def is_valid(self, spec: Body) -> bool:
        """Whether the model of the kind reads *spec*."""
        (model,) = (kind.spec for kind in KINDS if kind.kind == self.kind)
        try:
            parse_spec(model, {"spec": spec})
        except InvalidSpecError:
            return False
        return True

    def _values(self, leaf: SpecField) -> Iterable[Any]:
        return self.given[str(leaf)] if str(leaf) in self.given else _values(leaf.schema)

    def _with(self, base: Body, leaf: SpecField, value: object, choice: int) -> Body:
        """Put *value* into a copy of *base*.

        Args:
            choice: which values are filled in: its digits to the base of `_FILLED`.
        """
        spec: Any = copy.deepcopy(dict(base))
        digits = (choice // _FILLED**place % _FILLED for place in itertools.count())
        node, schema = spec, self.schema
        for index, step in enumerate(leaf.steps):
            last = index == len(leaf.steps) - 1
            if step == ITEM:
                node.extend([{}] if not node else [])
                node, schema = node[0], schema["items"]
                self._fill(node, schema, leaf.steps[: index + 1], digits, leaf.steps[index + 1])
                continue
            for other in _excluded(schema, step):
                node.pop(other, None)
            schema = schema["properties"][step]
            if last:
                node[step] = value
                break
            node = node.setdefault(step, [] if schema["type"] == "array" else {})
            if schema["type"] == "object":
                self._fill(node, schema, leaf.steps[: index + 1], digits, leaf.steps[index + 1])
        return dict(spec)

    def _fill(
        self,
        node: dict[str, Any],
        schema: Schema,
        steps: tuple[str, ...],
        digits: Iterator[int],
        but: str = "",
    ) -> None:
        """Give *node* the fields that it has to have, except one; *digits* say which values."""
        for name in schema.get("required", ()):
            if name == but or name in node:
                continue
            inner = schema["properties"][name]
            if "properties" in inner:
                self._fill(node.setdefault(name, {}), inner, (*steps, name), digits)
                continue
            leaf = SpecField((*steps, name), inner, required=True, immutable=False)
            values = list(itertools.islice(self._values(leaf), _FILLED))
            node[name] = values[next(digits) % len(values)]


def _leaves(
    schema: Schema, steps: tuple[str, ...], *, required: bool, immutable: bool
) -> Iterator[SpecField]:
    compared = set(_compared(schema))
    immutable = immutable or () in compared
    match schema:
        case {"type": "array", "items": {"properties": _}}:
            inner = (*steps, ITEM)
            yield from _leaves(schema["items"], inner, required=False, immutable=immutable)
        case {"properties": properties} if properties:
            needed = schema.get("required", ())
            for name, inner_schema in properties.items():
                yield from _leaves(
                    inner_schema,
                    (*steps, name),
                    required=name in needed,
                    immutable=immutable or any(path[:1] == (name,) for path in compared),
                )
        case _:
            yield SpecField(steps, schema, required, immutable)


def _rules(schema: Schema) -> Iterator[str]:
    for validation in schema.get("x-kubernetes-validations", ()):
        yield validation["rule"]


def _compared(schema: Schema) -> Iterator[tuple[str, ...]]:
    """Yield what the rules of an object compare with the object before, as paths below it."""
    for rule in _rules(schema):
        for path in re.findall(r"\boldSelf((?:\.\w+)*)(?!\()\b", rule):
            yield tuple(path.split(".")[1:])


def _excluded(schema: Schema, name: str) -> Iterator[str]:
    """Yield the fields that are not given where *name* is: of these exactly one is."""
    for rule in _rules(schema):
        if rule.endswith(".filter(given, given).size() == 1"):
            choices = re.findall(r"has\(self\.(\w+)\)", rule)
            yield from (other for other in choices if name in choices and other != name)


def _values(schema: Schema) -> Iterator[Any]:  # noqa: C901 - a case for each type
    """Yield candidates for one field, by its own schema."""
    match schema:
        case {"enum": values}:
            yield from values
        case {"type": "boolean"}:
            yield from (True, False)
        case {"type": "integer"}:
            least = schema.get("minimum", 0)
            yield from range(least, least + 5)
            if (most := schema.get("maximum")) is not None:
                yield from range(most, most - 5, -1)
        case {"type": "number"}:
            yield from (0.25, 0.5, 1.5, 2.5, 3.5)
        case {"type": "string"}:
            yield from _texts(_pattern(schema), schema.get("maxLength", 20))
        case {"type": "array", "items": items}:
            previous: list[Any] = []
            for value in _values(items):
                yield [value]
                if previous:
                    yield [value, *previous]
                previous = [value]
        case {"additionalProperties": items}:
            for value in _values(items):
                yield {"key": value}
        case {"type": "object"}:
            yield {}


def _pattern(schema: Schema) -> str | None:
    """Return the form of a text: its pattern, or the one that a rule matches it with."""
    if "pattern" in schema:
        found: str = schema["pattern"]
        return found
    matched = (re.fullmatch(r"self\.matches\((\".*\")\)", rule) for rule in _rules(schema))
    return next((json.loads(match[1]) for match in matched if match), None)


@functools.cache
def _texts(pattern: str | None, longest: int) -> tuple[str, ...]:
    """Return texts of a form; a number in them begins with no 0.

    Short ones come first: of those more are within bounds that only a model knows.
    """
    texts = (
        st.text(string.ascii_lowercase, min_size=1)
        if pattern is None
        else st.from_regex(re.compile(pattern, re.ASCII), fullmatch=True, alphabet=_ALPHABET)
    )
    found: dict[str, None] = {}

    def collect(most: int) -> None:
        @settings(
            max_examples=_SAMPLES,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            deadline=None,
        )
        @given(texts.filter(lambda text: 0 < len(text) <= most))
        def take(text: str) -> None:
            if not re.search(r"(?<!\d)0", text):
                found[text] = None

        with suppress(Unsatisfiable):
            take()

    for most in (_SHORT, _LONG):
        collect(min(longest, most))
    return tuple(found)

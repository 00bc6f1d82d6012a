"""The leaf fields of a CustomResourceDefinition, and specs that hold valid values of each.

The valid values are read from the CRD: enumerations, bounds, patterns, mutually exclusive
fields, and CEL comparisons with the old object. The model of the kind rejects candidates by its
other rules; `tests/integration/api` proves that model and API server agree.
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
from release.api_reference import required_of

CRDS = Path(__file__).parents[2] / "crds"
ITEM = "[]"
"""A step of a path: any item of a list."""
_TYPE = "type"
"""The field that decides which of its neighbours is set, where one does."""
_ALPHABET = string.ascii_letters + string.digits + "-._:/+"
_BEGIN_OF_PATH = r"^(?:\$"
"""Begin of the pattern of paths to fields of a payload, which have further characters."""
_SAMPLES = 25
_SHORT, _LONG = 4, 40
_TRIES = 400
_FILLED = 8
"""The number of values of a required neighbour field that are tried, in all pairs."""
Schema = Mapping[str, Any]


@dataclass(frozen=True)
class SpecField:
    """A field without inner fields: a scalar, a list of scalars, or a map.

    Attributes:
        steps: the path to it.
        required: the parent of the field requires it.
        immutable: a rule compares it, or a parent, with the old object.
    """

    steps: tuple[str, ...]
    schema: Schema
    required: bool
    immutable: bool

    def of(self, spec: Any) -> Any:  # noqa: ANN401 - any value
        """Return its value in *spec*; None if it is not set."""
        for step in self.steps:
            if not spec:
                return None
            spec = spec[0] if step == ITEM else spec.get(step)
        return spec

    def __str__(self) -> str:
        return ".".join(self.steps).replace(f".{ITEM}", ITEM)


@dataclass(frozen=True)
class SpecFields:
    """The fields of one kind, and their valid values.

    Args:
        kind: for example `RetryPolicy`.
        given: path → values of fields that refer to existing objects, for which a valid form is not
            enough.
    """

    kind: str
    given: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @functools.cached_property
    def schema(self) -> Schema:
        """The schema of the spec."""
        return _schemas()[self.kind]

    @functools.cached_property
    def all(self) -> tuple[SpecField, ...]:
        """Each leaf, in the order of the CRD."""
        return tuple(_leaves(self.schema, (), required=True, immutable=False))

    def specs(self, leaf: SpecField, base: Body, most: int) -> list[Body]:
        """Return up to *most* valid specs that differ from *base* and each other only in *leaf*.

        Fields that it excludes are removed, and fields that it requires are added.
        """
        results: list[Body] = []
        values = [leaf.of(base)]
        for value in itertools.islice(self._values(leaf), _TRIES):
            if value in values:
                continue
            specs = (self._with(base, leaf, value, choice) for choice in range(_FILLED**2))
            if (spec := next(filter(self.is_valid, specs), None)) is not None:
                results.append(spec)
                values.append(value)
            if len(results) == most:
                break
        return results

    def is_valid(self, spec: Body) -> bool:
        """Return True if the model of the kind accepts *spec*."""
        (model,) = (kind.spec for kind in KINDS if kind.kind == self.kind)
        try:
            parse_spec(model, {"spec": spec})
        except InvalidSpecError:
            return False
        return True

    def _values(self, leaf: SpecField) -> Iterable[Any]:
        return self.given[str(leaf)] if str(leaf) in self.given else _values(leaf.schema)

    def _with(self, base: Body, leaf: SpecField, value: object, choice: int) -> Body:
        """Return a copy of *base* with *value*.

        Args:
            choice: the values of required fields, as digits to the base of `_FILLED`.
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
            self._choose(node, schema, leaf.steps[:index], step, value if last else None, digits)
            schema = schema["properties"][step]
            if last:
                node[step] = value
                break
            node = node.setdefault(step, [] if schema["type"] == "array" else {})
            if schema["type"] == "object":
                self._fill(node, schema, leaf.steps[: index + 1], digits, leaf.steps[index + 1])
        return dict(spec)

    def _choose(  # noqa: PLR0913, PLR0917  one node
        self,
        node: dict[str, Any],
        schema: Schema,
        steps: tuple[str, ...],
        step: str,
        value: object,
        digits: Iterator[int],
    ) -> None:
        """Where a type decides which field is set, keep the type and that field alone in *node*.

        Args:
            step: the type, which gets *value*, or the field that it decides on.
        """
        fields = _fields_by_type(schema)
        chosen = value if step == _TYPE else {f: t for t, f in fields.items()}.get(step)
        if not fields or chosen is None:
            return
        node[_TYPE] = chosen
        for other in fields.keys() - {chosen}:
            node.pop(fields[other], None)
        if step == _TYPE and chosen in fields:
            name = fields[chosen]
            inner = schema["properties"][name]
            self._fill(node.setdefault(name, {}), inner, (*steps, name), digits)

    def _fill(
        self,
        node: dict[str, Any],
        schema: Schema,
        steps: tuple[str, ...],
        digits: Iterator[int],
        but: str = "",
    ) -> None:
        """Add the required fields of *node* except one, with values chosen by *digits*.

        An object that requires none gets its first one: an empty object counts as absent.
        """
        for name in required_of(schema) or ([] if but else [*schema["properties"]][:1]):
            if name == but or name in node:
                continue
            inner = schema["properties"][name]
            if "properties" in inner:
                self._fill(node.setdefault(name, {}), inner, (*steps, name), digits)
                continue
            leaf = SpecField((*steps, name), inner, required=True, immutable=False)
            values = list(itertools.islice(self._values(leaf), _FILLED))
            node[name] = values[next(digits) % len(values)]


@functools.cache
def _schemas() -> Mapping[str, Schema]:
    """Return the schema of the spec of each kind."""
    schemas: dict[str, Schema] = {}
    for file in CRDS.glob("*.yaml"):
        crd = yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader)
        (version,) = crd["spec"]["versions"]
        schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
        schemas[crd["spec"]["names"]["kind"]] = schema
    return schemas


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
            needed = required_of(schema)
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
    """Yield the paths that the rules of an object compare with the old object."""
    for rule in _rules(schema):
        for path in re.findall(r"\boldSelf((?:\.\w+)*)(?!\()\b", rule):
            yield tuple(path.split(".")[1:])


def _excluded(schema: Schema, name: str) -> Iterator[str]:
    """Yield the fields that *name* excludes: one of them is set at most."""
    for rule in _rules(schema):
        if re.search(r"\.filter\(given, given\)\.size\(\) (==|<=) 1$", rule):
            choices = re.findall(r"has\(self\.(\w+)\)", rule)
            yield from (other for other in choices if name in choices and other != name)


def _fields_by_type(schema: Schema) -> dict[object, str]:
    """Return the field that each type has, where a type decides which field is set."""
    text = " ".join(_rules(schema))
    return dict(re.findall(rf"\(self\.{_TYPE} == '(\w+)'\) == \(has\(self\.(\w+)\)", text))


def _values(schema: Schema) -> Iterator[Any]:  # noqa: C901 - a case for each type
    """Yield candidates for one field by its schema."""
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
    """Return the pattern of a text, from its schema or from a rule."""
    if "pattern" in schema:
        pattern: str = schema["pattern"]
        return pattern
    matched = (re.fullmatch(r"self\.matches\((\".*\")\)", rule) for rule in _rules(schema))
    return next((json.loads(match[1]) for match in matched if match), None)


@functools.cache
def _texts(pattern: str | None, longest: int) -> tuple[str, ...]:
    """Return texts that match a pattern, with numbers without leading zeros.

    Short texts come first, because more of them are within the bounds of the model.
    """
    is_path = pattern is not None and pattern.startswith(_BEGIN_OF_PATH)
    alphabet = _ALPHABET + "$[*]" if is_path else _ALPHABET
    texts = (
        st.text(string.ascii_lowercase, min_size=1)
        if pattern is None
        else st.from_regex(re.compile(pattern, re.ASCII), fullmatch=True, alphabet=alphabet)
    )
    samples: dict[str, None] = {}

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
                samples[text] = None

        with suppress(Unsatisfiable):
            take()

    for most in (_SHORT, _LONG):
        if _shortest(pattern) <= most:  # or each text that is made would be rejected
            collect(min(longest, most))
    return tuple(samples)


def _shortest(pattern: str | None) -> int:
    """Return the length of the shortest text that matches."""
    width: int = re._parser.parse(pattern or "").getwidth()[0]  # noqa: SLF001 - not public
    return width

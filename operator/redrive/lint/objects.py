"""Checks of one object, whatever else exists.

The models that the operator reads objects with check each spec, and its parser checks
`select.where`. Added are rules of the API server that no model has: types, unknown fields,
duplicates and names of objects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import yaml

from redrive.api import API_VERSION, Body
from redrive.api.annotations import is_dead_letter_annotation
from redrive.api.conditions import moment_of
from redrive.api.crds import KINDS, Kind, structural
from redrive.api.model import FieldProblem, field_problems, is_empty
from redrive.errors import InvalidSpecError
from redrive.kube import resources
from redrive.lint.manifests import FieldPath, Manifest
from redrive.lint.rules import IDS, Finding, LintRule, concerned, finding_at, nearest, suggestion

ANNOTATIONS = (
    resources.DEAD_LETTER_NOW,
    resources.HAND_OVER_TO,
    resources.IGNORE_OUTAGES_UNTIL,
    resources.PAUSE,
    resources.RECONCILE_REQUESTED_AT,
    resources.REQUESTED_BY,
    resources.SKIP_CLEANUP,
    resources.TAKE_OVER_FROM,
    resources.UNLOAD_REQUESTED_AT,
    resources.USABLE_BY,
)
"""Annotations that users write."""
_VALUES: Mapping[str, tuple[str, Callable[[str], bool]]] = {
    resources.PAUSE: ("true or false", lambda text: text in {"true", "false"}),
    **dict.fromkeys(
        (resources.IGNORE_OUTAGES_UNTIL, resources.UNLOAD_REQUESTED_AT),
        ("a time like 2026-11-27T12:00:00Z", lambda text: moment_of(text) is not None),
    ),
    resources.DEAD_LETTER_NOW: (
        "ORIGIN@TIME like 4711:3:0@2026-11-27T12:00:00Z, separated by spaces",
        is_dead_letter_annotation,
    ),
}
"""Annotation with a form → the form, and a function that returns True if a value has an effect."""
_WRITTEN_BY_OPERATOR = "application ended-at in-use launched-at".split()
_KINDS: Mapping[str, Kind] = {kind.kind: kind for kind in KINDS}
_TOP_LEVEL = frozenset({"apiVersion", "kind", "metadata", "spec", "status"})
_METADATA = frozenset(
    "annotations creationTimestamp deletionGracePeriodSeconds deletionTimestamp finalizers "
    "generateName generation labels managedFields name namespace ownerReferences resourceVersion "
    "selfLink uid".split()
)
_MAX_NAME = 63
_OBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "boolean": bool,
}
_TYPE_NAMES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer"}
_RULES_BY_TYPE = {"missing": LintRule.MISSING_FIELD, "extra_forbidden": LintRule.UNKNOWN_FIELD}


def check_object(manifest: Manifest) -> Iterator[Finding]:
    """Yield the findings in one object, whatever else exists."""
    for name, position in manifest.duplicate_keys():
        problem = f"the key {name} is there already, and only the last value counts; remove one"
        yield Finding(LintRule.DUPLICATE_KEY, position, name, problem, manifest.title)
    yield from _check_disabling(manifest)
    if manifest.api_version != API_VERSION:
        yield finding_at(
            manifest,
            LintRule.API_VERSION,
            ("apiVersion",),
            f"`apiVersion` of redrive's kinds must be {API_VERSION}; "
            f"got {manifest.api_version!r}; write {API_VERSION}",
        )
    kind = _KINDS.get(manifest.kind)
    if kind is None:
        yield finding_at(
            manifest,
            LintRule.UNKNOWN_KIND,
            ("kind",),
            f"redrive has no such kind; got {manifest.kind!r}; {suggestion(manifest.kind, _KINDS)}",
        )
        return
    yield from _check_metadata(manifest)
    yield from _check_spec(manifest, kind)


def _check_disabling(manifest: Manifest) -> Iterator[Finding]:
    for line, rules in manifest.disabled.items():
        for rule in sorted(rules - IDS):
            position = manifest.position(())._replace(line=line or manifest.position(()).line)
            problem = f"a comment disables an unknown rule; got {rule!r}; {suggestion(rule, IDS)}"
            yield Finding(LintRule.UNKNOWN_RULE, position, "", problem, manifest.title)


def _check_metadata(manifest: Manifest) -> Iterator[Finding]:
    for name in manifest.body.keys() - _TOP_LEVEL:
        yield unknown_field(manifest, (name,), _TOP_LEVEL)
    metadata = manifest.body.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        yield _wrong_type(manifest, ("metadata",), "object", metadata)
        return
    for name in manifest.metadata.keys() - _METADATA:
        yield unknown_field(manifest, ("metadata", name), _METADATA)
    yield from _check_name(manifest)
    yield from _check_labels(manifest)


def _check_name(manifest: Manifest) -> Iterator[Finding]:
    name, path = manifest.metadata.get("name"), ("metadata", "name")
    if name is None:
        if "generateName" not in manifest.metadata:
            yield finding_at(
                manifest, LintRule.OBJECT_NAME, path, "`metadata.name` is missing; add it"
            )
    elif not isinstance(name, str):
        yield _wrong_type(manifest, path, "string", name)
    elif len(name) > _MAX_NAME or not _OBJECT_NAME.fullmatch(name):
        yield finding_at(
            manifest,
            LintRule.OBJECT_NAME,
            path,
            "`metadata.name` must be lower-case letters, digits, '-' and '.', at most "
            f"{_MAX_NAME} of them, because labels repeat it; got {name[:128]!r}; use another name",
        )
    elif manifest.kind == "ReplayApproval":
        yield from _check_approval_name(manifest, name)
    namespace, path = manifest.metadata.get("namespace"), ("metadata", "namespace")
    if namespace is not None and not isinstance(namespace, str):
        yield _wrong_type(manifest, path, "string", namespace)
    elif namespace and (len(namespace) > _MAX_NAME or not _NAMESPACE.fullmatch(namespace)):
        yield finding_at(
            manifest,
            LintRule.OBJECT_NAME,
            path,
            f"`metadata.namespace` must be lower-case letters, digits and '-', at most {_MAX_NAME} "
            f"of them; got {namespace[:128]!r}; give the name of a namespace",
        )


def _check_approval_name(manifest: Manifest, name: str) -> Iterator[Finding]:
    (rule,) = _KINDS[manifest.kind].rules
    spec = manifest.body.get("spec")
    reference = spec.get("replayRef") if isinstance(spec, dict) else None
    replay = reference.get("name") if isinstance(reference, dict) else None
    if isinstance(replay, str) and replay != name:
        problem = f"{rule.problem}; got {name!r} and {replay!r}; {rule.remedy}"
        yield finding_at(manifest, LintRule.OBJECT_NAME, ("metadata", "name"), problem)


def _check_labels(manifest: Manifest) -> Iterator[Finding]:
    for field in ("annotations", "labels"):
        values = manifest.metadata.get(field)
        if values is not None and not isinstance(values, dict):
            yield _wrong_type(manifest, ("metadata", field), "object", values)
            continue
        for name, value in (values or {}).items():
            path = ("metadata", field, name)
            if not isinstance(value, str):
                yield _wrong_type(manifest, path, "string", value)
            elif field == "annotations" and name in _VALUES:
                yield from _check_annotation_value(manifest, path, value)
            elif field == "annotations" and name not in ANNOTATIONS:
                yield from _check_annotation(manifest, path, name)


def _check_annotation_value(manifest: Manifest, path: FieldPath, value: str) -> Iterator[Finding]:
    form, has_effect = _VALUES[str(path[-1])]
    if not has_effect(value):
        problem = f"the annotation has no effect with this value; got {value!r}; write {form}"
        yield finding_at(manifest, LintRule.ANNOTATION_VALUE, path, problem)


def _check_annotation(manifest: Manifest, path: FieldPath, name: str) -> Iterator[Finding]:
    domain, _, word = name.partition("/")
    near = nearest(name, ANNOTATIONS, cutoff=0.9)
    if near and "redrive" in domain and word not in _WRITTEN_BY_OPERATOR:
        problem = f"redrive reads no annotation of this name; got {name!r}; did you mean {near}?"
        yield finding_at(manifest, LintRule.UNKNOWN_ANNOTATION, path, problem, at_key=True)


def _check_spec(manifest: Manifest, kind: Kind) -> Iterator[Finding]:
    spec = manifest.body.get("spec")
    if spec is None:
        yield finding_at(manifest, LintRule.MISSING_FIELD, ("spec",), "is missing; add it")
        return
    problems = list(_shape_problems(spec, schema_of(kind.kind), ("spec",)))
    for problem in problems:
        if problem.rule is LintRule.UNKNOWN_FIELD:
            yield unknown_field(manifest, problem.path, problem.siblings)
        else:
            yield finding_at(manifest, problem.rule, problem.path, problem.text)
    if isinstance(spec, dict):
        wrong = {problem.path for problem in problems}
        errors = field_problems(kind.spec, spec)
        wrong_items = {error.path[:-1] for error in errors}
        for error in errors:
            path = ("spec", *error.path)
            if error.type == "too_short" and error.path in wrong_items:
                continue  # an item that can't be read is missing in the list
            if not any(path[: len(prefix)] == prefix for prefix in wrong):
                yield _model_finding(manifest, path, error)
        yield from _check_condition(manifest, spec)


def _model_finding(manifest: Manifest, path: FieldPath, error: FieldProblem) -> Finding:
    rule = _RULES_BY_TYPE.get(error.type, LintRule.INVALID_VALUE)
    if error.type == "value_error" and isinstance(manifest.node_at(path)[1], yaml.MappingNode):
        rule, path = LintRule.CONTRADICTION, concerned(manifest, path, error.text)
    return finding_at(manifest, rule, path, error.text)


class _ShapeProblem(NamedTuple):
    """Value whose shape the schema excludes."""

    rule: LintRule
    path: FieldPath
    text: str = ""
    siblings: tuple[str, ...] = ()


@cache
def schema_of(kind: str) -> Mapping[str, Any]:
    """Return the structural schema of the spec of *kind*."""
    return structural(_KINDS[kind].spec)


def _shape_problems(
    value: object, schema: Mapping[str, Any], path: FieldPath
) -> Iterator[_ShapeProblem]:
    """Yield where types, names of fields and sets differ from the schema."""
    if value is None and schema.get("nullable"):
        return
    if not _is_of_type(value, schema["type"]):
        yield _ShapeProblem(LintRule.INVALID_TYPE, path, _type_text(schema["type"], value))
    elif isinstance(value, dict):
        if "x-kubernetes-preserve-unknown-fields" in schema:
            return
        fields, others = schema.get("properties", {}), schema.get("additionalProperties")
        for name, item in value.items():
            field = fields.get(name, others)
            if field is None:
                yield _ShapeProblem(LintRule.UNKNOWN_FIELD, (*path, name), siblings=tuple(fields))
            else:
                yield from _shape_problems(item, field, (*path, name))
    elif isinstance(value, list):
        yield from _duplicate_items(value, schema, path)
        for index, item in enumerate(value):
            yield from _shape_problems(item, schema["items"], (*path, index))


def _is_of_type(value: object, name: str) -> bool:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return is_number if name == "integer" else isinstance(value, _TYPES[name])


def _type_text(name: str, value: object) -> str:
    article = "an" if name[0] in "aeiou" else "a"
    if value is None:
        return f"must be {article} {name}; got null; give a value, or leave the field out"
    is_text = name == "string" and not isinstance(value, (dict, list))
    remedy = "put it in quotes" if is_text else "correct it"
    return (
        f"must be {article} {name}; got a value of type {_TYPE_NAMES.get(type(value), 'number')}; "
        f"{remedy}"
    )


def _wrong_type(manifest: Manifest, path: FieldPath, name: str, value: object) -> Finding:
    return finding_at(manifest, LintRule.INVALID_TYPE, path, _type_text(name, value))


def _duplicate_items(
    items: list[Any], schema: Mapping[str, Any], path: FieldPath
) -> Iterator[_ShapeProblem]:
    keys = schema.get("x-kubernetes-list-map-keys", ())
    if schema.get("x-kubernetes-list-type") not in {"set", "map"}:
        return
    seen = set()
    for index, item in enumerate(items):
        value = {key: item.get(key) for key in keys} if keys and isinstance(item, dict) else item
        text = json.dumps(value, sort_keys=True)
        if text in seen:
            step = (*path, index, *keys[:1])
            problem = f"the list has this value already; got {text[:128]}; remove one of the two"
            yield _ShapeProblem(LintRule.DUPLICATE_ITEM, step, problem)
            return
        seen.add(text)


def _check_condition(manifest: Manifest, spec: Body) -> Iterator[Finding]:
    """Check `select.where` with the parser of the operator."""
    select = spec.get("select")
    where = select.get("where") if isinstance(select, dict) else None
    if not isinstance(where, str) or not where or is_empty(select):
        return
    # Loaded for manifests with a condition only: it takes as long as all other imports.
    selection = import_module("redrive.replay.selection")
    try:
        selection.to_sql(where)
    except InvalidSpecError as error:
        is_column = str(error).startswith(selection.UNKNOWN_COLUMN)
        rule = LintRule.SELECT_COLUMN if is_column else LintRule.SELECT_SYNTAX
        yield finding_at(manifest, rule, ("spec", "select", "where"), str(error))


def unknown_field(manifest: Manifest, path: FieldPath, siblings: Collection[str]) -> Finding:
    """Return the finding of a field that its object does not have."""
    name = str(path[-1])
    near = nearest(name, siblings)
    if not near and path[0] == "spec":
        near = _place_of(name, manifest.kind)
    remedy = f"did you mean {near}?" if near else f"remove it, or use {', '.join(sorted(siblings))}"
    problem = f"is not a known field; {remedy}"
    return finding_at(manifest, LintRule.UNKNOWN_FIELD, path, problem, at_key=True)


def _place_of(name: str, kind: str) -> str:
    """Return the one path in the spec of *kind* where a field *name* is known; else empty."""
    places = [path for path in _field_paths(schema_of(kind), "spec") if path.endswith(f".{name}")]
    return places[0] if len(places) == 1 else ""


def _field_paths(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    for name, field in schema.get("properties", {}).items():
        yield f"{path}.{name}"
        yield from _field_paths(field, f"{path}.{name}")


def is_readable(manifest: Manifest) -> bool:
    """Return True if the operator reads the spec of *manifest*."""
    kind, spec = _KINDS.get(manifest.kind), manifest.body.get("spec")
    if kind is None or not isinstance(spec, dict) or not manifest.name:
        return False
    is_shaped = not list(_shape_problems(spec, schema_of(kind.kind), ("spec",)))
    return is_shaped and not field_problems(kind.spec, spec)

"""Model → structural schema, the part of JSON Schema that a CRD may be written in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

_DROPPED = {"title", "$defs"}


def structural(model: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of *model*: no references, titles or null, every field described.

    Raises:
        TypeError: a field has no docstring: a mistake in the model.
    """
    schema = model.model_json_schema(by_alias=True)
    return _flat(schema, schema.get("$defs", {}))


def _flat(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    node = _resolved(node, definitions)
    flat: dict[str, Any] = {}
    for key, value in node.items():
        match key:
            case "properties":
                flat[key] = {n: _field(n, field, definitions) for n, field in value.items()}
            case "items":
                flat[key] = _flat(value, definitions)
            case "additionalProperties" if value is False:
                continue  # the API server knows no other objects
            case "additionalProperties":
                flat[key] = _flat(value, definitions)
            case "description":
                flat[key] = " ".join(value.split())
            case "default" if isinstance(value, dict):
                flat[key] = {}  # else server-side apply would make null of one that becomes empty
            case "default":
                continue  # once stored, it looks like a user's choice
            case _ if key not in _DROPPED:
                flat[key] = value
    return flat


def _field(name: str, node: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    field = _flat(node, definitions)
    if "description" not in field:
        msg = f"the field {name} has no docstring: give it one"
        raise TypeError(msg)
    return field


def _resolved(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Put what *node* refers to in its place; what stands beside the reference wins."""
    own = {k: v for k, v in node.items() if k not in {"$ref", "anyOf"}}
    if "$ref" in node:
        target = definitions[node["$ref"].removeprefix("#/$defs/")]
        return _resolved(target, definitions) | own
    if "anyOf" in node:
        # `X | None`: in a manifest, None is a field left out.
        (target,) = (choice for choice in node["anyOf"] if choice != {"type": "null"})
        return _resolved(target, definitions) | own
    return own

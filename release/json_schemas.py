"""JSON Schemas of the kinds, for editors and kubeconform, from the schemas of the CRDs.

`python -m release` writes `docs/reference/schemas/`, with the names that the CRDs-catalog uses:
`redrive.io/retrypolicy_v1beta1.json`. An unknown field is an error in them. JSON Schema has no
counterpart of the rules in CEL: `redrive lint` checks them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from redrive.api import API_VERSION, GROUP, VERSION
from redrive.api.crds import KINDS, Kind, structural
from release import CHECKOUT

FOLDER = CHECKOUT / "docs" / "reference" / "schemas" / GROUP
DIALECT = "http://json-schema.org/draft-07/schema#"
"""Draft of the schemas, the newest one that editors and kubeconform both read."""
_SAME = frozenset(
    "description enum items maxItems maxLength maxProperties maximum minItems minLength "
    "minProperties minimum pattern required type".split()
)
GENERATED = {FOLDER / f"{kind.kind.lower()}_{VERSION}.json": kind for kind in KINDS}


def render(kind: Kind) -> str:
    """Write the schema of *kind* as JSON."""
    status = {"status": json_schema(structural(kind.status))} if kind.status else {}
    schema = {
        "$schema": DIALECT,
        "title": kind.kind,
        "description": kind.description,
        "type": "object",
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "properties": {
            "apiVersion": {"type": "string", "enum": [API_VERSION]},
            "kind": {"type": "string", "enum": [kind.kind]},
            "metadata": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 63}},
            },
            "spec": json_schema(structural(kind.spec)),
            **status,
        },
        "additionalProperties": False,
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def json_schema(structural_schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a structural schema as JSON Schema."""
    schema = {key: value for key, value in structural_schema.items() if key in _SAME}
    if "properties" in structural_schema:
        properties = structural_schema["properties"]
        schema["properties"] = {name: json_schema(field) for name, field in properties.items()}
        schema["additionalProperties"] = False
    if isinstance(others := structural_schema.get("additionalProperties"), Mapping):
        schema["additionalProperties"] = json_schema(others)
    if "items" in schema:
        schema["items"] = json_schema(schema["items"])
    if structural_schema.get("x-kubernetes-list-type") == "set":
        schema["uniqueItems"] = True
    if structural_schema.get("format") == "date-time":
        schema["format"] = "date-time"
    if structural_schema.get("nullable"):
        schema["type"] = [schema["type"], "null"]
    return schema

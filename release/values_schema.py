"""The part of the chart's values.schema.json that is generated from the models: `jobTemplates`.

The other parts are written by hand.
"""

from __future__ import annotations

import json
from typing import Any

from redrive.api.crds import structural
from redrive.api.job import JobTemplate
from release import CHART

SCHEMA = CHART / "values.schema.json"


def render() -> str:
    """Return the schema with the current fields of a job template."""
    schema = json.loads(SCHEMA.read_text("utf-8"))
    schema["properties"]["jobTemplates"] = {
        "type": "object",
        "propertyNames": {"pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63},
        "additionalProperties": _closed(structural(JobTemplate)),
    }
    return json.dumps(schema, indent=2) + "\n"


def _closed(node: dict[str, Any]) -> dict[str, Any]:
    """Return *node* with unknown fields refused, and without keywords for API servers only."""
    closed: dict[str, Any] = {}
    for key, value in node.items():
        match key:
            case "properties":
                closed[key] = {name: _closed(field) for name, field in value.items()}
                closed["additionalProperties"] = False
            case "items" | "additionalProperties":
                closed[key] = _closed(value)
            case _ if key != "description" and not key.startswith("x-kubernetes-"):
                closed[key] = value
    return closed

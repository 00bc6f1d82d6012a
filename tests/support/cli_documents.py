"""Documents of commands, compared with their published schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCHEMAS = json.loads((ROOT / "docs/reference/cli.schema.json").read_text("utf-8"))


def check(value: object, schema: dict[str, Any], path: str = "$") -> None:
    """Check *value* against the keywords that the published schemas use."""
    if "$ref" in schema:
        schema = SCHEMAS["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    if "anyOf" in schema:
        nullable = {"type": "null"} in schema["anyOf"]
        assert value is not None or nullable, path
        rest = [choice for choice in schema["anyOf"] if choice != {"type": "null"}]
        if value is not None:
            check(value, rest[0], path)
        return
    types = {"string": str, "integer": int, "array": list, "object": dict, None: object}
    assert isinstance(value, types[schema.get("type")]), path
    assert value in schema.get("enum", [value]), path
    if isinstance(value, dict):
        assert sorted(value) == sorted(schema["properties"]), path
        for name, field in schema["properties"].items():
            check(value[name], field, f"{path}.{name}")
    if isinstance(value, list):
        for item in value:
            check(item, schema["items"], f"{path}[]")

"""The chart's README and schema hold every value of values.yaml."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml

from redrive.api.job import JobDefaults
from release import CHART, chart_readme, values_schema

TEXT = """\
# A file.

# -- Some words,
# and more.
one: {a: 1}
two:
  # Not a description.
  three: 1
  # -- Four.
  four: [x]
"""


def leaves(value: dict[str, Any], schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield the paths of a value's leaves: what the schema takes to be no folder of values."""
    for name, inner in value.items():
        known = schema["properties"][name]
        here = f"{path}{name}"
        if known.get("properties") and here not in WHOLE:
            yield from leaves(inner, known, f"{here}.")
        elif reference := known.get("$ref"):
            definition = DEFINITIONS[reference.rpartition("/")[2]]
            if "properties" in definition:
                yield from leaves(inner, definition, f"{here}.")
            else:
                yield here
        else:
            yield here


WHOLE = {
    "resources",
    "affinity",
    "dnsConfig",
    "securityContext",
    "podSecurityContext",
    "replay.job",
    "strategy",
}
"""Values that are passed on as they are: their fields have no defaults of the chart's."""
SCHEMA = json.loads((CHART / "values.schema.json").read_text("utf-8"))
DEFINITIONS = SCHEMA["definitions"]
VALUES = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))


def test_a_description_belongs_to_the_value_that_follows_it() -> None:
    assert list(chart_readme.values(TEXT)) == [
        ("one", {"a": 1}, "Some words, and more."),
        ("two.four", ["x"], "Four."),
    ]


def test_the_readme_is_generated_from_the_values() -> None:
    assert chart_readme.README.read_text("utf-8") == chart_readme.render()


def test_the_fields_of_a_job_in_the_schema_are_generated_from_the_model() -> None:
    assert values_schema.SCHEMA.read_text("utf-8") == values_schema.render()
    job = SCHEMA["properties"]["replay"]["properties"]["job"]
    assert set(job["properties"]) == {field.alias for field in JobDefaults.model_fields.values()}


def test_every_value_is_described_and_known_to_the_schema() -> None:
    text = (CHART / "values.yaml").read_text("utf-8")
    described = [value.path for value in chart_readme.values(text)]
    assert described == list(leaves(VALUES, SCHEMA))


def test_the_schema_knows_no_value_that_the_chart_has_not() -> None:
    def unknown(schema: dict[str, Any], value: dict[str, Any], path: str = "") -> Iterator[str]:
        for name, inner in schema.get("properties", {}).items():
            if name not in value:
                yield f"{path}{name}"
            elif isinstance(value[name], dict) and f"{path}{name}" not in WHOLE:
                yield from unknown(inner, value[name], f"{path}{name}.")

    assert list(unknown(SCHEMA, VALUES)) == ["enabled"]

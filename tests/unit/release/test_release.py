"""The release: README and schema of the chart, checks, and generated files."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from redrive.api.crds import KINDS
from redrive.api.job import JobTemplate
from release import CHART, CHECKOUT, HOME, chart_file, chart_readme, page
from release import __main__ as release
from release.check import CHECKS, Check, Result, run, table

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
    """Yield the paths of a value's leaves: values without properties in the schema."""
    for name, inner in value.items():
        inner_schema = schema["properties"][name]
        here = f"{path}{name}"
        if inner_schema.get("properties") and here not in WHOLE:
            yield from leaves(inner, inner_schema, f"{here}.")
        elif reference := inner_schema.get("$ref"):
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
    "jobTemplates",
    "strategy",
}
"""Values that are passed on as they are: their fields have no defaults of the chart's."""
SCHEMA = json.loads((CHART / "values.schema.json").read_text("utf-8"))
DEFINITIONS = SCHEMA["definitions"]
VALUES = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))


def test_description_belongs_to_the_following_value() -> None:
    assert list(chart_readme.values(TEXT)) == [
        ("one", {"a": 1}, "Some words, and more."),
        ("two.four", ["x"], "Four."),
    ]


def test_template_schema_has_the_fields_of_the_model() -> None:
    job = SCHEMA["properties"]["jobTemplates"]["additionalProperties"]
    assert set(job["properties"]) == {field.alias for field in JobTemplate.model_fields.values()}


def test_every_value_is_described_and_in_the_schema() -> None:
    text = (CHART / "values.yaml").read_text("utf-8")
    described = [value.path for value in chart_readme.values(text)]
    assert described == list(leaves(VALUES, SCHEMA))


def test_null_in_place_of_a_default_is_refused_by_name() -> None:
    """Helm removes a value that is null, and then checks the schema."""

    def optional(schema: dict[str, Any], value: dict[str, Any], path: str = "") -> Iterator[str]:
        for name, inner in value.items():
            here = f"{path}{name}"
            inner_schema = schema.get("properties", {}).get(name, {})
            reference = inner_schema.get("$ref", "").rpartition("/")[2]
            block = DEFINITIONS.get(reference, inner_schema)
            is_scalar = not isinstance(inner, dict | list) and inner is not False and inner != ""
            if "properties" in block and here not in WHOLE:
                yield from optional(block, inner, f"{here}.")
            elif is_scalar and name not in schema.get("required", ()):
                yield here

    assert list(optional(SCHEMA, VALUES)) == []


def test_schema_has_no_value_unknown_to_the_chart() -> None:
    def unknown(schema: dict[str, Any], value: dict[str, Any], path: str = "") -> Iterator[str]:
        for name, inner in schema.get("properties", {}).items():
            if name not in value:
                yield f"{path}{name}"
            elif isinstance(value[name], dict) and f"{path}{name}" not in WHOLE:
                yield from unknown(inner, value[name], f"{path}{name}.")

    assert list(unknown(SCHEMA, VALUES)) == ["enabled"]


def test_result_has_status_of_make_and_last_count(tmp_path: Path) -> None:
    two = "print('== 3 passed in 0.1s ==\\n=== 7 passed, 1 skipped in 2.00s (0:00:02) ===')"
    failing = "print('1 failed in 3.00s'); raise SystemExit(2)"
    for program, status, summary in (
        (two, "passed", "7 passed, 1 skipped in 2.00s (0:00:02)"),
        (failing, "failed", "1 failed in 3.00s"),
        ("raise SystemExit(2)", "failed", "make ended with 2"),
    ):
        result = run(Check(("test",)), tmp_path / "log", {}, (sys.executable, "-c", program))
        assert (result.status, result.summary) == (status, summary)


def test_check_without_its_environment_is_skipped(tmp_path: Path) -> None:
    result = run(Check(("e2e-node",), needs="KUBECONFIG"), tmp_path / "log", {})
    assert (result.status, result.summary) == ("skipped", "KUBECONFIG is not set")
    assert not (tmp_path / "log").exists()


def test_table_has_a_row_for_each_result() -> None:
    results = [Result(check, "passed", 1.25, "1 passed in 2.00s") for check in CHECKS]
    head, _, *rows = table(results).splitlines()
    assert head == "| check | result | minutes | tests |"
    assert rows[0] == "| test | passed | 1.2 | 1 passed in 2.00s |"
    assert len(rows) == len(CHECKS)


def test_checks_are_targets_of_the_makefile() -> None:
    makefile = (Path(__file__).parents[3] / "Makefile").read_text()
    for check in CHECKS:
        assert f"\n{check.arguments[0]}:" in makefile


def test_new_version_is_written_into_the_chart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chart_file, "__version__", "9.8.7")
    chart = yaml.safe_load(chart_file.render())
    assert (chart["version"], chart["appVersion"]) == ("9.8.7", "9.8.7")
    assert "redrive-replay:9.8.7" in chart["annotations"]["artifacthub.io/images"]


def test_generated_files_are_current() -> None:
    for file, render in release.GENERATED.items():
        assert file.read_text("utf-8") == render(), f"{file}: run `python -m release`"


def test_chart_has_a_definition_per_kind_and_no_links() -> None:
    """Flux and `git archive` drop symbolic links, and the chart would render without CRDs."""
    assert set(release.DEFINITIONS.iterdir()) == {
        file for file in release.GENERATED if file.parent == release.DEFINITIONS
    }
    assert not [path for path in CHART.rglob("*") if path.is_symlink()]


def test_chart_file_describes_each_kind_and_image() -> None:
    chart = yaml.safe_load(chart_file.CHART_FILE.read_text("utf-8"))
    assert chart.keys() >= {"home", "sources", "icon", "keywords", "maintainers"}
    lists = {
        name.removeprefix("artifacthub.io/"): yaml.safe_load(text)
        for name, text in chart["annotations"].items()
    }
    assert lists["license"] == "Apache-2.0"
    kinds = {kind.kind for kind in KINDS}
    assert {crd["kind"] for crd in lists["crds"]} == kinds
    assert {example["kind"] for example in lists["crdsExamples"]} == kinds
    assert [image["image"] for image in lists["images"]] == [*chart_file.images().values()]
    (change,) = lists["changes"]
    assert change["links"][0]["url"] == page("CHANGELOG.md")


def test_links_of_the_chart_are_absolute_and_lead_to_files() -> None:
    """A registry shows the README and the notes without the rest of the repository."""
    readme = chart_readme.README.read_text("utf-8")
    chart = yaml.safe_load(chart_file.CHART_FILE.read_text("utf-8"))
    links = [*re.findall(r"\]\(([^)]+)\)", readme), chart["icon"].replace("/raw/", "/blob/")]
    assert len(links) > 3
    prefix = page("")
    for link in links:
        assert link.startswith(prefix)
        assert (CHECKOUT / link.removeprefix(prefix)).is_file()
    notes = (CHART / "templates" / "NOTES.txt").read_text("utf-8")
    home = "{{ .Chart.Home }}/blob/v{{ .Chart.AppVersion }}/"
    assert prefix.startswith(HOME)
    assert notes.count("docs/") == notes.count(f"{home}docs/") == 2

"""Generated files of the repository: the version, and the chart's copies of the CRDs."""

from __future__ import annotations

import re

import pytest
import yaml

from redrive.api.crds import KINDS
from release import CHART, CHECKOUT, HOME, chart_file, chart_readme, page
from release import __main__ as release


def test_another_version_is_written_into_the_chart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chart_file, "__version__", "9.8.7")
    chart = yaml.safe_load(chart_file.render())
    assert (chart["version"], chart["appVersion"]) == ("9.8.7", "9.8.7")
    assert "redrive-replay:9.8.7" in chart["annotations"]["artifacthub.io/images"]


def test_each_generated_file_is_current() -> None:
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

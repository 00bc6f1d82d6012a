"""Generated files of the repository: the version, and the chart's copies of the CRDs."""

from __future__ import annotations

import pytest

from release import CHART, versions
from release import __main__ as release


def test_the_chart_has_the_version_of_the_package() -> None:
    assert versions.CHART_FILE.read_text("utf-8") == versions.render_chart_file()


def test_another_version_would_be_written_into_the_chart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "__version__", "9.8.7")
    written = versions.render_chart_file().splitlines()
    assert {"version: 9.8.7", "appVersion: 9.8.7"} <= set(written)


def test_each_generated_file_is_current() -> None:
    for file, render in release.GENERATED.items():
        assert file.read_text("utf-8") == render(), f"{file}: run `python -m release`"


def test_chart_has_a_definition_per_kind_and_no_links() -> None:
    """Flux and `git archive` drop symbolic links, and the chart would render without CRDs."""
    assert set(release.DEFINITIONS.iterdir()) == {
        file for file in release.GENERATED if file.parent == release.DEFINITIONS
    }
    assert not [path for path in CHART.rglob("*") if path.is_symlink()]

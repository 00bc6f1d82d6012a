"""The version stands in one place, from which the others are written."""

from __future__ import annotations

import pytest

from release import __main__ as release
from release import versions


def test_the_chart_has_the_version_of_the_package() -> None:
    assert versions.CHART_FILE.read_text("utf-8") == versions.render_chart_file()


def test_another_version_would_be_written_into_the_chart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "__version__", "9.8.7")
    written = versions.render_chart_file().splitlines()
    assert {"version: 9.8.7", "appVersion: 9.8.7"} <= set(written)


def test_each_generated_file_is_current() -> None:
    for file, render in release.GENERATED.items():
        assert file.read_text("utf-8") == render(), f"{file}: run `python -m release`"

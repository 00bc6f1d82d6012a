"""The chart as GitOps tools and parent charts render it, without a cluster."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sandbox import chart
from sandbox.errors import SandboxError
from tests.integration.chart.combinations import IMAGE


def test_chart_without_definitions_is_refused_while_wanted(tmp_path: Path) -> None:
    """Tools that drop links or files would otherwise install an operator without its kinds."""
    copy = tmp_path / "redrive"
    shutil.copytree(chart.CHART, copy)
    shutil.rmtree(copy / "definitions")
    with pytest.raises(SandboxError, match=r"no CRDs; got no file definitions/\*\.yaml"):
        chart.helm("template", "redrive", str(copy), values=IMAGE)
    without = IMAGE | {"crds": {"install": False}}
    assert "kind: Deployment" in chart.helm("template", "redrive", str(copy), values=without)

"""The version, in every file that has to name it: `redrive.__version__` is where it stands."""

from __future__ import annotations

import re

from redrive import __version__
from release import CHART

CHART_FILE = CHART / "Chart.yaml"


def render_chart_file() -> str:
    """Return Chart.yaml with the version of the package."""
    text = CHART_FILE.read_text("utf-8")
    return re.sub(r"^(version|appVersion): .*$", rf"\1: {__version__}", text, flags=re.MULTILINE)

"""The operator as a process, for whoever wants what it makes of manifests."""

from __future__ import annotations

from pathlib import Path

import pytest

from redrive.sandbox import installation
from redrive.sandbox.sandbox import Sandbox


@pytest.fixture(scope="session")
def operator_process(installed: Sandbox) -> Path:
    """The operator with the rights that the chart gives it, serving all namespaces: its log."""
    return installed.processes.log(installation.OPERATOR)

"""The operator as a process, for whoever wants what it makes of manifests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox import installation
from sandbox.sandbox import Sandbox


@pytest.fixture(scope="session")
def operator_process(installed: Sandbox) -> Iterator[Path]:
    """The operator with the rights that the chart gives it, serving all namespaces: its log."""
    log = installed.processes.log(installation.OPERATOR)
    yield log
    # Whatever the tests of the session have used: no token, no key.
    assert re.findall(r"eyJ[\w-]+\.eyJ[\w-]+\.[\w-]+|-----BEGIN", log.read_text("utf-8")) == []

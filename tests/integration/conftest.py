"""The operator as a process, for tests of its work on manifests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox import installation
from sandbox.sandbox import Sandbox


@pytest.fixture(scope="module")
def operator_process(installed: Sandbox) -> Iterator[Path]:
    """The operator with the rights that the chart gives it, serving all namespaces: its log."""
    log = installed.processes.log(installation.OPERATOR)
    begin = log.stat().st_size
    yield log
    # Whatever the tests of the module have used: no token, no key.
    written = log.read_bytes()[begin:]
    assert re.findall(rb"eyJ[\w-]+\.eyJ[\w-]+\.[\w-]+|-----BEGIN", written) == []

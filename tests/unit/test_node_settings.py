"""Settings and output of `make e2e-node`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("setting", "code"), [("", 0), ("installed", 0), ("instaled", 4)])
def test_unknown_spark_setting_is_refused(setting: str, code: int) -> None:
    command = "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/node"
    process = subprocess.run(
        [sys.executable, *command, "-o", "python_files=node_*.py"],
        env={**os.environ, "REDRIVE_NODE_SPARK": setting},
        cwd=ROOT, check=False, text=True, capture_output=True,
    )  # fmt: skip
    assert process.returncode == code, process.stdout + process.stderr
    refused = "REDRIVE_NODE_SPARK has one value, installed; got 'instaled'" in process.stderr
    assert refused == bool(code)
    waiting = "test_a_replay_waits_until_a_spark_operator_is_installed" in process.stdout
    assert waiting == (setting == "")


def test_installation_log_is_printed() -> None:
    """The log of passing tests is printed too."""
    dry = "/bin/sh", "-c", "make --dry-run e2e-node"
    ran = subprocess.run(dry, cwd=ROOT, check=True, text=True, capture_output=True)
    assert " -rP " in ran.stdout

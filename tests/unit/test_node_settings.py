"""What `make e2e-node` is told by the environment, and what it prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("given", "code"), [("", 0), ("installed", 0), ("instaled", 4)])
def test_unknown_spark_setting_is_refused(given: str, code: int) -> None:
    command = "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/node"
    ran = subprocess.run(
        [sys.executable, *command, "-o", "python_files=node_*.py"],
        env={**os.environ, "REDRIVE_NODE_SPARK": given},
        cwd=ROOT, check=False, text=True, capture_output=True,
    )  # fmt: skip
    assert ran.returncode == code, ran.stdout + ran.stderr
    refused = "REDRIVE_NODE_SPARK has one value, installed; got 'instaled'" in ran.stderr
    assert refused == bool(code)
    waiting = "test_a_replay_waits_until_a_spark_operator_is_installed" in ran.stdout
    assert waiting == (given == "")


def test_installation_log_is_printed() -> None:
    """That of tests that pass as well."""
    dry = "/bin/sh", "-c", "make --dry-run e2e-node"
    ran = subprocess.run(dry, cwd=ROOT, check=True, text=True, capture_output=True)
    assert " -rP " in ran.stdout

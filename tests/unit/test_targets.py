"""Mutants that `make mutants` runs fit the package and its tests; settings of `make e2e-node`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "operator" / "redrive"
MUTANTS: list[dict[str, str]] = tomllib.loads(
    (ROOT / "tests/mutants/mutants.toml").read_text(encoding="utf-8")
)["mutant"]


def test_each_mutant_changes_one_place() -> None:
    places = [(m["file"], m["original"], m["mutated"]) for m in MUTANTS]
    assert len(set(places)) == len(places)
    for file, original, mutated in places:
        assert (PACKAGE / file).read_text(encoding="utf-8").count(original) == 1, (file, original)
        assert mutated != original


def test_test_of_each_mutant_exists() -> None:
    for mutant in MUTANTS:
        file, _, name = mutant["test"].partition("::")
        text = (ROOT / "tests" / "unit" / file).read_text(encoding="utf-8")
        assert re.search(rf"\b{name}\b", text), mutant


def test_every_package_has_mutants() -> None:
    counts = Counter(Path(mutant["file"]).parts[0] for mutant in MUTANTS)
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages <= counts.keys()
    assert counts.total() >= 60


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

"""A unit test notices each rule of the product that is broken: `make mutants`.

`mutants.toml` lists changes of the product, one for a rule: a comparison turned round, a check left
out, a grant too many. A mutant is a copy of the package with one of them. The unit test that states
the rule has to fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
Mutant = Mapping[str, str]
MUTANTS: list[Mutant] = tomllib.loads(
    (ROOT / "tests/mutants/mutants.toml").read_text(encoding="utf-8")
)["mutant"]


def run_tests(
    folder: Path, tests: Iterable[str], mutant: Mutant | None = None
) -> subprocess.CompletedProcess[str]:
    """Run *tests* on a copy of the package in *folder*, changed as *mutant* says."""
    source = folder / "operator"
    shutil.copytree(ROOT / "operator", source)
    if mutant is not None:
        file = source / "redrive" / mutant["file"]
        text = file.read_text(encoding="utf-8")
        assert text.count(mutant["original"]) == 1, "mutants.toml is out of date"
        file.write_text(text.replace(mutant["original"], mutant["mutated"]), encoding="utf-8")
    return subprocess.run(
        [
            sys.executable, "-m", "pytest", "--quiet", "--exitfirst", "-p", "no:cacheprovider",
            "-o", f"pythonpath={source} {ROOT}", f"--basetemp={folder / 'tests'}",
            "--hypothesis-profile=mutants", *(f"tests/unit/{test}" for test in tests),
        ],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{source}{os.pathsep}{ROOT}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.xdist_group("unmutated")
def test_unmutated_package_passes(tmp_path: Path) -> None:
    run = run_tests(tmp_path, sorted({mutant["test"] for mutant in MUTANTS}))
    assert run.returncode == pytest.ExitCode.OK, run.stdout + run.stderr


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(
            mutant,
            id=f"{mutant['file']}: {mutant['mutated'].strip()}",
            marks=pytest.mark.xdist_group(f"mutant {number}"),
        )
        for number, mutant in enumerate(MUTANTS)
    ],
)
def test_mutant_fails_its_test(mutant: Mutant, tmp_path: Path) -> None:
    run = run_tests(tmp_path, [mutant["test"]], mutant)
    # A package that cannot be imported and a test that does not exist have other exit codes.
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout + run.stderr

"""The tests of the policy core notice when it is wrong, each law by the test that states it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import redrive.policy

HERE = Path(__file__).parent
SOURCE = Path(redrive.policy.__file__).parents[1]
MUTANTS = tomllib.loads((HERE / "mutants.toml").read_text(encoding="utf-8"))["mutant"]

Run = Future[subprocess.CompletedProcess[str]]


def run_laws(folder: Path, mutant: dict[str, Any] | None) -> subprocess.CompletedProcess[str]:
    """Run the law that *mutant* breaks, or all of them, on a copy of the policy core."""
    package, tests = folder / "redrive", folder / "tests"
    shutil.copytree(SOURCE / "policy", package / "policy")
    for name in ("__init__.py", "errors.py", "reasons.py"):
        shutil.copy(SOURCE / name, package)
    shutil.copytree(HERE, tests, ignore=shutil.ignore_patterns(Path(__file__).name))
    if mutant is not None:
        file = package / "policy" / mutant["file"]
        text = file.read_text(encoding="utf-8")
        assert text.count(mutant["original"]) == 1, "mutants.toml is out of date"
        file.write_text(text.replace(mutant["original"], mutant["mutated"]), encoding="utf-8")
    laws = sorted({m["law"] for m in MUTANTS}) if mutant is None else [mutant["law"]]
    (folder / "pytest.ini").write_text("[pytest]\n")
    environment = {
        "PYTHONPATH": str(folder),
        # Else most of the time goes into plugins that nothing here needs, and into Unicode tables.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(folder.parent / "hypothesis"),
    }
    return subprocess.run(
        [
            sys.executable, "-m", "pytest", "--quiet", "--exitfirst", "--import-mode=importlib",
            "-p", "no:cacheprovider", "-p", "_hypothesis_pytestplugin",
            "--hypothesis-profile=mutants", *(f"tests/{law}" for law in laws),
        ],
        cwd=folder, env=os.environ | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Run]]:
    """The run of each mutant, and of the unmutated core as None: one per processor at a time."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield [
            pool.submit(run_laws, tmp_path_factory.mktemp("mutant"), mutant)
            for mutant in [None, *MUTANTS]
        ]


def test_mutants_are_twenty_different_ones() -> None:
    assert len({(m["file"], m["original"], m["mutated"]) for m in MUTANTS}) == 20


def test_unmutated_core_keeps_every_law(
    runs: list[Run],
) -> None:
    run = runs[0].result()
    assert run.returncode == pytest.ExitCode.OK, run.stdout


@pytest.mark.parametrize(
    "number", range(len(MUTANTS)), ids=[f"{m['file']}: {m['mutated']}" for m in MUTANTS]
)
def test_mutant_breaks_its_law(runs: list[Run], number: int) -> None:
    run = runs[number + 1].result()
    # Nothing but a failed test counts: not a core that can't be imported, nor a law that is gone.
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout + run.stderr

"""The list of mutants that `make mutants` runs fits the package and its tests."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path

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

"""Rules of the layout of the repository."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = tuple((ROOT / "operator" / "redrive").rglob("*.py"))
MOST_FILES = 20
MOST_LINES = 600
BOUNDS = {
    "error classes": 60,
    "modules with one importer": 20,
    "files above 600 lines": 0,
}
"""The last measurement. A change that lowers a figure lowers its bound."""


def test_source_root_is_not_a_package() -> None:
    """`operator/__init__.py` would shadow the standard library for programs run in the root."""
    assert not (ROOT / "operator" / "__init__.py").exists()


def test_python_in_the_root_imports_the_standard_library() -> None:
    """The consequence of a package `operator`."""
    code = "import operator; print(operator.eq(1, 1))"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ran.stdout == "True\n"


def test_contributing_lists_every_package() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    packages = [path.parent for path in (ROOT / "operator/redrive").glob("*/__init__.py")]
    missing = [p for p in packages if f"| `{p.relative_to(ROOT)}` |" not in page]
    assert packages
    assert not missing


def test_unit_tests_mirror_package() -> None:
    """`tests/unit/a/b` tests `redrive/a/b`; `release` and `sandbox` are packages of their own."""
    tests = ROOT / "tests" / "unit"
    folders = {file.parent.relative_to(tests) for file in tests.rglob("test_*.py")}
    roots = ROOT / "operator" / "redrive", ROOT
    strays = [f for f in folders if not any((root / f / "__init__.py").exists() for root in roots)]
    assert Path("reading") in folders
    assert not strays


def test_delivery_folders_have_few_files() -> None:
    """It once was one folder of 42 files."""
    delivery = ROOT / "operator" / "redrive" / "delivery"
    files = Counter(file.parent.relative_to(delivery) for file in delivery.rglob("*.py"))
    assert {folder: count for folder, count in files.items() if count > MOST_FILES} == {}
    assert Path("middleware") in files


def test_class_names_are_unique() -> None:
    """A search for a name must lead to one place."""
    classes: dict[str, list[str]] = {}
    for file in sorted((ROOT / "operator" / "redrive").rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(str(file.relative_to(ROOT)))
    assert {name: files for name, files in classes.items() if len(files) > 1} == {}
    assert len(classes) > 200


def test_structure_stays_simple() -> None:
    """`pytest -s -k stays_simple tests/unit/test_layout.py` prints the figures."""
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in SOURCES}
    counts = {
        "files": len(SOURCES),
        "error classes": sum(
            isinstance(node, ast.ClassDef) and node.name.endswith("Error")
            for tree in trees.values()
            for node in ast.walk(tree)
        ),
        "modules with one importer": _count_modules_with_one_importer(trees),
        "files above 600 lines": sum(
            len(file.read_text(encoding="utf-8").splitlines()) > MOST_LINES for file in SOURCES
        ),
    }
    print(counts)  # noqa: T201
    assert {name: count for name, count in counts.items() if count > BOUNDS.get(name, count)} == {}


def _count_modules_with_one_importer(trees: dict[Path, ast.Module]) -> int:
    modules = {".".join(f.relative_to(ROOT / "operator").with_suffix("").parts) for f in trees}
    importers: dict[str, set[Path]] = defaultdict(set)
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    importers[name if name in modules else node.module].add(file)
    return sum(len(importers[module]) == 1 for module in modules if not module.endswith("__"))

"""Rules of the repository: its layout, public names, imports of a consumer, and used reasons."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import subprocess
import sys
from collections import Counter, defaultdict
from importlib import resources
from pathlib import Path
from typing import get_type_hints

import pytest

import redrive
from redrive.delivery.assembly import Options, RetryOptions
from redrive.delivery.consumers.broadcast import BroadcastOptions
from redrive.delivery.retry_producer import ProducerOptions
from redrive.errors import InvalidSpecError, OwnerConflictError, RedriveError
from redrive.reasons import Reason

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


OPTIONAL = {
    "aiohttp", "kopf", "kubernetes", "opentelemetry", "prometheus_client", "pydantic", "pyspark",
    "yaml", "redrive.admin", "redrive.api", "redrive.delivery.consumers.asynchronous",
    "redrive.delivery.consumers.broadcast", "redrive.delivery.middleware.ack_timeouts",
    "redrive.delivery.middleware.outage_breaker", "redrive.delivery.middleware.poison_guard",
    "redrive.policy.codec", "redrive.reasons",
    "redrive.opentelemetry", "redrive.prometheus", "redrive.delivery.retry_producer",
    "redrive.delivery.consumers.simple", "redrive.testing",
}  # fmt: skip
MOST_MODULES = 31
"""Modules of redrive that importing a consumer loads. A change that lowers it lowers the bound."""
SLOW = {
    "asyncio", "concurrent.futures", "hashlib", "multiprocessing", "pathlib", "platform", "socket",
    "ssl", "subprocess", "urllib.parse", "uuid",
}  # fmt: skip
"""Modules that a consumer may import only if the client or Python itself imports them."""


def imported_by(program: str) -> set[str]:
    """Return the modules that a fresh interpreter has at the end of *program*."""
    return set(
        subprocess.run(
            [sys.executable, "-c", f"{program}; import sys; print(*sys.modules)"],
            env={"PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
    )


def test_public_names_are_exactly_the_listed_ones() -> None:
    for name in redrive.__all__:
        assert getattr(redrive, name).__name__ == name
    unknown = "Consumer"
    with pytest.raises(AttributeError, match="no attribute 'Consumer'"):
        getattr(redrive, unknown)


def test_directory_of_the_package_lists_its_public_names() -> None:
    assert [name for name in dir(redrive) if not name.startswith("__")] == sorted(redrive.__all__)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (redrive.RetryConsumer, RetryOptions),
        (redrive.AsyncRetryConsumer, RetryOptions),
        (redrive.SimpleConsumer, Options),
        (redrive.AsyncSimpleConsumer, Options),
        (redrive.BroadcastConsumer, BroadcastOptions),
        (redrive.AsyncBroadcastConsumer, BroadcastOptions),
        (redrive.RetryProducer, ProducerOptions),
        (redrive.AsyncRetryProducer, ProducerOptions),
    ],
)
def test_help_of_a_class_lists_its_options(kind: type, options: type) -> None:
    listed = set(re.findall(r"\w+", inspect.getdoc(kind) or ""))
    assert set(get_type_hints(options)) <= listed


def test_documented_errors_are_public_names() -> None:
    documented = set()
    for name in redrive.__all__:
        public = getattr(redrive, name)
        shown = [
            getattr(public, member, None) for member in dir(public) if not member.startswith("_")
        ]
        for member in [public, *shown]:
            documented |= set(re.findall(r"^\s+(\w+Error): ", member.__doc__ or "", re.MULTILINE))
    assert "NotInFlightError" in documented
    assert documented <= {*redrive.__all__, *vars(builtins)}


def test_operator_imports_no_pulsar_client() -> None:
    assert "pulsar" not in imported_by("import redrive, redrive.policy.codec")


def test_consumer_imports_no_optional_module() -> None:
    """`make bench` measures the import time; these modules would increase it unnoticed."""
    ours = imported_by("from redrive import PolicyFile, RetryConsumer")
    assert len([name for name in ours if name.split(".")[0] == "redrive"]) <= MOST_MODULES
    assert "redrive.delivery.consumers.consumer" in ours
    assert not ours & (OPTIONAL | SLOW - imported_by("import pulsar"))


def test_package_is_marked_as_typed() -> None:
    assert resources.files(redrive).joinpath("py.typed").is_file()


def test_each_reason_is_used() -> None:
    """The documentation must not list a reason that nothing reports.

    Type checks refuse an unknown member, except of the errors that do not import the table.
    `docs/reference/reasons.md` is generated from it.
    """
    classes = (InvalidSpecError, OwnerConflictError, RedriveError)
    used = {Reason(error.reason).name for error in classes} | {
        node.attr
        for file in Path(redrive.__path__[0]).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "Reason"
    }
    assert {reason.name for reason in Reason} - used == set()

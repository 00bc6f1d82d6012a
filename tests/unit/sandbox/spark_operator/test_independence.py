"""The stand-in must not share an assumption with whoever writes SparkApplications."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox import spark_operator

PACKAGE = Path(spark_operator.__file__).parent
MODULES = sorted(PACKAGE.glob("*.py"))
OTHERS = {"aiohttp", "kubernetes", "psutil"}


def imported(module: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_a_module_imports_only_its_siblings_the_clients_and_the_standard_library(
    module: Path,
) -> None:
    foreign = {
        name
        for name in imported(module)
        if (name.startswith("..") or not name.startswith("."))
        and name.partition(".")[0] not in sys.stdlib_module_names | OTHERS
    }
    assert foreign == set()


def test_nothing_in_it_knows_the_product() -> None:
    telling = {
        file.name: line
        for file in [*MODULES, spark_operator.CRD]
        for line in file.read_text().splitlines()
        if "redrive" in line.replace("python -m sandbox.spark_operator", "")
    }
    assert telling == {}

"""Each block of commands that people work by is run by a test, as it is written."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

import pytest

from redrive.api.crds import crds
from tests.support.documented import (
    ARGOCD,
    AUDIT,
    BACK_UP,
    FIRST_CONSUMER,
    FLUX,
    GITOPS,
    INSTALL,
    PAGES,
    QUICK_START,
    READ,
    README,
    ROOT,
    SANDBOX,
    blocks,
    commands,
)

HERE = "tests/unit/test_documented.py"
GITOPS_PAGES = "tests/integration/gitops/test_pages.py"
NODE_INSTALL = "tests/node/node_install.py"
TUTORIALS = "tests/unit/testing/test_tutorials.py"
WHEEL, INSTALL_LIBRARY = "tests/e2e/test_package.py", "1. Install the library"
RUN_BY: Mapping[str, Mapping[str, str]] = {
    README: {"Try it": HERE, "Use it on your cluster": NODE_INSTALL},
    INSTALL: {
        "Images": "tests/node/conftest.py",
        "The operator": "tests/node/node_scenarios.py",
        "Uninstall": NODE_INSTALL,
        "Delete a namespace of the list `namespaces`": NODE_INSTALL,
        "Run outside of the cluster": NODE_INSTALL,
        "A Spark operator": "tests/node/conftest.py",
    },
    QUICK_START: dict.fromkeys(
        (block.heading for block in commands(QUICK_START)), "tests/node/node_quick_start.py"
    ),
    FIRST_CONSUMER: {
        block.heading: WHEEL if block.heading == INSTALL_LIBRARY else TUTORIALS
        for block in commands(FIRST_CONSUMER)
    },
    SANDBOX: dict.fromkeys(
        (block.heading for block in commands(SANDBOX)), "tests/e2e/test_tutorial.py"
    ),
    AUDIT: dict.fromkeys(
        (block.heading for block in commands(AUDIT)), "tests/integration/replay/test_ledger.py"
    ),
    BACK_UP: dict.fromkeys((block.heading for block in commands(BACK_UP)), GITOPS_PAGES),
    GITOPS: dict.fromkeys((block.heading for block in commands(GITOPS)), GITOPS_PAGES),
    ARGOCD: {"Set it up": GITOPS_PAGES},
    FLUX: {"Set it up": GITOPS_PAGES},
    READ: dict.fromkeys(
        (block.heading for block in commands(READ)), "tests/integration/replay/test_inspection.py"
    ),
}
"""The headings of pages → the test that runs the commands under them."""


@pytest.mark.parametrize("page", PAGES)
def test_every_command_block_is_run_by_a_test(page: str) -> None:
    headings = {block.heading for block in commands(page)}
    assert headings - set(RUN_BY[page]) == set(), "no test runs these"
    assert set(RUN_BY[page]) - headings == set(), "these are no more"


@pytest.mark.parametrize("page", PAGES)
def test_tests_read_commands_from_their_page(page: str) -> None:
    name = next(name for name, value in globals().items() if value == page)
    for heading, test in RUN_BY[page].items():
        text = (ROOT / test).read_text("utf-8")
        assert (
            f'({name}, "{heading}")' in text
            or f"{name}))" in text
            or f"{name}):" in text
            or f"commands({name})" in text
        ), heading


@pytest.mark.parametrize("page", PAGES)
def test_every_block_names_its_language(page: str) -> None:
    """Commands without a language would be omitted."""
    assert {block.language for block in blocks(page)} <= {"sh", "text", "python", "yaml"}


def test_make_targets_of_the_readme_exist() -> None:
    """The end-to-end tests cover `make demo`; `make test` runs the tests."""
    (block,) = commands(README, "Try it")
    dry = block.text.replace("make ", "make --dry-run ")
    run = subprocess.run(
        ["/bin/sh", "-euc", dry], cwd=ROOT, check=False, text=True, capture_output=True
    )
    assert run.returncode == 0, run.stderr
    assert "sandbox.demo" in run.stdout


@pytest.mark.parametrize("page", [INSTALL, QUICK_START])
def test_removal_by_the_page_deletes_each_crd(page: str) -> None:
    (names,) = (
        line.split()[3:]
        for block in commands(page)
        for line in block.text.splitlines()
        if line.startswith("kubectl delete crd ")
    )
    assert sorted(names) == sorted(crd["metadata"]["name"] for crd in crds())

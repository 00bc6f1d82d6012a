"""Each block of commands or code of each page is run by a test, as it is written."""

from __future__ import annotations

import itertools
import re
import subprocess
import textwrap
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from redrive.api.crds import crds
from redrive.kube.resources import USABLE_BY
from redrive.lint.checks import lint
from redrive.lint.manifests import Manifests
from tests.support import documented
from tests.support.documented import (
    API,
    ARGOCD,
    AUDIT,
    BACK_UP,
    BLOCKED_KEY,
    CHECK,
    CONSUMER_METRICS,
    CONTRIBUTING,
    DEVELOP,
    FIRST_CONSUMER,
    FLUX,
    GITOPS,
    GO,
    INSTALL,
    JAVA,
    JOB_TEMPLATES,
    METRICS,
    ORDER,
    OUTAGES,
    PROBES,
    PROPERTIES,
    QUICK_START,
    READ,
    README,
    RELEASE,
    REPLAYS_PAGE,
    RESPOND,
    RIGHTS,
    ROCKETMQ,
    ROOT,
    RUNBOOKS,
    SANDBOX,
    SELECTION,
    Block,
    block,
    blocks,
    commands,
)
from tests.support.invalid_manifests import VALID, manifest

HERE = "tests/unit/test_documented.py"
ALERTS = "tests/alerts/test_alerts.py"
CHART = "tests/integration/chart/test_chart.py"
CLUSTER = "tests/integration/cli/test_pages.py"
DEVELOPMENT = "tests/integration/provision/test_develop.py"
GITOPS_PAGES = "tests/integration/gitops/test_pages.py"
GUIDES = "tests/unit/testing/test_guides.py"
HOWTO = "tests/integration/delivery/test_howto.py"
INSPECTION = "tests/integration/replay/test_inspection.py"
JAVA_PAGES = "tests/contract/java/test_pages.py"
NODE, NODE_INSTALL = "tests/node/conftest.py", "tests/node/node_install.py"
NODE_QUICK_START = "tests/node/node_quick_start.py"
RELEASED = "tests/e2e/e2e_release.py"
TUTORIAL, TUTORIALS = "tests/e2e/e2e_tutorial.py", "tests/unit/testing/test_tutorials.py"
WHEEL = "tests/e2e/e2e_package.py"
SHOWN = "text"
"""Language of blocks that show an output or a diagram, and are not run."""


class Run(NamedTuple):
    """Blocks of a page, and the test that runs them.

    Args:
        page: of the documentation.
        test: the file of the test, which has the name of the page.
        headings: above the blocks; empty for the whole page.
        languages: of the blocks; empty for all.
    """

    page: str
    test: str
    headings: Collection[str] = ()
    languages: Collection[str] = ()

    def covers(self, block: Block) -> bool:
        """Return True if the test runs the block."""
        return (not self.headings or block.heading in self.headings) and (
            not self.languages or block.language in self.languages
        )


RUNS = [
    Run(README, HERE, ["Try it"]),
    Run(README, NODE_INSTALL, ["Use it on your cluster"]),
    Run(README, CLUSTER, ["When messages have died"]),
    Run(README, GUIDES, ["A consumer"]),
    Run(CONTRIBUTING, HERE),
    Run(FIRST_CONSUMER, WHEEL, ["1. Install the library"]),
    Run(FIRST_CONSUMER, GUIDES, ["On a broker"]),
    Run(FIRST_CONSUMER, TUTORIALS),
    Run(SANDBOX, TUTORIAL),
    Run(QUICK_START, NODE_QUICK_START),
    Run(INSTALL, NODE, ["Images", "A Spark operator"]),
    Run(INSTALL, "tests/node/node_scenarios.py", ["The operator"]),
    Run(INSTALL, CHART, ["Proxies"]),
    Run(
        INSTALL,
        NODE_INSTALL,
        [
            "Uninstall",
            "Delete a namespace of the list `namespaces`",
            "Run outside of the cluster",
        ],
    ),
    *(Run(f"docs/howto/{name}.md", GUIDES) for name in ("handle", "poison-messages")),
    Run("docs/howto/consume.md", HOWTO, ["Broadcast"]),
    Run("docs/howto/consume.md", GUIDES),
    Run("docs/howto/forks.md", HOWTO),
    Run("docs/howto/produce.md", HOWTO),
    Run("docs/howto/spark.md", "tests/integration/replay/test_data_source.py"),
    Run(OUTAGES, GUIDES, (), ["python"]),
    Run(OUTAGES, CLUSTER, (), ["sh"]),
    Run(OUTAGES, HERE, (), ["yaml"]),
    Run(ORDER, HERE),
    Run(PROBES, GUIDES, ["Serve probes"]),
    Run(PROBES, GITOPS_PAGES, ["Declare them"]),
    Run(PROBES, HOWTO, ["Renew tokens"]),
    Run(PROBES, ALERTS, (), ["promql"]),
    Run(DEVELOP, CLUSTER, ["See the changes that a changed manifest makes"]),
    Run(DEVELOP, "tests/unit/cli/test_develop.py", ["See names, attempts and lines to paste"]),
    Run(DEVELOP, DEVELOPMENT),
    Run(CHECK, WHEEL, ["Check manifests in CI and in the editor"]),
    Run(
        CHECK,
        CLUSTER,
        [
            "Check files and folders",
            "Check them together with the cluster",
            "Check Helm charts and kustomizations",
        ],
    ),
    Run(CHECK, HERE),
    Run(RESPOND, CLUSTER),
    Run(BLOCKED_KEY, CLUSTER),
    Run(AUDIT, "tests/integration/replay/test_ledger.py"),
    Run(ROCKETMQ, "tests/integration/provision/test_rocketmq.py"),
    Run(READ, JAVA_PAGES, ["By pulsar-admin"]),
    Run(READ, INSPECTION),
    *(Run(page, test) for page in RUNBOOKS for test in (CLUSTER, JAVA_PAGES)),
    *(Run(page, GITOPS_PAGES) for page in (BACK_UP, GITOPS, ARGOCD, FLUX)),
    Run(RELEASE, RELEASED),
    Run(REPLAYS_PAGE, CLUSTER, (), ["sh"]),
    Run(REPLAYS_PAGE, HERE),
    Run(RIGHTS, HERE),
    *(Run(page, HERE) for page in API),
    Run(JOB_TEMPLATES, CHART),
    Run(SELECTION, "tests/unit/replay/test_selection.py"),
    Run(CONSUMER_METRICS, GUIDES, (), ["python"]),
    Run(CONSUMER_METRICS, ALERTS, (), ["promql"]),
    Run(CONSUMER_METRICS, JAVA_PAGES, (), ["sh"]),
    Run(METRICS, ALERTS),
    Run(PROPERTIES, "tests/integration/delivery/test_not_copyable.py"),
    Run(GO, "tests/contract/delivery/test_go.py"),
    Run(JAVA, JAVA_PAGES),
]
PAGES = [
    README,
    CONTRIBUTING,
    *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")),
]


def names_of(page: str) -> Iterator[str]:
    """Yield the texts by which a test may name a page."""
    yield page
    yield f'"{Path(page).stem}"'
    yield f'"{Path(page).name}"'
    for name, value in vars(documented).items():
        if name.isupper() and (value == page or (isinstance(value, list) and page in value)):
            yield name
    if page == PROPERTIES:
        yield "original"


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_is_run_by_a_test(page: str) -> None:
    runs = [run for run in RUNS if run.page == page]
    runnable = [block for block in blocks(page) if block.language != SHOWN]
    assert [b for b in runnable if not any(run.covers(b) for run in runs)] == []
    for run in runs:
        covered = {b.heading for b in runnable if run.covers(b)}
        assert covered >= set(run.headings or covered), "no such block"
        assert covered, "no such block"
        source = (ROOT / run.test).read_text("utf-8")
        assert any(name in source for name in names_of(page)), f"{run.test} does not read {page}"
        assert [h for h in run.headings if h not in source and "commands(" not in source] == []


def dry_run(text: str) -> str:
    """Return the commands that the make targets of a block would run."""
    dry = text.replace("make ", "make --dry-run ")
    run = subprocess.run(
        ["/bin/sh", "-euc", dry], cwd=ROOT, check=False, text=True, capture_output=True
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_make_targets_of_the_front_pages_exist() -> None:
    """The end-to-end tests cover `make demo`; `make test` runs the tests."""
    [tried], [contributed] = commands(README, "Try it"), commands(CONTRIBUTING)
    assert "sandbox.demo" in dry_run(tried.text)
    assert "ruff check" in dry_run(contributed.text)


@pytest.mark.parametrize("page", [INSTALL, QUICK_START])
def test_removal_by_the_page_deletes_each_crd(page: str) -> None:
    (names,) = (
        line.split()[3:]
        for block in commands(page)
        for line in block.text.splitlines()
        if line.startswith("kubectl delete crd ")
    )
    assert sorted(names) == sorted(crd["metadata"]["name"] for crd in crds())


def findings(text: str) -> list[str]:
    """Return the findings in manifests."""
    manifests = Manifests("shop")
    manifests.add("page.yaml", text.encode())
    return [str(finding) for finding in lint(manifests, datetime(2026, 1, 1, tzinfo=UTC))]


def completed(kind: str, fields: str) -> str:
    """Return a manifest of *kind* with *fields* of its spec, as the page has them."""
    least = {name: value for name, value in VALID[kind].items() if f"{name}:" not in fields}
    head = yaml.safe_dump(manifest(kind) | {"spec": least})
    return head + textwrap.indent(fields, "  ")


@pytest.mark.parametrize(
    ("page", "heading"),
    [
        (ORDER, "Order of a key"),
        (ORDER, "Order beyond a dead letter"),
        (OUTAGES, "Enable it"),
    ],
)
def test_policy_fields_of_a_page_are_valid(page: str, heading: str) -> None:
    fields = textwrap.dedent(block(page, heading, "yaml").removeprefix("spec:\n"))
    assert findings(completed("RetryPolicy", fields)) == []


def test_replay_fields_of_the_page_are_valid() -> None:
    whole, *parts = [b.text for b in blocks(REPLAYS_PAGE) if b.language == "yaml"]
    assert findings(whole) == []
    choices = [part.splitlines() if part.count("select:") > 1 else [part] for part in parts]
    assert sum(map(len, choices)) == 7
    for fields in itertools.chain.from_iterable(choices):
        assert findings(completed("Replay", fields)) == [], fields


@pytest.mark.parametrize("page", API)
def test_example_of_an_api_page_is_valid(page: str) -> None:
    assert findings(block(page, "Example", "yaml")) == []


def test_rules_and_consent_of_the_page_are_valid() -> None:
    rules = block(RIGHTS, "Rules of a connection", "yaml")
    assert findings(completed("BrokerConnection", rules)) == []
    consent = yaml.safe_load(block(RIGHTS, "Consent of the owner", "yaml"))
    assert list(consent["metadata"]["annotations"]) == [USABLE_BY]


def test_inspection_fields_of_a_connection_are_valid() -> None:
    blocks = [block(RIGHTS, heading, "yaml") for heading in ("Of Inspections", "Destinations")]
    role, destinations = (yaml.safe_load(text)["spec"]["inspection"] for text in blocks)
    connection = manifest("BrokerConnection", inspection=role | destinations)
    assert findings(yaml.safe_dump(connection)) == []
    example = (ROOT / "examples/04-rocketmq/1-connection.yaml").read_text("utf-8")
    rocketmq = yaml.safe_load(example)
    added = yaml.safe_load(block(ROCKETMQ, "Read dead letters", "yaml"))["spec"]["rocketmq"]
    rocketmq["spec"]["rocketmq"] |= added
    assert findings(yaml.safe_dump(rocketmq)) == []


def test_inspection_of_the_page_is_valid() -> None:
    assert findings(block(READ, "With an Inspection", "yaml")) == []


def test_disabled_rules_of_the_page_hide_findings() -> None:
    text = block(CHECK, "Disable a rule", "yaml").removeprefix("spec:\n")
    fields = textwrap.dedent(text)
    assert findings(completed("RetryPolicy", fields)) == []
    uncommented = findings(completed("RetryPolicy", re.sub("#.*", "", fields)))
    assert len(uncommented) == 2


def test_hook_and_action_of_the_page_exist() -> None:
    hooks = yaml.safe_load(block(CHECK, "In a pre-commit hook", "yaml"))
    [defined] = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))
    [hook] = hooks["repos"][0]["hooks"]
    assert hook["id"] == defined["id"]
    steps = yaml.safe_load(block(CHECK, "In GitHub Actions", "yaml"))["steps"]
    action = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
    assert set(steps[1]["with"]) <= set(action["inputs"])


def test_schemas_that_the_page_names_exist() -> None:
    heading = "In the editor, and with kubeconform"
    [path] = re.findall(r"/v0\.1\.0/(\S+\.json)", block(CHECK, heading, "yaml"))
    assert (ROOT / path).is_file()
    [template] = re.findall(r"'(docs/\S+)'", block(CHECK, heading, "sh"))
    file = template.replace("{{.Group}}", "redrive.io").replace(
        "{{.ResourceAPIVersion}}", "v1beta1"
    )
    for crd in crds():
        kind = crd["spec"]["names"]["kind"].lower()
        assert (ROOT / file.replace("{{.ResourceKind}}", kind)).is_file()

"""Health checks and actions for Argo CD, run under its limits, and health checks of Flux."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from lupa.lua51 import LuaError

from redrive.api.crds import KINDS
from redrive.api.replay import Mode, ReplaySpec
from redrive.kube.resources import PAUSE, REQUESTED_BY
from release import CHECKOUT, gitops
from tests.support import argocd, flux

SCRIPTS = sorted(gitops.CUSTOMIZATIONS.rglob("*.lua"))
KIND_NAMES = [kind.kind for kind in KINDS]
TIME = re.compile(r"\d{4}-?\d\d-?\d\d(T\d\d:\d\d:\d\dZ|\d{4})")


def read(path: Path) -> Any:  # noqa: ANN401  YAML
    return yaml.safe_load(path.read_text("utf-8"))


def script(kind: str, path: str) -> str:
    return (gitops.CUSTOMIZATIONS / kind / path).read_text("utf-8")


def cases(file: str, table: str) -> list[Any]:
    """Return each test of a table of such a file, of all kinds, with the folder of the file."""
    return [
        pytest.param(kind, path.parent, case, id=f"{kind}-{case.get('action')}-{case['inputPath']}")
        for kind in KIND_NAMES
        if (path := gitops.CUSTOMIZATIONS / kind / file).exists()
        for case in read(path)[table]
    ]


@pytest.mark.parametrize(("kind", "folder", "case"), cases("health_test.yaml", "tests"))
def test_health_of_a_state_is_as_documented(kind: str, folder: Path, case: Any) -> None:  # noqa: ANN401
    body = read(folder / case["inputPath"])
    assert argocd.health(script(kind, "health.lua"), body) == case["healthStatus"]


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_every_state_has_a_health_test(kind: str) -> None:
    folder = gitops.CUSTOMIZATIONS / kind
    tested = {case["inputPath"] for case in read(folder / "health_test.yaml")["tests"]}
    assert tested == {f"testdata/{file.name}" for file in (folder / "testdata").iterdir()}
    assert {folder / path for path in tested} <= gitops.TEST_DATA.keys()


@pytest.mark.parametrize(
    ("kind", "folder", "case"), cases("actions/action_test.yaml", "discoveryTests")
)
def test_offered_actions_are_as_documented(kind: str, folder: Path, case: Any) -> None:  # noqa: ANN401
    actions = argocd.discover(
        script(kind, "actions/discovery.lua"), read(folder / case["inputPath"])
    )
    assert actions == sorted(case["result"], key=lambda action: str(action["name"]))
    assert {action["name"] for action in actions} == {
        file.parent.name for file in folder.glob("*/action.lua")
    }


@pytest.mark.parametrize(
    ("kind", "folder", "case"), cases("actions/action_test.yaml", "actionTests")
)
def test_action_changes_nothing_else(kind: str, folder: Path, case: Any) -> None:  # noqa: ANN401
    body = read(folder / case["inputPath"])
    operation, result = argocd.act(script(kind, f"actions/{case['action']}/action.lua"), body)
    expected = read(folder / case["expectedOutputPath"])
    if operation == "create":
        [created] = expected
        assert created["operation"] == "create"
        expected = created["unstructuredObj"]
    # The present time is in a name and in an annotation.
    assert TIME.sub("TIME", yaml.safe_dump(result)) == TIME.sub("TIME", yaml.safe_dump(expected))


def test_scripts_of_every_kind_are_in_the_configuration() -> None:
    data = read(gitops.CONFIGURATION)["data"]
    for kind in KIND_NAMES:
        name = f"resource.customizations.health.redrive.io_{kind}"
        assert data.pop(name) == script(kind, "health.lua")
    for kind in ("RetryPolicy", "Replay"):
        actions = yaml.safe_load(data.pop(f"resource.customizations.actions.redrive.io_{kind}"))
        assert actions["discovery.lua"] == script(kind, "actions/discovery.lua")
        for action in actions["definitions"]:
            assert action["action.lua"] == script(kind, f"actions/{action['name']}/action.lua")
    assert data == {}


def test_no_action_approves_or_moves_messages() -> None:
    policy = gitops.states("RetryPolicy")["provisioned"]
    for file in SCRIPTS:
        assert '"ReplayApproval"' not in file.read_text("utf-8")
    for action, mode in (("plan-replay", Mode.PLAN), ("review-replay", Mode.REVIEW)):
        _, plan = argocd.act(script("RetryPolicy", f"actions/{action}/action.lua"), policy)
        assert ReplaySpec.model_validate(plan["spec"]).mode is mode
        assert '"Run"' not in script("RetryPolicy", f"actions/{action}/action.lua")


def test_plan_of_a_policy_with_a_long_name_has_a_valid_name() -> None:
    policy = gitops.states("RetryPolicy")["provisioned"]
    for length, prefix in ((45, "a" * 45), (46, policy["metadata"]["uid"])):
        body = {**policy, "metadata": {**policy["metadata"], "name": "a" * length}}
        _, plan = argocd.act(script("RetryPolicy", "actions/plan-replay/action.lua"), body)
        name = plan["metadata"]["name"]
        assert name.startswith(f"{prefix}-plan-2")
        assert len(name) <= 63


def test_reconcile_writes_the_time_in_utc() -> None:
    before = datetime.now(UTC).replace(microsecond=0)  # noqa: TID251  Lua's clock
    policy = gitops.states("RetryPolicy")["provisioned"]
    _, result = argocd.act(script("RetryPolicy", "actions/reconcile/action.lua"), policy)
    [time] = result["metadata"]["annotations"].values()
    assert timedelta() <= datetime.fromisoformat(time) - before < timedelta(minutes=1)


@pytest.mark.parametrize("action", ["reconcile", "pause", "resume"])
def test_action_removes_the_name_of_who_acted_before(action: str) -> None:
    policy = gitops.states("RetryPolicy")["provisioned"]
    annotations = {REQUESTED_BY: "alice", "team": "shop"}
    body = {**policy, "metadata": {**policy["metadata"], "annotations": annotations}}
    _, result = argocd.act(script("RetryPolicy", f"actions/{action}/action.lua"), body)
    patch = argocd.merge_patch(body, result)
    assert patch["metadata"]["annotations"][REQUESTED_BY] is None
    assert "team" not in patch["metadata"]["annotations"]
    assert patch.keys() == {"metadata"}


def test_resume_removes_the_last_annotation() -> None:
    policy = gitops.states("RetryPolicy")["paused"]
    assert policy["metadata"]["annotations"] == {PAUSE: "true"}
    _, result = argocd.act(script("RetryPolicy", "actions/resume/action.lua"), policy)
    assert argocd.merge_patch(policy, result) == {"metadata": {"annotations": None}}


def test_role_permits_each_action_by_its_name() -> None:
    lines = (gitops.ARGOCD / "rbac.csv").read_text("utf-8").splitlines()
    rules = [line.split(", ") for line in lines if line.startswith("p, ")]
    permitted = {rule[3] for rule in rules if rule[3].startswith("action/")}
    actions = gitops.CUSTOMIZATIONS.glob("*/actions/*/action.lua")
    assert permitted == {
        f"action/redrive.io/{file.parents[2].name}/{file.parent.name}" for file in actions
    }
    assert {(rule[4], rule[5]) for rule in rules} == {("shop/*", "allow")}


def test_project_of_a_team_permits_what_actions_create() -> None:
    projects = yaml.safe_load_all((gitops.ARGOCD / "appproject.yaml").read_text("utf-8"))
    platform, shop = (project["spec"] for project in projects)
    kinds = {rule["kind"] for rule in shop["namespaceResourceWhitelist"]}
    _, plan = argocd.act(
        script("RetryPolicy", "actions/plan-replay/action.lua"),
        gitops.states("RetryPolicy")["provisioned"],
    )
    assert plan["kind"] in kinds
    assert not kinds & {"ReplayApproval", "BrokerConnection", "Secret", "Role", "RoleBinding"}
    assert {"Replay", "ReplayApproval", "Inspection"} == {
        rule["kind"] for rule in platform["namespaceResourceBlacklist"]
    }


def test_no_manifest_has_a_tool_replace_objects() -> None:
    """With these settings a refused change deletes a policy first."""
    files = [*(CHECKOUT / "gitops").rglob("*.yaml"), *(CHECKOUT / "examples").rglob("*.yaml")]
    assert len(files) > 60
    for file in files:
        assert not re.search("Replace=true|Force=true|force: true", file.read_text("utf-8")), file


@pytest.mark.parametrize(
    "source",
    [
        "return string.sub('ab', 1)",
        "return ('ab'):sub(1)",
        "return math.random()",
        "return io.open('/etc/hostname')",
        "return os.time()",  # only by require("os")
        "return require('os').getenv('HOME')",
        "return debug.getinfo(1)",
        "return coroutine.create(print)",
    ],
)
def test_scripts_have_the_libraries_of_argo_cd_only(source: str) -> None:
    with pytest.raises(LuaError, match="attempt to"):
        argocd.run(source, {})


def test_script_is_stopped_at_its_time_limit() -> None:
    with pytest.raises(LuaError, match="context deadline exceeded"):
        argocd.run("while true do end", {}, seconds=0.05)


WAITS = {"new": "Unknown", "progressing": "InProgress", "changed": "InProgress"}
BY_EXPRESSION = {
    "BrokerConnection": {
        **WAITS,
        "connected": "Current",
        "warning": "Current",
        "unreachable": "InProgress",
        "refused": "Failed",
    },
    "RetryPolicy": {
        **WAITS,
        "provisioned": "Current",
        "warning": "Current",
        "observed": "Current",
        "waiting": "InProgress",
        "stalled": "Failed",
        "paused": "Current",
        "paused-new": "InProgress",
    },
    "RocketMQRetryPolicy": {
        "new": "Unknown",
        "provisioned": "Current",
        "waiting": "InProgress",
        "stalled": "Failed",
        "paused": "Current",
    },
}
REPLAYS = {
    "new": "Current",
    "waiting": "InProgress",
    "running": "InProgress",
    "suspended": "InProgress",
    "awaiting-approval": "InProgress",
    "in-review": "InProgress",
    "stalled": "Failed",
    "completed": "Current",
    "completed-with-refusals": "Current",
    "planned": "Current",
    "failed": "Failed",
    "canceled": "Failed",
    "changed-after-its-end": "InProgress",
}

NAME = re.compile("Progressing|Healthy|Degraded|Suspended|waits|Current|InProgress|Failed")
UNKNOWN = {"Unknown": "waits"}
TABLE = (
    ("not read", [("RetryPolicy", "new")]),
    ("Ready", [("RetryPolicy", "provisioned")]),
    ("Ready, with a", [("RetryPolicy", "warning")]),
    ("Reconciling", [("RetryPolicy", "waiting")]),
    ("Stalled", [("RetryPolicy", "stalled")]),
    ("paused", [("RetryPolicy", "paused"), ("RetryPolicy", "paused-new")]),
    ("suspended", [("Replay", "suspended"), ("Replay", "awaiting-approval")]),
    ("`Complete`, `Failed`", [("Replay", "completed"), ("Replay", "failed")]),
)
"""Rows of the table on the page: words of the state, and examples."""


@pytest.mark.parametrize("kind", BY_EXPRESSION)
def test_status_by_expressions_is_as_documented(kind: str) -> None:
    checks = flux.expressions()[kind]
    statuses = {name: flux.evaluate(checks, body) for name, body in gitops.states(kind).items()}
    assert statuses == BY_EXPRESSION[kind]


@pytest.mark.parametrize("kind", BY_EXPRESSION)
def test_kstatus_differs_only_for_unread_objects(kind: str) -> None:
    statuses = {name: flux.kstatus(body) for name, body in gitops.states(kind).items()}
    assert statuses == BY_EXPRESSION[kind] | {"new": "Current"}


def test_kstatus_of_replays_follows_their_conditions() -> None:
    statuses = {name: flux.kstatus(body) for name, body in gitops.states("Replay").items()}
    assert statuses == REPLAYS


def test_health_table_of_the_page_is_true() -> None:
    page = (CHECKOUT / "docs/howto/gitops.md").read_text("utf-8")
    table = page.partition("## Health\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    checks = flux.expressions()
    statuses = {
        (kind, name): (
            argocd.health((gitops.CUSTOMIZATIONS / kind / "health.lua").read_text(), body)[
                "status"
            ],
            flux.evaluate(checks[kind], body) if kind in checks else flux.kstatus(body),
        )
        for kind in ("RetryPolicy", "Replay")
        for name, body in gitops.states(kind).items()
    }
    assert len(rows) == len(TABLE) + 1
    for (label, *cells), (words, examples) in zip(rows[1:], TABLE, strict=True):
        assert words in label
        for tool, cell in enumerate(cells):
            shown = [statuses[example][tool] for example in examples]
            distinct = list(dict.fromkeys(UNKNOWN.get(status, status) for status in shown))
            assert distinct == NAME.findall(cell)


def test_expressions_are_for_the_kinds_that_belong_in_git() -> None:
    checks = flux.expressions()
    assert checks.keys() == BY_EXPRESSION.keys()
    assert {check["apiVersion"] for check in checks.values()} == {"redrive.io/v1beta1"}

"""Commands for development without a cluster: explain, policy, rights, diff and lint."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from jsonschema import Draft202012Validator

from redrive.cli import develop
from redrive.cli.develop import resolved
from redrive.cli.diff import state
from redrive.cli.lint import lint
from redrive.errors import RedriveError
from redrive.lint.rules import IDS, LintRule
from redrive.policy import codec
from redrive.policy.model import SubscriptionType
from tests.support.documented import DEVELOP, shows, steps

ROOT = Path(__file__).parents[3]
FIRST = str(ROOT / "examples/01-first-policy")
EVERY = str(ROOT / "examples/03-every-field")
POLICY = """\
apiVersion: redrive.io/v1beta1
kind: RetryPolicy
metadata: {name: orders, namespace: shop}
spec:
  connectionRef: {name: main}
  topic: persistent://shop/prod/orders
  subscription: fulfilment
"""


def run(command: str, *arguments: str, stdin: str = "") -> Result:
    """Run a command; its errors are raised."""
    program = getattr(develop, command)
    return CliRunner().invoke(program, arguments, input=stdin, catch_exceptions=False)


def test_explain_shows_names_and_attempts_in_time() -> None:
    output = run("explain", FIRST).stdout
    for line in (
        "RetryPolicy shop/orders-fulfilment",
        "  retry topic        persistent://shop/prod/orders-fulfilment-RETRY",
        "  dead-letter topic  persistent://shop/prod/orders-fulfilment-DLQ",
        "  ConfigMap          orders-fulfilment-redrive",
        "  defaults           of BrokerConnection shop/main",
        "4 attempts in 7s, then dead-lettered",
        "        4  4s          7s",
    ):
        assert line in output.splitlines()


def test_explain_prints_what_the_page_shows() -> None:
    [step] = steps(DEVELOP, "See names, attempts and lines to paste")
    assert step.command == "redrive explain examples/01-first-policy"
    assert shows(f"{step.output}…\n", run("explain", FIRST).stdout)


def test_explain_shortens_many_attempts() -> None:
    output = run("explain", "-", stdin=POLICY + "  maxRetries: 1000\n").stdout
    attempts = [line.split() for line in output.splitlines() if re.match(r" +\d+ ", line)]
    assert len(attempts) == 11
    assert attempts[-1][0] == "1001"
    assert "shop/main is not in these manifests" in output


def test_explain_prints_the_java_lines_of_the_reference() -> None:
    page = (ROOT / "docs/reference/java.md").read_text("utf-8")
    block = page.partition("```java\n")[2].partition("\n\n")[0]
    expected = re.sub(r" +//.*", "", block)
    assert expected in run("explain", "-", stdin=POLICY).stdout


def test_explain_prints_lines_for_go_with_key_shared() -> None:
    output = run("explain", "-", stdin=POLICY + "  subscriptionType: KeyShared\n").stdout
    assert "    Type:             pulsar.KeyShared,\n" in output
    assert "        MaxDeliveries:    16,\n" in output
    assert ".subscriptionType(SubscriptionType.Key_Shared)" in output


def test_explain_offers_no_java_without_dead_letters() -> None:
    output = run("explain", "-", stdin=POLICY + "  deadLetter: {mode: Discard}\n").stdout
    assert "then discarded" in output
    assert "Java and Go: their clients need a dead-letter topic" in output
    assert "MaxDeliveries" not in output


def test_policy_file_has_the_defaults_of_its_connection() -> None:
    policy = codec.decode(run("policy", EVERY, "orders-billing").stdout)
    assert (policy.name, policy.subscription, policy.subscription_type) == (
        "shop/orders-billing",
        "billing",
        SubscriptionType.SHARED,
    )


def test_policy_file_of_several_policies_is_refused() -> None:
    with pytest.raises(RedriveError, match=r"orders-search'; name one of them"):
        run("policy", EVERY)
    with pytest.raises(RedriveError, match="has no RetryPolicy absent; got"):
        run("policy", EVERY, "absent")


def test_manifests_with_errors_are_refused_with_their_lines() -> None:
    result = CliRunner().invoke(develop.policy, ["-"], input=POLICY + "  maxRetries: -1\n")
    assert isinstance(result.exception, RedriveError)
    assert result.stderr.startswith("stdin:8:15 spec.maxRetries: ")


def test_rights_list_the_roles_of_a_policy() -> None:
    rows = [line.split(maxsplit=1) for line in run("rights", FIRST).stdout.splitlines()[1:]]
    assert [role for role, _ in rows] == ["fulfilment"] * 2 + ["replayer"] * 3
    without = run("rights", "-", stdin=POLICY).stdout
    assert without.endswith("  no rights: spec.consumerRoles is empty\n")


def test_provision_needs_an_address() -> None:
    result = CliRunner().invoke(develop.provision, [FIRST])
    assert result.exit_code == 2
    assert "Missing option '--admin-url'" in result.output


def test_state_shows_partitions_of_each_topic() -> None:
    policy = {
        "apiVersion": "redrive.io/v1beta1",
        "kind": "RetryPolicy",
        "metadata": {"namespace": "shop", "name": "orders", "uid": "u"},
        "spec": {
            "topic": "persistent://shop/prod/orders",
            "subscription": "fulfilment",
            "connectionRef": {"name": "main"},
            "deadLetter": {"partitions": 3},
        },
    }
    lines = list(state(resolved(policy, None)))
    assert "retry topic, partitions: default" in lines
    assert "dead-letter topic, partitions: 3" in lines


TEMPLATE = """\
apiVersion: redrive.io/v1beta1
kind: RetryPolicy
metadata: {name: NAME, namespace: shop}
spec:
  connectionRef: {name: main}
  topic: persistent://shop/prod/TOPIC
  subscription: SUBSCRIPTION
"""


def policy(name: str, topic: str, subscription: str, more: str = "") -> str:
    """Return a manifest of a policy."""
    values = {"NAME": name, "TOPIC": topic, "SUBSCRIPTION": subscription}
    return re.sub("NAME|TOPIC|SUBSCRIPTION", lambda match: values[match[0]], TEMPLATE) + more


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two policies that need a topic of one name, as the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b.yaml").write_text(policy("a", "orders", "eu-billing"), "utf-8")
    (tmp_path / "c.yaml").write_text(policy("c", "orders-eu", "billing"), "utf-8")
    return tmp_path


def run_lint(*arguments: str, stdin: str = "") -> Result:
    """Run the command as its frame does: it returns its exit code."""
    return CliRunner().invoke(lint, arguments, input=stdin, standalone_mode=False)


def test_name_collision_across_files_names_both_places(folder: Path) -> None:
    result = run_lint(str(folder))
    assert result.return_value == 1
    assert result.stdout.startswith(
        "c.yaml:7:17, a b.yaml:7:17 spec.subscription: another RetryPolicy, for subscription"
    )
    assert result.stdout.endswith("  [name-collision]\n")
    assert re.match(r"1 error, 0 warnings in 2 files \(\d+\.\d s\)\. Policies of ", result.stderr)


def test_valid_manifests_print_nothing_and_exit_with_0(folder: Path) -> None:
    result = run_lint(str(folder / "c.yaml"))
    assert (result.return_value, result.stdout) == (0, "")


def test_disabled_rule_is_left_out(folder: Path) -> None:
    result = run_lint("--disable", "name-collision", str(folder))
    assert (result.return_value, result.stdout) == (0, "")


def test_missing_path_exits_with_2(folder: Path) -> None:
    result = run_lint(str(folder / "absent"))
    assert result.return_value == 2
    assert result.stderr.startswith("error: a path of manifests can't be read; got ")


def test_standard_input_is_read(folder: Path) -> None:
    del folder
    result = run_lint("-", stdin=policy("a", "orders", "billing", "  maxRetries: -1\n"))
    assert result.stdout.startswith("stdin:8:15 spec.maxRetries: maxRetries must be from 0 to 1000")


def test_json_has_each_finding_with_its_position(folder: Path) -> None:
    report = json.loads(run_lint("-o", "json", str(folder)).stdout)
    schema = json.loads((ROOT / "docs/reference/cli.schema.json").read_text("utf-8"))
    Draft202012Validator(schema).validate(report)
    assert (report["kind"], report["errors"], report["warnings"], report["files"]) == (
        "FindingList", 1, 0, 2
    )  # fmt: skip
    (item,) = report["items"]
    assert (item["rule"], item["severity"], item["object"]) == (
        "name-collision", "error", "RetryPolicy shop/c"
    )  # fmt: skip
    assert (item["file"], item["line"], item["column"]) == ("c.yaml", 7, 17)
    assert item["related"] == [{"file": "a b.yaml", "line": 7, "column": 17}]


def test_sarif_has_rules_and_relative_paths(folder: Path) -> None:
    log = json.loads(run_lint("-o", "sarif", str(folder)).stdout)
    assert log["version"] == "2.1.0"
    (sarif_run,) = log["runs"]
    rules = [rule["id"] for rule in sarif_run["tool"]["driver"]["rules"]]
    assert set(rules) == IDS
    (result,) = sarif_run["results"]
    assert rules[result["ruleIndex"]] == result["ruleId"] == "name-collision"
    assert result["level"] == "error"
    (location,) = result["locations"]
    assert location["physicalLocation"] == {
        "artifactLocation": {"uri": "c.yaml"},
        "region": {"startLine": 7, "startColumn": 17},
    }
    (related,) = result["relatedLocations"]
    assert related["physicalLocation"]["artifactLocation"] == {"uri": "a%20b.yaml"}


def test_control_characters_are_not_printed(folder: Path) -> None:
    del folder
    result = run_lint("-", stdin=policy("a", "orders", '"a\\u001b[2Jb c"'))
    assert "\x1b" not in result.stdout
    assert "x1b[2Jb c" in result.stdout


def test_rule_names_are_stable() -> None:
    assert {rule.id for rule in LintRule} == IDS
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", name) for name in IDS)


def test_pre_commit_hook_installs_and_runs_the_command(folder: Path) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert hook["additional_dependencies"] == [".[cli]"]
    assert {"click", "pyyaml", "pydantic", "sqlglot"} <= {
        re.split(r"[<>=]", requirement)[0]
        for requirement in project["optional-dependencies"]["cli"]
    }
    assert hook["entry"] == "redrive lint"
    assert (hook["pass_filenames"], hook["require_serial"]) == (False, True)
    assert "[name-collision]" in run_lint(*hook["args"]).stdout
    assert folder.is_dir()


def test_action_writes_sarif_and_fails_with_findings(folder: Path) -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
    check = action["runs"]["steps"][-1]
    program = folder / "redrive/bin/redrive"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m redrive "$@"\n', "utf-8")
    program.chmod(0o755)
    process = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", check["run"]],  # noqa: S607  as a runner does
        env=os.environ
        | {"RUNNER_TEMP": str(folder), "PYTHONPATH": str(ROOT / "operator")}
        | {"PATHS": "c.yaml .", "NAMESPACE": "", "SARIF": "redrive.sarif"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 1, process.stderr
    assert "[name-collision]" in process.stdout
    assert json.loads((folder / "redrive.sarif").read_text("utf-8"))["version"] == "2.1.0"
    assert set(check["env"]) == {"PATHS", "NAMESPACE", "SARIF"}


def test_lint_imports_no_package_beyond_its_extra() -> None:
    code = (
        "import sys, redrive.cli.lint; print(sorted({'aiohttp', 'kopf', 'kubernetes', 'pulsar', "
        "'pyspark', 'prometheus_client'} & sys.modules.keys()))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT / "operator")},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert output == "[]\n"

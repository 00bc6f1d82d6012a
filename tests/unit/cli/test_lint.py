"""The command `redrive lint`: exit codes, text, JSON, SARIF."""

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

from redrive.cli.lint import lint
from redrive.lint.rules import IDS, LintRule

ROOT = Path(__file__).parents[3]
POLICY = """\
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
    return re.sub("NAME|TOPIC|SUBSCRIPTION", lambda match: values[match[0]], POLICY) + more


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two policies that need a topic of one name, as the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b.yaml").write_text(policy("a", "orders", "eu-billing"), "utf-8")
    (tmp_path / "c.yaml").write_text(policy("c", "orders-eu", "billing"), "utf-8")
    return tmp_path


def run(*arguments: str, stdin: str = "") -> Result:
    """Run the command as its frame does: it returns its exit code."""
    return CliRunner().invoke(lint, arguments, input=stdin, standalone_mode=False)


def test_name_collision_across_files_names_both_places(folder: Path) -> None:
    result = run(str(folder))
    assert result.return_value == 1
    assert result.stdout.startswith(
        "c.yaml:7:17, a b.yaml:7:17 spec.subscription: another RetryPolicy, for subscription"
    )
    assert result.stdout.endswith("  [name-collision]\n")
    assert re.match(r"1 error, 0 warnings in 2 files \(\d+\.\d s\)\. Policies of ", result.stderr)


def test_valid_manifests_print_nothing_and_exit_with_0(folder: Path) -> None:
    result = run(str(folder / "c.yaml"))
    assert (result.return_value, result.stdout) == (0, "")


def test_disabled_rule_is_left_out(folder: Path) -> None:
    result = run("--disable", "name-collision", str(folder))
    assert (result.return_value, result.stdout) == (0, "")


def test_missing_path_exits_with_2(folder: Path) -> None:
    result = run(str(folder / "absent"))
    assert result.return_value == 2
    assert result.stderr.startswith("error: a path of manifests can't be read; got ")


def test_standard_input_is_read(folder: Path) -> None:
    del folder
    result = run("-", stdin=policy("a", "orders", "billing", "  maxRetries: -1\n"))
    assert result.stdout.startswith("stdin:8:15 spec.maxRetries: maxRetries must be from 0 to 1000")


def test_json_has_each_finding_with_its_position(folder: Path) -> None:
    report = json.loads(run("-o", "json", str(folder)).stdout)
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
    log = json.loads(run("-o", "sarif", str(folder)).stdout)
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
    result = run("-", stdin=policy("a", "orders", '"a\\u001b[2Jb c"'))
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
    assert "[name-collision]" in run(*hook["args"]).stdout
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

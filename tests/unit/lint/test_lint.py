"""Reading of manifests, and checks: each wrong one is found, with its line, problem and remedy."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import yaml

from redrive.inspection import checks as inspection_checks
from redrive.kube.resources import (
    DEAD_LETTER_NOW,
    HAND_OVER_TO,
    IGNORE_OUTAGES_UNTIL,
    PAUSE,
    RECONCILE_REQUESTED_AT,
    SKIP_CLEANUP,
    TAKE_OVER_FROM,
    UNLOAD_REQUESTED_AT,
    USABLE_BY,
)
from redrive.kube.rocketmq import cluster_of
from redrive.lint.checks import lint
from redrive.lint.manifests import Manifests
from redrive.lint.objects import ANNOTATIONS
from redrive.lint.rules import Finding, LintRule
from redrive.provision.checks import (
    ADMISSION,
    chained,
    foreign_config_map,
    group_is_not_allowed,
    prior_claim,
    too_many_policies,
)
from redrive.reasons import Reason
from redrive.replay.controller import checks as replay_checks
from tests.support.manifests import REFUSED, VALID, bad_input, manifest, read
from tests.support.reasons import raises

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ROOT = Path(__file__).parents[3]
WRONG_MANIFESTS: list[dict[str, Any]] = read(Path(__file__).with_name("wrong_manifests.yaml"))
EXPECTED = re.compile(r"# expect: ([\w -]+)")
PLACEHOLDER = re.compile(r"\{(tenant|namespace|other)\}")
ADMISSIBLE = [*REFUSED, *(case for cases in bad_input().values() for case in cases)]


def findings_in(text: str, namespace: str = "") -> list[Finding]:
    """Check *text* as one file."""
    manifests = Manifests(namespace)
    manifests.add("wrong.yaml", text.encode())
    return lint(manifests, NOW)


def expected(text: str) -> Counter[tuple[int, str]]:
    """Return line and rule of each finding that the comments of *text* announce."""
    matches = ((n, EXPECTED.search(line)) for n, line in enumerate(text.split("\n"), start=1))
    return Counter((line, rule) for line, match in matches if match for rule in match[1].split())


@pytest.mark.parametrize("wrong", WRONG_MANIFESTS, ids=lambda wrong: wrong["case"])
def test_wrong_manifest_is_found_at_its_line(wrong: dict[str, Any]) -> None:
    findings = findings_in(wrong["text"])
    assert Counter((f.position.line, f.rule.id) for f in findings) == expected(wrong["text"])
    messages = "\n".join(f"{finding.field}: {finding.message}" for finding in findings)
    for words in wrong["says"]:
        assert words in messages
    assert wrong.get("never", "\0") not in messages
    assert all("; " in finding.message for finding in findings), "a remedy follows the problem"


def test_every_rule_has_a_wrong_manifest() -> None:
    rules = {rule for wrong in WRONG_MANIFESTS for _, rule in expected(wrong["text"])}
    assert rules == {rule.id for rule in LintRule}


def reasons_given(function: FunctionType) -> Iterator[Reason]:
    """Yield the reasons that *function* and the functions that it calls name."""
    for name in function.__code__.co_names:
        if name in Reason.__members__:
            yield Reason[name]
        elif isinstance(called := function.__globals__.get(name), FunctionType):
            yield from reasons_given(called)


def test_every_reason_of_the_operators_checks_has_a_rule() -> None:
    others = (prior_claim, chained, too_many_policies, foreign_config_map, group_is_not_allowed)
    checks: list[object] = [*others, *ADMISSION.checks, cluster_of]
    for module in (replay_checks, inspection_checks):
        checks += vars(module).values()
    reasons = {
        r for check in checks if isinstance(check, FunctionType) for r in reasons_given(check)
    }
    assert Reason.AUTHOR_FIELD_MISSING in reasons
    assert {LintRule.of(reason.error("x", remedy="y")) for reason in reasons} <= set(LintRule)


def test_all_that_admission_refuses_is_found_at_its_field() -> None:
    missed = []
    for case in ADMISSIBLE:
        if "reason" in case or PLACEHOLDER.search(str(case)):
            continue  # a condition of an object that exists, or names of an installation
        body = manifest(case["kind"], case.get("name", "one"), **case["spec"])
        findings = findings_in(yaml.safe_dump(body, sort_keys=False))
        fields = [finding.field for finding in findings]
        if not any(field.startswith(case["path"]) for field in fields):
            missed.append((case["case"], fields))
        assert case.get("never", "\0") not in str(findings)
    assert missed == []


@pytest.mark.parametrize("kind", VALID)
def test_smallest_object_has_no_finding(kind: str) -> None:
    assert findings_in(yaml.safe_dump(manifest(kind))) == []


@pytest.mark.parametrize("folder", sorted((ROOT / "examples").iterdir()), ids=lambda f: f.name)
def test_examples_have_no_finding(folder: Path) -> None:
    assert lint(Manifests.read([str(folder)]), NOW) == []


def test_annotations_of_users_are_known() -> None:
    of_policies = {
        DEAD_LETTER_NOW,
        SKIP_CLEANUP,
        IGNORE_OUTAGES_UNTIL,
        PAUSE,
        HAND_OVER_TO,
        TAKE_OVER_FROM,
        UNLOAD_REQUESTED_AT,
    }
    assert set(ANNOTATIONS) >= {*of_policies, USABLE_BY, RECONCILE_REQUESTED_AT}


POLICY = """\
apiVersion: redrive.io/v1beta1
kind: RetryPolicy
metadata: {name: orders}
spec:
  connectionRef: {name: main}
  topic: persistent://shop/prod/orders
  subscription: billing
"""
WRONG = f"{POLICY}  maxRetries: -1\n"


def parsed(text: str, namespace: str = "") -> Manifests:
    """Read *text* as one file."""
    manifests = Manifests(namespace)
    manifests.add("a/b.yaml", text.encode())
    return manifests


def places(manifests: Manifests) -> list[str]:
    """Return position and rule of each finding."""
    return [f"{finding.position} {finding.rule.id}" for finding in lint(manifests, NOW)]


def test_rendered_chart_has_positions_in_its_templates() -> None:
    source = "---\n# Source: shop/templates/"
    assert places(parsed(f"{source}one.yaml\n{POLICY}{source}a.yaml\n{WRONG}")) == [
        "shop/templates/a.yaml:3:18 duplicate-object",
        "shop/templates/a.yaml:8:15 invalid-value",
    ]


def test_document_after_separator_has_lines_of_the_file() -> None:
    assert places(parsed(f"kind: ConfigMap\n--- # next\n{WRONG}")) == [
        "a/b.yaml:10:15 invalid-value"
    ]
    assert places(parsed(f"# comment\n\n---\n---\n{WRONG}...\n")) == [
        "a/b.yaml:12:15 invalid-value"
    ]


def test_unreadable_document_leaves_the_others_readable() -> None:
    text = f"kind: RetryPolicy\n a: b: c\n---\n{WRONG}"
    assert places(parsed(text)) == ["a/b.yaml:2:3 yaml-syntax", "a/b.yaml:11:15 invalid-value"]


@pytest.mark.parametrize(
    "text",
    [
        WRONG.replace("-1", "-1  # redrive-lint: disable=invalid-value"),
        WRONG.replace("  max", "  # redrive-lint: disable=name-collision, invalid-value\n  max"),
        f"# redrive-lint: disable=invalid-value\n{WRONG}",
    ],
    ids=["beside the field", "on the line before", "before the document"],
)
def test_comment_disables_a_rule(text: str) -> None:
    assert places(parsed(text)) == []


def test_comment_of_another_line_or_document_disables_nothing() -> None:
    comment = "# redrive-lint: disable=invalid-value\n"
    assert places(parsed(f"{comment}kind: ConfigMap\n---\n{WRONG}")) != []
    assert places(parsed(WRONG.replace("  topic", f"  {comment}  topic"))) != []
    assert places(parsed(f"{WRONG}{comment}")) != []


def test_other_kinds_and_groups_are_ignored() -> None:
    foreign = "apiVersion: example.com/v1\nkind: Replay\nspec: {redrive: 1}\n"
    manifests = parsed(f"{foreign}---\nkind: ConfigMap\ndata: {{a: redrive.io}}\n---\n- redrive\n")
    assert (places(manifests), manifests.objects) == ([], [])


def test_broken_yaml_of_others_is_ignored() -> None:
    assert places(parsed("kind: ConfigMap\n a: b: {{ c }}\n")) == []


def test_scalars_mean_the_same_as_to_kubectl() -> None:
    body = (
        parsed(
            "apiVersion: redrive.io/v1beta1\n"
            "spec: [4711:3, 2026-11-27T00:00:00Z, on, 1e3, 0x10, 017, ~, '3', 1_000, y: no]\n"
        )
        .objects[0]
        .body
    )
    assert body["spec"] == [
        "4711:3", "2026-11-27T00:00:00Z", True, 1000.0, 16, 15, None, "3", 1000, {"y": False}
    ]  # fmt: skip


def test_folder_is_read_without_templates_and_patches(tmp_path: Path) -> None:
    for name, text in {
        "chart/Chart.yaml": "name: shop\n",
        "chart/templates/policy.yaml": "kind: RetryPolicy\nmetadata: {{ .Values.metadata }}\n",
        "overlay/kustomization.yml": "patches: [{path: patch.yaml}]\n",
        "overlay/patch.yaml": "kind: RetryPolicy\napiVersion: redrive.io/v1beta1\n",
        "overlay/more.json": '{"kind": "Replay", "apiVersion": "redrive.io/v1beta1"}',
        ".git/policy.yaml": WRONG,
        "notes.txt": WRONG,
        "policy.yml": WRONG,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    manifests = Manifests.read([str(tmp_path)])
    assert [m.document.file.removeprefix(f"{tmp_path}/") for m in manifests.objects] == [
        "overlay/more.json",
        "policy.yml",
    ]
    assert [note.split(" ", 1)[0].removeprefix(f"{tmp_path}/") for note in manifests.notes] == [
        "chart/templates",
        "overlay/patch.yaml",
    ]


def test_paths_are_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "policy.yaml").write_text(WRONG, "utf-8")
    monkeypatch.chdir(tmp_path)
    assert places(Manifests.read([str(tmp_path)])) == ["policy.yaml:8:15 invalid-value"]


def test_missing_path_has_a_remedy(tmp_path: Path) -> None:
    with raises("ManifestsUnreadable", match=r"got .*/absent: No such file.*; name"):
        Manifests.read([str(tmp_path / "absent")])


def test_default_namespace_is_that_of_objects_without_one() -> None:
    connection = """\
apiVersion: redrive.io/v1beta1
kind: BrokerConnection
metadata: {name: main, namespace: platform}
spec:
  pulsar:
    serviceURL: pulsar://pulsar:6650
    adminURL: http://pulsar:8080
    authentication: {type: None}
  allow:
  - {name: shop, namespaces: {names: [shop]}, topics: ["persistent://shop/*/*"]}
---
"""
    policy = POLICY.replace("{name: main}", "{name: main, namespace: platform}")
    assert places(parsed(connection + policy)) == []  # its namespace is unknown
    assert places(parsed(connection + policy, "shop")) == []
    assert places(parsed(connection + policy, "pay")) == ["a/b.yaml:16:18 namespace-not-allowed"]


def test_environments_in_folders_are_no_rivals(tmp_path: Path) -> None:
    for folder in ("dev", "prod"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "policy.yaml").write_text(POLICY, "utf-8")
    manifests = Manifests.read([str(tmp_path)])
    assert places(manifests) == []
    assert manifests.notes == [
        "1 objects are in several folders, such as RetryPolicy orders: check each environment alone"
    ]

"""Reading of manifests: files, folders, rendered charts, comments, scalars."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from redrive.lint.checks import lint
from redrive.lint.manifests import Manifests
from tests.support.reasons import raises

NOW = datetime(2026, 1, 1, tzinfo=UTC)
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


def read(text: str, namespace: str = "") -> Manifests:
    """Read *text* as one file."""
    manifests = Manifests(namespace)
    manifests.add("a/b.yaml", text.encode())
    return manifests


def places(manifests: Manifests) -> list[str]:
    """Return position and rule of each finding."""
    return [f"{finding.position} {finding.rule.id}" for finding in lint(manifests, NOW)]


def test_rendered_chart_has_positions_in_its_templates() -> None:
    source = "---\n# Source: shop/templates/"
    assert places(read(f"{source}one.yaml\n{POLICY}{source}a.yaml\n{WRONG}")) == [
        "shop/templates/a.yaml:3:18 duplicate-object",
        "shop/templates/a.yaml:8:15 invalid-value",
    ]


def test_document_after_separator_has_lines_of_the_file() -> None:
    assert places(read(f"kind: ConfigMap\n--- # next\n{WRONG}")) == ["a/b.yaml:10:15 invalid-value"]
    assert places(read(f"# comment\n\n---\n---\n{WRONG}...\n")) == ["a/b.yaml:12:15 invalid-value"]


def test_unreadable_document_leaves_the_others_readable() -> None:
    text = f"kind: RetryPolicy\n a: b: c\n---\n{WRONG}"
    assert places(read(text)) == ["a/b.yaml:2:3 yaml-syntax", "a/b.yaml:11:15 invalid-value"]


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
    assert places(read(text)) == []


def test_comment_of_another_line_or_document_disables_nothing() -> None:
    comment = "# redrive-lint: disable=invalid-value\n"
    assert places(read(f"{comment}kind: ConfigMap\n---\n{WRONG}")) != []
    assert places(read(WRONG.replace("  topic", f"  {comment}  topic"))) != []
    assert places(read(f"{WRONG}{comment}")) != []


def test_other_kinds_and_groups_are_ignored() -> None:
    foreign = "apiVersion: example.com/v1\nkind: Replay\nspec: {redrive: 1}\n"
    manifests = read(f"{foreign}---\nkind: ConfigMap\ndata: {{a: redrive.io}}\n---\n- redrive\n")
    assert (places(manifests), manifests.objects) == ([], [])


def test_broken_yaml_of_others_is_ignored() -> None:
    assert places(read("kind: ConfigMap\n a: b: {{ c }}\n")) == []


def test_scalars_mean_the_same_as_to_kubectl() -> None:
    body = (
        read(
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
    assert places(read(connection + policy)) == []  # its namespace is unknown
    assert places(read(connection + policy, "shop")) == []
    assert places(read(connection + policy, "pay")) == ["a/b.yaml:16:18 namespace-not-allowed"]


def test_environments_in_folders_are_no_rivals(tmp_path: Path) -> None:
    for folder in ("dev", "prod"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "policy.yaml").write_text(POLICY, "utf-8")
    manifests = Manifests.read([str(tmp_path)])
    assert places(manifests) == []
    assert manifests.notes == [
        "1 objects are in several folders, such as RetryPolicy orders: check each environment alone"
    ]

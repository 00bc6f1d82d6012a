"""Checks of manifests: each wrong one is found, at its line, with problem, value and remedy."""

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
from tests.support.invalid_manifests import REFUSED, VALID, bad_input, manifest, read

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ROOT = Path(__file__).parents[3]
WRONG: list[dict[str, Any]] = read(Path(__file__).with_name("wrong_manifests.yaml"))
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


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong["case"])
def test_wrong_manifest_is_found_at_its_line(wrong: dict[str, Any]) -> None:
    findings = findings_in(wrong["text"])
    assert Counter((f.position.line, f.rule.id) for f in findings) == expected(wrong["text"])
    messages = "\n".join(f"{finding.field}: {finding.message}" for finding in findings)
    for words in wrong["says"]:
        assert words in messages
    assert wrong.get("never", "\0") not in messages
    assert all("; " in finding.message for finding in findings), "a remedy follows the problem"


def test_every_rule_has_a_wrong_manifest() -> None:
    rules = {rule for wrong in WRONG for _, rule in expected(wrong["text"])}
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

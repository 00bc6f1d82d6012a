"""Findings as text, as items of a document, and as SARIF 2.1.0 for code scanning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from redrive import __version__
from redrive.kube.logs import printable
from redrive.lint.manifests import Place
from redrive.lint.rules import Finding, LintRule, Severity

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def count(findings: Sequence[Finding], severity: Severity) -> int:
    """Return the number of *findings* of one severity."""
    return sum(finding.rule.severity is severity for finding in findings)


def to_text(findings: Sequence[Finding]) -> str:
    """Write one line for each finding: positions, field, message, rule."""
    return "".join(map(_line, findings))


def _line(finding: Finding) -> str:
    positions = ", ".join(map(str, (finding.position, *finding.related)))
    field = f" {finding.field}" if finding.field else ""
    is_warning = finding.rule.severity is Severity.WARNING
    mark = f"warning: {finding.rule.id}" if is_warning else finding.rule.id
    return f"{positions}{field}: {printable(finding.message)}  [{mark}]\n"


def items(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return *findings* as items of a document for programs."""
    return [
        {
            "rule": finding.rule.id,
            "severity": finding.rule.severity.value,
            **finding.position._asdict(),
            "field": finding.field,
            "object": finding.title,
            "message": finding.message,
            "related": [position._asdict() for position in finding.related],
        }
        for finding in findings
    ]


def to_sarif(findings: Sequence[Finding]) -> str:
    """Write one run, with paths relative to the working directory."""
    rules = list(LintRule)
    driver = {
        "name": "redrive",
        "semanticVersion": __version__,
        "rules": [
            {
                "id": rule.id,
                "shortDescription": {"text": rule.meaning},
                "defaultConfiguration": {"level": rule.severity.value},
            }
            for rule in rules
        ],
    }
    results = [
        {
            "ruleId": finding.rule.id,
            "ruleIndex": rules.index(finding.rule),
            "level": finding.rule.severity.value,
            "message": {"text": f"{finding.field}: {finding.message}".removeprefix(": ")},
            "locations": [_location(finding.position) | _object(finding)],
            "relatedLocations": [
                {"id": number, **_location(position)}
                for number, position in enumerate(finding.related)
            ],
        }
        for finding in findings
    ]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    log = {"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(log, indent=2, ensure_ascii=False) + "\n"


def _location(position: Place) -> dict[str, Any]:
    return {
        "physicalLocation": {
            "artifactLocation": {"uri": quote(position.file)},
            "region": {"startLine": position.line, "startColumn": position.column},
        }
    }


def _object(finding: Finding) -> dict[str, Any]:
    if not finding.title:
        return {}
    name = f"{finding.title} {finding.field}".strip()
    return {"logicalLocations": [{"fullyQualifiedName": name, "kind": "object"}]}

"""Status of objects as Flux computes it: by kstatus, or by expressions of a Kustomization."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import celpy
import yaml
from celpy.adapter import json_to_cel

from release import CHECKOUT

COMPONENT = CHECKOUT / "gitops" / "flux" / "health-checks" / "kustomization.yaml"
CURRENT, IN_PROGRESS, FAILED = "Current", "InProgress", "Failed"
UNKNOWN = "Unknown"
"""An expression failed, because the object has no status: Flux waits, until its time-out."""


def expressions(component: Path = COMPONENT) -> dict[str, Mapping[str, str]]:
    """Return the expressions that the component adds, by kind."""
    [patch] = yaml.safe_load(component.read_text("utf-8"))["patches"]
    values = {item["path"]: item["value"] for item in yaml.safe_load(patch["patch"])}
    return {check["kind"]: check for check in values["/spec/healthCheckExprs"]}


def evaluate(checks: Mapping[str, str], body: Mapping[str, Any]) -> str:
    """Return the status by expressions: the generation, then inProgress, failed and current."""
    if "status" not in body:  # where cel-go fails, even at has(status.conditions), celpy does not
        return UNKNOWN
    if _is_outdated(body):
        return IN_PROGRESS
    fields = {name: json_to_cel(value) for name, value in body.items()}
    for field, status in (("inProgress", IN_PROGRESS), ("failed", FAILED), ("current", CURRENT)):
        if field in checks and compute(checks[field], fields):
            return status
    return IN_PROGRESS


def compute(expression: str, variables: Mapping[str, Any]) -> bool:
    """Return the value of an expression in CEL."""
    environment = celpy.Environment()
    return bool(environment.program(environment.compile(expression)).evaluate(dict(variables)))


def kstatus(body: Mapping[str, Any]) -> str:
    """Return the status of an object of a kind without expressions."""
    if _is_outdated(body):
        return IN_PROGRESS
    conditions = (body.get("status") or {}).get("conditions") or ()
    for condition in conditions:
        if condition["status"] == "True" and condition["type"] in ("Reconciling", "Stalled"):
            return IN_PROGRESS if condition["type"] == "Reconciling" else FAILED
    states = [condition["status"] for condition in conditions if condition["type"] == "Ready"]
    return IN_PROGRESS if states and states != ["True"] else CURRENT


def _is_outdated(body: Mapping[str, Any]) -> bool:
    generation = body["metadata"]["generation"]
    return bool((body.get("status") or {}).get("observedGeneration", generation) != generation)

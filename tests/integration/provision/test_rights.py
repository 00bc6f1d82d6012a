"""The operator's ServiceAccount may do what it needs, as `examples/operator.yaml` says, no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from redrive.sandbox.kubernetes import Cluster

ACCOUNT = "system:serviceaccount:redrive-system:redrive-operator"
VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
NEEDED = {
    "redrive.io/pulsarconnections": {"list", "watch"},
    "redrive.io/pulsarconnections/status": {"patch"},
    "redrive.io/retrypolicies": {"list", "watch", "patch"},
    "redrive.io/retrypolicies/status": {"patch"},
    "redrive.io/replays": {"list", "watch"},
    "redrive.io/replays/status": {"patch"},
    "/secrets": {"get"},
    "/configmaps": {"get", "create", "patch"},
    "/events": {"create"},
    "/pods": set(),
    "/namespaces": set(),
    "rbac.authorization.k8s.io/roles": set(),
    "apiextensions.k8s.io/customresourcedefinitions": set(),
    "sparkoperator.k8s.io/sparkapplications": {"list", "watch", "create"},
}


def review(resource: str, verb: str) -> dict[str, Any]:
    """The question whether the account may do *verb* to *resource* in any namespace."""
    group, plural, *subresource = resource.split("/")
    attributes = {"verb": verb, "group": group, "resource": plural}
    if subresource:
        attributes["subresource"] = subresource[0]
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": ACCOUNT,
            "groups": ["system:serviceaccounts", "system:authenticated"],
            "resourceAttributes": attributes,
        },
    }


def test_the_operator_may_do_what_it_needs_and_nothing_else(
    cluster: Cluster, operator_process: Path
) -> None:
    assert operator_process.is_file()
    asked = [(resource, verb) for resource in NEEDED for verb in VERBS]
    questions = {"apiVersion": "v1", "kind": "List", "items": [review(*ask) for ask in asked]}
    answers = cluster.kubectl(
        "create", "-f", "-", '--output=jsonpath={.status.allowed}{"\\n"}',
        input=json.dumps(questions),
    ).splitlines()  # fmt: skip
    allowed: dict[str, set[str]] = {resource: set() for resource in NEEDED}
    for (resource, verb), answer in zip(asked, answers, strict=True):
        assert answer in {"true", "false"}
        if answer == "true":
            allowed[resource].add(verb)
    assert allowed == NEEDED

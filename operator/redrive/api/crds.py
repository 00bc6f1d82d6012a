"""CustomResourceDefinitions: kinds, printer columns, structural schemas, and their generator.

`python -m redrive.api.crds DIRECTORY` writes them; a test fails when `crds/` differs. A structural
schema is the part of JSON Schema that a CRD may be written in.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from redrive.api import API_VERSION, GROUP, VERSION
from redrive.api.connection import BrokerConnectionSpec, BrokerConnectionStatus
from redrive.api.model import VALIDATIONS, ApiModel, Rule, StatusModel
from redrive.api.policy_defaults import SAME_SCHEME
from redrive.api.replay import ReplaySpec, ReplayStatus
from redrive.api.retrypolicy import RetryPolicySpec, RetryPolicyStatus


@dataclass(frozen=True)
class Column:
    """A column of `kubectl get`; one that is *wide* shows with `-o wide` only."""

    name: str
    path: str
    description: str
    type: str = "string"
    wide: bool = False


@dataclass(frozen=True)
class Kind:
    """One kind of object of the API; its *rules* are about spec and status together."""

    kind: str
    plural: str
    short_names: tuple[str, ...]
    description: str
    spec: type[ApiModel]
    status: type[StatusModel]
    columns: tuple[Column, ...]
    rules: tuple[Rule, ...] = ()


_READY = '.status.conditions[?(@.type=="Ready")]'
_AGE = Column("Age", ".metadata.creationTimestamp", "When the object was created.", type="date")

BROKER_CONNECTION = Kind(
    kind="BrokerConnection",
    plural="brokerconnections",
    short_names=("bconn",),
    description="A Pulsar cluster, its credentials, and which namespaces may use it for what.",
    spec=BrokerConnectionSpec,
    status=BrokerConnectionStatus,
    columns=(
        Column("Ready", f"{_READY}.status", "Whether the broker answers and the token has rights."),
        Column("Reason", f"{_READY}.reason", "Why, in one word."),
        Column("Policies", ".status.policies", "RetryPolicies that use it.", "integer"),
        Column("Warnings", ".status.warnings", "Conditions that need attention.", wide=True),
        Column("URL", ".spec.serviceUrl", "Where Pulsar clients connect."),
        Column("Admin URL", ".spec.adminUrl", "Where the admin REST API answers.", wide=True),
        _AGE,
    ),
)

RETRY_POLICY = Kind(
    kind="RetryPolicy",
    plural="retrypolicies",
    short_names=("rpol",),
    description="How failed messages of one Pulsar subscription are retried, and where they end.",
    spec=RetryPolicySpec,
    status=RetryPolicyStatus,
    columns=(
        Column("Ready", f"{_READY}.status", "Whether everything is as the policy asks."),
        Column("Reason", f"{_READY}.reason", "Why, in one word."),
        Column(
            "Warnings",
            ".status.warnings",
            "Conditions that need attention although the policy is ready.",
        ),
        Column("Topic", ".spec.topic", "The source topic."),
        Column("Subscription", ".spec.subscription", "Whose failed messages are retried."),
        Column("Retries", ".status.maxRetries", "Retries of one message.", "integer"),
        Column("Waiting", ".status.backlog.retry", "Messages that wait for a retry.", "integer"),
        Column(
            "Dead", ".status.backlog.deadLetter", "Messages in the dead-letter topic.", "integer"
        ),
        Column(
            "Oldest Dead Letter",
            ".status.backlog.oldestDeadLetter",
            "How long ago the oldest one was dead-lettered.",
            "date",
            wide=True,
        ),
        Column("Retry Topic", ".status.retryTopic", "Where messages wait.", wide=True),
        Column("Dead-Letter Topic", ".status.deadLetterTopic", "Where they end.", wide=True),
        _AGE,
    ),
    rules=SAME_SCHEME,
)

REPLAY = Kind(
    kind="Replay",
    plural="replays",
    short_names=("rpl",),
    description="One run that moves the dead letters of a RetryPolicy back to be processed again.",
    spec=ReplaySpec,
    status=ReplayStatus,
    columns=(
        Column("Policy", ".spec.policyRef.name", "Whose dead letters are moved."),
        Column("Phase", ".status.phase", "The phase of the run."),
        Column("Scanned", ".status.scanned", "Dead letters looked at.", "integer"),
        Column("Matched", ".status.matched", "Dead letters selected.", "integer"),
        Column("Moved", ".status.moved", "Stored in the target.", "integer"),
        Column("Refused", ".status.refused", "Selected, and can't be moved.", "integer"),
        Column("Left", ".status.left", "Selected, and yet to be moved.", "integer"),
        Column("Rate", ".status.rate", "Messages moved in a second.", "number"),
        Column("Remaining", ".status.remaining", "How long it still takes."),
        Column("Skipped", ".status.skipped", "Needed no move.", "integer", wide=True),
        Column(
            "Unevaluated",
            ".status.unevaluated",
            "Not selected, as the condition can't be computed for them.",
            "integer",
            wide=True,
        ),
        Column("Handled", ".status.aftermath.handled", "Moved, and over.", "integer", wide=True),
        Column(
            "Died Again",
            ".status.aftermath.diedAgain",
            "Moved, and dead again.",
            "integer",
            wide=True,
        ),
        Column("Dry Run", ".spec.dryRun", "Whether it moves nothing.", "boolean", wide=True),
        Column("Reason", f"{_READY}.reason", "Why, in one word.", wide=True),
        _AGE,
    ),
)

KINDS = (BROKER_CONNECTION, RETRY_POLICY, REPLAY)


def crds() -> list[dict[str, Any]]:
    """Return one CustomResourceDefinition per kind."""
    return [_crd(kind) for kind in KINDS]


def write(directory: Path) -> None:
    """Write each CRD into *directory*, as `redrive.io_<plural>.yaml`."""
    for crd in crds():
        path = directory / f"{GROUP}_{crd['spec']['names']['plural']}.yaml"
        path.write_text(
            "# Generated from redrive.api by `python -m redrive.api.crds`; do not edit.\n"
            + yaml.safe_dump(crd, sort_keys=False, allow_unicode=True, width=100),
            encoding="utf-8",
        )


def _crd(kind: Kind) -> dict[str, Any]:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind.kind,
                "listKind": f"{kind.kind}List",
                "plural": kind.plural,
                "singular": kind.kind.lower(),
                "shortNames": list(kind.short_names),
                "categories": ["redrive"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [_column(column) for column in kind.columns],
                    "schema": {"openAPIV3Schema": _schema(kind)},
                }
            ],
        },
    }


def _schema(kind: Kind) -> dict[str, Any]:
    rules = [rule.to_schema() for rule in kind.rules]
    return {
        "type": "object",
        "description": kind.description,
        **({VALIDATIONS: rules} if rules else {}),
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"Always `{API_VERSION}`."},
            "kind": {"type": "string", "description": f"Always `{kind.kind}`."},
            "metadata": {"type": "object"},
            "spec": structural(kind.spec),
            "status": structural(kind.status),
        },
    }


def _column(column: Column) -> dict[str, Any]:
    return {
        "name": column.name,
        "type": column.type,
        "description": column.description,
        "jsonPath": column.path,
        "priority": int(column.wide),
    }


_DROPPED = {"title", "$defs"}


def structural(model: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of *model*: no references, titles or null, every field described.

    Raises:
        TypeError: a field has no docstring: a mistake in the model.
    """
    schema = model.model_json_schema(by_alias=True)
    return _flat(schema, schema.get("$defs", {}))


def _flat(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    node = _resolved(node, definitions)
    flat: dict[str, Any] = {}
    for key, value in node.items():
        match key:
            case "properties":
                flat[key] = {n: _field(n, field, definitions) for n, field in value.items()}
            case "items":
                flat[key] = _flat(value, definitions)
            case "additionalProperties" if value is False:
                continue  # the API server knows no other objects
            case "additionalProperties":
                flat[key] = _flat(value, definitions)
            case "description":
                flat[key] = " ".join(value.split())
            case "default" if isinstance(value, dict):
                flat[key] = {}  # else server-side apply would make null of one that becomes empty
            case "default":
                continue  # once stored, it looks like a user's choice
            case _ if key not in _DROPPED:
                flat[key] = value
    return flat


def _field(name: str, node: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    field = _flat(node, definitions)
    if "description" not in field:
        msg = f"the field {name} has no docstring: give it one"
        raise TypeError(msg)
    return field


def _resolved(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Put what *node* refers to in its place; what stands beside the reference wins."""
    own = {k: v for k, v in node.items() if k not in {"$ref", "anyOf"}}
    if "$ref" in node:
        target = definitions[node["$ref"].removeprefix("#/$defs/")]
        return _resolved(target, definitions) | own
    if "anyOf" in node:
        # `X | None`: in a manifest, None is a field left out.
        (target,) = (choice for choice in node["anyOf"] if choice != {"type": "null"})
        return _resolved(target, definitions) | own
    return own


def main(arguments: Sequence[str]) -> None:
    """Write the CRDs into the directory that the one argument names."""
    (directory,) = arguments
    write(Path(directory))


if __name__ == "__main__":
    main(sys.argv[1:])

"""CustomResourceDefinitions: kinds, printer columns, structural schemas, and their generator.

`python -m redrive.api.crds DIRECTORY` writes them; a test compares them with `crds/`. A structural
schema is the subset of JSON Schema that a CRD may use.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from redrive.api import API_VERSION, GROUP, VERSION
from redrive.api.connection import BrokerConnectionSpec, BrokerConnectionStatus
from redrive.api.inspection import InspectionSpec, InspectionStatus
from redrive.api.model import VALIDATIONS, ApiModel, Rule, StatusModel
from redrive.api.replay import ReplayApprovalSpec, ReplaySpec
from redrive.api.replay_status import ReplayStatus
from redrive.api.retrypolicy import RetryPolicySpec, RetryPolicyStatus
from redrive.api.rocketmq import RocketMQRetryPolicySpec, RocketMQRetryPolicyStatus


@dataclass(frozen=True)
class Column:
    """A column of `kubectl get`; a *wide* one is shown with `-o wide` only."""

    name: str
    path: str
    description: str
    type: str = "string"
    wide: bool = False


@dataclass(frozen=True)
class Kind:
    """One kind of object of the API.

    Attributes:
        status: None for a kind without status.
        selectable: paths of fields for field selectors.
        rules: rules on the whole object, which may use `metadata.name`.
    """

    kind: str
    plural: str
    short_names: tuple[str, ...]
    description: str
    spec: type[ApiModel]
    status: type[StatusModel] | None
    columns: tuple[Column, ...]
    selectable: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()


_READY = '.status.conditions[?(@.type=="Ready")]'
_AGE = Column("Age", ".metadata.creationTimestamp", "Time since the creation.", type="date")

BROKER_CONNECTION = Kind(
    kind="BrokerConnection",
    plural="brokerconnections",
    short_names=("bconn",),
    description="A Pulsar or RocketMQ cluster, credentials, and the namespaces that may use it.",
    spec=BrokerConnectionSpec,
    status=BrokerConnectionStatus,
    columns=(
        Column("Ready", f"{_READY}.status", "Status of the condition Ready."),
        Column("Reason", f"{_READY}.reason", "Reason of the condition Ready."),
        Column("Policies", ".status.policies", "RetryPolicies that use it.", "integer"),
        Column("Version", ".status.brokerVersion", "Release of the broker."),
        Column("Warnings", ".status.warnings", "Types of the warning conditions.", wide=True),
        Column("URL", ".spec.pulsar.serviceURL", "Address for Pulsar clients.", wide=True),
        Column("Admin URL", ".spec.pulsar.adminURL", "Address of the admin REST API.", wide=True),
        _AGE,
    ),
)

RETRY_POLICY = Kind(
    kind="RetryPolicy",
    plural="retrypolicies",
    short_names=("rpol",),
    description="Retries of failed messages of one Pulsar subscription, and their dead letters.",
    spec=RetryPolicySpec,
    status=RetryPolicyStatus,
    columns=(
        Column("Ready", f"{_READY}.status", "Status of the condition Ready."),
        Column("Reason", f"{_READY}.reason", "Reason of the condition Ready."),
        Column("Topic", ".status.topic", "Local name of the source topic."),
        Column("Subscription", ".spec.subscription", "Subscription of the source topic."),
        Column("Waiting", ".status.backlog.retry", "Messages that wait for a retry.", "integer"),
        Column("Dead", ".status.backlog.deadLetter",
               "Messages in the dead-letter topic.", "integer"),
        Column("Oldest", ".status.backlog.oldestDeadLetterTime",
               "Time since the oldest dead letter was stored.", "date"),
        Column("Counted", ".status.backlog.observedTime",
               "Time since Waiting, Dead and Oldest were read from the broker.", "date", wide=True),
        Column("Warnings", ".status.warnings", "Types of the warning conditions.", wide=True),
        Column("Retries", ".status.effective.maxRetries",
               "Retries of one message.", "integer", wide=True),
        Column("Retry Topic", ".status.retryTopic", "Full name of the retry topic.", wide=True),
        Column("Dead-Letter Topic", ".status.deadLetterTopic",
               "Full name of the dead-letter topic.", wide=True),
        _AGE,
    ),
    selectable=(".spec.connectionRef.name",),
)  # fmt: skip

_COUNTS = ".status.run.counts"

REPLAY = Kind(
    kind="Replay",
    plural="replays",
    short_names=("rpl",),
    description="One run that moves the dead letters of a RetryPolicy back to be processed again.",
    spec=ReplaySpec,
    status=ReplayStatus,
    columns=(
        Column("Policy", ".spec.policyRef.name", "Policy whose dead letters are moved."),
        Column("Phase", ".status.phase", "Phase of the run."),
        Column("Moved", f"{_COUNTS}.moved", "Messages stored in the target.", "integer"),
        Column("Refused", f"{_COUNTS}.refused", "Messages that cannot be moved.", "integer"),
        Column("Reason", f"{_READY}.reason", "Reason of the condition Ready."),
        Column("Dead Again", ".status.run.outcome.deadAgain",
               "Moved messages that were dead-lettered again.", "integer", wide=True),
        Column("Progress", ".status.run.progress", "Settled and selected messages.", wide=True),
        Column("Scanned", f"{_COUNTS}.scanned", "Dead letters read.", "integer", wide=True),
        Column("Skipped", f"{_COUNTS}.skipped",
               "Messages that needed no move.", "integer", wide=True),
        Column("Rate", ".status.run.ratePerMinute",
               "Messages moved in a minute.", "integer", wide=True),
        Column("Remaining", ".status.run.remaining", "Estimated time to the end.", wide=True),
        Column("Mode", ".spec.mode", "`Plan` or `Audit` if nothing is moved.", wide=True),
        _AGE,
    ),
    selectable=(".spec.policyRef.kind", ".spec.policyRef.name", ".status.phase"),
)  # fmt: skip

INSPECTION = Kind(
    kind="Inspection",
    plural="inspections",
    short_names=("insp",),
    description="One reading of the dead letters or waiting retries of a RetryPolicy, by cause.",
    spec=InspectionSpec,
    status=InspectionStatus,
    columns=(
        Column("Policy", ".spec.policyRef.name", "Policy whose messages are read."),
        Column("Phase", ".status.phase", "Phase of the run."),
        Column("Read", ".status.run.messages", "Messages that were read.", "integer"),
        Column("Matched", ".status.run.matched", "Messages that are selected.", "integer"),
        Column("Reason", f"{_READY}.reason", "Reason of the condition Ready."),
        _AGE,
    ),
    selectable=(".spec.policyRef.kind", ".spec.policyRef.name", ".status.phase"),
)

REPLAY_APPROVAL = Kind(
    kind="ReplayApproval",
    plural="replayapprovals",
    short_names=("rappr",),
    description="Approval of one Replay that moves more messages than it may without approval.",
    spec=ReplayApprovalSpec,
    status=None,
    columns=(
        Column("Messages", ".spec.messages", "Messages that the Replay may move.", "integer"),
        _AGE,
    ),
    rules=(
        Rule(
            "self.metadata.name == self.spec.replayRef.name",
            "a ReplayApproval must have the name of its Replay",
            "use the name of the Replay for both",
        ),
    ),
)

ROCKETMQ_RETRY_POLICY = Kind(
    kind="RocketMQRetryPolicy",
    plural="rocketmqretrypolicies",
    short_names=("rmqpol",),
    description="Retries of one consumer group of a RocketMQ topic, and its dead letters.",
    spec=RocketMQRetryPolicySpec,
    status=RocketMQRetryPolicyStatus,
    columns=(
        Column("Ready", f"{_READY}.status", "Status of the condition Ready."),
        Column("Reason", f"{_READY}.reason", "Reason of the condition Ready."),
        Column("Topic", ".spec.topic", "Source topic."),
        Column("Group", ".spec.group", "Consumer group."),
        Column("Dead", ".status.deadLetters", "Messages in the dead-letter topic.", "integer"),
        Column("Masters", ".status.masters", "Masters with the group.", wide=True),
        Column("Warnings", ".status.warnings", "Types of the warning conditions.", wide=True),
        _AGE,
    ),
    selectable=(".spec.connectionRef.name",),
)

KINDS = (
    BROKER_CONNECTION,
    RETRY_POLICY,
    REPLAY,
    REPLAY_APPROVAL,
    INSPECTION,
    ROCKETMQ_RETRY_POLICY,
)


def crds() -> list[dict[str, Any]]:
    """Return one CustomResourceDefinition per kind."""
    return [_crd(kind) for kind in KINDS]


def write(directory: Path) -> None:
    """Write each CRD into *directory*, as `redrive.io_<plural>.yaml`."""
    for crd in crds():
        path = directory / f"{GROUP}_{crd['spec']['names']['plural']}.yaml"
        path.write_text(
            "# Generated from redrive.api by `python -m redrive.api.crds`; do not edit.\n"
            + yaml.dump(crd, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=100),
            encoding="utf-8",
        )


class _Plain(yaml.SafeDumper):
    """Writes no anchors, which some readers of CRDs do not support."""

    def ignore_aliases(self, _data: object) -> bool:
        """Write repeated values in full."""
        return True


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
                    **({"subresources": {"status": {}}} if kind.status else {}),
                    "additionalPrinterColumns": [_column(column) for column in kind.columns],
                    **(
                        {"selectableFields": [{"jsonPath": path} for path in kind.selectable]}
                        if kind.selectable
                        else {}
                    ),
                    "schema": {"openAPIV3Schema": _schema(kind)},
                }
            ],
        },
    }


def _schema(kind: Kind) -> dict[str, Any]:
    properties = {
        "apiVersion": {"type": "string", "description": f"Always `{API_VERSION}`."},
        "kind": {"type": "string", "description": f"Always `{kind.kind}`."},
        # Labels repeat the name.
        "metadata": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 63}}},
        "spec": structural(kind.spec),
        **({"status": structural(kind.status)} if kind.status else {}),
    }
    rules = [rule.to_schema() for rule in kind.rules]
    return {
        "type": "object",
        "description": kind.description,
        "required": ["spec"],
        "properties": properties,
        **({VALIDATIONS: rules} if rules else {}),
    }


def _column(column: Column) -> dict[str, Any]:
    return {
        "name": column.name,
        "type": column.type,
        "description": column.description,
        "jsonPath": column.path,
        "priority": int(column.wide),
    }


_DROPPED = {"title", "$defs", "additionalProperties", "default"}
# A stored default would look like a choice of the user.
_INT32 = 2**31 - 1
_PRESENT = re.compile(r"present\((self|oldSelf)((?:[.]\w+)+)\)")


def structural(model: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of *model*, without references and titles, and with all descriptions.

    Optional objects and lists are nullable, and may be empty (see `redrive.api.model`). So a field
    that an optional object requires is required only beside its other fields, by a rule.

    Raises:
        TypeError: a field has no docstring, which is a bug in the model.
    """
    schema = model.model_json_schema(by_alias=True, schema_generator=_WithDocstrings)
    return _flat(schema, schema.get("$defs", {}))


class _WithDocstrings(GenerateJsonSchema):
    """Adds the rules of each model, and the docstring of each field as its description.

    With `use_attribute_docstrings` pydantic reads them whenever a program imports the models: a
    seventh of the start of the operator.
    """

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        generated = super().model_schema(schema)
        model = schema["cls"]
        for name, docstring in _docstrings(model).items():
            if field := model.model_fields.get(name):
                generated["properties"][field.alias].setdefault("description", docstring)
        if model.RULES:
            generated[VALIDATIONS] = [rule.to_schema() for rule in model.RULES]
        return generated


def _docstrings(model: type) -> dict[str, str]:
    """Return the docstrings of the fields of a model and its bases, by field."""
    docstrings: dict[str, str] = {}
    for base in reversed(model.__mro__):
        docstrings |= _docstrings_of_module(base.__module__).get(base.__qualname__, {})
    return docstrings


@functools.cache
def _docstrings_of_module(name: str) -> dict[str, dict[str, str]]:
    """Return the docstrings of the fields of all classes of a module of redrive."""
    if not name.startswith("redrive."):
        return {}
    classes = ast.parse(inspect.getsource(sys.modules[name])).body
    return {
        body.name: {
            field.target.id: inspect.cleandoc(text.value.value)
            for field, text in itertools.pairwise(body.body)
            if isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        }
        for body in classes
        if isinstance(body, ast.ClassDef)
    }


def _flat(
    node: Mapping[str, Any], definitions: Mapping[str, Any], *, optional: bool = False
) -> dict[str, Any]:
    """Return *node* without references.

    Args:
        optional: True if it may be left out, and so may be empty.
    """
    node = _resolved(node, definitions)
    required = () if optional else node.get("required", ())
    flat: dict[str, Any] = {}
    for key, value in node.items():
        match key:
            case "properties":
                flat[key] = {
                    name: _field(name, field, definitions, optional=name not in required)
                    for name, field in value.items()
                }
            case "items":
                flat[key] = _flat(value, definitions)
            case "additionalProperties" if value is not False:  # the API server prunes unknown keys
                flat[key] = _flat(value, definitions)
            case "description":
                flat[key] = " ".join(value.split())
            case _ if key not in _DROPPED:
                flat[key] = value
    rules = _rules(flat, optional=optional)  # they replace those of *flat*
    kind, is_long = flat.get("type"), flat.get("maximum", _INT32 + 1) > _INT32
    is_nullable = optional and kind in {"object", "array"}
    return {
        # The order of a list has a meaning, unless it has another type.
        **({"x-kubernetes-list-type": "atomic"} if kind == "array" else {}),
        **flat,
        **({"nullable": True} if is_nullable else {}),
        **({"format": "int64" if is_long else "int32"} if kind == "integer" else {}),
        **rules,
    }


def _rules(flat: dict[str, Any], *, optional: bool) -> dict[str, Any]:
    """Return the rules of *flat* in CEL; of an optional object they replace its `required`."""
    properties = flat.get("properties", {})
    rules = flat.pop(VALIDATIONS, [])
    required = flat.pop("required", []) if optional else []
    rules = rules + [_required_beside(name, properties) for name in required if len(properties) > 1]
    return {VALIDATIONS: [_expanded(rule, properties) for rule in rules]} if rules else {}


IS_REQUIRED = "is required if any other field of this object is set"
"""Follows the name of a field in the message of the rule that requires it."""


def _required_beside(name: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rule that an object that is not empty has the field *name*."""
    others = " || ".join(f"present(self.{other})" for other in properties if other != name)
    return Rule(
        f"present(self.{name}) || !({others})",
        f"`{name}` {IS_REQUIRED}",
        "add it, or leave all of them out",
    ).to_schema()


def _expanded(rule: Mapping[str, Any], properties: Mapping[str, Any]) -> dict[str, Any]:
    """Expand `present(self.a.b)` to CEL: the field exists, and is not empty."""

    def write(match: re.Match[str]) -> str:
        path, schema, terms = match[1], {"properties": properties}, []
        for step in match[2].removeprefix(".").split("."):
            path, schema = f"{path}.{step}", schema["properties"][step]
            terms.append(f"has({path})")
        return f"({' && '.join([*terms[:-1], _held(path, schema)])})"

    return {
        key: _PRESENT.sub(write, text) if key in {"rule", "messageExpression"} else text
        for key, text in rule.items()
    }


def _held(path: str, schema: Mapping[str, Any]) -> str:
    if schema.get("type") != "object":
        return f"has({path})"
    if "properties" not in schema:
        return f"has({path}) && {path}.size() > 0"
    fields = " || ".join(_held(f"{path}.{n}", field) for n, field in schema["properties"].items())
    return f"has({path}) && ({fields})"


def _field(
    name: str, node: Mapping[str, Any], definitions: Mapping[str, Any], *, optional: bool
) -> dict[str, Any]:
    field = _flat(node, definitions, optional=optional)
    if "description" not in field:
        msg = f"the field {name} has no docstring: add one"
        raise TypeError(msg)
    return field


def _resolved(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Resolve references of *node*; its own keys have priority."""
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
    """Write the CRDs into the directory of the argument."""
    (directory,) = arguments
    write(Path(directory))


if __name__ == "__main__":
    main(sys.argv[1:])

"""The three kinds: how each is named, read and shown. `crds` writes them out for the API server."""

from __future__ import annotations

from dataclasses import dataclass

from redrive.api.connection import PulsarConnectionSpec, PulsarConnectionStatus
from redrive.api.model import ApiModel, StatusModel
from redrive.api.naming import SAME_SCHEME
from redrive.api.replay import ReplaySpec, ReplayStatus
from redrive.api.retrypolicy import RetryPolicySpec
from redrive.api.retrypolicy_status import RetryPolicyStatus
from redrive.api.rules import Rule


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

PULSAR_CONNECTION = Kind(
    kind="PulsarConnection",
    plural="pulsarconnections",
    short_names=("pconn",),
    description="A Pulsar cluster, its credentials, and which namespaces may use it for what.",
    spec=PulsarConnectionSpec,
    status=PulsarConnectionStatus,
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
    short_names=("rp",),
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
    short_names=(),
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

KINDS = (PULSAR_CONNECTION, RETRY_POLICY, REPLAY)

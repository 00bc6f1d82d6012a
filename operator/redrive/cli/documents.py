"""Documents of `cli.redrive.io/v1`, which commands that read print with `-o json`.

The schemas in docs/reference/cli.schema.json are generated from these types. Times are RFC 3339 in
UTC, counts are integers. Fields are only added in a major version.
"""

from __future__ import annotations

from typing import Literal, TypedDict

from redrive.inspection.payloads import CauseCount, MessageRecord


class Attention(TypedDict):
    """A reason for which an object needs attention."""

    reason: str
    message: str


class ConnectionStatus(TypedDict):
    """State of a BrokerConnection."""

    namespace: str
    name: str
    ready: Literal["True", "False", "Unknown"]
    reason: str
    message: str
    brokerVersion: str | None
    operatorVersion: str | None
    policies: int | None
    warnings: list[str]


class ReplayRecord(TypedDict):
    """A Replay of a policy; the result alone outlives the object."""

    namespace: str
    name: str
    policy: str
    mode: str
    phase: str
    result: str
    moved: int | None
    refused: int | None
    doubled: int | None
    deadAgain: int | None
    completionTime: str | None
    requestedBy: str | None
    approvedBy: str | None
    reason: str | None
    ticket: str | None


class DeadLetterRequestRecord(TypedDict):
    """Request to dead-letter a message at its next failure."""

    origin: str
    endTime: str


class BlockedKeyRecord(TypedDict):
    """A key whose messages wait for the retry of one."""

    keyHash: str
    sinceTime: str
    messageID: str
    cause: str
    failures: int
    behind: int


class PolicyStatus(TypedDict):
    """State of a RetryPolicy."""

    namespace: str
    name: str
    topic: str
    subscription: str
    subscriptionType: str
    connection: str
    ready: Literal["True", "False", "Unknown"]
    reason: str
    message: str
    readySince: str | None
    unprocessed: int | None
    sourceConsumers: int | None
    retryConsumers: int | None
    waiting: int | None
    due: int | None
    deadLetters: int | None
    deadLettersLastHour: int | None
    deadLetterBytes: int | None
    deadLetterQuotaBytes: int | None
    oldestDeadLetterTime: str | None
    expiryTime: str | None
    observedTime: str | None
    attention: list[Attention]
    blockedKeys: list[BlockedKeyRecord]
    deadLetterNow: list[DeadLetterRequestRecord]
    replays: list[ReplayRecord]


class EntryRefusal(TypedDict):
    """An entry of a dead-letter topic that a Replay did not move."""

    entry: str
    messages: int
    cause: str


AuditFindingName = Literal["doubled", "unrecorded", "missing", "returned", "open"]


class AuditFinding(TypedDict):
    """Number of differences of one kind."""

    finding: AuditFindingName
    count: int


class ComponentVersion(TypedDict):
    """Version of one part of an installation, or of the API server."""

    component: str
    version: str
    problem: str


class CheckResult(TypedDict):
    """Result of one check of an installation."""

    check: str
    result: Literal["ok", "warning", "failed"]
    message: str


class FilePosition(TypedDict):
    """A place in a file; lines and columns count from 1."""

    file: str
    line: int
    column: int


class LintFinding(TypedDict):
    """A rule that a field of a manifest breaks; `related` are other fields that take part."""

    rule: str
    severity: Literal["error", "warning"]
    file: str
    line: int
    column: int
    field: str
    object: str
    message: str
    related: list[FilePosition]


class PlannedCause(TypedDict):
    """Dead letters with one cause that a Replay can move."""

    cause: str
    messages: int
    fingerprint: str
    replayed: int | None
    firstTime: str | None
    lastTime: str | None


class MalformedEntryRecord(TypedDict):
    """An entry that no client can show."""

    id: str
    cause: str


class _Document(TypedDict):
    apiVersion: Literal["cli.redrive.io/v1"]


class StatusList(_Document):
    """Output of `status`."""

    kind: Literal["StatusList"]
    context: str
    connections: list[ConnectionStatus]
    items: list[PolicyStatus]


class ReplayHistory(_Document):
    """Output of `history`."""

    kind: Literal["ReplayHistory"]
    items: list[ReplayRecord]


class BlockedKeyList(_Document):
    """Output of `keys`, the longest blocked first."""

    kind: Literal["BlockedKeyList"]
    items: list[BlockedKeyRecord]


class AuditFindingList(_Document):
    """Output of `audit`; the examples are ids of at most five messages, or entries."""

    kind: Literal["AuditFindingList"]
    replay: str
    messages: int
    topics: list[str]
    doubledExamples: list[str]
    unrecordedExamples: list[str]
    items: list[AuditFinding]


class RefusedEntryList(_Document):
    """Output of `refused`; `total` counts messages, the items are the first hundred entries."""

    kind: Literal["RefusedEntryList"]
    replay: str
    total: int
    items: list[EntryRefusal]


class VersionList(_Document):
    """Output of `version`."""

    kind: Literal["VersionList"]
    items: list[ComponentVersion]


class CheckResultList(_Document):
    """Output of `doctor`."""

    kind: Literal["CheckResultList"]
    items: list[CheckResult]


class FindingList(_Document):
    """Output of `lint`."""

    kind: Literal["FindingList"]
    files: int
    errors: int
    warnings: int
    items: list[LintFinding]


class _Inspected(_Document):
    """Extent of a reading.

    Of `totalEntries` that are not acknowledged, the newest `readEntries` were read. They hold
    `read` messages, of which `matched` are selected.
    """

    topic: str
    source: Literal["DeadLetter", "Retry"]
    totalEntries: int
    readEntries: int
    read: int
    matched: int
    malformedEntries: list[MalformedEntryRecord]


class CauseList(_Inspected):
    """Output of `causes`."""

    kind: Literal["CauseList"]
    items: list[CauseCount]


class PlannedCauseList(_Document):
    """Output of `causes` that a Replay of mode Plan counts, as with `--where`.

    Of `scanned` dead letters `matched` are selected. The items do not count `refused` ones, which
    no Replay can move.
    """

    kind: Literal["PlannedCauseList"]
    replay: str
    scanned: int
    matched: int
    refused: int
    items: list[PlannedCause]


class _OfInspection(_Document):
    inspection: str
    totalEntries: int
    readEntries: int
    messages: int
    matched: int


class InspectedCauseList(_OfInspection):
    """Output of `causes` without `--direct`: counts of an Inspection.

    Of `messages` that were read `matched` are selected, and counted in the items.
    """

    kind: Literal["InspectedCauseList"]
    items: list[CauseCount]


class MessageList(_Inspected):
    """Output of `peek`, the newest message first."""

    kind: Literal["MessageList"]
    items: list[MessageRecord]


class InspectedMessageList(_OfInspection):
    """Output of `peek` without `--direct`: messages of an Inspection, the newest first.

    Of `messages` that were read `matched` are selected.
    """

    kind: Literal["InspectedMessageList"]
    items: list[MessageRecord]


DOCUMENTS = (
    StatusList,
    ReplayHistory,
    BlockedKeyList,
    AuditFindingList,
    RefusedEntryList,
    VersionList,
    CheckResultList,
    FindingList,
    CauseList,
    PlannedCauseList,
    InspectedCauseList,
    MessageList,
    InspectedMessageList,
)

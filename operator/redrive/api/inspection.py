"""The kind Inspection: one reading of dead letters or waiting retries, which consumes nothing."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, Strict

from redrive.api import replay
from redrive.api.conditions import Conditions, Timestamp, WarningTypes
from redrive.api.model import ApiModel, CheckedModel, Form, at_most_one, one_of
from redrive.api.permissions import RuleName
from redrive.api.policy_defaults import bounded_duration
from redrive.api.replay_status import JobFailure, LenientStatus, Phase, PlannedCauseCount

RETURNED, MAX_RETURNED = 20, 500
"""Messages that are returned by default, and at most."""
MAX_SEALED = 256 * 2**10
"""Characters of an encrypted result in a status; an object may have 1.5 MiB."""
NEWEST = 10_000
"""Entries that are read by default."""
MAX_NEWEST = 1_000_000
MAX_INSPECTED_CAUSES = 50
DEFAULT_DEADLINE, DEFAULT_TTL = "10m", "1h"

Deadline = Annotated[
    str,
    *bounded_duration(
        1, 86_400, "`deadline` must be from 1s to 1d", "choose a duration within these bounds"
    ),
]


class InspectedMessages(enum.StrEnum):
    """Messages that an Inspection reads."""

    DEAD_LETTER = "DeadLetter"
    RETRY = "Retry"

    @property
    def words(self) -> str:
        """Return the messages for people."""
        return "dead letters" if self is self.DEAD_LETTER else "messages that wait for a retry"


class ReturnedPayload(enum.StrEnum):
    """Form of the messages that an Inspection returns."""

    MASKED = "Masked"
    CLEAR = "Clear"


Payload = Annotated[ReturnedPayload, *one_of(ReturnedPayload, "`payload`")]


class ReturnedCauses(ApiModel):
    """Causes that an Inspection returns with consumers and examples, encrypted for one recipient.

    Beyond 256 KiB, encrypted and compressed, the least frequent causes are left out.
    """

    recipient: Annotated[
        str,
        Field(max_length=44),
        Form(
            r"[A-Za-z0-9+/]{43}=",
            "`recipient` must be a public key of X25519, in base64",
            "use redrive peek or causes, which makes one for each call",
        ),
    ]
    """Public key of X25519, in base64, for which the result is encrypted: 44 characters.
    `redrive peek` and `causes` make one for each call. Only its private key decrypts it."""

    payload: Payload = ReturnedPayload.MASKED
    """`Masked`: types and lengths of values, hashes of keys, and masked texts, except what
    `inspection.masking` of the connection shows. `Clear`: clear text, with payloads up to 64
    KiB. The author of the Inspection needs the verb `reveal` on inspections, and
    `inspection.clearPayloads` of the connection must allow it. The verb is checked at the
    creation; an Inspection that starts within 10 minutes of it runs, a later one is Failed.
    Defaults to Masked."""


class ReturnedMessages(ReturnedCauses):
    """Single messages that an Inspection returns, encrypted for one recipient."""

    limit: Annotated[int, Strict(), Field(ge=1, le=MAX_RETURNED)] = RETURNED
    """Maximum number of messages, the newest selected ones, 1 to 500. Their encrypted and
    compressed text has at most 256 KiB. A message that does not fit alone is left out. Of the
    others, the oldest are left out until the rest fits. Defaults to 20."""


class ExportFormat(enum.StrEnum):
    """Form of a file of messages."""

    PARQUET = "Parquet"
    JSON_LINES = "JSONLines"
    HTML = "HTML"

    @property
    def suffix(self) -> str:
        """Return the ending of names of such files."""
        return {"Parquet": "parquet", "JSONLines": "jsonl", "HTML": "html"}[self]


class Export(ApiModel):
    """One file of the selected messages, at a destination of the connection."""

    destination: RuleName
    """Name of one of `inspection.destinations` of the connection. Example: `archive`."""

    format: Annotated[ExportFormat, *one_of(ExportFormat, "`format`")] = ExportFormat.PARQUET
    """`Parquet` or `JSONLines`: each message, with its payload. `HTML`: a report of their causes,
    times, keys and sizes as one page, without payloads. Defaults to Parquet."""

    payload: Payload = ReturnedPayload.MASKED
    """`Masked`: types and lengths of values, hashes of keys, and masked texts, except what
    `inspection.masking` of the connection shows. `Clear`: clear text, with the same conditions as
    for `messages`. Defaults to Masked."""


_RESULT_FIELDS = ("messages", "causes", "export")
_RESULTS = at_most_one("spec", *_RESULT_FIELDS)


_FIXED = (
    "policyRef", "from", "select", "newest", "rateLimit", "messages", "causes", "export",
    "deadline", "reason", "ticket",
)  # fmt: skip
_ONE_READING = replay.immutable(
    _FIXED,
    "the spec of an Inspection is immutable, except ttlAfterFinished: it is one run, like a Job",
    "create another Inspection",
)


class InspectionSpec(CheckedModel):
    """One reading of messages. Immutable, except `ttlAfterFinished`."""

    RULES = (_ONE_READING, _RESULTS, replay.IDS_OF_BROKER)

    policy_ref: replay.PolicyRef
    """Policy of the messages, in the same namespace."""

    source: Annotated[
        InspectedMessages,
        *one_of(InspectedMessages, "`from`"),
        Field(alias="from"),
    ] = InspectedMessages.DEAD_LETTER
    """`DeadLetter`: dead letters that no Replay has moved. `Retry`: messages that wait for a retry;
    `inspection.retryTopics` of the connection must allow it. Defaults to DeadLetter."""

    select: replay.MessageSelection | None = None
    """Messages to count. Defaults to all that are read."""

    newest: Annotated[int, Strict(), Field(ge=1, le=MAX_NEWEST)] = NEWEST
    """Maximum number of entries to read, 1 to 1000000: the newest ones of each partition, and about
    256 MiB of them; with `export` any size. Defaults to 10000."""

    rate_limit: replay.ReplayRate | None = None
    """Rate limit of the messages that are read. Defaults to no limit."""

    messages: ReturnedMessages | None = None
    """Single messages to return beside the summary, encrypted. Defaults to none."""

    causes: ReturnedCauses | None = None
    """Consumers and an example of each cause, to return beside the summary, encrypted. Defaults to
    none."""

    export: Export | None = None
    """A file to write beside the summary. Defaults to none."""

    deadline: Deadline = DEFAULT_DEADLINE
    """Time limit of the job, 1s to 1d. After it the Inspection is Failed. Defaults to 10m."""

    ttl_after_finished: replay.Duration = DEFAULT_TTL
    """Time after its end when the Inspection is deleted, with its job and pods. At least 1s. It can
    change at any time. Defaults to 1h. Example: `10m`."""

    reason: replay.ReasonText | None = None
    """Reason of the Inspection for later readers, 1 to 1024 characters. Defaults to none."""

    ticket: replay.TicketText | None = None
    """Ticket of the Inspection, 1 to 256 characters. Defaults to none. Example: `OPS-1432`."""

    def _check(self) -> None:
        names = [name for name in _RESULT_FIELDS if getattr(self, name)]
        if len(names) > 1:
            raise _RESULTS.error(" ".join(names))
        replay.check_ids(self.select, self.policy_ref.kind)

    @property
    def reveals(self) -> bool:
        """Return True if it returns or writes messages in clear text."""
        return any(result.payload is ReturnedPayload.CLEAR for result in self._results)

    @property
    def _results(self) -> list[ReturnedCauses | Export]:
        return [result for result in (self.messages, self.causes, self.export) if result]


class InspectedCause(PlannedCauseCount):
    """Messages with one cause."""

    following: int | None = None
    """Number of these messages that have no cause of their own, because they follow a dead letter
    of their key."""


class InspectionRun(LenientStatus):
    """Summary of the messages. The job writes it, by server-side apply."""

    total_entries: int | None = None
    """Entries of the topic that are not acknowledged. An entry holds one message or a batch."""

    planned_entries: int | None = None
    """Entries of these that are read."""

    read_entries: int | None = None
    """Entries that were read so far."""

    read_seconds: int | None = None
    """Time in which they were read, in seconds, rounded up. The start of the pod is not in it."""

    messages: int | None = None
    """Messages that were read so far."""

    matched: int | None = None
    """Messages of these that are selected."""

    truncated: bool | None = None
    """True if older messages were not read, because of `newest`."""

    malformed_entries: int | None = None
    """Entries that no client can read. Absent without any."""

    causes: Annotated[tuple[InspectedCause, ...], Field(max_length=MAX_INSPECTED_CAUSES)] = ()
    """The 50 most frequent causes of the selected messages."""

    distinct_keys: int | None = None
    """Number of different keys of the selected messages, up to 100000."""

    payload_bytes: int | None = None
    """Size of their payloads."""

    sealed: Annotated[str, Field(max_length=MAX_SEALED)] | None = None
    """With `messages` or `causes`, the result, encrypted for its recipient, as base64. Absent
    without a selected message."""

    file: Annotated[str, Field(max_length=2_048)] | None = None
    """With `export`, address of the file. Absent without a selected message."""

    finished: bool | None = None
    """True once the summary is complete."""

    failure: JobFailure | None = None
    """Error of the last pod that failed."""


class InspectionStatus(LenientStatus):
    """State of the Inspection. The operator writes all of it except `run`, which the job writes.

    It contains no message key and no payload, except encrypted in `run.sealed`.
    """

    observed_generation: int | None = None
    """The `metadata.generation` that this status describes."""

    warnings: WarningTypes | None = None
    """Types of the conditions that warn. Absent without any."""

    phase: Phase | None = None
    """Summary for people; programs should read `conditions`. Pending, Submitted, Running, Completed
    or Failed; the last two are final."""

    run: InspectionRun = InspectionRun()
    """Summary of the messages, written by the job."""

    job: str | None = None
    """Kubernetes Job of the Inspection, in the same namespace."""

    completion_time: Timestamp | None = None
    """Time at which the Inspection reached its final phase."""

    conditions: Conditions = ()
    """`Ready`: the summary is complete. An ended Inspection has exactly one of `Complete` and
    `Failed`. `Reconciling` and `Stalled` are present only while true."""

    @classmethod
    def of(cls, inspection: Mapping[str, Any]) -> Self:
        """Parse the status of *inspection*."""
        return cls.model_validate(inspection.get("status") or {})

"""Conditions: the state of an object, in the form that is standard in Kubernetes.

`Ready` is present once an object was reconciled. `Reconciling` and `Stalled` follow kstatus and are
present only while true: the first while redrive works on the object or waits, the second while a
user has to act. A warning about an object that is ready is a condition of its own type, present
only while true. An object that runs once has `Complete` or `Failed` after its end.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
)

from redrive.api import Body
from redrive.api.model import StatusModel
from redrive.errors import RedriveError
from redrive.reasons import Reason

READY = "Ready"
RECONCILING = "Reconciling"
STALLED = "Stalled"
COMPLETE = "Complete"
FAILED = "Failed"


class ConditionStatus(enum.StrEnum):
    """Status of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


MAX_MESSAGE = 32_768


def _in_utc(moment: datetime) -> datetime:
    try:
        return moment.astimezone(UTC)
    except OverflowError as error:
        message = "the time is outside of the years 1 to 9999 in UTC"
        raise ValueError(message) from error


def written(moment: datetime) -> str:
    """Format a time as Kubernetes does: in UTC and whole seconds."""
    # Unlike strftime, it writes all four digits of a year before 1000.
    return f"{moment.astimezone(UTC).replace(tzinfo=None).isoformat(timespec='seconds')}Z"


Timestamp = Annotated[
    datetime, AfterValidator(_in_utc), PlainSerializer(written, when_used="json-unless-none")
]
"""A time with a time zone, written in UTC and whole seconds as Kubernetes does."""
_MOMENT = TypeAdapter[datetime](Timestamp)


def moment_of(value: object) -> datetime | None:
    """Parse a time that others may have written; None if it is invalid.

    The API server accepts times that cannot be parsed, such as those in the year 0.
    """
    try:
        return _MOMENT.validate_python(value)
    except ValidationError:
        return None


_TYPE_PATTERN = (
    r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
    r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$"
)
_REASON_PATTERN = r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"
"""The patterns of `metav1.Condition`."""


class Condition(StatusModel):
    """One aspect of an object's state."""

    model_config = ConfigDict(
        json_schema_extra={
            "required": ["type", "status", "reason", "message", "lastTransitionTime"]
        }
    )

    type: Annotated[str, Field(max_length=316, json_schema_extra={"pattern": _TYPE_PATTERN})]
    """Aspect of the object: Ready, Reconciling, Stalled, Complete, Failed, Suspended, or a warning
    about an object that is ready, such as `NameCollision`."""

    status: ConditionStatus
    """Status of the condition: True, False or Unknown."""

    reason: Annotated[
        str,
        Field(min_length=1, max_length=1024, json_schema_extra={"pattern": _REASON_PATTERN}),
    ]
    """Reason, as one word for programs. Example: `TopicNotFound`."""

    message: Annotated[str, Field(max_length=MAX_MESSAGE)]
    """Explanation for people: the problem, the value, the remedy."""

    last_transition_time: Timestamp | None = None
    """Time at which `status` last changed."""

    observed_generation: int | None = None
    """The `metadata.generation` that this condition describes."""


MAX_CONDITIONS = 32
"""Maximum conditions of an object: the API server refuses a status with more."""

Conditions = Annotated[
    tuple[Condition, ...],
    Field(
        max_length=MAX_CONDITIONS,
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
        },
    ),
]


WarningTypes = Annotated[
    tuple[Annotated[str, Field(max_length=316)], ...],
    Field(max_length=32, json_schema_extra={"x-kubernetes-list-type": "set"}),
]
"""Types of conditions that need attention."""


def merge(
    previous: Iterable[Condition], new: Iterable[Condition], now: datetime
) -> tuple[Condition, ...]:
    """Return *new* with transition times; the previous time if `status` has not changed.

    Conditions of *previous* that *new* lacks are removed. If there are more than `MAX_CONDITIONS`,
    the last ones are left out, which are the least important warnings.

    Args:
        previous: conditions of the current status.
        new: conditions of the next status, without transition times.
        now: transition time of conditions whose status changed.
    """
    before = {condition.type: condition for condition in previous}

    def since(condition: Condition) -> datetime:
        old = before.get(condition.type)
        if old is None or old.status != condition.status:
            return now
        return old.last_transition_time or now

    latest = list(new)[:MAX_CONDITIONS]
    return tuple(c.model_copy(update={"last_transition_time": since(c)}) for c in latest)


_CUT = " …"


@dataclass(frozen=True)
class StatusWarning:
    """Warning about an object that is ready.

    Attributes:
        reason: also the type of its condition, which is present only while true.
    """

    reason: str
    message: str


def first_of(names: Sequence[str], most: int = 5) -> list[str]:
    """Return the first of *names* for a message, and the number of the others."""
    more = [f"{len(names) - most} more"] if len(names) > most else []
    return [*names[:most], *more]


@dataclass(frozen=True)
class ObjectEvent:
    """A Kubernetes Event about an object: `Normal`, or a `Warning`."""

    reason: str
    message: str
    is_warning: bool = False


def progressing(message: str) -> tuple[Condition, ...]:
    """Return the conditions of an object whose first reconcile has not ended."""
    return (
        _condition(READY, ConditionStatus.UNKNOWN, Reason.PROGRESSING, message),
        _condition(RECONCILING, ConditionStatus.TRUE, Reason.PROGRESSING, message),
    )


def ready(
    reason: str, message: str, warnings: Iterable[StatusWarning] = ()
) -> tuple[Condition, ...]:
    """Return the conditions of an object that is ready, with *warnings*."""
    return (
        _condition(READY, ConditionStatus.TRUE, reason, message),
        *map(warning, warnings),
    )


def warning(status_warning: StatusWarning) -> Condition:
    """Return the condition of a warning."""
    return _condition(
        status_warning.reason, ConditionStatus.TRUE, status_warning.reason, status_warning.message
    )


def paused(reason: str, message: str) -> tuple[Condition, ...]:
    """Return the conditions of a paused object whose current spec was not reconciled."""
    return (
        _condition(READY, ConditionStatus.UNKNOWN, reason, message),
        _condition(reason, ConditionStatus.TRUE, reason, message),
    )


def with_condition(conditions: tuple[Condition, ...], kind: str) -> tuple[Condition, ...]:
    """Add a true condition of type *kind*, with the reason and message of the first condition."""
    first, *_ = conditions
    return (*conditions, _condition(kind, ConditionStatus.TRUE, first.reason, first.message))


def ended(conditions: tuple[Condition, ...]) -> tuple[Condition, ...]:
    """Add `Complete` if the object is ready, else `Failed`."""
    is_ready = conditions[0].status is ConditionStatus.TRUE
    return with_condition(conditions, COMPLETE if is_ready else FAILED)


def unchanged(body: Body, without: str) -> tuple[Condition, ...]:
    """Return the conditions of *body*, without `Reconciling` and *without*."""
    return tuple(c for c in read_conditions(body) if c.type not in {RECONCILING, without})


def waiting(error: RedriveError, message: str = "") -> tuple[Condition, ...]:
    """Return the conditions for *error*, which may be transient.

    Args:
        error: the reason of the conditions.
        message: their message, if it differs from that of *error*.
    """
    return _not_ready(RECONCILING, error, message)


def failed(error: RedriveError) -> tuple[Condition, ...]:
    """Return the conditions for *error*, which keeps the object from being ready."""
    return _not_ready(STALLED, error) if Reason.of(error).stalls else waiting(error)


def is_new(body: Body) -> bool:
    """Return True if the status does not describe the current spec yet."""
    status = body.get("status") or {}
    return bool(status.get("observedGeneration") != body["metadata"]["generation"])


def is_progressing(body: Body) -> bool:
    """Return True while the first reconcile of a new spec is pending or under way."""
    return reason(body) == Reason.PROGRESSING


def is_settled(body: Body) -> bool:
    """Return True if the object is ready with its current spec, and is not being deleted."""
    ready = find(body, READY)  # parsed: an invalid condition must be written again
    return ready is not None and is_ready(body) and not is_new(body)


def is_ready(body: Body) -> bool:
    """Return True if the object was ready, even with an older spec, and is not being deleted.

    It is cheap, like `reason`, because it is called for every object repeatedly.
    """
    ready = written_ready(body).get("status") == ConditionStatus.TRUE
    return ready and "deletionTimestamp" not in body.get("metadata", {})


def find(body: Body, kind: str) -> Condition | None:
    """Return one condition from the status of *body*."""
    return next((c for c in read_conditions(body) if c.type == kind), None)


def reason(body: Body) -> str:
    """Return the reason of the Ready condition; empty before the first reconcile."""
    return str(written_ready(body).get("reason", ""))


def _not_ready(kind: str, error: RedriveError, message: str = "") -> tuple[Condition, ...]:
    text = message or str(error)
    return (
        _condition(READY, ConditionStatus.FALSE, error.reason, text),
        _condition(kind, ConditionStatus.TRUE, error.reason, text),
    )


def _condition(kind: str, status: ConditionStatus, reason: str, message: str) -> Condition:
    """Return a condition; a message that is too long is cut."""
    shown = message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - len(_CUT)] + _CUT
    return Condition(type=kind, status=status, reason=reason, message=shown)


def written_ready(body: Body) -> Mapping[str, Any]:
    """Return the Ready condition as it is stored; empty before the first reconcile."""
    written = (body.get("status") or {}).get("conditions") or ()
    return next((condition for condition in written if condition.get("type") == READY), {})


def read_conditions(body: Body) -> list[Condition]:
    """Parse the conditions of *body*, and skip invalid ones.

    The API server accepts values that cannot be parsed, such as times in the year 0. Users who may
    write a status must not stop the operator: skipped conditions are written again.
    """
    written = (body.get("status") or {}).get("conditions") or []
    return list(filter(None, map(_read_condition, written)))


def _read_condition(condition: Mapping[str, Any]) -> Condition | None:
    try:
        return Condition.model_validate(condition)
    except ValidationError:
        return None

"""Conditions: the state of an object, in the form that is standard in Kubernetes.

`Ready` is there once an object was reconciled. `Reconciling` and `Stalled` follow kstatus: they are
there only while true, the first while redrive works on the object or waits for something, the
second while a user has to act. What needs attention although the object is ready is a condition
of its own type, there only while true.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, ClassVar, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
)

from redrive.api.model import StatusModel

READY = "Ready"
RECONCILING = "Reconciling"
STALLED = "Stalled"


class ConditionStatus(enum.StrEnum):
    """Whether a condition holds."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


MAX_MESSAGE = 32_768


def _in_utc(moment: datetime) -> datetime:
    try:
        return moment.astimezone(UTC)
    except OverflowError as error:
        message = "the moment lies outside of the years 1 to 9999 in UTC"
        raise ValueError(message) from error


def written(moment: datetime) -> str:
    """Write a moment as Kubernetes does: in UTC and whole seconds."""
    # Unlike strftime, it writes all four digits of a year before 1000.
    return f"{moment.astimezone(UTC).replace(tzinfo=None).isoformat(timespec='seconds')}Z"


Timestamp = Annotated[
    datetime, AfterValidator(_in_utc), PlainSerializer(written, when_used="json-unless-none")
]
"""A moment with a time zone, written in UTC and whole seconds as Kubernetes does."""
_MOMENT = TypeAdapter[datetime](Timestamp)


def moment_of(found: object) -> datetime | None:
    """Read a moment that others may have written; None for what is none.

    The API server lets more pass than can be read, such as times in the year 0.
    """
    try:
        return _MOMENT.validate_python(found)
    except ValidationError:
        return None


class Reason(str):
    """A reason or type of conditions that no error has; all are declared at the top of modules.

    Attributes:
        declared: all of them, as far as their modules are loaded.
    """

    __slots__ = ()
    declared: ClassVar[set[str]] = set()

    def __new__(cls, name: str) -> Self:
        """Declare one."""
        cls.declared.add(name)
        return super().__new__(cls, name)


class Condition(StatusModel):
    """One aspect of an object's state."""

    model_config = ConfigDict(
        json_schema_extra={
            "required": ["type", "status", "reason", "message", "lastTransitionTime"]
        }
    )

    type: Annotated[str, Field(max_length=316)]
    """Which aspect: Ready, Reconciling, Stalled, or what needs attention although the object is
    ready, such as `NameCollision`."""

    status: ConditionStatus
    """Whether it holds: True, False or Unknown."""

    reason: Annotated[str, Field(min_length=1, max_length=1024)]
    """Why, as one word for programs, for example `TopicNotFound`."""

    message: Annotated[str, Field(max_length=MAX_MESSAGE)]
    """Why, for people: what is wrong, what was found, what to do."""

    last_transition_time: Timestamp | None = None
    """When `status` last changed."""

    observed_generation: int | None = None
    """The `metadata.generation` that this condition is about."""


Conditions = Annotated[
    tuple[Condition, ...],
    Field(
        max_length=16,
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
        },
    ),
]


def merge(
    previous: Iterable[Condition], new: Iterable[Condition], now: datetime
) -> tuple[Condition, ...]:
    """Return *new* with transition times: the previous one where `status` has not changed.

    A condition of *previous* that *new* does not name is gone.

    Args:
        previous: what the status held.
        new: what it shall hold; their transition times are not read.
        now: the time of those that changed.
    """
    before = {condition.type: condition for condition in previous}

    def since(condition: Condition) -> datetime:
        old = before.get(condition.type)
        if old is None or old.status != condition.status:
            return now
        return old.last_transition_time or now

    return tuple(c.model_copy(update={"last_transition_time": since(c)}) for c in new)

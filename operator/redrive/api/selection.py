"""Which dead letters a Replay is about."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from redrive.api.fields import SET
from redrive.api.model import ApiModel
from redrive.api.rules import VALIDATIONS, Form, Rule, refusing
from redrive.errors import InvalidSpecError

# All of a selection is one argument of a process, which holds 128 KiB.
_MAX_IDS = 500
_MAX_KEYS = 64

_PARTS = ("where", "ids", "keys", "since", "until", "limit")
_GIVEN = Rule(
    " || ".join(f"has(self.{part})" for part in _PARTS),
    "a selection selects by nothing",
    f"give one of {', '.join(_PARTS)}, or leave select out: then all is selected",
)
_WINDOW = Rule(
    "!has(self.since) || !has(self.until) || timestamp(self.since) < timestamp(self.until)",
    "a selection begins before it ends",
    "have since lie before until",
)

LetterId = Annotated[
    str,
    Field(max_length=64),
    Form(
        r"\d{1,18}:\d{1,18}(:-?\d{1,9}){0,2}",
        "the id of a message is written ledger:entry, ledger:entry:partition or "
        "ledger:entry:partition:index",
        "write it as a dry run shows it",
    ),
]


def _moment(text: str) -> str:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        raise InvalidSpecError(
            "there is no such moment", got=text, remedy="write one like 2026-11-20T10:00:00Z"
        ) from None
    return text


Moment = Annotated[
    str,
    Field(max_length=32),
    Form(
        r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}([.]\d{1,3})?(Z|[+-]\d{2}:\d{2})",
        "a moment is written with its date, its time and its offset",
        "write one like 2026-11-20T10:00:00Z",
    ),
    AfterValidator(refusing(_moment)),
]


class Selection(ApiModel):
    """Which dead letters a replay moves: those for which all holds that is given."""

    model_config = ConfigDict(
        json_schema_extra={
            VALIDATIONS: [_GIVEN.to_schema(), _WINDOW.to_schema()],
            "minProperties": 1,
        }
    )

    where: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """A condition in SQL over the columns of a dead letter, which is true for it.
    Example: `cause_type = 'TimeoutError'`."""

    ids: (
        Annotated[
            tuple[LetterId, ...], Field(min_length=1, max_length=_MAX_IDS, json_schema_extra=SET)
        ]
        | None
    ) = None
    """Its id is one of these, as `ledger:entry:partition:index`; without an index, or with -1, all
    messages of the entry. Example: `4711:3:0:0`."""

    keys: (
        Annotated[
            tuple[Annotated[str, Field(min_length=1, max_length=128)], ...],
            Field(min_length=1, max_length=_MAX_KEYS, json_schema_extra=SET),
        ]
        | None
    ) = None
    """Its key is one of these."""

    since: Moment | None = None
    """It came to the dead-letter topic at this moment or later, by the clock of its producer.
    Example: `2026-11-20T10:00:00Z`."""

    until: Moment | None = None
    """It came there before this moment."""

    limit: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    """At most so many, the first ones by partition and position. A batch that has no room among
    them ends the selection."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refusing(Selection._check_parts)(self)
        return self

    def _check_parts(self) -> None:
        if all(getattr(self, part) is None for part in _PARTS):
            raise InvalidSpecError(_GIVEN.problem, remedy=_GIVEN.remedy)
        since, until = milliseconds(self.since), milliseconds(self.until)
        if since is not None and until is not None and since >= until:
            raise InvalidSpecError(_WINDOW.problem, got=self.since, remedy=_WINDOW.remedy)


def milliseconds(moment: str | None) -> int | None:
    """Return a `Moment` in milliseconds since 1970."""
    return None if moment is None else round(datetime.fromisoformat(moment).timestamp() * 1_000)

"""The delay ladder of a RetryPolicy: by preset, as a list, or one fixed delay."""

from __future__ import annotations

import json
from typing import Annotated, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from redrive.api.model import ApiModel
from redrive.api.rules import QUOTED, VALIDATIONS, Rule, refusing
from redrive.errors import InvalidSpecError
from redrive.policy import durations
from redrive.policy.ladder import MAX_DELAY, MAX_RUNGS, PRESETS, Ladder, check_delay

_WRITTEN = f"self != '' && self.matches('{durations.PATTERN}')"
# CEL's own duration() knows no days.
_SECONDS = (
    "self.findAll('[0-9]+[dhms]').map(part, int(part.substring(0, part.size() - 1)) * "
    "(part.endsWith('d') ? 86400 : part.endsWith('h') ? 3600 : part.endsWith('m') ? 60 : 1)).sum()"
)


def _check_delay(text: str) -> str:
    check_delay(durations.parse(text), "a delay")
    return text


def _check_preset(name: str) -> str:
    Ladder.from_preset(name)
    return name


Delay = Annotated[
    str,
    Field(max_length=40),
    Rule(
        _WRITTEN,
        "a duration is whole numbers with the units d, h, m, s, largest first",
        "write it like 90s, 1m30s, 2h or 10d",
        got=QUOTED,
    ),
    Rule(
        f"!({_WRITTEN}) || [{_SECONDS}].all(s, 1 <= s && s <= {int(MAX_DELAY.total_seconds())})",
        "a delay must be from 1 s to 864000 s (10 days)",
        "choose a delay within these bounds",
        got=QUOTED,
    ),
    AfterValidator(refusing(_check_delay)),
]

Preset = Annotated[
    str,
    Field(max_length=64),
    Rule(
        f"self in {json.dumps(list(PRESETS))}",
        "the delay ladder names an unknown preset",
        f"use one of {', '.join(PRESETS)}",
        got=QUOTED,
    ),
    AfterValidator(refusing(_check_preset)),
]

Rungs = Annotated[
    tuple[Delay, ...],
    Field(max_length=MAX_RUNGS),
    Rule(
        "self.size() > 0",
        f"a delay ladder has from 1 to {MAX_RUNGS} rungs",
        "list at least one delay, or name a preset",
        got='"0"',
    ),
]

_CHOICES = "[has(self.preset), has(self.delays), has(self.fixed)].filter(given, given).size()"
_ONE_OF = Rule(
    f"{_CHOICES} == 1",
    "a delay ladder is exactly one of preset, delays and fixed",
    "keep one of them, or leave delayLadder out for the default",
    got=f"({_CHOICES} == 0 ? 'none of them' : 'more than one of them')",
)


class DelayLadder(ApiModel):
    """The delay before retry 1, 2, 3 …; past its end the last delay repeats."""

    model_config = ConfigDict(json_schema_extra={VALIDATIONS: [_ONE_OF.to_schema()]})

    preset: Preset | None = None
    """A ladder by name. `tdmq`: 1s 5s 10s 30s, 1m to 10m by the minute, 20m 30m 1h 2h (18 rungs).
    `rocketmq` and `apsaramq`: the same from 10s on (16 rungs)."""

    delays: Rungs | None = None
    """The delays themselves, one per retry, 1 to 1000 of them, each from 1s to 10d (864000 s),
    written like `90s`, `1m30s`, `2h` or `10d`. Example: `[10s, 1m, 30m]`."""

    fixed: Delay | None = None
    """The same delay before every retry, from 1s to 10d (864000 s). Example: `30s`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refusing(DelayLadder.to_ladder)(self)
        return self

    def to_ladder(self) -> Ladder:
        """Return the ladder that is asked for.

        Raises:
            InvalidSpecError: none or more than one is, or it is out of bounds.
        """
        match (self.preset, self.delays, self.fixed):
            case (str(preset), None, None):
                return Ladder.from_preset(preset)
            case (None, tuple(delays), None):
                return Ladder.from_delays(delays)
            case (None, None, str(fixed)):
                return Ladder.from_fixed(fixed)
        found = "more than one of them" if self.to_manifest() else "none of them"
        raise InvalidSpecError(_ONE_OF.problem, got=found, remedy=_ONE_OF.remedy)

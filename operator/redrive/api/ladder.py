"""The delay ladder of a policy: by preset, as a list, one fixed delay, or growing by a factor."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, ConfigDict, Field, Strict, WithJsonSchema, model_validator

from redrive.api.model import ApiModel
from redrive.api.oneof import one_given
from redrive.api.rules import QUOTED, VALIDATIONS, Rule, refusing
from redrive.errors import InvalidSpecError
from redrive.policy import durations
from redrive.policy.ladder import (
    MAX_DELAY,
    MAX_FACTOR,
    MAX_LEVELS,
    MAX_RUNGS,
    MIN_FACTOR,
    PRESETS,
    Ladder,
    check_delay,
)

WRITTEN = f"self != '' && self.matches('{durations.PATTERN}')"
# CEL's own duration() knows no days.
SECONDS = (
    "self.findAll('[0-9]+[dhms]').map(part, int(part.substring(0, part.size() - 1)) * "
    "(part.endsWith('d') ? 86400 : part.endsWith('h') ? 3600 : part.endsWith('m') ? 60 : 1)).sum()"
)


def _check_delay(text: str) -> str:
    check_delay(durations.parse(text), "a delay")
    return text


def _check_preset(name: str) -> str:
    Ladder.from_preset(name)
    return name


IS_DURATION = WithJsonSchema(
    {"type": "string", "minLength": 1, "maxLength": 40, "pattern": durations.PATTERN}
)

Delay = Annotated[
    str,
    Field(max_length=40),
    IS_DURATION,
    Rule(
        f"!({WRITTEN}) || [{SECONDS}].all(s, 1 <= s && s <= {int(MAX_DELAY.total_seconds())})",
        "a delay must be from 1 s to 864000 s (10 days)",
        "choose a delay within these bounds",
        got=QUOTED,
    ),
    AfterValidator(refusing(_check_delay)),
]

Preset = Annotated[
    str,
    WithJsonSchema({"type": "string", "enum": list(PRESETS)}),
    AfterValidator(refusing(_check_preset)),
]

Rungs = Annotated[
    tuple[Delay, ...],
    Field(max_length=MAX_RUNGS, json_schema_extra={"minItems": 1}),
]


def _check_levels(levels: tuple[str, ...]) -> tuple[str, ...]:
    if not levels:
        raise InvalidSpecError(
            f"there are from 1 to {MAX_LEVELS} delay levels",
            got=0,
            remedy="list at least one delay, or leave delayLevels out for the default",
        )
    return levels


Levels = Annotated[
    tuple[Delay, ...],
    Field(max_length=MAX_LEVELS, json_schema_extra={"minItems": 1}),
    AfterValidator(refusing(_check_levels)),
]

Factor = Annotated[
    float,
    Strict(),
    WithJsonSchema({"type": "number", "minimum": MIN_FACTOR, "maximum": MAX_FACTOR}),
    # Beside bounds: the API server cuts 1.1 to 1 before it compares a whole number with it.
    Rule(
        f"double(self) >= {MIN_FACTOR} && double(self) <= {MAX_FACTOR}",
        f"the factor of an exponential ladder is from {MIN_FACTOR:g} to {MAX_FACTOR:g}",
        "choose one within these bounds; 2 doubles the delay each time",
    ),
]

Jitter = Annotated[
    float,
    Strict(),
    WithJsonSchema({"type": "number", "minimum": 0, "maximum": 1}),
]

_INITIAL, _MAX = (SECONDS.replace("self", f"self.{field}") for field in ("initial", "max"))
_RISES = Rule(
    f"{_INITIAL} <= {_MAX}",
    "the longest delay of an exponential ladder is shorter than its first",
    "raise max, or lower initial",
    got="'initial ' + self.initial + ', max ' + self.max",
)


class Exponential(ApiModel):
    """Delays that grow by a factor from retry to retry."""

    model_config = ConfigDict(json_schema_extra={VALIDATIONS: [_RISES.to_schema()]})

    initial: Delay
    """The delay before the first retry, from 1s to 10d. Example: `1s`."""

    factor: Factor = 2.0
    """How many times as long each delay is as the one before it, from 1.1 to 100. Left out: 2."""

    max: Delay
    """The longest delay, from 1s to 10d; once reached, it repeats. Example: `10m`."""

    jitter: Jitter = 0.0
    """Up to which share of itself each delay is shortened at random, from 0 to 1, so that messages
    that failed together do not come again together. Left out: 0, none."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refusing(Exponential.to_ladder)(self)
        return self

    def to_ladder(self) -> Ladder:
        """Return the ladder that is asked for.

        Raises:
            InvalidSpecError: a value is out of bounds, or max is shorter than initial.
        """
        return Ladder.from_exponential(self.initial, self.factor, self.max, self.jitter)


_CHOICES = (
    "[has(self.preset), has(self.delays), has(self.fixed), has(self.exponential),"
    " has(self.ordered)]"
    ".filter(given, given).size()"
)
_ONE_OF = Rule(
    f"{_CHOICES} == 1",
    "a delay ladder is exactly one of preset, delays, fixed and exponential",
    "keep one of them, or leave delayLadder out for the default",
    got=f"({_CHOICES} == 0 ? 'none of them' : 'more than one of them')",
)


class DelayLadder(ApiModel):
    """The delay before retry 1, 2, 3 …; past its end the last delay repeats."""

    model_config = ConfigDict(json_schema_extra=one_given(_ONE_OF))

    preset: Preset | None = None
    """A ladder by name. `tdmq`: 1s 5s 10s 30s, 1m to 10m by the minute, 20m 30m 1h 2h (18 rungs).
    `rocketmq` and `apsaramq`: the same from 10s on (16 rungs)."""

    delays: Rungs | None = None
    """The delays themselves, one per retry, 1 to 1000 of them, each from 1s to 10d (864000 s),
    written like `90s`, `1m30s`, `2h` or `10d`. Example: `[10s, 1m, 30m]`."""

    fixed: Delay | None = None
    """The same delay before every retry, from 1s to 10d (864000 s). Example: `30s`."""

    exponential: Exponential | None = None
    """Delays that grow by a factor from retry to retry, with jitter if wanted."""

    ordered: Delay | None = None
    """Deprecated: `fixed`, and `ordering: PerKey` beside `delayLadder`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refusing(DelayLadder.to_ladder)(self)
        return self

    def to_ladder(self) -> Ladder:
        """Return the ladder that is asked for.

        Raises:
            InvalidSpecError: none or more than one is, or it is out of bounds.
        """
        match (self.preset, self.delays, self.fixed or self.ordered, self.exponential):
            case (str(preset), None, None, None):
                return Ladder.from_preset(preset)
            case (None, tuple(delays), None, None):
                return Ladder.from_delays(delays)
            case (None, None, str(fixed), None) if not (self.fixed and self.ordered):
                return Ladder.from_fixed(fixed)
            case (None, None, None, Exponential() as exponential):
                return exponential.to_ladder()
        found = "more than one of them" if self.to_manifest() else "none of them"
        raise InvalidSpecError(_ONE_OF.problem, got=found, remedy=_ONE_OF.remedy)

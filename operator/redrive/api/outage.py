"""When consumers pause because what they depend on is down."""

from __future__ import annotations

import enum
from typing import Annotated, Self

from pydantic import AfterValidator, ConfigDict, Field, Strict, model_validator

from redrive.api.choosing import one_of
from redrive.api.ladder import IS_DURATION, SECONDS, WRITTEN
from redrive.api.model import ApiModel
from redrive.api.rules import QUOTED, VALIDATIONS, Rule, refusing
from redrive.policy import durations
from redrive.policy.outage import MAX_INTERVAL, MAX_PAUSE, MAX_WINDOW, OutageLimits


def _check_interval(text: str) -> str:
    OutageLimits(max_probe_interval=durations.parse(text))
    return text


def _check_pause(text: str) -> str:
    OutageLimits(max_pause=durations.parse(text))
    return text


def _within(name: str, most: int, words: str) -> Rule:
    return Rule(
        f"!({WRITTEN}) || [{SECONDS}].all(s, 1 <= s && s <= {most})",
        f"{name} of an outage breaker is from 1s to {words}",
        "choose a value within these bounds, or leave it out",
        got=QUOTED,
    )


ProbeInterval = Annotated[
    str,
    Field(max_length=40),
    IS_DURATION,
    _within("maxProbeInterval", int(MAX_INTERVAL.total_seconds()), "1h"),
    AfterValidator(refusing(_check_interval)),
]
Pause = Annotated[
    str,
    Field(max_length=40),
    IS_DURATION,
    _within("maxPause", int(MAX_PAUSE.total_seconds()), "7d"),
    AfterValidator(refusing(_check_pause)),
]

_FITS = Rule(
    "(has(self.minMessages) ? self.minMessages : 10) <= (has(self.window) ? self.window : 100)",
    "minMessages of an outage breaker is at most its window",
    "lower it, or raise the window",
)


class OutageMode(enum.StrEnum):
    """Whether consumers pause."""

    PAUSE = "Pause"
    NEVER = "Never"


class OutageBreakerSpec(ApiModel):
    """When consumers pause because what they depend on is down, and for how long."""

    model_config = ConfigDict(json_schema_extra={VALIDATIONS: [_FITS.to_schema()]})

    mode: Annotated[
        OutageMode,
        *one_of(
            OutageMode,
            "mode of an outage breaker says whether consumers pause",
            "use one of Pause, Never",
        ),
    ] = OutageMode.PAUSE
    """`Pause`: consumers pause in an outage. `Never`: they don't, whatever the connection's
    `policyDefaults` say. Left out: Pause."""

    min_messages: Annotated[int, Strict(), Field(ge=1, le=MAX_WINDOW)] = 10
    """A consumer pauses when so many different messages have failed for one cause, and their share
    of its latest outcomes is `failurePercent`. 1 to 10000. Left out: 10."""

    failure_percent: Annotated[int, Strict(), Field(ge=1, le=100)] = 50
    """From which share of the latest outcomes on failures for one cause are an outage, 1 to 100.
    Left out: 50."""

    window: Annotated[int, Strict(), Field(ge=1, le=MAX_WINDOW)] = 100
    """How many of its latest outcomes a consumer looks at, 1 to 10000. Left out: 100."""

    max_probe_interval: ProbeInterval = "30s"
    """While it has paused, a consumer handles one message after 1s, then with back-off up to this,
    1s to 1h. The first that succeeds ends the outage. Left out: 30s."""

    max_pause: Pause = "6h"
    """After this a consumer goes on in spite of the outage, and failures use up retries again,
    until a message succeeds. 1s to 7d. Left out: 6h."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refusing(OutageBreakerSpec.to_limits)(self)
        return self

    def to_limits(self) -> OutageLimits | None:
        """Return what consumers go by; None if they never pause.

        Raises:
            InvalidSpecError: the values don't go together.
        """
        limits = OutageLimits(
            min_messages=self.min_messages,
            failure_percent=self.failure_percent,
            window=self.window,
            max_probe_interval=durations.parse(self.max_probe_interval),
            max_pause=durations.parse(self.max_pause),
        )
        return limits if self.mode is OutageMode.PAUSE else None

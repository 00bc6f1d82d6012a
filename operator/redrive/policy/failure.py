"""An exception → what becomes of the message it was raised on; obeyed by `delivery`'s `run`.

`verdict` decides by how often a message has failed; the rules here, by *why* it failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from redrive.errors import PROCESS_ERRORS, InvalidSpecError
from redrive.policy import durations
from redrive.policy.converted import Converted
from redrive.policy.ladder import check_delay
from redrive.policy.matching import ErrorRule, nearest, parts
from redrive.policy.model import Policy
from redrive.policy.verdict import Dead, DeadReason, Discard, Retry, after_failure, end

_Delays = Mapping[Any, float | timedelta]
"""By rules; a mapping is invariant in the type of its keys, so that one of classes would not do."""


class RetryLater(Exception):  # noqa: N818 - what a handler asks for, and no error
    """Raised by a handler: retry the message, whatever the rules say of other exceptions.

    The attempt has failed and counts; with no retries left the message is dead-lettered. Raised
    *from* an exception, that one is the cause.

    Args:
        delay: wait this long, 1 s … 864 000 s, as a server says with Retry-After: in seconds, or a
            timedelta; None leaves it to the ladder.

    Raises:
        InvalidSpecError: the delay is out of bounds.
    """

    def __init__(self, delay: float | timedelta | None = None) -> None:
        if delay is not None:
            delay = check_delay(delay, "the delay of a retry")
        super().__init__("the ladder's delay" if delay is None else f"after {delay}")
        self.delay = delay


class DeadLetter(Exception):  # noqa: N818 - what a handler asks for, and no error
    """Raised by a handler: dead-letter the message now; no retry helps.

    Raised *from* an exception, that one is the cause. As a part of an `ExceptionGroup`, as a
    `TaskGroup` raises, it asks for the same; so does `RetryLater` if there is no `DeadLetter`.

    Args:
        reason: for people; the text of the cause if there is no other.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


def _name(rule: ErrorRule) -> str:
    return str(getattr(rule, "__name__", rule))


def _check_rules(name: str, rules: Iterable[ErrorRule], kind: type) -> None:
    if not isinstance(rules, kind):
        raise InvalidSpecError(
            f"{name} is a {kind.__name__.lower()} of classes of exceptions, or of functions of an "
            "exception",
            got=rules,
            remedy="give one with a single rule as (ValueError,), or {ValueError: 5}",
        )
    for rule in rules:
        if not (_is_failure(rule) if isinstance(rule, type) else callable(rule)):
            raise InvalidSpecError(
                f"a rule of {name} is a class of exceptions, or a function of an exception",
                got=rule,
                remedy="name the class of a failure, or give a function that returns a bool; "
                "KeyboardInterrupt, SystemExit and GeneratorExit fail no message",
            )


def _is_failure(rule: type) -> bool:
    return issubclass(rule, BaseException) and not issubclass(rule, PROCESS_ERRORS)


def _delays(delays: _Delays | None) -> dict[ErrorRule, timedelta]:
    delays = {} if delays is None else delays
    _check_rules("delays", delays, Mapping)
    return {
        rule: check_delay(delay, f"the delay after {_name(rule)}") for rule, delay in delays.items()
    }


def _deadline(deadline: float | timedelta | None) -> timedelta | None:
    if deadline is None:
        return None
    found = durations.given(deadline, "the deadline of all attempts")
    if found <= timedelta():
        raise InvalidSpecError(
            "the deadline of all attempts is a positive time",
            got=str(found),
            remedy="leave it out to retry for as long as the policy does",
        )
    return found


@dataclass(frozen=True)
class FailureRules:
    """Which exceptions are worth a retry, after how long, and for how long in all.

    A rule is for a class of exceptions, or for those for which a function of it returns true. Where
    a class and its base are both named, the rule for the class wins, as if the nearest `except` had
    caught it; a function wins over both, and one that raises an exception leaves the decision to
    the policy. Where nothing but `Exception` names it, what the exception was raised *from*
    decides; `Exception` covers failures that are none too, such as `asyncio.CancelledError`. Of a
    group every part decides: all have to be worth a retry, and the longest delay is waited for.
    Without any rule every exception is retried as the policy says.

    Attributes:
        dead_letter_on: no retry helps: the message is dead-lettered at its first failure.
        retry_on: these are retried. An exception that neither tuple covers is dead-lettered.
        delays: wait this long after these, 1 s … 864 000 s, instead of the ladder's next rung: in
            seconds, or a timedelta.
        deadline: a retry that would come later than this after the first failure is not made; the
            message is dead-lettered instead.

    Raises:
        InvalidSpecError: a rule is neither class nor function, is both to be retried and to be
            dead-lettered, a delay is out of bounds, or the deadline is not positive.
    """

    dead_letter_on: tuple[ErrorRule, ...] = ()
    retry_on: tuple[ErrorRule, ...] = (Exception,)
    delays: Converted[_Delays | None, Mapping[ErrorRule, timedelta]] = Converted(_delays, None)
    deadline: Converted[float | timedelta | None, timedelta | None] = Converted(_deadline, None)

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        for name in ("dead_letter_on", "retry_on"):
            _check_rules(name, getattr(self, name), tuple)
        both = set(self.dead_letter_on) & set(self.retry_on)
        if both:
            raise InvalidSpecError(
                "an exception is either retried or dead-lettered",
                got=", ".join(sorted(map(_name, both))),
                remedy="leave it out of retry_on or of dead_letter_on",
            )

    def retries(self, error: BaseException) -> bool:
        """Tell whether *error* is worth a retry."""
        found = nearest(error, (*self.dead_letter_on, *self.retry_on))
        return all(rule in self.retry_on for rule in found)

    def delay(self, error: BaseException) -> timedelta | None:
        """Return how long to wait after *error*; None: the ladder knows."""
        found = nearest(error, self.delays)
        return max((self.delays[rule] for rule in found if rule is not None), default=None)


def after_error(  # noqa: PLR0913 - all that a verdict depends on
    policy: Policy,
    rules: FailureRules,
    error: BaseException,
    *,
    reconsume_times: int,
    failing_for: timedelta,
    luck: float = 0.0,
) -> Retry | Dead | Discard:
    """Decide about a message whose handler raised *error*.

    Args:
        reconsume_times: the retries it has had.
        failing_for: the time since its first failure; nothing at the first.
        luck: drawn for this failure, from 0 to 1; see `Ladder.delay`.
    """
    failures = reconsume_times + 1
    asked = list(parts(error))
    later = [part.delay for part in asked if isinstance(part, RetryLater)]
    if any(isinstance(part, DeadLetter) for part in asked):
        return end(policy, DeadReason.REQUESTED, failures)
    if later:
        delay = max(filter(None, later), default=None)
    elif rules.retries(error):
        delay = rules.delay(error)
    else:
        return end(policy, DeadReason.NOT_RETRYABLE, failures)
    verdict = after_failure(policy, reconsume_times, delay=delay, luck=luck)
    if not isinstance(verdict, Retry) or rules.deadline is None:
        return verdict
    if failing_for + verdict.delay > rules.deadline:
        return end(policy, DeadReason.DEADLINE_EXCEEDED, failures)
    return verdict

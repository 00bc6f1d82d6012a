"""The verdict about a failed attempt, and the rules that classify failures; pure.

A verdict is a value, which `delivery` carries out:

receive → handle ─ success ──────────────▶ Done
                 └ failure ─ retries left ▶ Retry(delay)
                           └ none, or level < 0 ▶ Dead(reason), or Discard(reason)

`after_failure` decides by the number of failures, with the retry delay of the policy's ladder.
With `ordering: PerKey` the delay passes in the consumer (`delivery.middleware.scheduling`).
`FailureRules` decide by the *cause*: the class of an exception, its own cause, or a predicate.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeGuard, TypeVar

from redrive.errors import PROCESS_ERRORS, InvalidSpecError, RedriveError
from redrive.policy.ladder import check_delay
from redrive.policy.model import Policy
from redrive.policy.values import (
    Converted,
    check_instance,
    is_function,
    reads_directly,
    to_timedelta,
)


class HandlerTimeoutError(RedriveError, TimeoutError):
    """A handler exceeded its time-out."""

    reason = "HandlerTimeout"


class HandlerCancelledError(RedriveError):
    """A handler was cancelled, but neither by its time-out nor by `run`."""

    reason = "HandlerCancelled"


class NotDoneError(RedriveError):
    """Handler returned neither `Done` nor one result per message, where one is required."""

    reason = "NotDone"


_UNRAISED = (HandlerTimeoutError, HandlerCancelledError, NotDoneError)
"""Failures that no handler has raised. Failure rules retry them unless they name them."""
_BASES = (OSError, RedriveError)
"""Base classes of `_UNRAISED`. A rule for one applies only to exceptions that a handler raised."""


class DeadReason(enum.StrEnum):
    """Reason of a dead letter, or of a discarded message."""

    RETRIES_EXHAUSTED = "RetriesExhausted"
    REQUESTED = "Requested"
    NOT_RETRYABLE = "NotRetryable"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    CONSUMER_CRASH = "ConsumerCrash"
    FOLLOWS = "AfterDeadLetter"
    NOT_COPYABLE = "NotCopyable"


@dataclass(frozen=True)
class Done:
    """The message is settled: acknowledge it."""


@dataclass(frozen=True)
class Retry:
    """Deliver the message again after *delay*, as retry number *reconsume_times*."""

    delay: timedelta
    reconsume_times: int


@dataclass(frozen=True)
class Dead:
    """Send the message to the dead-letter topic.

    Attributes:
        reconsume_times: number of failed attempts, one more than the retries, as the Java client
            counts on this hop.
    """

    reason: DeadReason
    reconsume_times: int


@dataclass(frozen=True)
class Discard:
    """Acknowledge the message without a copy: the policy keeps no dead letters.

    Attributes:
        reconsume_times: number of failed attempts, as for a dead letter.
    """

    reason: DeadReason
    reconsume_times: int


def after_failure(
    policy: Policy,
    reconsume_times: int,
    *,
    delay: timedelta | None = None,
    level: int | None = None,
    luck: float = 0.0,
) -> Retry | Dead | Discard:
    """Decide about a message that failed after *reconsume_times* retries.

    The caller may request a *delay*, or a *level*: k above the highest means the highest, k < 0
    means no retry, and 0 means the ladder. Without either the next rung of the ladder applies
    (level increment). A message without remaining retries gets none, regardless of the request.

    Args:
        luck: random number for this failure, from 0 to 1; see `Ladder.delay`.

    Raises:
        InvalidSpecError: both are given, or the delay is not from 1 s to 864 000 s.
    """
    check_request(delay, level)
    retry = reconsume_times + 1
    if level is not None and level < 0:
        return end(policy, DeadReason.REQUESTED, retry)
    if retry > policy.max_retries:
        return end(policy, DeadReason.RETRIES_EXHAUSTED, retry)
    if delay is not None:
        return Retry(delay, retry)
    return Retry(policy.levels.delay(level) if level else policy.ladder.delay(retry, luck), retry)


def check_request(delay: timedelta | None, level: int | None) -> None:
    """Check the arguments of a requested retry.

    Raises:
        InvalidSpecError: both are given, the delay is not from 1 s to 864 000 s, or the level is
            not a whole number.
    """
    check_instance(level, int, "level", optional=True)
    if delay is not None and level is not None:
        raise InvalidSpecError(
            "a retry must have a delay or a level, not both",
            got=f"delay={delay}, level={level}",
            remedy="leave one of them out",
        )
    if delay is not None:
        check_delay(delay, "the delay of a retry")


def after_expiry(policy: Policy, reconsume_times: int) -> Retry | Dead | Discard:
    """Decide about a message whose invisible duration has ended after *reconsume_times* retries.

    There is no delay: the message becomes visible at once, or has used up its retries.
    """
    failed = reconsume_times + 1
    if reconsume_times < policy.max_retries:
        return Retry(timedelta(), failed)
    return end(policy, DeadReason.RETRIES_EXHAUSTED, failed)


def end(policy: Policy, reason: DeadReason, failed: int) -> Dead | Discard:
    """Return the verdict for a message without further retries, after *failed* attempts."""
    return Dead(reason, failed) if policy.dead_letters else Discard(reason, failed)


class RetryLater(Exception):  # noqa: N818 - a request of a handler, not an error
    """Raised by a handler: retry the message, regardless of the rules for other exceptions.

    The attempt counts as failed; without remaining retries the message is dead-lettered. If it is
    raised *from* an exception, that one is the cause.

    Args:
        delay: 1 s … 864 000 s, in seconds or as a timedelta, for example from Retry-After. None
            means the delay of the ladder.

    Raises:
        InvalidSpecError: the delay is out of bounds.
    """

    def __init__(self, delay: float | timedelta | None = None) -> None:
        if delay is not None:
            delay = check_delay(delay, "the delay of a retry")
        super().__init__("the ladder's delay" if delay is None else f"after {delay}")
        self.delay = delay


class DeadLetter(Exception):  # noqa: N818 - a request of a handler, not an error
    """Raised by a handler: dead-letter the message now, because no retry helps.

    If it is raised *from* an exception, that one is the cause. Within an `ExceptionGroup`, such as
    that of a `TaskGroup`, it has the same effect; so does `RetryLater` without a `DeadLetter`.

    Args:
        reason: text for people; it becomes the text of the cause if there is no other.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


def _name(rule: ErrorRule) -> str:
    return str(getattr(rule, "__name__", rule))


def _check_rules(name: str, rules: Iterable[ErrorRule], kind: type) -> None:
    if not isinstance(rules, kind):
        raise InvalidSpecError(
            f"{name} must be a {kind.__name__.lower()} of exception classes, or of functions of an "
            "exception",
            got=rules,
            remedy="pass a single rule as (ValueError,), or {ValueError: 5}",
        )
    for rule in rules:
        if not (_is_failure(rule) if isinstance(rule, type) else is_function(rule)):
            raise InvalidSpecError(
                f"a rule of {name} must be an exception class, or a function of an exception",
                got=rule,
                remedy="use the class of a failure, or a function that returns a bool; "
                "KeyboardInterrupt, SystemExit and GeneratorExit never fail a message",
            )


def _is_failure(rule: type) -> bool:
    return issubclass(rule, BaseException) and not issubclass(rule, PROCESS_ERRORS)


def _delays(delays: Mapping[Any, float | timedelta] | None) -> dict[ErrorRule, timedelta]:
    delays = {} if delays is None else delays
    _check_rules("delays", delays, Mapping)
    return {
        rule: check_delay(delay, f"the delay after {_name(rule)}") for rule, delay in delays.items()
    }


def _deadline(deadline: float | timedelta | None) -> timedelta | None:
    if deadline is None:
        return None
    limit = to_timedelta(deadline, "the deadline of all attempts")
    if limit <= timedelta():
        raise InvalidSpecError(
            "the deadline of all attempts must be positive",
            got=str(limit),
            remedy="leave it out to use all retries of the policy",
        )
    return limit


@reads_directly
@dataclass(frozen=True)
class FailureRules:
    """Rules for exceptions: which are retried, after which delay, and for how long in total.

    A rule is an exception class, or a function of an exception that returns True if it applies. The
    rule for a class has priority over that for its base, like the nearest `except`. A function has
    priority over both; if it raises an exception, the policy decides. If only `Exception` applies,
    the exception's `__cause__` decides. `Exception` also covers failures of other base classes,
    such as `asyncio.CancelledError`. In a group all exceptions must be retryable, and the longest
    delay applies. Without rules every exception is retried as the policy defines.

    Attributes:
        dead_letter_on: exceptions whose message is dead-lettered at its first failure.
        retry_on: exceptions to retry. Exceptions in neither tuple are dead-lettered, except
            failures that no handler raises: `HandlerTimeoutError`, `NotDoneError`, and that of a
            cancelled handler. `OSError` and `RedriveError` do not contain these.
        delays: delays after these exceptions, 1 s … 864 000 s, instead of the ladder's next rung:
            in seconds, or a timedelta.
        deadline: maximum time from the first failure to a retry. A message whose retry would be
            later is dead-lettered instead.

    Raises:
        InvalidSpecError: a rule is neither class nor function, an exception is in both tuples, a
            delay is out of bounds, or the deadline is not positive.
    """

    dead_letter_on: tuple[ErrorRule, ...] = ()
    retry_on: tuple[ErrorRule, ...] = (Exception,)
    delays: Converted[  # Any, because a mapping is invariant in the type of its keys
        Mapping[Any, float | timedelta] | None, Mapping[ErrorRule, timedelta]
    ] = Converted(_delays, None)
    deadline: Converted[float | timedelta | None, timedelta | None] = Converted(_deadline, None)

    def __post_init__(self) -> None:
        """Check that the rules are valid and do not contradict each other."""
        for name in ("dead_letter_on", "retry_on"):
            _check_rules(name, getattr(self, name), tuple)
        both = set(self.dead_letter_on) & set(self.retry_on)
        if both:
            raise InvalidSpecError(
                "an exception must be either retried or dead-lettered",
                got=", ".join(sorted(map(_name, both))),
                remedy="leave it out of retry_on or of dead_letter_on",
            )

    def retries(self, error: BaseException) -> bool:
        """Return True if *error* is retried."""
        if self.retry_on == (Exception,) and not self.dead_letter_on:
            return True
        rules, unraised = (*self.dead_letter_on, *self.retry_on), is_a(error, _UNRAISED)
        applied = nearest(error, [r for r in rules if r not in _BASES] if unraised else rules)
        if applied == (None,) and unraised:
            return True
        return all(rule in self.retry_on for rule in applied)

    def delay(self, error: BaseException) -> timedelta | None:
        """Return the delay after *error*; None means the ladder's."""
        if not self.delays:
            return None
        applied = nearest(error, self.delays)
        return max((self.delays[rule] for rule in applied if rule is not None), default=None)


def after_error(  # noqa: PLR0913 - the inputs of a verdict
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
        reconsume_times: its retries so far.
        failing_for: time since its first failure; zero at the first.
        luck: random number for this failure, from 0 to 1; see `Ladder.delay`.
    """
    failures = reconsume_times + 1
    requests = [part for part in parts(error) if is_a(part, (DeadLetter, RetryLater))]
    if any(is_a(part, DeadLetter) for part in requests):
        return end(policy, DeadReason.REQUESTED, failures)
    if requests:
        later = [part.delay for part in requests if is_a(part, RetryLater)]
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


ErrorRule = type[BaseException] | Callable[[BaseException], bool]
"""An exception class, or a function that returns True if the rule applies to an exception."""

_ALL = (Exception, BaseException)
"""Either covers all failures: a handler's exception need not be an `Exception`."""
_MAX_CAUSES = 20


def nearest(error: BaseException, rules: Collection[ErrorRule]) -> tuple[ErrorRule | None, ...]:
    """Return the rule that applies to *error*; of a group, one for each of its exceptions.

    A function has priority over classes, and a class over its bases. If no rule is more specific
    than `Exception`, the `__cause__` of *error* decides. None means that no rule applies.
    """
    catch_all = next((kind for kind in _ALL if kind in rules), None)
    return _named(error, rules, _MAX_CAUSES) or (catch_all,)


_Error = TypeVar("_Error", bound=BaseException)


def parts(error: BaseException) -> Sequence[BaseException]:
    """Return the exceptions of a group, including nested groups; else *error* itself."""
    members = members_of(error)
    return (error,) if members is None else [p for member in members for p in parts(member)]


def is_a(error: object, kinds: type[_Error] | tuple[type[_Error], ...]) -> TypeGuard[_Error]:
    """Return True if *error* is of one of the classes, without reading `error.__class__`.

    `isinstance` reads it, and a class of the program may raise at the access to any attribute.
    """
    return issubclass(type(error), kinds)


def members_of(error: BaseException) -> Sequence[BaseException] | None:
    """Return the exceptions of a group, which may hide them; None if *error* is no group."""
    if not is_a(error, BaseExceptionGroup):
        return None
    members: Sequence[BaseException] = vars(BaseExceptionGroup)["exceptions"].__get__(error)
    return members


def cause_of(error: BaseException) -> BaseException | None:
    """Return the exception that *error* was raised from, which it may hide."""
    cause: BaseException | None = vars(BaseException)["__cause__"].__get__(error)
    return cause


def _named(
    error: BaseException, rules: Collection[ErrorRule], causes: int
) -> tuple[ErrorRule | None, ...]:
    own = _own(error, rules)
    if own is not None:
        return (own,)
    if (members := members_of(error)) is not None:
        return tuple(rule for part in members for rule in nearest(part, rules))
    cause = cause_of(error)
    return () if cause is None or not causes else _named(cause, rules, causes - 1)


def _own(error: BaseException, rules: Collection[ErrorRule]) -> ErrorRule | None:
    for rule in rules:
        if not isinstance(rule, type) and rule(error):
            return rule
    return next((kind for kind in type(error).__mro__ if kind not in _ALL and kind in rules), None)

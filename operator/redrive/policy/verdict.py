"""The decision about a failed attempt, and the rules that classify failures.

A failed attempt → what becomes of the message, as a value that `delivery` carries out.

receive → handle ─ success ──────────────▶ Done
                 └ failure ─ retries left ▶ Retry(delay)
                           └ none, or level < 0 ▶ Dead(reason), or Discard(reason)

An exception → what becomes of the message it was raised on; obeyed by `delivery`'s `run`.

`verdict` decides by how often a message has failed; the rules here, by *why* it failed.

Which rule speaks for an exception: by its class, by what it was raised from, or by a predicate.

Called by `failure`.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from redrive.errors import PROCESS_ERRORS, InvalidSpecError, RedriveError
from redrive.policy.ladder import check_delay
from redrive.policy.model import Policy
from redrive.policy.values import Converted, to_timedelta


class HandlerTimeoutError(RedriveError, TimeoutError):
    """A handler took longer than it may. Rules of failures retry it unless they name it."""

    reason = "HandlerTimeout"


class DeadReason(enum.StrEnum):
    """Why a message became a dead letter, or was discarded."""

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
        reconsume_times: what the dead letter carries: its failed attempts, one more than its
            retries, as the Java client counts on this hop.
    """

    reason: DeadReason
    reconsume_times: int


@dataclass(frozen=True)
class Discard:
    """Acknowledge the message and keep no copy: the policy has dead-lettering switched off.

    Attributes:
        reconsume_times: the failed attempts, as of a dead letter.
    """

    reason: DeadReason
    reconsume_times: int


Verdict = Done | Retry | Dead | Discard


def after_failure(
    policy: Policy,
    reconsume_times: int,
    *,
    delay: timedelta | None = None,
    level: int | None = None,
    luck: float = 0.0,
) -> Retry | Dead | Discard:
    """Decide about a message that failed after *reconsume_times* retries.

    The caller asks for one of: an arbitrary *delay*; a *level*, where k above the highest means
    the highest, k < 0 means no retry any more and 0 leaves it to the ladder; neither, which is
    the ladder's next rung (level increment). Retries used up win over any delay asked for.

    Args:
        luck: drawn for this failure, from 0 to 1; see `Ladder.delay`.

    Raises:
        InvalidSpecError: both were asked for, or the delay is not from 1 s to 864 000 s.
    """
    check_asked(delay, level)
    retry = reconsume_times + 1
    if level is not None and level < 0:
        return end(policy, DeadReason.REQUESTED, retry)
    if retry > policy.max_retries:
        return end(policy, DeadReason.RETRIES_EXHAUSTED, retry)
    if delay is not None:
        return Retry(delay, retry)
    return Retry(policy.levels.delay(level) if level else policy.ladder.delay(retry, luck), retry)


def check_asked(delay: timedelta | None, level: int | None) -> None:
    """Pass if a retry can be asked for so.

    Raises:
        InvalidSpecError: both were asked for, or the delay is not from 1 s to 864 000 s.
    """
    if delay is not None and level is not None:
        raise InvalidSpecError(
            "a retry is asked for by a delay or by a level, not by both",
            got=f"delay={delay}, level={level}",
            remedy="leave one of them out",
        )
    if delay is not None:
        check_delay(delay, "the delay of a retry")


def after_expiry(policy: Policy, reconsume_times: int) -> Retry | Dead | Discard:
    """Decide about a message whose invisible duration has ended after *reconsume_times* retries.

    There is no delay: the message turns visible at once, or has used up its retries.
    """
    failed = reconsume_times + 1
    if reconsume_times < policy.max_retries:
        return Retry(timedelta(), failed)
    return end(policy, DeadReason.RETRIES_EXHAUSTED, failed)


def end(policy: Policy, reason: DeadReason, failed: int) -> Dead | Discard:
    """Decide about a message that gets no retry any more, after *failed* attempts."""
    return Dead(reason, failed) if policy.dead_letters else Discard(reason, failed)


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
        if not (_is_failure(rule) if isinstance(rule, type) else _is_function(rule)):
            raise InvalidSpecError(
                f"a rule of {name} is a class of exceptions, or a function of an exception",
                got=rule,
                remedy="name the class of a failure, or give a function that returns a bool; "
                "KeyboardInterrupt, SystemExit and GeneratorExit fail no message",
            )


def _is_function(rule: object) -> bool:
    """Return True for a function whose call gives an answer, as a coroutine would not."""
    return callable(rule) and not inspect.iscoroutinefunction(rule)


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
    found = to_timedelta(deadline, "the deadline of all attempts")
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
        retry_on: these are retried. An exception that neither tuple covers is dead-lettered,
            except `HandlerTimeoutError`: that of a handler which exceeded its time-out.
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
        if found == (None,) and isinstance(error, HandlerTimeoutError):
            return True  # the handler raised nothing that a program could have named
        return all(rule in self.retry_on for rule in found)

    def delay(self, error: BaseException) -> timedelta | None:
        """Return how long to wait after *error*; None: the ladder knows."""
        if not self.delays:
            return None
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


ErrorRule = type[BaseException] | Callable[[BaseException], bool]
"""A class of exceptions, or what tells for an exception whether the rule is for it."""

_ALL = (Exception, BaseException)
"""Either stands for all failures: an exception of a handler that is no `Exception` is one too."""
_MAX_CAUSES = 20


def nearest(error: BaseException, rules: Collection[ErrorRule]) -> tuple[ErrorRule | None, ...]:
    """Return the one of *rules* that speaks for *error*; of a group, one for each of its parts.

    A predicate comes before classes, and a class before its bases. What *error* was raised *from*
    is asked where no rule names it more closely than `Exception`; None if there is no rule.
    """
    catch_all = next((kind for kind in _ALL if kind in rules), None)
    return _named(error, rules, _MAX_CAUSES) or (catch_all,)


def parts(error: BaseException) -> Iterator[BaseException]:
    """Go through the exceptions of a group, and of groups in it; else there is *error* alone."""
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from parts(part)
    else:
        yield error


def _named(
    error: BaseException, rules: Collection[ErrorRule], causes: int
) -> tuple[ErrorRule | None, ...]:
    own = _own(error, rules)
    if own is not None:
        return (own,)
    if isinstance(error, BaseExceptionGroup):
        return tuple(rule for part in error.exceptions for rule in nearest(part, rules))
    if error.__cause__ is None or not causes:
        return ()
    return _named(error.__cause__, rules, causes - 1)


def _own(error: BaseException, rules: Collection[ErrorRule]) -> ErrorRule | None:
    for rule in rules:
        if not isinstance(rule, type) and rule(error):
            return rule
    return next((kind for kind in type(error).__mro__ if kind not in _ALL and kind in rules), None)

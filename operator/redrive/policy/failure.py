"""An exception → what becomes of the message it was raised on; obeyed by `delivery`'s `run`.

`verdict` decides by how often a message has failed; the rules here, by *why* it failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from redrive.errors import InvalidSpecError
from redrive.policy.ladder import check_delay
from redrive.policy.model import Policy
from redrive.policy.verdict import Dead, DeadReason, Discard, Retry, after_failure, end


class RetryLater(Exception):  # noqa: N818 - what a handler asks for, and no error
    """Raised by a handler: retry the message, whatever the rules say of other exceptions.

    The attempt has failed and counts; with no retries left the message is dead-lettered. Raised
    *from* an exception, that one is the cause.

    Args:
        delay: wait this long, 1 s … 864 000 s, as a server says with Retry-After; None leaves it
            to the ladder.

    Raises:
        InvalidSpecError: the delay is out of bounds.
    """

    def __init__(self, delay: timedelta | None = None) -> None:
        if delay is not None:
            check_delay(delay, "the delay of a retry")
        super().__init__("the ladder's delay" if delay is None else f"after {delay}")
        self.delay = delay


class DeadLetter(Exception):  # noqa: N818 - what a handler asks for, and no error
    """Raised by a handler: dead-letter the message now; no retry helps.

    Raised *from* an exception, that one is the cause.

    Args:
        reason: for people; the text of the cause if there is no other.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


@dataclass(frozen=True)
class FailureRules:
    """Which exceptions are worth a retry, after how long, and for how long in all.

    Where a class and its base are both named, the rule for the class wins, as if the nearest
    `except` had caught it. Without any rule every exception is retried as the policy says.

    Attributes:
        dead_letter_on: no retry helps: the message is dead-lettered at its first failure.
        retry_on: these are retried. An exception that neither tuple covers is dead-lettered.
        delays: wait this long after these, 1 s … 864 000 s, instead of the ladder's next rung.
        deadline: a retry that would come later than this after the first failure is not made; the
            message is dead-lettered instead.

    Raises:
        InvalidSpecError: a class is both to be retried and to be dead-lettered, a delay is out of
            bounds, or the deadline is not positive.
    """

    dead_letter_on: tuple[type[Exception], ...] = ()
    retry_on: tuple[type[Exception], ...] = (Exception,)
    delays: Mapping[type[Exception], timedelta] = field(default_factory=dict)
    deadline: timedelta | None = None

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        both = set(self.dead_letter_on) & set(self.retry_on)
        if both:
            raise InvalidSpecError(
                "an exception is either retried or dead-lettered",
                got=", ".join(sorted(kind.__name__ for kind in both)),
                remedy="leave it out of retry_on or of dead_letter_on",
            )
        for kind, delay in self.delays.items():
            check_delay(delay, f"the delay after {kind.__name__}")
        if self.deadline is not None and self.deadline <= timedelta():
            raise InvalidSpecError(
                "the deadline of all attempts is a positive time",
                got=str(self.deadline),
                remedy="leave it out to retry for as long as the policy does",
            )

    def retries(self, kind: type[Exception]) -> bool:
        """Tell whether an exception of class *kind* is worth a retry."""
        nearest = (c for c in kind.__mro__ if c in self.retry_on or c in self.dead_letter_on)
        return next(nearest, None) in self.retry_on

    def delay(self, kind: type[Exception]) -> timedelta | None:
        """Return how long to wait after an exception of class *kind*; None: the ladder knows."""
        return next((self.delays[c] for c in kind.__mro__ if c in self.delays), None)


def after_error(  # noqa: PLR0913 - all that a verdict depends on
    policy: Policy,
    rules: FailureRules,
    error: Exception,
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
    delay = rules.delay(type(error))
    if isinstance(error, DeadLetter):
        return end(policy, DeadReason.REQUESTED, failures)
    if isinstance(error, RetryLater):
        delay = error.delay
    elif not rules.retries(type(error)):
        return end(policy, DeadReason.NOT_RETRYABLE, failures)
    verdict = after_failure(policy, reconsume_times, delay=delay, luck=luck)
    if not isinstance(verdict, Retry) or rules.deadline is None:
        return verdict
    if failing_for + verdict.delay > rules.deadline:
        return end(policy, DeadReason.DEADLINE_EXCEEDED, failures)
    return verdict

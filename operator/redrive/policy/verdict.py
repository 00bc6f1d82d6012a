"""A failed attempt → what becomes of the message, as a value that `delivery` carries out.

receive → handle ─ success ──────────────▶ Done
                 └ failure ─ retries left ▶ Retry(delay)
                           └ none, or level < 0 ▶ Dead(reason), or Discard(reason)
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import timedelta

from redrive.errors import InvalidSpecError
from redrive.policy.ladder import check_delay
from redrive.policy.model import Policy


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

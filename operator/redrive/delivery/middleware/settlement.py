"""What is decided about a message, as one value; made by `decisions`, carried out by `processor`.

The verdicts of `policy.verdict` are about failed attempts; a consumer has three more of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import pulsar

from redrive.errors import InvalidSpecError
from redrive.policy.cause import Cause
from redrive.policy.envelope import Attempt
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.policy.verdict import Dead, Discard, Done, Retry

HANDLE_AGAIN_AFTER = timedelta(seconds=5)
"""When a message that could not be settled is handed out again by this consumer."""


@dataclass(frozen=True)
class RetryInPlace:
    """Hand the message out again after *delay*, by this consumer, as its next attempt."""

    delay: timedelta
    reconsume_times: int


@dataclass(frozen=True)
class Redeliver:
    """Acknowledge the message negatively: the broker delivers it again after its delay.

    Attributes:
        counted: by the broker, as a redelivery; else this consumer counts.
        reason: the class of the exception that the application gave as the cause, if any.
    """

    counted: bool
    reason: str = ""


@dataclass(frozen=True)
class HandBack:
    """Hand the message out again at once, by this consumer, as the same attempt."""


Decide = Callable[[Policy], Retry | Dead | Discard]
"""What a policy makes of a failed attempt."""

DONE = Done()
HAND_BACK = HandBack()


class Failure(NamedTuple):
    """A failed attempt.

    Attributes:
        policy: the one in force when the verdict was found.
        error: what the handler raised, or what the application gave as the cause.
        cause: the same, as it travels with the message.
        raised: the attempt failed by itself: its handler raised, or its time was over. False if
            the application asked for a retry.
        decide: finds the verdict of another policy about it.
        not_copied: reasons why the message can't be copied as it is; see `NotCopyableError`.
    """

    attempt: Attempt
    policy: Policy
    error: BaseException | None
    cause: Cause | None
    raised: bool
    decide: Decide | None = None
    not_copied: frozenset[str] = frozenset()


class Settlement(NamedTuple):
    """The end of one attempt.

    Attributes:
        failure: None for `Done`, `Redeliver` and `HandBack`.
    """

    message: pulsar.Message
    verdict: Done | Retry | Dead | Discard | RetryInPlace | Redeliver | HandBack
    failure: Failure | None = None

    def failed(self) -> Failure:
        """Return the failed attempt, which a verdict about a failure needs.

        Raises:
            InvalidSpecError: there is none.
        """
        if self.failure is None:
            raise InvalidSpecError(
                "a verdict about a failed attempt comes with that attempt",
                got=f"{self.verdict} and no failure",
                remedy="give failure= to the Settlement",
            )
        return self.failure


class Hop(NamedTuple):
    """A copy of a message for the retry or the dead-letter topic.

    Attributes:
        message: the original; of one that can't be copied as it is, what stands for it.
        properties: those of the copy, in place of the original's.
        deliver_after: how long the broker keeps it back.
    """

    message: pulsar.Message
    topic: TopicName
    properties: Mapping[str, str]
    deliver_after: timedelta | None

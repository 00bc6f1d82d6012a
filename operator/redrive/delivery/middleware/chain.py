"""The chain of middleware, and the settlement that passes through it.

What is decided about a message, as one value; made by `decisions`, carried out by `processor`.

The verdicts of `policy.verdict` are about failed attempts; a consumer has three more of its own.

The middleware protocol: what a consumer does around each message is a chain of middleware.

    take ─▶ receive ─▶ handle ─▶ verdict ─▶ settle ─▶ forward

Each stage is a function; a middleware wraps those that concern it. A chain is composed once: what
wraps nothing costs nothing per message. From the outside in: tracing, ack time-out, crash log, what
the program gives, order of keys, events. Programs import this from `redrive.middleware`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, Protocol, TypeVar

import pulsar

from redrive.errors import InvalidSpecError
from redrive.policy.envelope import Attempt, Cause
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


Outcome = BaseException | None
"""Why a message was not handled; None if it was."""
Take = Callable[[], list[pulsar.Message]]
"""Returns the messages of the next call of the handler; raises ConsumerStoppedError at the end."""
Receive = Callable[[float | None], pulsar.Message | None]
"""Returns the next message, or None if none came within so many seconds; None waits for ever."""
Ready = Callable[[], pulsar.Message | None]
"""Returns the next message if that takes no waiting."""
Handle = Callable[[Sequence[pulsar.Message]], Sequence[Outcome]]
"""Has messages handled: one outcome for each. What it raises is the outcome of all."""
Acknowledge = Callable[[pulsar.Message], None]
"""Ends an attempt that succeeded."""
Settle = Callable[[Settlement], pulsar.MessageId | None]
"""Ends an attempt; returns the id of the copy that was sent, if one was. Raises NotSentError if
there is no receipt for that: then the message stays in this consumer, unacknowledged."""
Forward = Callable[[Hop], pulsar.MessageId | None]
"""Sends a copy, and returns its id once the broker has stored it; None if an earlier send had
stored it, whose id the broker does not repeat. Raises NotSentError."""

_Stage = TypeVar("_Stage")


def receive_accepted(
    receive: Receive,
    accepts: Callable[[pulsar.Message], bool],
    monotonic: Callable[[], float],
    timeout: float | None,
) -> pulsar.Message | None:
    """Return the next message that *accepts* says yes to; None if none came within *timeout*."""
    end = None if timeout is None else monotonic() + timeout
    left = timeout
    while True:
        message = receive(left)
        if message is None or accepts(message):
            return message
        left = None if end is None else max(0.0, end - monotonic())


class BoundConsumer(Protocol):
    """The consumer that a middleware serves; every kind of ours has more."""

    @property
    def name(self) -> str:
        """Return its name."""

    @property
    def policy(self) -> Policy:
        """Return the policy in force."""

    def attempt_of(self, message: pulsar.Message) -> Attempt:
        """Return which attempt at *message* this is."""


class Middleware:
    """Wraps stages of a consumer; each method here returns its stage as it is.

    A wrapper calls the stage that it got, with what it got or with something else: a settlement
    with another verdict, a hop with more properties. One that does not call `settle` leaves the
    message in hand, unacknowledged. What a wrapper raises ends the call, or the `run`, in which it
    happened, and its message stays unacknowledged.

    All consumers call their chain in threads, that of `AsyncRetryConsumer` included, and several at
    a time: a wrapper may block, but not the event loop.
    """

    def bind(self, consumer: BoundConsumer) -> Middleware:  # noqa: ARG002 - for those who need it
        """Return what serves *consumer*; called once, before anything is wrapped."""
        return self

    def take(self, take: Take) -> Take:
        """Wrap how a worker of `run` gets the messages of one call of its handler."""
        return take

    def receive(self, receive: Receive) -> Receive:
        """Wrap how one message comes from the source or the retry topic."""
        return receive

    def ready(self, ready: Ready) -> Ready | None:
        """Wrap how a message comes that takes no waiting.

        None, the default of a middleware that wraps `take` or `receive`, has each pass these.
        """
        kind = type(self)
        wraps = kind.receive is not Middleware.receive or kind.take is not Middleware.take
        return None if wraps else ready

    def handle(self, handle: Handle) -> Handle:
        """Wrap the handler of `run`."""
        return handle

    def settle(self, settle: Settle) -> Settle:
        """Wrap the end of an attempt: acknowledged, moved on, or handed back."""
        return settle

    def acknowledge(self, acknowledge: Acknowledge) -> Acknowledge | None:
        """Wrap the end of a successful attempt where that costs less than a `Settlement`.

        None, the default of a middleware that wraps `settle`, has each success pass `settle`.
        """
        return acknowledge if type(self).settle is Middleware.settle else None

    def forward(self, forward: Forward) -> Forward:
        """Wrap the send of a failed message to the retry or dead-letter topic."""
        return forward

    def close(self) -> None:
        """Release what it holds: the consumer closes."""


def compose(wrappers: Iterable[Callable[[_Stage], _Stage]], innermost: _Stage) -> _Stage:
    """Return *innermost* in its *wrappers*, the first of them outermost."""
    return functools.reduce(lambda stage, wrap: wrap(stage), reversed([*wrappers]), innermost)

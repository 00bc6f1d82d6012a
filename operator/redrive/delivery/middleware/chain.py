"""The chain of middleware, and the settlement that passes through it.

    take ─▶ receive ─▶ handle ─▶ verdict ─▶ settle ─▶ forward

Each stage is a function, and a middleware wraps the stages that it needs. A chain is composed once,
so stages without wrappers cost no time per message. From the outside in: tracing, acknowledgement
time-out, crash log, middleware of the program, order of keys, events. Programs import this from
`redrive.middleware`.

A `Settlement` is the decision about one message, made by `decisions` and executed by `processor`.
The verdicts of `policy.verdict` are for failed attempts; a consumer has three more of its own.
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
"""Delay before this consumer handles a message again that could not be settled."""


@dataclass(frozen=True)
class RetryInPlace:
    """Handle the message again after *delay*, in this consumer, as its next attempt."""

    delay: timedelta
    reconsume_times: int


@dataclass(frozen=True)
class Redeliver:
    """Acknowledge the message negatively: the broker redelivers it after its delay.

    Attributes:
        counted: True if the broker counts the redelivery; otherwise this consumer does.
        reason: class of the cause that the application passed; otherwise empty.
    """

    counted: bool
    reason: str = ""


@dataclass(frozen=True)
class HandBack:
    """Handle the message again at once, in this consumer, as the same attempt."""


Decide = Callable[[Policy], Retry | Dead | Discard]
"""Verdict of a policy about a failed attempt."""

DONE = Done()
HAND_BACK = HandBack()


class Failure(NamedTuple):
    """A failed attempt.

    Attributes:
        policy: the policy in force at the decision.
        error: the exception of the handler, or the cause that the application passed.
        cause: the same, as properties of the message.
        raised: True if the handler raised an exception or its time-out passed; False if the
            application requested a retry.
        decide: returns the verdict of another policy about this attempt.
        not_copied: reasons why the message can't be copied; see `NotCopyableError`.
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
        """Return the failed attempt of a verdict about a failure.

        Raises:
            InvalidSpecError: the settlement has none.
        """
        if self.failure is None:
            raise InvalidSpecError(
                "a verdict about a failed attempt needs the failure",
                got=f"{self.verdict} without a failure",
                remedy="pass failure= to the Settlement",
            )
        return self.failure


class Hop(NamedTuple):
    """A copy of a message for the retry or the dead-letter topic.

    Attributes:
        message: the original, or the encoded form of a message that can't be copied.
        properties: properties of the copy, in place of the original's.
        deliver_after: delay of the delivery by the broker.
    """

    message: pulsar.Message
    topic: TopicName
    properties: Mapping[str, str]
    deliver_after: timedelta | None


Outcome = BaseException | None
"""Failure of a message; None if it was handled."""
Take = Callable[[], list[pulsar.Message]]
"""Returns the messages of the next call of the handler; raises ConsumerStoppedError at the end."""
Receive = Callable[[float | None], pulsar.Message | None]
"""Returns the next message, or None after so many seconds without one; None as time waits
permanently."""
Ready = Callable[[], pulsar.Message | None]
"""Returns the next message if that needs no wait."""
Handle = Callable[[Sequence[pulsar.Message]], Sequence[Outcome]]
"""Handles messages: returns one outcome for each, in a sequence that must not be changed. An
exception is the outcome of all."""
Acknowledge = Callable[[pulsar.Message], None]
"""Ends an attempt that succeeded."""
Settle = Callable[[Settlement], pulsar.MessageId | None]
"""Ends an attempt; returns the id of the copy, if one was sent. Raises NotSentError without a
receipt: the message then stays in this consumer, unacknowledged."""
Forward = Callable[[Hop], pulsar.MessageId | None]
"""Sends a copy, and returns its id when the broker has stored it; None if an earlier send had
stored it, because the broker does not repeat the id. Raises NotSentError."""

_Stage = TypeVar("_Stage")


def receive_accepted(
    receive: Receive,
    accepts: Callable[[pulsar.Message], bool],
    monotonic: Callable[[], float],
    timeout: float | None,
) -> pulsar.Message | None:
    """Return the next message that *accepts* accepts; None after *timeout* seconds without one."""
    end = None if timeout is None else monotonic() + timeout
    remaining = timeout
    while True:
        message = receive(remaining)
        if message is None or accepts(message):
            return message
        remaining = None if end is None else max(0.0, end - monotonic())


class BoundConsumer(Protocol):
    """The members of every consumer that middleware may use."""

    @property
    def name(self) -> str:
        """Return its name."""

    @property
    def policy(self) -> Policy:
        """Return the policy in force."""

    def attempt_of(self, message: pulsar.Message) -> Attempt:
        """Return the current attempt at *message*."""


class Middleware:
    """Wraps stages of a consumer; each method here returns its stage unchanged.

    A wrapper calls the stage with the same or with other arguments: a settlement with another
    verdict, a hop with more properties. A wrapper that does not call `settle` leaves the message
    in-flight, unacknowledged. An exception of a wrapper ends the call or the `run`, and the message
    stays unacknowledged.

    All consumers, including `AsyncRetryConsumer`, call their chain in threads, several at a time.
    So a wrapper may block without blocking the event loop.
    """

    def bind(self, consumer: BoundConsumer) -> Middleware:  # noqa: ARG002 - for subclasses
        """Return the middleware for *consumer*; called once, before stages are wrapped."""
        return self

    def take(self, take: Take) -> Take:
        """Wrap the stage by which a worker of `run` takes messages for one call of its handler."""
        return take

    def receive(self, receive: Receive) -> Receive:
        """Wrap the stage that receives one message from the source or the retry topic."""
        return receive

    def ready(self, ready: Ready) -> Ready | None:
        """Wrap the stage that receives a message without a wait.

        With None, the default of a middleware that wraps `take` or `receive`, all messages pass
        those stages.
        """
        kind = type(self)
        wraps = kind.receive is not Middleware.receive or kind.take is not Middleware.take
        return None if wraps else ready

    def handle(self, handle: Handle) -> Handle:
        """Wrap the handler of `run`."""
        return handle

    def settle(self, settle: Settle) -> Settle:
        """Wrap the end of an attempt: acknowledged, sent on, or returned."""
        return settle

    def acknowledge(self, acknowledge: Acknowledge) -> Acknowledge | None:
        """Wrap the end of a successful attempt, which costs less than a `Settlement`.

        With None, the default of a middleware that wraps `settle`, successes pass `settle` too.
        """
        return acknowledge if type(self).settle is Middleware.settle else None

    def forward(self, forward: Forward) -> Forward:
        """Wrap the send of a failed message to the retry or dead-letter topic."""
        return forward

    def close(self) -> None:
        """Release all resources when the consumer closes."""


def compose(wrappers: Iterable[Callable[[_Stage], _Stage]], innermost: _Stage) -> _Stage:
    """Return *innermost* in its *wrappers*, the first of them outermost."""
    return functools.reduce(lambda stage, wrap: wrap(stage), reversed([*wrappers]), innermost)

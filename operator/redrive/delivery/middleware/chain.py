"""The middleware protocol: what a consumer does around each message is a chain of middleware.

    take ─▶ receive ─▶ handle ─▶ verdict ─▶ settle ─▶ forward

Each stage is a function; a middleware wraps those that concern it. A chain is composed once: what
wraps nothing costs nothing per message. From the outside in: tracing, ack time-out, crash log, what
the program gives, order of keys, events. Programs import this from `redrive.middleware`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import pulsar

from redrive.delivery.middleware.settlement import Hop, Settlement
from redrive.policy.envelope import Attempt
from redrive.policy.model import Policy

Outcome = BaseException | None
"""Why a message was not handled; None if it was."""
Take = Callable[[], list[pulsar.Message]]
"""Returns the messages of the next call of the handler; raises ConsumerStoppedError at the end."""
Receive = Callable[[float | None], pulsar.Message | None]
"""Returns the next message, or None if none came within so many seconds; None waits for ever."""
Handle = Callable[[Sequence[pulsar.Message]], Sequence[Outcome]]
"""Has messages handled: one outcome for each. What it raises is the outcome of all."""
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

    def handle(self, handle: Handle) -> Handle:
        """Wrap the handler of `run`."""
        return handle

    def settle(self, settle: Settle) -> Settle:
        """Wrap the end of an attempt: acknowledged, moved on, or handed back."""
        return settle

    def forward(self, forward: Forward) -> Forward:
        """Wrap the send of a failed message to the retry or dead-letter topic."""
        return forward

    def close(self) -> None:
        """Release what it holds: the consumer closes."""


def compose(wrappers: Iterable[Callable[[_Stage], _Stage]], innermost: _Stage) -> _Stage:
    """Return *innermost* in its *wrappers*, the first of them outermost."""
    return functools.reduce(lambda stage, wrap: wrap(stage), reversed([*wrappers]), innermost)

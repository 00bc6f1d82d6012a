"""One attempt at a message at a time: the next one waits for a handler that is out of time."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

import pulsar

from redrive.delivery.middleware.chain import Handle, Middleware, Outcome, Take
from redrive.delivery.parts import Incoming
from redrive.delivery.retrying.attempts import Attempts

_LOOK_AGAIN_SECONDS = 1.0

_at_work_here: ContextVar[OneAttempt | None] = ContextVar("redrive_at_work_here", default=None)


@dataclass(eq=False)
class _Call:
    """One call of a handler.

    Attributes:
        settled: those of its messages whose settlement has begun: their time was over.
    """

    messages: Sequence[pulsar.Message]
    settled: list[pulsar.Message] = field(default_factory=list)


class OneAttempt(Middleware):
    """Keeps a message in this consumer while a handler is still at work on an attempt before.

    A handler that is out of time can't be interrupted. Its message has failed and comes again,
    which would be its next attempt beside this one. Redelivery to another consumer cannot be
    prevented. Only a handler whose message was settled meanwhile makes others wait, and only those
    with the same first id: messages that share an origin are messages of their own. May be used by
    several threads.
    """

    def __init__(self, incoming: Incoming, attempts: Attempts) -> None:
        self._incoming = incoming
        self._attempts = attempts
        self._calls: dict[int, _Call] = {}

    def take(self, take: Take) -> Take:
        """Take what no handler is at work on."""

        def take_apart() -> list[pulsar.Message]:
            while True:
                messages = take()
                if not self._calls:
                    return messages
                free = [message for message in messages if not self._put_off(message)]
                if free:
                    return free

        return take_apart

    def handle(self, handle: Handle) -> Handle:
        """Note what a handler is at work on."""

        def handle_noted(messages: Sequence[pulsar.Message]) -> Sequence[Outcome]:
            call = _Call(messages)
            self._calls[id(call)] = call
            before = _at_work_here.set(self)
            try:
                return handle(messages)
            finally:
                _at_work_here.reset(before)
                del self._calls[id(call)]

        return handle_noted

    def note_settlement(self, message: pulsar.Message) -> None:
        """Note that the settlement of *message* begins; before it can come again."""
        for call in list(self._calls.values()):
            if any(other is message for other in call.messages):
                call.settled.append(message)

    def in_handler(self) -> bool:
        """Return whether a handler of this consumer is the caller, in whichever thread or task."""
        return _at_work_here.get() is self

    def _put_off(self, message: pulsar.Message) -> bool:
        if not self._is_at_work(message):
            return False
        self._incoming.again(message, _LOOK_AGAIN_SECONDS)
        return True

    def _is_at_work(self, message: pulsar.Message) -> bool:
        calls = list(self._calls.values())
        if any(other is message for call in calls for other in call.messages):
            return True
        settled = [other for call in calls for other in call.settled]
        if not settled or not self._attempts.was_retried(message):
            return False
        first_id = self._attempts.of(message).first_id
        return any(self._attempts.of(other).first_id == first_id for other in settled)

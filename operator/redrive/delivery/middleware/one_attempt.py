"""One attempt at a message at a time: the next one waits for a handler that is out of time."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar

import pulsar

from redrive.delivery.middleware.chain import Handle, Middleware, Outcome, Take
from redrive.delivery.parts import Incoming
from redrive.delivery.retrying.attempts import Attempts

_LOOK_AGAIN_SECONDS = 1.0

_at_work_here: ContextVar[OneAttempt | None] = ContextVar("redrive_at_work_here", default=None)


class OneAttempt(Middleware):
    """Keeps a message in hand while a handler of this consumer is still at work on it.

    A handler that is out of time can't be interrupted. Its message has failed and comes again,
    which would be its next attempt beside this one. That another consumer gets it can't be helped.
    May be used by several threads.
    """

    def __init__(self, incoming: Incoming, attempts: Attempts) -> None:
        self._incoming = incoming
        self._attempts = attempts
        self._at_work: dict[int, Sequence[pulsar.Message]] = {}

    def take(self, take: Take) -> Take:
        """Take what no handler is at work on."""

        def take_apart() -> list[pulsar.Message]:
            while True:
                messages = take()
                if not self._at_work:
                    return messages
                free = [message for message in messages if not self._put_off(message)]
                if free:
                    return free

        return take_apart

    def handle(self, handle: Handle) -> Handle:
        """Note what a handler is at work on."""

        def handle_noted(messages: Sequence[pulsar.Message]) -> Sequence[Outcome]:
            self._at_work[id(messages)] = messages
            before = _at_work_here.set(self)
            try:
                return handle(messages)
            finally:
                _at_work_here.reset(before)
                del self._at_work[id(messages)]

        return handle_noted

    def in_handler(self) -> bool:
        """Return whether a handler of this consumer is the caller, in whichever thread or task."""
        return _at_work_here.get() is self

    def _put_off(self, message: pulsar.Message) -> bool:
        if not self._is_at_work(message):
            return False
        self._incoming.again(message, _LOOK_AGAIN_SECONDS)
        return True

    def _is_at_work(self, message: pulsar.Message) -> bool:
        others = [other for messages in list(self._at_work.values()) for other in messages]
        if any(other is message for other in others):
            return True
        if not self._attempts.was_retried(message):
            return False
        origin = self._attempts.of(message).origin
        return any(self._attempts.of(other).origin == origin for other in others)

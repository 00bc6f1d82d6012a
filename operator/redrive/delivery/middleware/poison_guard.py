"""Poison messages: those that were in hand when a process was killed, or left by `sys.exit`.

At first such a message is a suspect: it is handed out when nothing else is in hand, and nothing
else is handed out meanwhile. So the next kill tells which of those in hand it was, and the others
are cleared once they are settled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pulsar

from redrive.copying.reading import id_text
from redrive.delivery.handling.interruption import exits
from redrive.delivery.middleware.chain import Handle, Middleware, Outcome, Receive, Settle
from redrive.delivery.middleware.crash_log import CrashLog
from redrive.delivery.middleware.crash_log_file import CrashLogFile
from redrive.delivery.middleware.settlement import HandBack, Settlement
from redrive.delivery.parts import Parts
from redrive.errors import RedriveError
from redrive.policy.model import Policy

_LOOK_EVERY_SECONDS = 0.05
_GIVE_UP_SECONDS = 60.0
"""How long a suspect and the others wait for each other while nothing is settled: a program that
wants several messages at a time before it settles one must not wait for ever."""


class ConsumerCrashError(RedriveError):
    """Processes were killed, or left, with a message in hand more often than allowed."""

    reason = "ConsumerCrash"


class PoisonGuard(Middleware):
    """Hands out suspects one by one, and dead-letters poison messages.

    May be used by several threads.

    Args:
        dead_letter: settles a message, for a reason.

    Raises:
        InvalidSpecError: the crash log can't be written.
    """

    def __init__(
        self,
        parts: Parts,
        notes: CrashLog,
        policy: Policy,
        dead_letter: Callable[[pulsar.Message, ConsumerCrashError], object],
    ) -> None:
        self._incoming = parts.incoming
        self._clock = parts.clock
        self._log_file = CrashLogFile(Path(notes.directory), policy)
        self._max_redeliveries = notes.max_redeliveries
        self._dead_letter = dead_letter
        self._in_hand: dict[str, bool] = {}  # by key, whether it is a suspect
        # Over the calls of all takers: one that asks again every moment waits as long as another.
        self._waiting_since: float | None = None
        self._taking = threading.Lock()

    def receive(self, receive: Receive) -> Receive:
        """Receive the next message that may be handed out beside what is in hand."""

        def receive_guarded(timeout: float | None) -> pulsar.Message | None:
            end = None if timeout is None else self._clock.monotonic() + timeout
            # One at a time: while a suspect waits for what is in hand, no thread takes any more.
            if not self._taking.acquire(timeout=-1 if timeout is None else timeout):
                return None
            try:
                return self._next(receive, end)
            finally:
                self._taking.release()

        return receive_guarded

    def handle(self, handle: Handle) -> Handle:
        """Count a handler that asks for the end of the process, as `sys.exit` does, as a crash."""

        def handle_noted(messages: Sequence[pulsar.Message]) -> Sequence[Outcome]:
            try:
                return handle(messages)
            except BaseException as error:
                if exits(error):
                    self._crashed(messages)
                raise

        return handle_noted

    def settle(self, settle: Settle) -> Settle:
        """Note that a message is no longer in hand, before it is settled."""

        def settle_noted(settlement: Settlement) -> pulsar.MessageId | None:
            message, verdict, failure = settlement
            if failure is not None and isinstance(failure.error, ConsumerCrashError):
                receipt = settle(settlement)
                self._log_file.end(id_text(message.message_id()))  # not before it is away
                return receipt
            if isinstance(verdict, HandBack):
                self._log_file.let_go(self._taken_back(message))  # it stays a suspect
            else:
                self._log_file.end(self._taken_back(message))
            return settle(settlement)

        return settle_noted

    def _next(self, receive: Receive, end: float | None) -> pulsar.Message | None:
        while True:
            if not self._wait_while(lambda: any(list(self._in_hand.values())), end):
                return None
            left = None if end is None else max(0.0, end - self._clock.monotonic())
            message = receive(left)
            if message is None:
                return None
            key = id_text(message.message_id())
            crashes = self._log_file.crashes(key)
            if crashes > self._max_redeliveries:
                self._dead_letter(message, _too_many(crashes))
                continue
            if crashes and not self._wait_while(lambda: bool(self._in_hand), end):
                self._incoming.again(message, 0)  # the next taker gets it first
                return None
            self._in_hand[key] = bool(crashes)
            self._log_file.begin(key)
            return message

    def _crashed(self, messages: Sequence[pulsar.Message]) -> None:
        for key in (id_text(message.message_id()) for message in messages):
            if key in self._in_hand:  # else it has failed: its handler was out of time
                self._log_file.crash(key)

    def close(self) -> None:
        """Leave to the next process what it has to know."""
        self._log_file.close()

    def _taken_back(self, message: pulsar.Message) -> str:
        key = id_text(message.message_id())
        self._in_hand.pop(key, None)
        self._waiting_since = None
        return key

    def _wait_while(self, busy: Callable[[], bool], end: float | None) -> bool:
        """Wait, and tell whether it was worth it: False if the caller's time is over."""
        while busy():
            now = self._clock.monotonic()
            since = self._waiting_since
            if since is None:
                since = self._waiting_since = now
            if now - since >= _GIVE_UP_SECONDS:
                return True
            if end is not None and now >= end:
                return False
            self._incoming.sleep(_LOOK_EVERY_SECONDS)
        return True


def _too_many(crashes: int) -> ConsumerCrashError:
    return ConsumerCrashError(
        "processes were killed while they had this message in hand",
        got=f"{crashes} times",
        remedy="look for what kills them, such as memory, before it is replayed",
    )

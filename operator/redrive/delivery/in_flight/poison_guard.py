"""Poison messages: those that were in hand when a process was killed; called by `holding`.

At first such a message is a suspect: it is handed out when nothing else is in hand, and nothing
else is handed out meanwhile. So the next kill tells which of those in hand it was, and the others
are cleared once they are settled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pulsar

from redrive.delivery.in_flight.crash_log import CrashLog
from redrive.delivery.in_flight.crash_log_file import CrashLogFile
from redrive.delivery.parts import Parts
from redrive.delivery.receiving.reading import id_text
from redrive.errors import RedriveError
from redrive.policy.model import Policy

_LOOK_EVERY_SECONDS = 0.05
_GIVE_UP_SECONDS = 60.0
"""How long a suspect and the others wait for each other while nothing is settled: a program that
wants several messages at a time before it settles one must not wait for ever."""


class ConsumerCrashError(RedriveError):
    """Processes were killed while they had a message in hand, more often than allowed."""

    reason = "ConsumerCrash"


class PoisonGuard:
    """Hands out what *take* brings, suspects one by one, and dead-letters poison messages.

    May be used by several threads.

    Args:
        dead_letter: takes a message and the reason; False if it fails: the message comes again.
    """

    def __init__(
        self,
        take: Callable[[float | None], pulsar.Message | None],
        parts: Parts,
        notes: CrashLog,
        policy: Policy,
        dead_letter: Callable[[pulsar.Message, ConsumerCrashError], bool],
    ) -> None:
        self._take = take
        self._incoming = parts.incoming
        self._clock = parts.clock
        self._log_file = CrashLogFile(Path(notes.directory), policy)
        self._max_redeliveries = notes.max_redeliveries
        self._dead_letter = dead_letter
        self._in_hand: dict[str, bool] = {}  # by key, whether it is a suspect
        # Over the calls of all takers: one that asks again every moment waits as long as another.
        self._waiting_since: float | None = None
        self._taking = threading.Lock()

    def take(self, timeout: float | None = None) -> pulsar.Message | None:
        """Return the next message, as `Incoming.take` does."""
        end = None if timeout is None else self._clock.monotonic() + timeout
        # One at a time: while a suspect waits for what is in hand, no thread takes anything more.
        if not self._taking.acquire(timeout=-1 if timeout is None else timeout):
            return None
        try:
            return self._take_next(end)
        finally:
            self._taking.release()

    def _take_next(self, end: float | None) -> pulsar.Message | None:
        while True:
            if not self._wait_while(lambda: any(list(self._in_hand.values())), end):
                return None
            left = None if end is None else max(0.0, end - self._clock.monotonic())
            message = self._take(left)
            if message is None:
                return None
            key = id_text(message.message_id())
            crashes = self._log_file.crashes(key)
            if crashes > self._max_redeliveries:
                if self._dead_letter(message, _too_many(crashes)):
                    self._log_file.end(key)
                continue
            if crashes and not self._wait_while(lambda: bool(self._in_hand), end):
                self._incoming.again(message, 0)  # the next taker gets it first
                return None
            self._in_hand[key] = bool(crashes)
            self._log_file.begin(key)
            return message

    def end(self, message: pulsar.Message) -> None:
        """Record that *message* is settled."""
        self._log_file.end(self._taken_back(message))

    def let_go(self, message: pulsar.Message) -> None:
        """Record that *message* is no longer in hand; it stays a suspect."""
        self._log_file.let_go(self._taken_back(message))

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

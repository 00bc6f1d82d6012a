"""Messages that could not be sent on: kept, and sent again; called by `processor`."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from redrive.copying.errors import NotSentError
from redrive.copying.reading import id_text
from redrive.delivery.handling.interruption import ends_thread
from redrive.delivery.middleware.settlement import Settlement
from redrive.delivery.parts import AnyTimer, Parts
from redrive.delivery.retrying.decisions import Decisions
from redrive.delivery.retrying.forwarder import destination
from redrive.policy.naming import TopicName

MAX_UNSENT = 1_000
"""With so many messages that wait to be sent on, nothing new is taken from the broker."""
_GO_ON = 0.9
"""Below this share of them it is taken again."""

_FIRST_SECONDS = 5.0
_LONGEST_SECONDS = 60.0

_log = logging.getLogger(__name__)


@dataclass
class _Waiting:
    """What waits to be sent to one topic."""

    next_try: float
    pause: float = _FIRST_SECONDS
    settlements: deque[Settlement] = field(default_factory=deque)


class _Report(Protocol):
    def __call__(self, *, stopped: bool) -> None: ...


class UnsentMessages:
    """Keeps settlements whose message could not be sent, and tries the send again.

    For each topic one message is tried after 5 s, then with back-off up to a minute. When one is
    sent the others follow at once. All stay unacknowledged: a crash loses none, and the broker
    delivers them again. What has become of the policy meanwhile decides. May be used by several
    threads.

    Args:
        send: settles again; raises NotSentError if there is no receipt.
        decisions: decide once more about a settlement.
        taking: reports that nothing new is taken, as too many wait, and that it goes on.
    """

    def __init__(
        self,
        parts: Parts,
        send: Callable[[Settlement], object],
        decisions: Decisions,
        taking: _Report,
    ) -> None:
        self._parts = parts
        self._send = send
        self._decisions = decisions
        self._taking = taking
        self._full = False
        self._waiting: dict[TopicName, _Waiting] = {}
        self._timer: AnyTimer | None = None
        self._closed = False
        self._changing = threading.Lock()

    def keep(self, settlement: Settlement) -> None:
        """Carry out *settlement* later, which sends its message to another topic."""
        with self._changing:
            self._append(settlement)
            if self._timer is None and not self._closed:
                self._timer = self._parts.timer(self._next_try, self._try)
            timer = self._timer
        self._bound()
        if timer is not None:
            timer.look()

    def close(self) -> None:
        """Send nothing more, once a send that has begun has ended."""
        with self._changing:
            self._closed = True
            timer = self._timer
        if timer is not None:
            timer.close()

    def _append(self, settlement: Settlement) -> None:
        topic = destination(settlement.verdict, settlement.failed().policy)
        if topic not in self._waiting:
            self._waiting[topic] = _Waiting(self._now() + _FIRST_SECONDS)
        self._waiting[topic].settlements.append(settlement)

    def _now(self) -> float:
        return self._parts.clock.monotonic()

    def _next_try(self) -> float | None:
        with self._changing:
            return min((topic.next_try for topic in self._waiting.values()), default=None)

    def _try(self) -> None:
        """Send one message to a topic that is due."""
        with self._changing:
            topic, waiting = min(self._waiting.items(), key=lambda entry: entry[1].next_try)
            settlement = waiting.settlements.popleft()
        unsent = self._send_again(settlement)
        with self._changing:
            if unsent is None:
                waiting.pause = _FIRST_SECONDS
            else:  # the others first: it may be this message that can't be sent
                self._append(unsent)
                waiting.pause = min(2 * waiting.pause, _LONGEST_SECONDS)
                waiting.next_try = self._now() + waiting.pause
            if not waiting.settlements:
                del self._waiting[topic]
        self._bound()

    def _send_again(self, settlement: Settlement) -> Settlement | None:
        """Carry out *settlement* as the policy says by now; return what is to be tried again."""
        try:
            settlement = self._decisions.again(settlement)
            self._send(settlement)
        except NotSentError as error:
            return self._decisions.not_copied(settlement, error) or settlement
        except BaseException as error:  # of the program; else this and the others would stay
            if ends_thread(error):
                raise
            message_id = id_text(settlement.message.message_id())
            _log.exception("message %s is kept, and settled again later", message_id)
            return settlement
        return None

    def _bound(self) -> None:
        with self._changing:
            count = sum(len(topic.settlements) for topic in self._waiting.values())
            # A broker that accepts few does not stop and resume the taking with each of them.
            full = count >= (MAX_UNSENT * _GO_ON if self._full else MAX_UNSENT)
            if full == self._full:
                return
            self._full = full
            self._parts.incoming.hold_new(self, held=full)  # in the order of what was counted
        self._taking(stopped=full)

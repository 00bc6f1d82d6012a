"""What a consumer has in hand: taken, and not settled yet; called by `processor`.

A broker that has lost a connection, or a topic that has moved to another, delivers again whatever
is not acknowledged, to the consumer that still holds it as well. Such a copy is dropped here: what
becomes of the message that is in hand becomes of it too, since they have one id.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable

import pulsar

from redrive.delivery.parts import Clock

REMEMBERED_SECONDS = 10.0
"""How long the broker may not have got an acknowledgement: the client keeps it for up to 0.1 s, and
a broker that is killed forgets the last second. No longer, for an admin may have moved the
subscription back, and wants these messages once more."""

MAX_REMEMBERED = 10_000

_Held = weakref.ref[pulsar.Message]


class InHand:
    """The messages that were taken and not settled, for as long as anything refers to them.

    What an application drops without settling it is in hand no longer. May be used by several
    threads.

    Args:
        acknowledge: tells the broker once more that a message is settled.
    """

    def __init__(self, clock: Clock, acknowledge: Callable[[pulsar.Message], object]) -> None:
        self._clock = clock
        self._acknowledge = acknowledge
        # To read the id of a message takes as long as all else here: it is left until a second
        # message is in hand, so that a program with one at a time never pays for it.
        self._new: dict[int, _Held] = {}
        self._known: dict[int, tuple[bytes, _Held]] = {}
        self._by_id: dict[bytes, _Held] = {}
        # By id, when; in this order. A plain dict gets slow where its first entries are deleted.
        self._settled: OrderedDict[bytes, float] = OrderedDict()
        self._look_at = 1_000
        self._changing = threading.Lock()

    def begin(self, message: pulsar.Message) -> bool:
        """Note that *message* is in hand; False if it is a copy, which is not to be handed out."""
        held = self._new.get(id(message))
        if held is not None and held() is message:
            return True  # handed out once more
        if not (self._new or self._known or self._settled):
            self._new[id(message)] = weakref.ref(message)
            return True
        with self._changing:
            return self._begin_known(message)

    def end(self, message: pulsar.Message, *, moved: bool = False) -> None:
        """Note that *message* is settled; one that was *moved* on is remembered for some seconds.

        A copy of that would be moved on too. Others are remembered where their id is known.
        """
        if self._new.pop(id(message), None) is not None and not moved:
            return
        with self._changing:
            known = self._forget(id(message))
            if moved or known is not None:
                self._remember(known or _id_of(message))

    def let_go(self, message: pulsar.Message) -> None:
        """Note that the broker will deliver *message* again, which is wanted."""
        self._new.pop(id(message), None)
        with self._changing:
            self._forget(id(message))

    def __len__(self) -> int:
        """Return how many messages are in hand."""
        with self._changing:
            self._forget_dropped()
            return len(self._known)

    def _begin_known(self, message: pulsar.Message) -> bool:
        if len(self._known) > self._look_at:
            self._forget_dropped()
        self._learn()
        known = self._known.get(id(message))
        if known is not None and known[1]() is message:
            return True
        key = _id_of(message)
        original = self._by_id.get(key)
        if original is not None and original() is not None:
            return False
        self._expire()
        if key in self._settled:
            self._acknowledge(message)
            return False
        self._hold(message, key)
        return True

    def _learn(self) -> None:
        """Read the ids of those in hand."""
        while self._new:
            _, held = self._new.popitem()
            message = held()
            if message is not None:
                self._hold(message, _id_of(message))

    def _hold(self, message: pulsar.Message, key: bytes) -> None:
        self._forget(id(message))  # of a message dropped before, at the same address
        held = weakref.ref(message)
        self._known[id(message)] = (key, held)
        self._by_id[key] = held

    def _forget(self, address: int) -> bytes | None:
        known = self._known.pop(address, None)
        if known is None:
            return None
        key, held = known
        if self._by_id.get(key) is held:
            del self._by_id[key]
        return key

    def _remember(self, key: bytes) -> None:
        self._settled.pop(key, None)
        self._settled[key] = self._clock.monotonic()
        self._expire()

    def _expire(self) -> None:
        end = self._clock.monotonic() - REMEMBERED_SECONDS
        while self._settled:
            oldest = next(iter(self._settled.values()))
            if oldest > end and len(self._settled) <= MAX_REMEMBERED:
                return
            self._settled.popitem(last=False)

    def _forget_dropped(self) -> None:
        self._learn()
        for address, (_, held) in list(self._known.items()):
            if held() is None:
                self._forget(address)
        self._look_at = 2 * len(self._known) + 1_000


def _id_of(message: pulsar.Message) -> bytes:
    serialized: bytes = message.message_id().serialize()
    return serialized

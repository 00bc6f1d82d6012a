"""What a consumer has in hand: taken, and not settled yet; called by `processor`.

A broker that has lost a connection, or a topic that has moved to another, delivers again whatever
is not acknowledged, to the consumer that still holds it as well. Such a copy is dropped here: what
becomes of the message that is in hand becomes of it too.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import pulsar

from redrive.copying import reading
from redrive.delivery.receiving.settled import Settled

_Held = weakref.ref[pulsar.Message]

_RESUME = 0.9
"""Below this share of them new messages are taken again."""

_MAX_COPIES = 1_000
"""So many messages at most are on their way when the broker is asked to deliver again."""


class InHand:
    """The messages that were taken and not settled, for as long as anything refers to them.

    What an application drops without settling it is in hand no longer. May be used by several
    threads.

    Args:
        settled: remembers what no longer is in hand.
        acknowledge: tells the broker that a message is settled.
        read_ids: always, not only while several messages are in hand.
        hold: called with True while nothing new is to be taken, as contents in hand are too big
            together; with False once that is over.
        max_bytes: of contents. A first message is not counted before there is a second one.
    """

    def __init__(
        self,
        settled: Settled,
        acknowledge: Callable[[pulsar.Message], object],
        hold: Callable[[bool], object],
        *,
        read_ids: bool,
        max_bytes: int,
    ) -> None:
        self._settled = settled
        self._acknowledge = acknowledge
        self._read_ids = read_ids
        # To read the id of a message takes as long as all else here: it is left until a second
        # message is in hand, so that a program with one at a time never pays for it.
        self._new: dict[int, _Held] = {}
        self._known: dict[int, tuple[bytes, _Held, int]] = {}
        self._hold_new = hold
        self._max_bytes = max_bytes
        self._bytes = 0
        self._full = False
        self._by_id: dict[bytes, _Held] = {}
        # By id, the last copy of each. The client acknowledges an entry with several messages when
        # all of one delivery are acknowledged: to settle the original alone counts for an earlier.
        self._copies: dict[bytes, pulsar.Message] = {}
        self._look_at = 1_000
        self._dropped = 0  # by an application that has not settled them
        self._copies_expected = 0
        self._changing = threading.Lock()

    def begin(self, message: pulsar.Message) -> bool:
        """Note that *message* is in hand; False if it is a copy, which is not to be handed out."""
        if not (self._read_ids or self._copies_expected):
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
            key, copy = self._forget(id(message))
            if moved or key is not None:
                self._settled.add(key or _id_of(message))
        if copy is not None:
            self._acknowledge(copy)

    def let_go(self, message: pulsar.Message) -> None:
        """Note that the broker will deliver *message* again, which is wanted."""
        self._new.pop(id(message), None)
        with self._changing:
            self._forget(id(message))

    def expect_copies(self) -> bool:
        """Prepare for copies of what comes next; False if something is unsettled.

        That is in hand, or an application has dropped it: the broker is not to deliver it again.
        """
        with self._changing:
            self._forget_dropped()
            if self._known or self._dropped:
                return False
            self._copies_expected = _MAX_COPIES
            return True

    def __len__(self) -> int:
        """Return how many messages are in hand."""
        with self._changing:
            self._forget_dropped()
            return len(self._known)

    def _begin_known(self, message: pulsar.Message) -> bool:
        if len(self._known) > self._look_at:
            self._forget_dropped()
        if self._full:
            self._forget_dropped()
            self._hold_new(self._full)
        if self._copies_expected:
            self._copies_expected -= 1
        if self._new:
            self._learn()
        known = self._known.get(id(message))
        if known is not None:
            if known[1]() is message:
                return True
            self._forget(id(message))  # as in `_learn`
            self._dropped += 1
        key = _id_of(message)
        settled = self._settled.take(key)
        original = self._by_id.get(key)
        if original is not None and original() is not None:
            self._copies[key] = message
            return False
        if settled:
            self._acknowledge(message)
            return False
        self._hold(message, key)
        return True

    def _learn(self) -> None:
        """Read the ids of those in hand."""
        while self._new:
            _, held = self._new.popitem()
            message = held()
            if message is None:
                self._dropped += 1
            else:
                self._forget(id(message))  # of a message dropped before, at the same address
                self._hold(message, _id_of(message))

    def _hold(self, message: pulsar.Message, key: bytes) -> None:
        address, size = id(message), reading.size(message)
        held = weakref.ref(message, lambda _: self._let_in(address))
        self._known[address] = (key, held, size)
        self._by_id[key] = held
        self._bytes += size
        self._bound()

    def _forget(self, address: int) -> tuple[bytes | None, pulsar.Message | None]:
        """Return the id of what is in hand no longer, and a copy of it that came."""
        known = self._known.pop(address, None)
        if known is None:
            return None, None
        key, held, size = known
        self._bytes -= size
        self._bound()
        if self._by_id.get(key) is not held:
            return key, None
        del self._by_id[key]
        return key, self._copies.pop(key, None) if self._copies else None

    def _bound(self) -> None:
        full = self._bytes >= (self._max_bytes * _RESUME if self._full else self._max_bytes)
        if full != self._full:
            self._full = full
            self._hold_new(full)

    def _let_in(self, address: int) -> None:
        """Take another message after one was dropped unsettled; called in any thread, lock or not.

        With that the room is counted again.
        """
        if self._full and address in self._known:
            self._hold_new(False)  # noqa: FBT003

    def _forget_dropped(self) -> None:
        self._learn()
        for address, (_, held, _) in list(self._known.items()):
            if held() is None:
                self._forget(address)
                self._dropped += 1
        self._look_at = 2 * len(self._known) + 1_000


def _id_of(message: pulsar.Message) -> bytes:
    serialized: bytes = message.message_id().serialize()
    return serialized

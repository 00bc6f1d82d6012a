"""What was settled a moment ago, of which a copy may still come; called by `in_hand`.

A copy comes within some seconds, or has waited in the client since before: the queue of a topic
with partitions outlives their connections, and takes what is delivered again behind what it has.
"""

from __future__ import annotations

from collections import OrderedDict

from redrive.delivery.parts import Clock, Incoming

REMEMBERED_SECONDS = 10.0
"""How long the broker may not have got an acknowledgement: the client keeps it for up to 0.1 s, and
a broker that is killed forgets the last second. No longer, for an admin may have moved the
subscription back, and wants these messages once more."""

MAX_REMEMBERED = 10_000

_LOOK_EVERY = 64
"""To look for what may be forgotten at each message would cost as much as all else here."""

_Moment = tuple[float, int, int]
"""When something was settled: the time, how many were taken before, and in which arrival."""


class Settled(OrderedDict[bytes, _Moment]):
    """The ids of messages that were settled, in this order. Not for several threads.

    Args:
        behind: so many messages may go before a copy that waits in the client; see `Parts`.
    """

    def __init__(self, incoming: Incoming, clock: Clock, behind: int) -> None:
        super().__init__()  # a plain dict gets slow where its first entries are deleted
        self._incoming = incoming
        self._clock = clock
        self._behind = behind
        self._most = max(MAX_REMEMBERED, behind)
        self._taken = 0

    def add(self, key: bytes) -> None:
        """Remember what is settled now."""
        self[key] = (self._clock.monotonic(), self._taken, self._incoming.arrivals)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)

    def take(self, key: bytes) -> bool:
        """Note that a message was taken; tell whether it is a copy of one that was settled."""
        self._taken += 1
        if not self._taken % _LOOK_EVERY:
            self._expire()
        moment = self.get(key)
        if moment is None or not self._counts(moment):
            return False
        if self._behind:  # the next copy would wait behind this one
            self.add(key)
        return True

    def _counts(self, moment: _Moment) -> bool:
        at, taken, arrival = moment
        if self._clock.monotonic() - at < REMEMBERED_SECONDS:
            return True
        # What came when none waited any more had not waited when the message was settled.
        return self._taken - taken <= self._behind and self._incoming.arrivals == arrival

    def _expire(self) -> None:
        while self and not self._counts(next(iter(self.values()))):
            self.popitem(last=False)

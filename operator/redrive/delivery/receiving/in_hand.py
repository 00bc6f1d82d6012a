"""What a consumer has in hand: taken, and not settled yet; called by `processor`."""

from __future__ import annotations

import weakref

import pulsar


class InHand:
    """The messages that were taken and not settled, for as long as anything refers to them.

    What an application drops without settling it is in hand no longer. May be used by several
    threads.
    """

    def __init__(self) -> None:
        # Not a WeakValueDictionary, which takes thrice as long: each message comes by here.
        self._held: dict[int, weakref.ref[pulsar.Message]] = {}
        self._look_at = 1_000

    def begin(self, message: pulsar.Message) -> None:
        """Note that *message* is in hand."""
        self._held[id(message)] = weakref.ref(message)
        if len(self._held) > self._look_at:
            self._forget_dropped()

    def end(self, message: pulsar.Message) -> None:
        """Note that *message* is settled."""
        self._held.pop(id(message), None)

    def __len__(self) -> int:
        """Return how many messages are in hand."""
        self._forget_dropped()
        return len(self._held)

    def _forget_dropped(self) -> None:
        for key, held in list(self._held.items()):
            # Its place may have been taken since, by a message at the same address.
            if held() is None and self._held.get(key) is held:
                self._held.pop(key, None)
        self._look_at = 2 * len(self._held) + 1_000

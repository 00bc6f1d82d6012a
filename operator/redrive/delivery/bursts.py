"""Bursts: messages that the client hands over in one call, with all their ids in a few numbers.

To read the id of a message takes as long as all else that is done for it. The ids of a burst
ascend, so that those of two messages of one batch show all between them. A burst above all that
came before contains no redelivered message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import pulsar

BURST = 128
"""Messages in a burst at most: each costs a hand-over between two threads of the client."""

BURST_BYTES = 256 * 1024
"""Bytes of payload in a burst of several messages at most."""

_BLOCK = 1_024

Place = tuple[int, int, int]
"""The id of a message: ledger, entry, and the index in a batch or -1."""

Run = tuple[tuple[int, int], int]
"""Settled messages of an entry, or of a block of entries without batches, as bits of a number."""


class Burst:
    """Messages of one topic that came in one call.

    Attributes:
        topic: name of the topic, without partition.
        alone: True for what stands for all messages of a topic that were received one by one, and
            are above all before: none of them is a copy.
        runs: the ids of all messages; None where one may be a copy, or once the burst is closed.
        open: True while the ids of its in-flight messages are not read one by one.
        settled: when each settled message was settled, while the burst is open.
        since: when it was opened.
    """

    __slots__ = ("alone", "open", "runs", "settled", "since", "size", "topic")

    def __init__(self, topic: str, size: int, runs: list[Run] | None) -> None:
        self.topic = topic
        self.size = size
        self.runs = runs
        self.alone = False
        self.open = False
        self.settled: deque[tuple[float, pulsar.Message]] = deque()
        self.since = 0.0


class Arrivals:
    """Messages of one topic as they arrive: finds those whose id is above all before."""

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._highest: Place = (-1, -1, -1)
        self._alone = Burst(topic, 1, None)
        self._alone.alone = True
        self._partitioned = False

    def one(self, message: pulsar.Message) -> None:
        """Note a message that was received alone."""
        if self._partitioned:
            return
        message_id = message.message_id()
        place = place_of(message_id)
        if message_id.partition() >= 0:
            self._partitioned = True
        elif place > self._highest:
            self._highest = place
            message.redrive = self._alone

    def burst(self, messages: Sequence[pulsar.Message]) -> None:
        """Join *messages*, which arrived together, to a burst: each gets it as `redrive`."""
        first, last = messages[0].message_id(), place_of(messages[-1].message_id())
        runs: list[Run] | None = None
        # Each partition has an order of its own.
        if first.partition() < 0 and len(messages) > 1 and place_of(first) > self._highest:
            runs = ascending_runs(messages)
        self._highest = max(self._highest, place_of(first), last)
        burst = Burst(self._topic, len(messages), runs)
        for message in messages:
            message.redrive = burst


def place_of(message_id: pulsar.MessageId) -> Place:
    """Return the parts of *message_id* that order the messages of a topic."""
    return message_id.ledger_id(), message_id.entry_id(), message_id.batch_index()


def ascending_runs(messages: Sequence[pulsar.Message]) -> list[Run] | None:
    """Return the ids of *messages*; None unless they ascend.

    In a batch, ids that differ by as much as their positions have no gap between them, so not all
    are read. Between two entries without batches there can be a batch.
    """
    places: dict[int, Place] = {}

    def place(position: int) -> Place:
        if position not in places:
            places[position] = place_of(messages[position].message_id())
        return places[position]

    runs: dict[tuple[int, int], int] = {}
    before: Place = (-1, -1, -1)
    start = 0
    while start < len(messages):
        ledger, entry, index = first = place(start)
        if first <= before:
            return None
        end, beyond = start, len(messages) if index >= 0 else start + 1
        probe = beyond - 1
        while beyond - end > 1:
            if place(probe) == (ledger, entry, index + probe - start):
                end = probe
            else:
                beyond = probe
            probe = (end + beyond) // 2
        key, bit = _bit_of(first)
        runs[key] = runs.get(key, 0) | ((1 << end - start + 1) - 1) << bit
        before, start = place(end), end + 1
    return list(runs.items())


def _bit_of(place: Place) -> tuple[tuple[int, int], int]:
    ledger, entry, index = place
    return (
        ((ledger, entry), index) if index >= 0 else ((ledger, ~(entry // _BLOCK)), entry % _BLOCK)
    )


_SLICE_SECONDS = 0.5
_MAX_BLOCKS = 50_000
"""Of about 400 bytes each."""


class SettledRuns:
    """The ids of bursts that were settled as a whole. Not for several threads.

    Attributes:
        blocks: how many batches, and blocks of entries without batches, are remembered.
    """

    def __init__(self) -> None:
        self._slices: deque[tuple[float, dict[tuple[int, int], int]]] = deque()
        self.blocks = 0

    def add(self, runs: Sequence[Run], now: float) -> None:
        """Remember *runs*, which are settled *now*."""
        if not self._slices or now - self._slices[-1][0] >= _SLICE_SECONDS:
            self._slices.append((now, {}))
        _, settled = self._slices[-1]
        before = len(settled)
        for key, bits in runs:
            settled[key] = settled.get(key, 0) | bits
        self.blocks += len(settled) - before
        while self.blocks > _MAX_BLOCKS and len(self._slices) > 1:
            self._drop()

    def contains(self, message: pulsar.Message, since: float) -> bool:
        """Return True if *message* was settled; forget what was settled before *since*."""
        while self._slices and self._slices[0][0] < since:
            self._drop()
        if not self._slices:
            return False
        key, bit = _bit_of(place_of(message.message_id()))
        return any(settled.get(key, 0) >> bit & 1 for _, settled in self._slices)

    def _drop(self) -> None:
        self.blocks -= len(self._slices.popleft()[1])

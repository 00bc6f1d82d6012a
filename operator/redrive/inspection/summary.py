"""Messages grouped by the cause of their last failure, in bounded memory.

Messages that follow a dead letter of their key (`AfterDeadLetter`) are counted with its cause: they
have none of their own.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field

from redrive.inspection.payloads import NONE_RECORDED, OTHERS, CauseCount
from redrive.inspection.record import Recorder
from redrive.policy.envelope import CONSUMER, REPLAY
from redrive.policy.values import time_text
from redrive.reading.rows import DeadLetterRow
from redrive.replay.spec import FOLLOWER, FailureCause

MAX_GROUPS = 500
MAX_CONSUMERS = 50
"""Names of consumers that a group keeps."""
MAX_KEYS, MAX_KEY_BYTES = 100_000, 32 * 2**20
"""Different keys that are counted, and their size in memory."""
MAX_INTERVALS = 20_000
"""Intervals of time of all groups; beyond them each interval becomes twice as long."""
MAX_REPLAYS = 100
"""Replays of a message that are distinguished."""
MAX_TEXT = 256
LATEST = 2**63 - 1


@dataclass
class CauseGroup:
    """Messages with one cause.

    Attributes:
        cause: class of the exception; empty if none is recorded.
        fingerprint: 16 hexadecimal digits; empty if none is recorded.
        messages: number of messages, with those that follow them.
        following: number of these that follow a dead letter of their key.
        replayed: number of these that were replayed before, and died again.
        first: first publish time, in milliseconds since 1970.
        last: last publish time.
        times: number of messages by interval of their publish time; see `Summary.interval`.
        consumers: number of messages by name of the consumer that saw the failure.
        example: text of the cause of the first message that was read, as it may be shown.
    """

    cause: str = ""
    fingerprint: str = ""
    messages: int = 0
    following: int = 0
    replayed: int = 0
    first: int = LATEST
    last: int = 0
    times: Counter[int] = field(default_factory=Counter)
    consumers: Counter[str] = field(default_factory=Counter)
    example: str = ""

    @property
    def name(self) -> str:
        """Return the cause for people."""
        return self.cause or NONE_RECORDED


def count_of(group: CauseGroup) -> CauseCount:
    """Return a cause as commands show it."""
    return {
        "cause": group.cause,
        "fingerprint": group.fingerprint,
        "messages": group.messages,
        "following": group.following,
        "replayed": group.replayed,
        "firstTime": time_text(group.first),
        "lastTime": time_text(group.last),
        "consumers": [name for name, _ in group.consumers.most_common()],
        "example": group.example,
    }


@dataclass
class Summary:
    """Figures of the messages that were added.

    Attributes:
        recorder: masks the texts of causes, unless it reveals; None for no texts.
        groups: by cause and fingerprint; beyond `MAX_GROUPS` one for all others.
        messages: number of messages.
        interval: length of the intervals of time in milliseconds.
        partitions: number of messages by partition.
        keys: number of messages by key; of at most `MAX_KEYS` different ones.
        replays: number of messages by the number of their replays, up to `MAX_REPLAYS`.
        died_again: number of messages by the Replay that moved them last.
        payload_bytes: size of all payloads.
        sizes: number of messages by the number of bits that the size of their payload has.
        without_key: number of messages without a key.
    """

    recorder: Recorder | None = None
    groups: dict[FailureCause, CauseGroup] = field(default_factory=dict)
    messages: int = 0
    interval: int = 1
    partitions: Counter[int] = field(default_factory=Counter)
    keys: Counter[str] = field(default_factory=Counter)
    replays: Counter[int] = field(default_factory=Counter)
    died_again: Counter[str] = field(default_factory=Counter)
    payload_bytes: int = 0
    sizes: Counter[int] = field(default_factory=Counter)
    without_key: int = 0
    _leaders: dict[str, CauseGroup] = field(default_factory=dict)
    _key_bytes: int = 0
    _intervals: int = 0

    @property
    def ordered(self) -> list[CauseGroup]:
        """Groups by number of messages, the largest first."""
        return sorted(self.groups.values(), key=lambda group: (-group.messages, group.name))

    def add(self, row: DeadLetterRow) -> None:
        """Count a message."""
        # Properties of the row that compute are read once.
        properties, replays, size, sequence_key = (
            row.properties, row.replays, row.size, row.sequence_key
        )  # fmt: skip
        key = None if sequence_key is None else self._counted(sequence_key[:MAX_TEXT])
        follows = row.follows
        group = self._group(row, key, follows=follows)
        self.messages += 1
        group.messages += 1
        group.following += follows
        group.replayed += replays > 0
        self._add_time(group, min(row.publish_time, LATEST))
        _count(group.consumers, properties.get(CONSUMER, "")[:MAX_TEXT], MAX_CONSUMERS)
        self.partitions[row.partition] += 1
        self.replays[min(replays, MAX_REPLAYS)] += 1
        self.payload_bytes += size
        self.sizes[size.bit_length()] += 1
        if replays:
            _count(self.died_again, properties.get(REPLAY, "")[:MAX_TEXT], MAX_GROUPS)
        self.without_key += sequence_key is None

    def _counted(self, key: str) -> str | None:
        """Count *key*; return None if the limit of different keys is reached."""
        if key not in self.keys:
            size = sys.getsizeof(key)
            if len(self.keys) >= MAX_KEYS or self._key_bytes + size > MAX_KEY_BYTES:
                return None
            self._key_bytes += size
        self.keys[key] += 1
        return key

    def _add_time(self, group: CauseGroup, time: int) -> None:
        group.first, group.last = min(group.first, time), max(group.last, time)
        number = time // self.interval
        self._intervals += number not in group.times
        group.times[number] += 1
        while self._intervals > max(MAX_INTERVALS, len(self.groups)):
            self.interval *= 2
            for other in self.groups.values():
                times = Counter[int]()
                for number, count in other.times.items():
                    times[number // 2] += count
                other.times = times
            self._intervals = sum(len(other.times) for other in self.groups.values())

    def _group(self, row: DeadLetterRow, key: str | None, *, follows: bool) -> CauseGroup:
        if follows and key in self._leaders:
            return self._leaders[key]
        failure = FailureCause.of(row.properties)
        if follows and not failure.cause:
            failure = FOLLOWER
        if failure not in self.groups:
            if len(self.groups) >= MAX_GROUPS:
                failure = FailureCause(OTHERS)
            example = "" if self.recorder is None else self.recorder.cause_text(row)
            group = CauseGroup(*failure, example=example)
            self.groups.setdefault(failure, group)
        group = self.groups[failure]
        if key is not None and not follows:
            self._leaders[key] = group
        return group


def _count(counter: Counter[str], name: str, most: int) -> None:
    """Count *name*, if the counter has it or has room for it."""
    if name and (name in counter or len(counter) < most):
        counter[name] += 1

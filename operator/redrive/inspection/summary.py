"""Messages grouped by the cause of their last failure, in bounded memory.

Messages that follow a dead letter of their key (`AfterDeadLetter`) are counted with its cause: they
have none of their own.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field

from redrive.inspection.record import Recorder
from redrive.policy.envelope import CONSUMER, DEAD_REASON, REPLAY
from redrive.policy.verdict import DeadReason
from redrive.reading.rows import DeadLetterRow
from redrive.replay.spec import FailureCause

NONE_RECORDED = "none recorded"
"""Name of the group without a cause, as dead letters of Java and Go consumers."""
OTHERS = "(others)"
MAX_GROUPS = 500
MAX_CONSUMERS = 50
"""Names of consumers that a group keeps."""
MAX_KEYS = 100_000
"""Different keys that are counted."""
MAX_TEXT = 256
_LATEST = 2**63 - 1


@dataclass
class CauseGroup:
    """Messages with one cause.

    Attributes:
        cause: class of the exception; empty if none is recorded.
        fingerprint: 16 hexadecimal digits; empty if none is recorded.
        messages: number of messages, with those that follow them.
        following: number of these that follow a dead letter of their key.
        replayed: number of these that were replayed before, and died again.
        times: publish times in milliseconds since 1970, in the order of reading.
        consumers: number of messages by name of the consumer that saw the failure.
        example: text of the cause of the first message that was read, as it may be shown.
    """

    cause: str = ""
    fingerprint: str = ""
    messages: int = 0
    following: int = 0
    replayed: int = 0
    times: array[int] = field(default_factory=lambda: array("q"))
    consumers: Counter[str] = field(default_factory=Counter)
    example: str = ""

    @property
    def name(self) -> str:
        """Return the cause for people."""
        return self.cause or NONE_RECORDED

    @property
    def first(self) -> int:
        """Return the first publish time, in milliseconds since 1970."""
        return min(self.times)

    @property
    def last(self) -> int:
        """Return the last publish time, in milliseconds since 1970."""
        return max(self.times)


@dataclass
class Summary:
    """Figures of the messages that were added.

    Attributes:
        recorder: masks the texts of causes, unless it reveals; None for no texts.
        groups: by cause and fingerprint; beyond `MAX_GROUPS` one for all others.
        partitions: number of messages by partition.
        keys: number of messages by key; of at most `MAX_KEYS` different ones.
        replays: number of messages by the number of their replays.
        died_again: number of messages by the Replay that moved them last.
        sizes: of payloads, in bytes.
        without_key: number of messages without a key.
    """

    recorder: Recorder | None = None
    groups: dict[FailureCause, CauseGroup] = field(default_factory=dict)
    partitions: Counter[int] = field(default_factory=Counter)
    keys: Counter[str] = field(default_factory=Counter)
    replays: Counter[int] = field(default_factory=Counter)
    died_again: Counter[str] = field(default_factory=Counter)
    sizes: array[int] = field(default_factory=lambda: array("q"))
    without_key: int = 0
    _leaders: dict[str, CauseGroup] = field(default_factory=dict)

    @property
    def ordered(self) -> list[CauseGroup]:
        """Groups by number of messages, the largest first."""
        return sorted(self.groups.values(), key=lambda group: (-group.messages, group.name))

    def add(self, row: DeadLetterRow) -> None:
        """Count a message."""
        properties = row.properties
        follows = properties.get(DEAD_REASON) == DeadReason.FOLLOWS
        group = self._group(row, follows=follows)
        group.messages += 1
        group.following += follows
        group.replayed += row.replays > 0
        group.times.append(min(row.publish_time, _LATEST))
        _count(group.consumers, properties.get(CONSUMER, "")[:MAX_TEXT], MAX_CONSUMERS)
        self.partitions[row.partition] += 1
        self.replays[row.replays] += 1
        self.sizes.append(row.size)
        if row.replays:
            _count(self.died_again, properties.get(REPLAY, "")[:MAX_TEXT], MAX_GROUPS)
        if row.key is None:
            self.without_key += 1
        else:
            _count(self.keys, row.key[:MAX_TEXT], MAX_KEYS)

    def _group(self, row: DeadLetterRow, *, follows: bool) -> CauseGroup:
        key = None if row.key is None else row.key[:MAX_TEXT]
        if follows and key in self._leaders:
            return self._leaders[key]
        failure = FailureCause.of(row.properties)
        if follows and not failure.cause:
            failure = FailureCause(DeadReason.FOLLOWS.value)
        if failure not in self.groups:
            if len(self.groups) >= MAX_GROUPS:
                failure = FailureCause(OTHERS)
            example = "" if self.recorder is None else self.recorder.cause_text(row)
            group = CauseGroup(*failure, example=example)
            self.groups.setdefault(failure, group)
        group = self.groups[failure]
        if key is not None and not follows and len(self._leaders) < MAX_KEYS:
            self._leaders[key] = group
        return group


def _count(counter: Counter[str], name: str, most: int) -> None:
    """Count *name*, if the counter has it or has room for it."""
    if name and (name in counter or len(counter) < most):
        counter[name] += 1

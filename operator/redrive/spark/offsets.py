"""Where a read begins and ends in each partition, as text. Pure.

Two forms. In options a position names a message, the first or the last to be read: as
`ledger:entry`, `ledger:entry:index` within a batch, or the bytes of a message id, as the JVM
connector has it. In checkpoints of a stream it is what has been read: all up to it, inclusive.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from redrive.errors import RedriveError
from redrive.policy.naming import TopicName
from redrive.replay.topic import messageid
from redrive.replay.topic.position import NOWHERE, EntryId, Position
from redrive.spark.options import InvalidOptionError, topic_name

WHOLE = 2**31 - 1
"""The index behind all messages of an entry."""
_LAST = 2**63 - 1
BEGINNING = Position(*NOWHERE, WHOLE)
"""Before all that a partition holds."""
END = Position(_LAST, _LAST, WHOLE)
"""Behind all that a partition holds, and will."""

_TEXT = re.compile(r"(\d{1,19}):(\d{1,19})(?::(\d{1,9}))?", re.ASCII)
_READ_SO_FAR = re.compile(r"(-?\d{1,19}):(-?\d{1,19})(?::(\d{1,10}))?", re.ASCII)


class InvalidCheckpointError(RedriveError):
    """The offset of a stream is none that this data source has written."""

    reason: ClassVar[str] = "InvalidCheckpoint"


@dataclass(frozen=True)
class Offsets:
    """A position in each partition, or in all that are not named.

    Attributes:
        named: by partition, or by a topic that has none.
    """

    otherwise: Position
    named: Mapping[TopicName, Position]

    def of(self, partition: TopicName) -> Position:
        """Return the position in *partition*."""
        return self.named.get(partition, self.otherwise)

    def check(self, option: str, partitions: Iterable[TopicName]) -> None:
        """Check that each name is one of *partitions*, those that are read.

        Raises:
            InvalidOptionError: *option* names something else, so a position would be ignored.
        """
        unknown = sorted(map(str, self.named.keys() - set(partitions)))
        if unknown:
            raise InvalidOptionError(
                f"{option} names what is no partition of the topics that are read",
                got=", ".join(unknown),
                remedy="name each partition, such as persistent://shop/prod/orders-partition-0; "
                "or the topic itself where it has no partitions",
            )


def starting(text: str) -> Offsets:
    """Read `startingOffsets`: behind what a read begins. `latest` gives `END`.

    Raises:
        InvalidOptionError: it is something else.
    """
    words = {"earliest": BEGINNING, "latest": END}
    return _offsets("startingOffsets", text, words, BEGINNING, _before)


def ending(text: str) -> Offsets:
    """Read `endingOffsets`: up to what is read, inclusive.

    Raises:
        InvalidOptionError: it is something else.
    """
    return _offsets("endingOffsets", text, {"latest": END}, END, _through)


def to_json(read: Mapping[TopicName, Position]) -> dict[str, str]:
    """Write what has been read of each partition."""
    return {str(partition): _written(position) for partition, position in read.items()}


def from_json(written: Mapping[str, str]) -> dict[TopicName, Position]:
    """Read what `to_json` wrote.

    Raises:
        InvalidCheckpointError: it is something else.
    """
    return {TopicName.parse(partition): _read(text) for partition, text in written.items()}


def _written(read: Position) -> str:
    index = "" if read.batch_index == WHOLE else f":{read.batch_index}"
    return f"{read.entry_id}{index}"


def _read(text: str) -> Position:
    match = _READ_SO_FAR.fullmatch(text)
    if match is None:
        raise InvalidCheckpointError(
            "an offset of the stream is not ledger:entry, or ledger:entry:index",
            got=text,
            remedy="start the query with a checkpoint of its own, or a new one",
        )
    return Position(int(match[1]), int(match[2]), WHOLE if match[3] is None else int(match[3]))


def _before(first: EntryId, index: int) -> Position:
    ledger, entry = first
    return Position(ledger, entry, index - 1) if index > 0 else Position(ledger, entry - 1, WHOLE)


def _through(last: EntryId, index: int) -> Position:
    return Position(*last, WHOLE if index < 0 else index)


def _offsets(
    option: str,
    text: str,
    words: Mapping[str, Position],
    otherwise: Position,
    bound: Callable[[EntryId, int], Position],
) -> Offsets:
    if text in words:
        return Offsets(words[text], {})

    def position(written: object) -> Position:
        if isinstance(written, str) and written in words:
            return words[written]
        return bound(*_message(written))

    try:
        given: Mapping[str, object] = json.loads(text)
        named = {topic_name(topic): position(written) for topic, written in given.items()}
    except (ValueError, TypeError, AttributeError, RedriveError) as error:
        raise InvalidOptionError(
            f"{option} is neither {' nor '.join(words)}, nor JSON with a position for partitions",
            got=text,
            remedy='write such as {"persistent://shop/prod/orders-partition-0": "12:0"}, '
            f"with ledger:entry, ledger:entry:index or the bytes of a message id ({error})",
        ) from None
    return Offsets(otherwise, named)


def _message(written: object) -> tuple[EntryId, int]:
    """Return the entry of a message, and its index; -1 for the whole entry."""
    if isinstance(written, list):
        entry, index = messageid.place_of(bytes(number & 0xFF for number in written))
        if NOWHERE < entry < EntryId(_LAST, _LAST):
            return entry, index
    match = _TEXT.fullmatch(written) if isinstance(written, str) else None
    if match is None:
        msg = f"no position of a message: {written!r}"
        raise ValueError(msg)
    return EntryId(int(match[1]), int(match[2])), -1 if match[3] is None else int(match[3])

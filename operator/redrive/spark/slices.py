"""Offsets, pushed filters, slices, and the rate of a stream.

What a read covers → the slices that tasks read. Pure.

Where a read begins and ends in each partition, as text. Pure.

Two forms. In options a position names a message, the first or the last to be read: as
`ledger:entry`, `ledger:entry:index` within a batch, or the bytes of a message id, as the JVM
connector has it. In checkpoints of a stream it is what has been read: all up to it, inclusive.

Conditions of a query that say what need not be read. Pure.

They narrow only: Spark evaluates each of them again, so one that is not understood costs time and
no message. `AND` joins all of them.

How far a stream reads in its next batch. Pure.
"""

from __future__ import annotations

import bisect
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from redrive.errors import RedriveError
from redrive.policy.naming import TopicName
from redrive.reading import ranges
from redrive.reading.positions import NOWHERE, EntryId, Position, place_of
from redrive.reading.ranges import Partition, Span
from redrive.spark.options import InvalidOptionError, topic_name

SLICE_ENTRIES = 10_000
"""About so many entries make up a task, where the broker says how many there are."""


class DataLossError(RedriveError):
    """The broker does not have all that was to be read."""

    reason = "DataLoss"


@dataclass(frozen=True)
class Extent:
    """What one partition holds when a read is planned.

    Attributes:
        topic: the partition, or a topic without any.
        partition: what is known of it; without `admin.url` only where it ends.
        complete: whether it has all ledgers, with their entries.
    """

    topic: TopicName
    partition: Partition
    complete: bool = True

    @property
    def begin(self) -> Position:
        """Return the position behind which lies all there is.

        It names the first ledger, if that is known and has entries: so it is found out when that
        is deleted before it was read. One without entries may be, whenever the topic is loaded.
        """
        if not self.complete or not self.partition.ledgers:
            return BEGINNING
        first, _ = self.partition.ledgers[0]
        return Position(first, -1, WHOLE)

    @property
    def end(self) -> Position:
        """Return the position up to which it reaches."""
        return Position(*self.partition.end, WHOLE)

    @property
    def tail(self) -> Position:
        """Return the position behind which lies all that is written from now on."""
        return max(self.end, Position(*self.partition.tail, WHOLE))


class Slice(NamedTuple):
    """What one task reads of one partition: from behind a position up to another, inclusive.

    Attributes:
        topic: the partition, or a topic without any.
        partition: its index; -1 without.
        begin: behind which entry to begin reading, for the chunks of the first messages.
        spans: the entries of which it has messages, in order; where the broker does not tell of
            ledgers, those in the last one alone.
        entry_bytes: their average size.
    """

    topic: TopicName
    partition: int
    begin: EntryId
    behind: Position
    through: Position
    spans: tuple[Span, ...]
    entry_bytes: float

    def holds(self, position: Position) -> bool:
        """Whether a message belongs to it."""
        return self.behind < position <= self.through


def cut(extent: Extent, behind: Position, through: Position, filters: Filters) -> Iterator[Slice]:
    """Cut what lies behind one position, up to another inclusive, as far as *filters* keep it."""
    through = min(through, extent.end)
    if behind >= through or not filters.keep_partition(extent.topic, extent.partition.index):
        return
    if not extent.complete:
        yield _unknown(extent, behind, through)
        return
    together: list[Span] = []
    entries = 0
    for span in _spans(extent, behind, through, filters):
        full = entries >= SLICE_ENTRIES
        if together and (full or not _follows(extent.partition, together[-1], span)):
            yield _slice(extent, together, behind, through)
            together, entries = [], 0
        together.append(span)
        entries += span.size
    if together:
        yield _slice(extent, together, behind, through)


def check_held(extent: Extent, behind: Position) -> None:
    """Check that nothing is gone between what was read and what the broker holds.

    Without knowing the ledgers nothing is found.

    Raises:
        DataLossError: the ledger is gone, in which the reading would go on, or it ends before that.
    """
    if not extent.complete or behind == BEGINNING:
        return
    held = extent.partition.held
    if (behind.ledger not in held and not _is_kept(extent, behind)) or behind > extent.tail:
        raise DataLossError(
            f"{extent.topic} does not hold what follows on {behind.entry_id} any more, "
            "or it is another topic of this name",
            got=f"ledgers {min(held, default=None)} to {max(held, default=None)}",
            remedy="keep what is not read yet by a subscription (predefinedSubscription) or by "
            "retention; to go on with what there is, set failOnDataLoss to false",
        )


def _is_kept(extent: Extent, behind: Position) -> bool:
    """Whether a subscription has kept all that follows: ledgers go when it has passed them."""
    return NOWHERE < extent.partition.acknowledged.through <= behind.entry_id


def first_unread(behind: Position) -> int:
    """Return the first entry, in its ledger, of which something lies behind a position."""
    return behind.entry + (behind.batch_index == WHOLE)


def _spans(extent: Extent, behind: Position, through: Position, filters: Filters) -> Iterator[Span]:
    """Return what is to be read of each ledger, in parts of bounded size."""
    for ledger, entries in extent.partition.ledgers:
        low, high = filters.entries(ledger)
        high = min(high, entries - 1)
        if ledger == behind.ledger:
            low = max(low, first_unread(behind))
        if ledger == through.ledger:
            high = min(high, through.entry)
        if behind.ledger <= ledger <= through.ledger:
            for first in range(low, high + 1, SLICE_ENTRIES):
                yield Span(ledger, first, min(high, first + SLICE_ENTRIES - 1))


def _follows(partition: Partition, one: Span, other: Span) -> bool:
    """Whether nothing lies between two spans."""
    if one.ledger == other.ledger:
        return one.last + 1 == other.first
    ledgers = partition.ledgers
    at = bisect.bisect_left(ledgers, (one.ledger, 0))
    return (
        ledgers[at] == (one.ledger, one.last + 1)
        and ledgers[at + 1][0] == other.ledger
        and other.first == 0
    )


def _slice(extent: Extent, spans: list[Span], behind: Position, through: Position) -> Slice:
    first, last = spans[0], spans[-1]
    return Slice(
        extent.topic,
        extent.partition.index,
        ranges.look_back(extent.partition, EntryId(first.ledger, first.first)),
        max(behind, Position(first.ledger, first.first - 1, WHOLE)),
        min(through, Position(last.ledger, last.last, WHOLE)),
        tuple(spans),
        extent.partition.entry_bytes,
    )


def _unknown(extent: Extent, behind: Position, through: Position) -> Slice:
    back = EntryId(behind.ledger, max(-1, behind.entry - ranges.LOOK_BACK))
    begin = NOWHERE if behind == BEGINNING else back
    partition = extent.partition
    there = first_unread(behind) if through.ledger == behind.ledger else 0
    span = Span(through.ledger, there, through.entry)
    return Slice(
        extent.topic, partition.index, begin, behind, through, (span,), partition.entry_bytes
    )


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

    reason = "InvalidCheckpoint"


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


def starting_offsets(text: str) -> Offsets:
    """Read `startingOffsets`: behind what a read begins. `latest` gives `END`.

    Raises:
        InvalidOptionError: it is something else.
    """
    words = {"earliest": BEGINNING, "latest": END}
    return _offsets("startingOffsets", text, words, BEGINNING, _before)


def ending_offsets(text: str) -> Offsets:
    """Read `endingOffsets`: up to what is read, inclusive.

    Raises:
        InvalidOptionError: it is something else.
    """
    return _offsets("endingOffsets", text, {"latest": END}, END, _through)


def offset_to_json(read: Mapping[TopicName, Position]) -> dict[str, str]:
    """Write what has been read of each partition."""
    return {str(partition): _written(position) for partition, position in read.items()}


def offset_from_json(written: Mapping[str, str]) -> dict[TopicName, Position]:
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
        entry, index = place_of(bytes(number & 0xFF for number in written))
        if NOWHERE < entry < EntryId(_LAST, _LAST):
            return entry, index
    match = _TEXT.fullmatch(written) if isinstance(written, str) else None
    if match is None:
        msg = f"no position of a message: {written!r}"
        raise ValueError(msg)
    return EntryId(int(match[1]), int(match[2])), -1 if match[3] is None else int(match[3])


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_NO_LIMIT = 2**63 - 1

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "EqualTo": operator.eq,
    "EqualNullSafe": operator.eq,
    "GreaterThan": operator.gt,
    "GreaterThanOrEqual": operator.ge,
    "LessThan": operator.lt,
    "LessThanOrEqual": operator.le,
    "In": lambda value, among: value in among,
}
_TYPES: dict[str, type] = {
    "__topic": str,
    "__partition": int,
    "__ledger": int,
    "__entry": int,
    "__messageId": bytes,
    "__publishTime": datetime,
    "__eventTime": datetime,
}


class PushedFilter(NamedTuple):
    """A comparison of a column with a value, or for `In` with a tuple of values.

    Attributes:
        kind: the name of a class of filters in PySpark.
    """

    column: str
    kind: str
    value: Any


class Filters:
    """What some conditions leave over.

    Args:
        conditions: those of other kinds, or of other columns, are passed over.
    """

    def __init__(self, conditions: Iterable[PushedFilter] = ()) -> None:
        self._conditions = tuple(filter(_is_understood, conditions))

    def keep_partition(self, topic: TopicName, index: int) -> bool:
        """Whether messages of a partition may be asked for."""
        return self._hold("__topic", str(topic)) and self._hold("__partition", index)

    def entries(self, ledger: int) -> tuple[int, int]:
        """Return the first and the last entry of a ledger that may be asked for."""
        low, high = 0, _NO_LIMIT if self._hold("__ledger", ledger) else -1
        for condition in self._of("__entry"):
            first, last = _span(condition)
            low, high = max(low, first), min(high, last)
        for condition in self._of("__messageId"):
            if condition.kind in {"EqualTo", "EqualNullSafe"}:
                entry, _ = place_of(condition.value)
                wanted = entry.entry if entry.ledger == ledger else -1
                low, high = max(low, wanted), min(high, wanted)
        return low, high

    def keep_times(self, published: int, event: int | None) -> bool:
        """Whether a message of these times may be asked for, in milliseconds since 1970."""
        return self._at("__publishTime", published) and self._at("__eventTime", event)

    def _at(self, column: str, milliseconds: int | None) -> bool:
        if not any(self._of(column)):
            return True
        # Where there is no time, the column is NULL, which no comparison is true of.
        if milliseconds is None:
            return False
        try:
            return self._hold(column, _EPOCH + milliseconds * _MILLISECOND)
        except OverflowError:  # whoever sends a message sets it
            return True

    def _hold(self, column: str, value: object) -> bool:
        return all(_COMPARE[each.kind](value, each.value) for each in self._of(column))

    def _of(self, column: str) -> Iterator[PushedFilter]:
        return (each for each in self._conditions if each.column == column)


def _is_understood(condition: PushedFilter) -> bool:
    column, kind, value = condition
    if kind not in _COMPARE or column not in _TYPES:
        return False
    values = value if kind == "In" else (value,)
    return all(
        isinstance(each, _TYPES[column])
        and not (isinstance(each, datetime) and each.tzinfo is None)
        and not (column == "__messageId" and not _is_id(each))
        for each in values
    )


def _is_id(value: object) -> bool:
    try:
        place_of(bytes(value) if isinstance(value, bytes) else b"")
    except ValueError:
        return False
    return True


def _span(condition: PushedFilter) -> tuple[int, int]:
    _, kind, value = condition
    if kind == "In":
        return min(value, default=_NO_LIMIT), max(value, default=-1)
    low = {"GreaterThan": value + 1, "LessThan": 0, "LessThanOrEqual": 0}.get(kind, value)
    high = {"LessThan": value - 1, "GreaterThan": _NO_LIMIT, "GreaterThanOrEqual": _NO_LIMIT}
    return low, high.get(kind, value)


Offset = Mapping[TopicName, Position]
"""What has been read of each partition: all up to a position, inclusive."""


def advance_offset(
    extents: Sequence[Extent], read: Offset, limit: int | None = None
) -> dict[TopicName, Position]:
    """Return up to where to read, of each partition.

    Partitions that are new are read from their beginning.

    Args:
        extents: all partitions.
        read: what has been read.
        limit: how many bytes, about, by the average size of a partition's entries: each partition
            that has anything new advances by its share of them, and by one entry at least. None
            for all there is.
    """
    waiting = {each.topic: _waiting(each, read.get(each.topic, BEGINNING)) for each in extents}
    total = sum(sum(waiting[each.topic].values()) * each.partition.entry_bytes for each in extents)
    share = 1.0 if limit is None or total <= limit else limit / total
    return {
        each.topic: _ahead(each, read.get(each.topic, BEGINNING), waiting[each.topic], share)
        for each in extents
    }


def check_unread(extents: Sequence[Extent], read: Offset) -> None:
    """Check that all is there that has not been read.

    Raises:
        DataLossError: a partition is gone, or see `slices.check_held`.
    """
    gone = read.keys() - {each.topic for each in extents}
    if gone:
        raise DataLossError(
            "topics that the stream has been reading are not there any more",
            got=sorted(map(str, gone)),
            remedy="create them again; to go on without them, set failOnDataLoss to false",
        )
    for each in extents:
        check_held(each, read.get(each.topic, BEGINNING))


def _waiting(extent: Extent, behind: Position) -> dict[int, int]:
    """Return how many entries of each ledger have not been read."""
    return {ledger: last - first + 1 for ledger, first, last in _unread(extent, behind)}


def _unread(extent: Extent, behind: Position) -> Iterator[tuple[int, int, int]]:
    for ledger, entries in extent.partition.ledgers:
        if ledger >= behind.ledger:
            first = first_unread(behind) if ledger == behind.ledger else 0
            if first < entries:
                yield ledger, first, entries - 1


def _ahead(extent: Extent, behind: Position, waiting: Mapping[int, int], share: float) -> Position:
    if extent.complete and behind > extent.tail:
        return extent.end  # another topic of this name, which is read from its beginning
    left = max(1, int(sum(waiting.values()) * share))
    for ledger, first, last in _unread(extent, behind):
        if left <= last - first + 1:
            return Position(ledger, first + left - 1, WHOLE)
        left -= last - first + 1
    return max(behind, extent.end)

"""Offsets, pushed filters, slices, and the rate of a stream; pure.

Positions have two forms. In options a position identifies a message, the first or the last to read:
`ledger:entry`, `ledger:entry:index` within a batch, or the bytes of a message id, as in the JVM
connector. In checkpoints of a stream it is the last position that was read, inclusive.

Filters only narrow a read: Spark evaluates each of them again, so an unsupported one costs time but
loses no message. Filters are combined with `AND`.
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

from redrive.errors import InvalidSpecError, RedriveError
from redrive.policy.naming import TopicName
from redrive.reading import ranges
from redrive.reading.positions import NOWHERE, EntryId, Position, place_of
from redrive.reading.ranges import Partition, Span
from redrive.spark.options import topic_name

SLICE_ENTRIES = 10_000
"""Approximate entries of one task, if the broker returns their number."""


class DataLossError(RedriveError):
    """The broker has deleted messages that should be read."""

    reason = "DataLoss"


@dataclass(frozen=True)
class Extent:
    """Content of one partition when a read is planned.

    Attributes:
        topic: the partition, or a topic without partitions.
        partition: its ledgers; without `admin.url` only its end.
        complete: True if all ledgers and their entries are known.
    """

    topic: TopicName
    partition: Partition
    complete: bool = True

    @property
    def begin(self) -> Position:
        """Return the position before all messages.

        It contains the first ledger, if that is known and has entries. So its deletion before the
        read is detected. A ledger without entries may be deleted whenever the topic is loaded.
        """
        if not self.complete or not self.partition.ledgers:
            return BEGINNING
        first, _ = self.partition.ledgers[0]
        return Position(first, -1, WHOLE)

    @property
    def end(self) -> Position:
        """Return the position of the last message."""
        return Position(*self.partition.end, WHOLE)

    @property
    def tail(self) -> Position:
        """Return the position before all later messages."""
        return max(self.end, Position(*self.partition.tail, WHOLE))


class Slice(NamedTuple):
    """Work of one task: messages of one partition from behind a position up to another, inclusive.

    Attributes:
        topic: the partition, or a topic without partitions.
        partition: its index; -1 without partitions.
        begin: entry behind which the read begins, for the chunks of the first messages.
        spans: entries with its messages, in order; if ledgers are unknown, only those of the last
            ledger.
        entry_bytes: average size of the entries.
    """

    topic: TopicName
    partition: int
    begin: EntryId
    behind: Position
    through: Position
    spans: tuple[Span, ...]
    entry_bytes: float

    def holds(self, position: Position) -> bool:
        """Return True if a message belongs to the slice."""
        return self.behind < position <= self.through


def cut(extent: Extent, behind: Position, through: Position, filters: Filters) -> Iterator[Slice]:
    """Yield slices between two positions, the second inclusive, as *filters* allow."""
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
    """Check that no messages behind a position were deleted.

    Without known ledgers it finds nothing.

    Raises:
        DataLossError: the next ledger was deleted, or the topic ends before the position.
    """
    if not extent.complete or behind == BEGINNING:
        return
    held = extent.partition.held
    if (behind.ledger not in held and not _is_kept(extent, behind)) or behind > extent.tail:
        raise DataLossError(
            f"{extent.topic} no longer has the messages after {behind.entry_id}, "
            "or it is another topic of this name",
            got=f"ledgers {min(held, default=None)} to {max(held, default=None)}",
            remedy="retain unread messages by a subscription (predefinedSubscription) or by "
            "retention; to continue with the existing ones, set failOnDataLoss to false",
        )


def _is_kept(extent: Extent, behind: Position) -> bool:
    """Return True if a subscription retained all later messages: ledgers it passed are deleted."""
    return NOWHERE < extent.partition.acknowledged.through <= behind.entry_id


def first_unread(behind: Position) -> int:
    """Return the first entry, in its ledger, with messages behind a position."""
    return behind.entry + (behind.batch_index == WHOLE)


def _spans(extent: Extent, behind: Position, through: Position, filters: Filters) -> Iterator[Span]:
    """Yield the entries to read of each ledger, in parts of bounded size."""
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
    """Return True if *other* follows *one* directly."""
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
    first = first_unread(behind) if through.ledger == behind.ledger else 0
    span = Span(through.ledger, first, through.entry)
    return Slice(
        extent.topic, partition.index, begin, behind, through, (span,), partition.entry_bytes
    )


WHOLE = 2**31 - 1
"""Index behind all messages of an entry."""
_LAST = 2**63 - 1
BEGINNING = Position(*NOWHERE, WHOLE)
"""Position before all messages of a partition."""
END = Position(_LAST, _LAST, WHOLE)
"""Position behind all present and future messages of a partition."""

_TEXT = re.compile(r"(\d{1,19}):(\d{1,19})(?::(\d{1,9}))?", re.ASCII)
_READ_SO_FAR = re.compile(r"(-?\d{1,19}):(-?\d{1,19})(?::(\d{1,10}))?", re.ASCII)


@dataclass(frozen=True)
class Offsets:
    """Position in each partition, with a default for partitions that are not listed.

    Attributes:
        otherwise: the default.
        named: by partition, or by a topic without partitions.
    """

    otherwise: Position
    named: Mapping[TopicName, Position]

    def of(self, partition: TopicName) -> Position:
        """Return the position in *partition*."""
        return self.named.get(partition, self.otherwise)

    def check(self, option: str, partitions: Iterable[TopicName]) -> None:
        """Check that only *partitions*, which are read, are listed.

        Raises:
            InvalidSpecError: *option* lists another name, whose position would be ignored.
        """
        unknown = sorted(map(str, self.named.keys() - set(partitions)))
        if unknown:
            raise InvalidSpecError(
                f"{option} names topics or partitions that are not read",
                got=", ".join(unknown),
                remedy="list partitions, such as persistent://shop/prod/orders-partition-0, or the "
                "topic itself if it has no partitions",
            )


def starting_offsets(text: str) -> Offsets:
    """Parse `startingOffsets`, as positions behind which a read begins; `latest` gives `END`.

    Raises:
        InvalidSpecError: it is invalid.
    """
    words = {"earliest": BEGINNING, "latest": END}
    return _offsets("startingOffsets", text, words, BEGINNING, _before)


def ending_offsets(text: str) -> Offsets:
    """Parse `endingOffsets`, as inclusive ends of a read.

    Raises:
        InvalidSpecError: it is invalid.
    """
    return _offsets("endingOffsets", text, {"latest": END}, END, _through)


def offset_to_json(read: Mapping[TopicName, Position]) -> dict[str, str]:
    """Return the progress of each partition as text."""
    return {str(partition): _written(position) for partition, position in read.items()}


def offset_from_json(written: Mapping[str, str]) -> dict[TopicName, Position]:
    """Parse the texts of `offset_to_json`.

    Raises:
        RedriveError: a text is invalid.
    """
    return {TopicName.parse(partition): _read(text) for partition, text in written.items()}


def _written(read: Position) -> str:
    index = "" if read.batch_index == WHOLE else f":{read.batch_index}"
    return f"{read.entry_id}{index}"


def _read(text: str) -> Position:
    match = _READ_SO_FAR.fullmatch(text)
    if match is None:
        raise RedriveError(
            "an offset of the stream must be ledger:entry, or ledger:entry:index",
            got=text,
            remedy="start the query with its own checkpoint, or a new one",
            reason="InvalidCheckpoint",
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
        positions: Mapping[str, object] = json.loads(text)
        named = {topic_name(topic): position(written) for topic, written in positions.items()}
    except (ValueError, TypeError, AttributeError, RedriveError) as error:
        raise InvalidSpecError(
            f"{option} must be {' or '.join(words)}, or JSON with a position for partitions",
            got=text,
            remedy='write it like {"persistent://shop/prod/orders-partition-0": "12:0"}, '
            f"with ledger:entry, ledger:entry:index or the bytes of a message id ({error})",
        ) from None
    return Offsets(otherwise, named)


def _message(written: object) -> tuple[EntryId, int]:
    """Parse a position: the entry of a message, and its index; -1 for the whole entry."""
    if isinstance(written, list):
        entry, index = place_of(bytes(number & 0xFF for number in written))
        if NOWHERE < entry < EntryId(_LAST, _LAST):
            return entry, index
    match = _TEXT.fullmatch(written) if isinstance(written, str) else None
    if match is None:
        msg = f"not a position of a message: {written!r}"
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
    """Comparison of a column with a value, or for `In` with a tuple of values.

    Attributes:
        kind: class name of the filter in PySpark.
    """

    column: str
    kind: str
    value: Any


class Filters:
    """Filters of a query, applied before messages are read.

    Args:
        conditions: conditions of unsupported kinds or columns are ignored.
    """

    def __init__(self, conditions: Iterable[PushedFilter] = ()) -> None:
        self._conditions = tuple(filter(_is_supported, conditions))

    def keep_partition(self, topic: TopicName, index: int) -> bool:
        """Return True if messages of a partition may match."""
        return self._hold("__topic", str(topic)) and self._hold("__partition", index)

    def entries(self, ledger: int) -> tuple[int, int]:
        """Return the first and the last entry of a ledger that may match."""
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
        """Return True if a message with these times, in milliseconds since 1970, may match."""
        return self._at("__publishTime", published) and self._at("__eventTime", event)

    def _at(self, column: str, milliseconds: int | None) -> bool:
        if not any(self._of(column)):
            return True
        # Without a time the column is NULL, and no comparison is true.
        if milliseconds is None:
            return False
        try:
            return self._hold(column, _EPOCH + milliseconds * _MILLISECOND)
        except OverflowError:  # senders choose the time
            return True

    def _hold(self, column: str, value: object) -> bool:
        return all(_COMPARE[c.kind](value, c.value) for c in self._of(column))

    def _of(self, column: str) -> Iterator[PushedFilter]:
        return (condition for condition in self._conditions if condition.column == column)


def _is_supported(condition: PushedFilter) -> bool:
    column, kind, value = condition
    if kind not in _COMPARE or column not in _TYPES:
        return False
    values = value if kind == "In" else (value,)
    return all(
        isinstance(item, _TYPES[column])
        and not (isinstance(item, datetime) and item.tzinfo is None)
        and not (column == "__messageId" and not _is_id(item))
        for item in values
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
"""Progress of each partition: the last position that was read, inclusive."""


def advance_offset(
    extents: Sequence[Extent], read: Offset, limit: int | None = None
) -> dict[TopicName, Position]:
    """Return the end of the next batch in each partition.

    New partitions are read from their beginning.

    Args:
        extents: all partitions.
        read: progress so far.
        limit: approximate maximum bytes, by the average entry size of each partition. Each
            partition with new messages advances by its share, at least by one entry. None for no
            limit.
    """
    waiting = {e.topic: _count_unread(e, read.get(e.topic, BEGINNING)) for e in extents}
    total = sum(waiting[e.topic] * e.partition.entry_bytes for e in extents)
    share = 1.0 if limit is None or total <= limit else limit / total
    return {
        e.topic: _ahead(e, read.get(e.topic, BEGINNING), waiting[e.topic], share) for e in extents
    }


def check_unread(extents: Sequence[Extent], read: Offset) -> None:
    """Check that no unread messages were deleted.

    Raises:
        DataLossError: a partition was deleted, or see `check_held`.
    """
    gone = read.keys() - {extent.topic for extent in extents}
    if gone:
        raise DataLossError(
            "topics of the stream no longer exist, or no longer match",
            got=sorted(map(str, gone)),
            remedy="create them again, or set includeDerivedTopics to true if they belong to a "
            "RetryPolicy now; to continue without them, set failOnDataLoss to false",
        )
    for extent in extents:
        check_held(extent, read.get(extent.topic, BEGINNING))


def _count_unread(extent: Extent, behind: Position) -> int:
    return sum(last - first + 1 for _, first, last in _unread(extent, behind))


def _unread(extent: Extent, behind: Position) -> Iterator[tuple[int, int, int]]:
    for ledger, entries in extent.partition.ledgers:
        if ledger >= behind.ledger:
            first = first_unread(behind) if ledger == behind.ledger else 0
            if first < entries:
                yield ledger, first, entries - 1


def _ahead(extent: Extent, behind: Position, waiting: int, share: float) -> Position:
    if extent.complete and behind > extent.tail:
        return extent.end  # another topic of the same name, which is read from its beginning
    remaining = max(1, int(waiting * share))
    for ledger, first, last in _unread(extent, behind):
        if remaining <= last - first + 1:
            return Position(ledger, first + remaining - 1, WHOLE)
        remaining -= last - first + 1
    return max(behind, extent.end)

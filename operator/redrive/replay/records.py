"""Records of the ledger: its owner, ranges, plans and the permit.

A ledger is a topic in which the last value of each key counts. The keys are `owner`, ranges, and
the plans of Replays. The record `permit` is read by tasks alone: the ledger is the only channel
from the driver to running tasks, which read it before they send.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, Self, TypeVar, get_type_hints

from pydantic import Field, GetPydanticSchema, PlainSerializer, TypeAdapter
from pydantic_core import core_schema
from typing_extensions import TypedDict

from redrive.errors import InvalidSpecError
from redrive.reading import bitmap
from redrive.reading.positions import EntryId, Tail, TargetPartition
from redrive.reading.ranges import MAX_RANGE_ENTRIES, Range

_Key = TypeVar("_Key")

OWNER = "owner"
"""Key of the record with which a run takes the ledger over."""

_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Offset = Annotated[int, Field(ge=0, lt=MAX_RANGE_ENTRIES)]

Parts = Mapping[str, Mapping[_Offset, int]]
"""Bitmaps of indexes of messages, by uid of a Replay and offset of an entry."""

SentTo = tuple[TargetPartition, int | None]
"""Partition of a target, and the number of partitions at that time, see `Tail`."""

Unproven = Mapping[SentTo, int]
"""Last offset of messages that may have been stored in a partition and deleted there since."""


def _entry(text: str) -> EntryId:
    entry = EntryId.parse(text)
    if not all(-1 <= number < 2**63 for number in entry):
        msg = f"no entry: {text}"
        raise ValueError(msg)
    return entry


def _written_as(form: Any, parse: Callable[[Any], object]) -> GetPydanticSchema:  # noqa: ANN401
    """Return the annotation of a field that JSON has in another form."""
    return GetPydanticSchema(
        lambda _, schema_of: core_schema.no_info_after_validator_function(parse, schema_of(form))
    )


_Bitmap = Annotated[int, _written_as(str, bitmap.decode), PlainSerializer(bitmap.encode)]
_Entry = Annotated[EntryId, _written_as(str, _entry), PlainSerializer(str)]
_Place = Annotated[TargetPartition, _written_as(str, TargetPartition.parse), PlainSerializer(str)]
_WrittenTail = tuple[_Entry, _Count, _Count | None, _Bitmap | None]
_Tail = Annotated[Tail, _written_as(_WrittenTail, lambda parts: Tail(*parts))]


class RefusedEntry(NamedTuple):
    """An entry that cannot be moved, and stays in the dead-letter topic.

    Attributes:
        entry: the entry.
        messages: number of selected messages in it.
        cause: cause of the refusal, in one word.
    """

    entry: EntryId
    messages: int
    cause: str


class RefusedMessage(NamedTuple):
    """A dead letter of RocketMQ that cannot be moved, see `RefusedEntry`.

    Attributes:
        entry: id of the message.
    """

    entry: str
    messages: int
    cause: str


_Refused = Annotated[
    RefusedEntry,
    _written_as(tuple[_Entry, _Count, str], lambda parts: RefusedEntry(*parts)),
]


def _read_unproven(written: Iterable[tuple[TargetPartition, int | None, int]]) -> Unproven:
    return {(place, partitions): entries for place, partitions, entries in written}


def _write_unproven(unproven: Unproven) -> list[tuple[str, int | None, str]]:
    return [
        (str(place), partitions, bitmap.encode(entries))
        for (place, partitions), entries in unproven.items()
    ]


class _Record:
    """A part of a ledger that is stored as JSON."""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document."""
        document: dict[str, Any] = self._shape().dump_python(vars(self), mode="json")
        return document

    @classmethod
    def from_json(cls, written: bytes) -> Self:
        """Parse the document of `to_json`.

        Raises:
            ValueError: the document has another shape.
            InvalidSpecError: it names no topic.
        """
        return cls(**cls._shape().validate_json(written, strict=True))

    @classmethod
    @functools.cache
    def _shape(cls) -> TypeAdapter[Any]:
        """Return the shape of the JSON, which has all fields of the class."""
        fields = get_type_hints(cls, include_extras=True)
        return TypeAdapter(TypedDict(cls.__name__, fields))  # type: ignore[operator]


_Stored = TypeVar("_Stored", bound=_Record)


@dataclass(frozen=True)
class RangeRecord(_Record):
    """Record of a range. Sets of entries are bitmaps of offsets.

    Attributes:
        generation: number of leases.
        leased: True if the last lease has not ended.
        moved: moved entries by uid of the Replay. Their messages are stored in the target once.
        partly: moved messages of entries that are not known to be moved completely.
        tails: ends of targets, after which leases may have stored unrecorded messages. They are
            searched before the range is sent again, to any target.
        replays: uids of the Replays that may have stored messages behind *tails*, for a replicated
            target also has messages of other Replays; and that of the last one while messages of it
            are *unproven*. None if unknown.
        unproven: entries of which messages may be stored and cannot be searched for. This is
            permanent.
        chunks: first chunk of moved messages in chunks, by the offset of the last one.
        renamed: last generation whose producer names were blocked at the broker; 0 without one.
            Later generations use other names.
    """

    generation: _Count = 0
    leased: bool = False
    moved: Mapping[str, _Bitmap] = field(default_factory=dict)
    partly: Parts = field(default_factory=dict)
    tails: Mapping[_Place, _Tail] = field(default_factory=dict)
    replays: Annotated[frozenset[str], PlainSerializer(sorted)] | None = frozenset()
    unproven: Annotated[
        Unproven,
        _written_as(list[tuple[_Place, _Count | None, _Bitmap]], _read_unproven),
        PlainSerializer(_write_unproven),
    ] = field(default_factory=dict)
    chunks: Mapping[_Offset, _Entry] = field(default_factory=dict)
    renamed: _Count = 0

    @property
    def moved_by_any(self) -> int:
        """Return the entries that any Replay has moved."""
        return unite(self.moved.values())


class EntriesRead(NamedTuple):
    """Information of a task about entries that the plan had not read. Sets are bitmaps.

    Attributes:
        entries: entries that were read.
        sizes: see `RangePlan`.
        chunks: see `RangePlan`.
        empty: entries without a message, such as chunks before the last one.
    """

    entries: int = bitmap.EMPTY
    sizes: Mapping[int, int] = MappingProxyType({})
    chunks: Mapping[int, EntryId] = MappingProxyType({})
    empty: int = bitmap.EMPTY


@dataclass(frozen=True)
class RangePlan(_Record):
    """Plan of one Replay for the entries of a range.

    Attributes:
        scanned: number of unacknowledged messages when the plan was made.
        selected: bitmap of entries to move, without those that are refused.
        sizes: number of messages of entries with more than one, by offset.
        refused: selected entries that cannot be moved.
        chunks: first chunk of messages in chunks, by the offset of the last one.
        skipped: selected entries that another Replay has moved, or others have acknowledged.
        done: True if the run has finished the range.
        unread: selected entries that the plan did not read, because all entries are selected. Each
            counts as one message until a task has read it.
        unevaluated: number of messages for which the condition could not be computed.
        discarded: number of selected messages that were acknowledged without a move, because no
            client can show them.
    """

    scanned: _Count
    selected: _Bitmap
    sizes: Mapping[_Offset, _Count]
    refused: tuple[_Refused, ...]
    skipped: _Bitmap = bitmap.EMPTY
    done: bool = False
    chunks: Mapping[_Offset, _Entry] = field(default_factory=dict)
    unread: _Bitmap = bitmap.EMPTY
    unevaluated: _Count = 0
    discarded: _Count = 0

    @classmethod
    def of_unread(cls, entries: int) -> RangePlan:
        """Return a plan for entries that were not read."""
        return cls(entries.bit_count(), entries, {}, (), unread=entries)

    def first_messages(self, source_range: Range) -> int:
        """Return the number of selected messages in the first entry that has any; 0 without one.

        Args:
            source_range: the range of this plan.
        """
        counts = [
            (refused.entry.entry - source_range.first, refused.messages) for refused in self.refused
        ]
        if self.selected:
            offset = bitmap.lowest(self.selected)
            counts.append((offset, self.sizes.get(offset, 1)))
        return min(counts, default=(0, 0))[1]

    def joined(self, other: RangePlan) -> RangePlan:
        """Return this plan of a new run, merged with the plan of other entries of the range."""
        return RangePlan(
            self.scanned + other.scanned,
            self.selected | other.selected,
            {**self.sizes, **other.sizes},
            (*self.refused, *other.refused),
            chunks={**self.chunks, **other.chunks},
            unevaluated=self.unevaluated + other.unevaluated,
        )

    @property
    def matched(self) -> int:
        """Return the number of selected messages, including refused ones."""
        refused = sum(refusal.messages for refusal in self.refused)
        return self.messages(self.selected) + refused + self.discarded

    def messages(self, entries: int) -> int:
        """Return the number of messages in *entries*, a bitmap."""
        more = sum(n - 1 for offset, n in self.sizes.items() if bitmap.contains(entries, offset))
        return entries.bit_count() + more

    def batched(self, entries: int) -> int:
        """Return the number of messages of *entries*, a bitmap, that are in batches."""
        return sum(n for offset, n in self.sizes.items() if bitmap.contains(entries, offset))

    def read(self, information: EntriesRead) -> RangePlan:
        """Return the plan with the information of a task about unread entries."""
        if not self.unread:
            return self
        # Entries that were read before keep their information, which is more complete.
        unread = frozenset(bitmap.members(self.unread))
        sizes = {at: size for at, size in information.sizes.items() if at in unread}
        chunks = {at: chunk for at, chunk in information.chunks.items() if at in unread}
        plan = replace(
            self,
            selected=self.selected & ~information.empty,
            sizes={**self.sizes, **sizes},
            chunks={**self.chunks, **chunks},
            unread=self.unread & ~information.entries & ~information.empty,
        )
        return replace(plan, scanned=plan.matched)

    def after(
        self,
        source_range: Range,
        refused: Iterable[tuple[EntryId, str]],
        gone: int,
        *,
        done: bool,
        discarded: int = bitmap.EMPTY,
    ) -> RangePlan:
        """Return the plan of a range after its task has ended.

        Args:
            source_range: the range.
            refused: selected entries that cannot be moved, with causes.
            gone: selected entries that others have acknowledged.
            done: True if no entry of the range is left.
            discarded: selected entries that were acknowledged because no client can show them.
        """
        offsets = [(entry.entry - source_range.first, entry, cause) for entry, cause in refused]
        out = bitmap.of((offset for offset, _, _ in offsets), source_range.size)
        more = tuple(
            RefusedEntry(entry, self.sizes.get(at, 1), cause) for at, entry, cause in offsets
        )
        return replace(
            self,
            selected=self.selected & ~out & ~discarded,
            discarded=self.discarded + self.messages(self.selected & discarded),
            refused=self.refused + more,
            skipped=self.skipped | gone,
            done=done,
        )


@dataclass(frozen=True)
class Header(_Record):
    """Header of the plan of a Replay. It is written last, so a plan with a header is complete.

    Attributes:
        replay: `namespace/name` of the Replay.
        target_partitions: number of partitions of the target; 0 if it is not partitioned. It must
            not change during the run.
        reason: reason that the author gave; may be empty.
        ticket: ticket that the author gave; may be empty.
        began: end of each tracked partition at the start, see `ReplayJob.follow_for`.
        held: ids of the ledgers of each partition of the dead-letter topic at the start.
    """

    replay: str
    target_partitions: _Count
    reason: str = ""
    ticket: str = ""
    began: Mapping[_Place, _Entry] = field(default_factory=dict)
    held: Mapping[int, Annotated[frozenset[int], PlainSerializer(sorted)]] = field(
        default_factory=dict
    )


_OWNER = TypeAdapter(str)


class Records:
    """Records of a ledger, with the last value of each key.

    Attributes:
        skipped: number of skipped records, which are not JSON of a known shape.
        owner: run that owns the ledger.
        ranges: records of ranges.
        headers: headers of plans, by uid of the Replay.
        plans: plans of ranges, by uid of the Replay.
    """

    def __init__(self) -> None:
        self.skipped = 0
        self.owner = ""
        self.ranges: dict[Range, RangeRecord] = {}
        self.headers: dict[str, Header] = {}
        self.plans: dict[str, dict[Range, RangePlan]] = {}

    def apply(self, key: str, value: bytes) -> None:
        """Apply a record. An empty value removes the record of its key.

        Any role with the right to produce may have written it. A record that is not JSON of a known
        shape is skipped and counted, and the previous value remains.
        """
        try:
            self._apply(key, value)
        except (ValueError, InvalidSpecError):
            self.skipped += 1

    def _apply(self, key: str, value: bytes) -> None:
        kind, _, rest = key.partition("/")
        uid, _, piece = rest.partition("/")
        match kind:
            case "owner":
                self.owner = _OWNER.validate_json(value, strict=True) if value else ""
            case "range":
                _put(self.ranges, Range.parse(rest), value, RangeRecord)
            case "plan" if piece:
                plan = self.plans.setdefault(uid, {})
                _put(plan, Range.parse(piece), value, RangePlan)
            case "plan":
                _put(self.headers, uid, value, Header)
            case "permit":  # for tasks, see `Lease`
                pass
            case _:
                self.skipped += 1

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yield each record as it is written, with the header of a plan after its ranges."""
        yield OWNER, self.owner
        for source_range, record in self.ranges.items():
            yield range_key(source_range), record.to_json()
        for uid, plans in self.plans.items():
            for source_range, plan in plans.items():
                yield plan_key(uid, source_range), plan.to_json()
        yield from ((header_key(uid), header.to_json()) for uid, header in self.headers.items())

    def range(self, source_range: Range) -> RangeRecord:
        """Return the record of a range; an empty one without a record."""
        return self.ranges.get(source_range, RangeRecord())

    @property
    def header_keys(self) -> frozenset[str]:
        """Return the keys of all headers. An incomplete plan with a header would be used."""
        return frozenset(map(header_key, self.headers))

    def outdated(self, uid: str, held: Iterable[tuple[int, int]]) -> Iterator[str]:
        """Yield the keys of records that the run of Replay *uid* does not need.

        Args:
            uid: Replay whose plan is kept. Other plans are not needed, because the records of
                ranges contain the moved entries.
            held: partition and id of each ledger that the dead-letter topic has. Entries of other
                ledgers were deleted, but the account of the run includes them.
        """
        ledgers, own = set(held), self.plans.get(uid, {})
        for source_range in self.ranges:
            ledger = source_range.partition, source_range.ledger
            if ledger not in ledgers and source_range not in own:
                yield range_key(source_range)
        for other in {*self.plans, *self.headers} - {uid}:
            yield from [header_key(other)] if other in self.headers else []
            yield from (plan_key(other, source_range) for source_range in self.plans.get(other, {}))


def range_key(source_range: Range) -> str:
    """Return the key of a range."""
    return f"range/{source_range}"


def header_key(uid: str) -> str:
    """Return the key of a plan's header."""
    return f"plan/{uid}"


def plan_key(uid: str, source_range: Range) -> str:
    """Return the key of the plan for a range."""
    return f"plan/{uid}/{source_range}"


def unite(bitmaps: Iterable[int]) -> int:
    """Return the union of *bitmaps*."""
    union = bitmap.EMPTY
    for entries in bitmaps:
        union |= entries
    return union


def _put(into: dict[_Key, _Stored], key: _Key, value: bytes, kind: type[_Stored]) -> None:
    if value:
        into[key] = kind.from_json(value)
    else:
        into.pop(key, None)


PERMIT = "permit"
"""Key of the record of the permit."""


@dataclass(frozen=True)
class Permit(_Record):
    """Permit of one task.

    Attributes:
        rate: limit in messages per second; None for no limit.
        drain: True if the task has to settle in-flight messages and end.
    """

    rate: Annotated[float, Field(gt=0)] | None = None
    drain: bool = False

"""Records of the ledger: ranges, the permit, the account.

What a ledger records, and what its records come to. Pure.

A ledger is a topic in which of each key only the last value counts. Its keys are `owner`, ranges,
and the plans of Replays; `permit` is for those that hold a lease, and no part of the records.

What a run lets its tasks do, for as long as their leases last. Pure.

A driver has no channel to tasks that run but the ledger, which each of them reads before it sends.

What has become of what a Replay selected: one equation. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, NotRequired, TypeVar

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from redrive.errors import InvalidSpecError
from redrive.reading import bitmap
from redrive.reading.positions import EntryId, Tail, TargetPartition
from redrive.reading.ranges import MAX_RANGE_ENTRIES, Range

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

OWNER = "owner"
"""The key of the record with which a run takes the ledger over."""

Parts = Mapping[str, Mapping[int, int]]
"""uid of a Replay → offset of an entry → which of its messages, a bitmap of their indexes."""


SentTo = tuple[TargetPartition, int | None]
"""A partition of a target, and how many its topic had then, see `Tail`."""

Unproven = Mapping[SentTo, int]
"""Where to → the last offset of what was to be sent there and may be stored, though the broker
holds it no more."""


class RefusedEntry(NamedTuple):
    """An entry that can't be moved, and stays where it is.

    Attributes:
        messages: how many selected messages it holds.
        cause: one word.
    """

    entry: EntryId
    messages: int
    cause: str


@dataclass(frozen=True)
class RangeRecord:
    """What is known of the entries of a range; sets of them are bitmaps of offsets.

    Attributes:
        generation: how often it was leased.
        leased: whether the last lease has not come to its end.
        moved: uid of a Replay → what it has moved: stored in the target, each message once.
        partly: what is moved of entries that are not, as far as is known, moved as a whole.
        tails: behind which a lease may have stored what is not on record. That has to be read
            before anything is sent again, to whichever target.
        replays: the Replays that have leased the range while there were tails, by their uids;
            None if that is not known. A target that is replicated has messages of others, too.
        unproven: what may be stored where it could not be seen any more; it stays so for good.
        chunks: offset of what was moved → the first chunk of the message that ends there.
        renamed: the last generation whose producer names were blocked at the broker; 0 for none.
            The names depend on it, so later generations have others.
    """

    generation: int = 0
    leased: bool = False
    moved: Mapping[str, int] = field(default_factory=dict)
    partly: Parts = field(default_factory=dict)
    tails: Mapping[TargetPartition, Tail] = field(default_factory=dict)
    replays: frozenset[str] | None = frozenset()
    unproven: Unproven = field(default_factory=dict)
    chunks: Mapping[int, EntryId] = field(default_factory=dict)
    renamed: int = 0

    @property
    def moved_by_any(self) -> int:
        """Return what has been moved, by whichever Replay."""
        return unite(self.moved.values())

    def to_json(self) -> dict[str, Any]:
        """Write it."""
        return {
            "generation": self.generation,
            "leased": self.leased,
            "moved": {uid: bitmap.encode(bits) for uid, bits in self.moved.items()},
            "partly": {
                uid: {str(offset): bits for offset, bits in entries.items()}
                for uid, entries in self.partly.items()
            },
            "tails": _write_entries((place, tail.entry) for place, tail in self.tails.items()),
            "sentBy": {
                str(place): [tail.generation, tail.partitions, tail.through]
                for place, tail in self.tails.items()
            },
            "replays": None if self.replays is None else sorted(self.replays),
            "unproven": [
                [str(place), partitions, through]
                for (place, partitions), through in self.unproven.items()
            ],
            "chunks": _write_entries(self.chunks.items()),
            "renamed": self.renamed,
        }

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> RangeRecord:
        """Read what `to_json` wrote; images of before it say less."""
        replays = written.get("replays")
        sent_by = {place: _read_sent_by(*by) for place, by in written.get("sentBy", {}).items()}
        tails = _read_entries(written["tails"], str)
        return cls(
            written["generation"],
            written["leased"],
            {uid: bitmap.decode(bits) for uid, bits in written["moved"].items()},
            {
                uid: {int(offset): bits for offset, bits in entries.items()}
                for uid, entries in written["partly"].items()
            },
            {
                TargetPartition.parse(place): Tail(entry, *sent_by.get(place, ()))
                for place, entry in tails.items()
            },
            None if replays is None else frozenset(replays),
            {
                (TargetPartition.parse(place), partitions): through
                for place, partitions, through in written.get("unproven", [])
            },
            _read_entries(written.get("chunks", {}), int),
            written.get("renamed", 0),
        )


class EntriesRead(NamedTuple):
    """What a task has learned of entries that their plan had not read; sets are bitmaps.

    Attributes:
        entries: those that were read.
        sizes: see `RangePlan`, likewise *chunks*.
        empty: those that hold no message, such as the parts of one that was sent in chunks.
    """

    entries: int = bitmap.EMPTY
    sizes: Mapping[int, int] = MappingProxyType({})
    chunks: Mapping[int, EntryId] = MappingProxyType({})
    empty: int = bitmap.EMPTY


@dataclass(frozen=True)
class RangePlan:
    """What one Replay does with the entries of a range.

    Attributes:
        scanned: how many messages rested when it was planned.
        selected: the entries to move, a bitmap; those that turned out to be refused are taken out.
        sizes: offset → how many messages an entry holds, where it is more than one.
        refused: what was selected and can't be moved.
        chunks: offset → of a message that was sent in chunks, and ends there, the first one.
        skipped: selected entries that this Replay has not to move any more: another one did, or
            they were acknowledged meanwhile.
        done: whether the run is through with the range.
        unread: selected entries that were not read for the plan, as nothing selects among them:
            until a task has, each counts as one message.
        discarded: how many selected messages were acknowledged without being moved, as no client
            can show them.
        unevaluated: how many messages were not selected because the condition can't be computed for
            them.
    """

    scanned: int
    selected: int
    sizes: Mapping[int, int]
    refused: tuple[RefusedEntry, ...]
    skipped: int = bitmap.EMPTY
    done: bool = False
    chunks: Mapping[int, EntryId] = field(default_factory=dict)
    unread: int = bitmap.EMPTY
    unevaluated: int = 0
    discarded: int = 0

    @classmethod
    def of_unread(cls, entries: int) -> RangePlan:
        """Plan to move some entries, whatever they hold."""
        return cls(entries.bit_count(), entries, {}, (), unread=entries)

    def first_messages(self, of: Range) -> int:
        """Return the number of selected messages in the first entry that has any; 0 without one.

        Args:
            of: the range of this plan.
        """
        counts = [(refused.entry.entry - of.first, refused.messages) for refused in self.refused]
        if self.selected:
            offset = bitmap.lowest(self.selected)
            counts.append((offset, self.sizes.get(offset, 1)))
        return min(counts, default=(0, 0))[1]

    def joined(self, other: RangePlan) -> RangePlan:
        """Return this plan of a new run, with that of other entries of the range."""
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
        """Return how many messages were selected: to be moved, or refused."""
        refused = sum(refusal.messages for refusal in self.refused)
        return self.messages(self.selected) + refused + self.discarded

    def messages(self, entries: int) -> int:
        """Return how many messages *entries* hold, a bitmap."""
        more = sum(n - 1 for offset, n in self.sizes.items() if bitmap.contains(entries, offset))
        return entries.bit_count() + more

    def batched(self, entries: int) -> int:
        """Return how many messages of *entries*, a bitmap, share their entry with others."""
        return sum(n for offset, n in self.sizes.items() if bitmap.contains(entries, offset))

    def read(self, found: EntriesRead) -> RangePlan:
        """Return the plan once some of what was *unread* is read."""
        if not self.unread:
            return self
        # Of what was read before, more was known then than is left to be found.
        first = frozenset(bitmap.members(self.unread))
        sizes = {at: size for at, size in found.sizes.items() if at in first}
        chunks = {at: chunk for at, chunk in found.chunks.items() if at in first}
        plan = replace(
            self,
            selected=self.selected & ~found.empty,
            sizes={**self.sizes, **sizes},
            chunks={**self.chunks, **chunks},
            unread=self.unread & ~found.entries & ~found.empty,
        )
        return replace(plan, scanned=plan.matched)

    def after(
        self,
        of: Range,
        refused: Iterable[tuple[EntryId, str]],
        gone: int,
        *,
        done: bool,
        discarded: int = bitmap.EMPTY,
    ) -> RangePlan:
        """Return the plan of a range once its task has come to an end.

        Args:
            of: the range.
            refused: selected entries that can't be moved after all, and why.
            gone: selected entries that others have acknowledged.
            done: whether nothing of the range is left.
            discarded: selected entries that were acknowledged, as no client can show them.
        """
        offsets = [(entry.entry - of.first, entry, cause) for entry, cause in refused]
        out = bitmap.of((offset for offset, _, _ in offsets), of.size)
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

    def to_json(self) -> dict[str, Any]:
        """Write it."""
        return {
            "scanned": self.scanned,
            "selected": bitmap.encode(self.selected),
            "sizes": {str(offset): count for offset, count in self.sizes.items()},
            "refused": [[str(entry), count, cause] for entry, count, cause in self.refused],
            "skipped": bitmap.encode(self.skipped),
            "done": self.done,
            "chunks": _write_entries(self.chunks.items()),
            "unread": bitmap.encode(self.unread),
            "unevaluated": self.unevaluated,
            "discarded": self.discarded,
        }

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> RangePlan:
        """Read what `to_json` wrote."""
        return cls(
            written["scanned"],
            bitmap.decode(written["selected"]),
            {int(offset): count for offset, count in written["sizes"].items()},
            tuple(RefusedEntry(_entry(e), n, cause) for e, n, cause in written["refused"]),
            bitmap.decode(written["skipped"]),
            written["done"],
            _read_entries(written.get("chunks", {}), int),
            bitmap.decode(written["unread"]) if "unread" in written else bitmap.EMPTY,
            written.get("unevaluated", 0),
            written.get("discarded", 0),
        )


@dataclass(frozen=True)
class Header:
    """The plan of a Replay as a whole; written last, so that a plan with one is complete.

    Attributes:
        replay: the Replay, as `namespace/name`.
        target_partitions: of the target, 0 if it has none; they must not change meanwhile.
        reason: why it was made, in its author's words; empty if it gives none.
        ticket: where that was decided; likewise.
        began: behind which entry all lies that was written since, in each partition that is
            followed, see `ReplayJob.follow_for`.
    """

    replay: str
    target_partitions: int
    reason: str = ""
    ticket: str = ""
    began: Mapping[TargetPartition, EntryId] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Write it."""
        written = {
            "replay": self.replay,
            "target_partitions": self.target_partitions,
            "reason": self.reason,
            "ticket": self.ticket,
        }
        # Where it says nothing it is left out: images of before it do not know it.
        return written | ({"began": _write_entries(self.began.items())} if self.began else {})

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> Header:
        """Read what `to_json` wrote."""
        began = _read_entries(written.get("began", {}), TargetPartition.parse)
        return cls(**{**written, "began": began})


_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Offset = Annotated[int, Field(ge=0, lt=MAX_RANGE_ENTRIES)]


class _RangeShape(TypedDict):
    """JSON of a `RangeRecord`."""

    generation: _Count
    leased: bool
    moved: dict[str, str]
    partly: dict[str, dict[_Offset, int]]
    tails: dict[str, str]
    sentBy: NotRequired[dict[str, Annotated[list[_Count | bool | None], Field(min_length=3)]]]
    replays: NotRequired[list[str] | None]
    unproven: NotRequired[list[tuple[str, _Count | None, _Offset]]]
    chunks: NotRequired[dict[_Offset, str]]
    renamed: NotRequired[_Count]


class _PlanShape(TypedDict):
    """JSON of a `RangePlan`."""

    scanned: _Count
    selected: str
    sizes: dict[_Offset, _Count]
    refused: list[tuple[str, _Count, str]]
    skipped: str
    done: bool
    chunks: NotRequired[dict[_Offset, str]]
    unread: NotRequired[str]
    unevaluated: NotRequired[_Count]
    discarded: NotRequired[_Count]


class _HeaderShape(TypedDict):
    """JSON of a `Header`."""

    replay: str
    target_partitions: _Count
    reason: NotRequired[str]
    ticket: NotRequired[str]
    began: NotRequired[dict[str, str]]


_OWNER, _RANGE = TypeAdapter(str), TypeAdapter(_RangeShape)
_PLAN, _HEADER = TypeAdapter(_PlanShape), TypeAdapter(_HeaderShape)


class Records:
    """All records of a ledger, as the last of each key has it.

    Attributes:
        skipped: number of records that were skipped, because they are no JSON of a known shape.
    """

    def __init__(self) -> None:
        self.skipped = 0
        self.owner = ""
        self.ranges: dict[Range, RangeRecord] = {}
        self.headers: dict[str, Header] = {}
        self.plans: dict[str, dict[Range, RangePlan]] = {}

    def apply(self, key: str, value: bytes) -> None:
        """Apply a record; an empty value removes the one of its key.

        Everybody with the right to produce may have written it: a record that is not JSON, or of no
        known shape, is skipped and counted, and the one before it stays.
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
                _put(self.ranges, Range.parse(rest), value, _RANGE, RangeRecord.from_json)
            case "plan" if piece:
                plan = self.plans.setdefault(uid, {})
                _put(plan, Range.parse(piece), value, _PLAN, RangePlan.from_json)
            case "plan":
                _put(self.headers, uid, value, _HEADER, Header.from_json)
            case "permit":  # for tasks, see `Lease`
                pass
            case _:
                self.skipped += 1

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yield each record as it is written, the header of a plan behind its ranges."""
        yield OWNER, self.owner
        yield from ((range_key(of), record.to_json()) for of, record in self.ranges.items())
        for uid, plan in self.plans.items():
            yield from ((plan_key(uid, of), each.to_json()) for of, each in plan.items())
        yield from ((header_key(uid), header.to_json()) for uid, header in self.headers.items())

    def range(self, of: Range) -> RangeRecord:
        """Return what is known of a range."""
        return self.ranges.get(of, RangeRecord())

    def outdated(self, uid: str, held: Iterable[tuple[int, int]]) -> Iterator[str]:
        """Yield the keys that are of no use any more to the run of Replay *uid*.

        Args:
            uid: its own plan stays, others go: what was moved stands in the ranges.
            held: partition and id of each ledger that the dead-letter topic still has. What lay in
                others can't come back; but the account of the run tells of it.
        """
        kept, own = set(held), self.plans.get(uid, {})
        for of in self.ranges:
            if (of.partition, of.ledger) not in kept and of not in own:
                yield range_key(of)
        for other in {*self.plans, *self.headers} - {uid}:
            # The header first: a plan without one is made again, one in part would be believed.
            yield from [header_key(other)] if other in self.headers else []
            yield from (plan_key(other, of) for of in self.plans.get(other, {}))


def range_key(of: Range) -> str:
    """Return the key of a range."""
    return f"range/{of}"


def header_key(uid: str) -> str:
    """Return the key of a plan's header."""
    return f"plan/{uid}"


def plan_key(uid: str, of: Range) -> str:
    """Return the key of the plan for a range."""
    return f"plan/{uid}/{of}"


def unite(bitmaps: Iterable[int]) -> int:
    """Return the union of *bitmaps*."""
    union = bitmap.EMPTY
    for each in bitmaps:
        union |= each
    return union


def _write_entries(entries: Iterable[tuple[object, EntryId]]) -> dict[str, str]:
    return {str(key): str(entry) for key, entry in entries}


def _read_sent_by(
    generation: int, partitions: int | None, through: int | None, *batches: bool
) -> tuple[int, int | None, int | None]:
    """Read the rest of a `Tail`.

    Images of before wrote of batches of which the broker knew only the first message: then its
    last sequence id tells nothing, as of a lease that is not known.
    """
    return 0 if batches else generation, partitions, through


def _read_entries(written: Mapping[str, str], parse: Callable[[str], _Key]) -> dict[_Key, EntryId]:
    return {parse(key): _entry(entry) for key, entry in written.items()}


def _entry(text: str) -> EntryId:
    entry = EntryId.parse(text)
    if not all(-1 <= number < 2**63 for number in entry):
        msg = f"no entry: {text}"
        raise ValueError(msg)
    return entry


def _put(
    into: dict[_Key, _Value],
    key: _Key,
    value: bytes,
    shape: TypeAdapter[Any],
    read: Callable[[Any], _Value],
) -> None:
    if value:
        into[key] = read(shape.validate_json(value, strict=True))
    else:
        into.pop(key, None)


PERMIT = "permit"
"""The key of its record."""


@dataclass(frozen=True)
class Permit:
    """What one task may do.

    Attributes:
        rate: how many messages a second it may send; None for as many as it can.
        drain: whether to end: what is on its way is settled, nothing more is sent.
    """

    rate: Annotated[float, Field(gt=0)] | None = None
    drain: bool = False

    def to_json(self) -> dict[str, Any]:
        """Write it."""
        return {"rate": self.rate, "drain": self.drain}

    @classmethod
    def from_json(cls, written: bytes) -> Permit:
        """Read the JSON that `to_json` wrote.

        Raises:
            ValueError: it is something else.
        """
        return _PERMIT.validate_json(written, strict=True)


_PERMIT = TypeAdapter(Permit)


SHOWN = 100
_NUMBERS = (
    "scanned", "matched", "moved", "skipped", "refused", "left", "unevaluated", "discarded",
    "batched",
)  # fmt: skip


@dataclass(frozen=True)
class Account:
    """Numbers of messages; `matched` = `moved` + `skipped` + `refused` + `discarded` + `left`.

    Of `scanned`, `unevaluated` are not among `matched`. `batched` are among `moved` and `left`.

    Attributes:
        scanned: how many rested when the run was planned.
        matched: how many of these were selected.
        moved: stored in the target by this Replay, once, whichever of its attempts did it.
        skipped: not moved because there was no need: another Replay had moved them before, or they
            were acknowledged by others after the run was planned.
        refused: can't be moved; they stay where they are.
        left: yet to be moved.
        discarded: acknowledged without being moved, as no client can show them.
        unevaluated: not selected because the condition can't be computed for them; they stay where
            they are.
        batched: moved or left, and stored in batches. A consumer may have acknowledged some of them
            one by one: the broker shows acknowledgements of whole entries only.
        refusals: the first of what was refused.
        skipped_records: see `Records.skipped`.
    """

    scanned: int = 0
    matched: int = 0
    moved: int = 0
    skipped: int = 0
    refused: int = 0
    left: int = 0
    unevaluated: int = 0
    discarded: int = 0
    batched: int = 0
    refusals: tuple[RefusedEntry, ...] = ()
    skipped_records: int = 0

    @classmethod
    def of(
        cls, uid: str, records: Records, acknowledged: Mapping[Range, int] = MappingProxyType({})
    ) -> Account:
        """Draw up the account of a Replay that has a plan.

        Args:
            uid: the Replay's.
            records: of the ledger.
            acknowledged: what was seen to be acknowledged since a range was leased, a bitmap. While
                the lease lasts that is moved, though not on record yet.
        """
        plans = records.plans.get(uid, {})
        parts = [
            _of_range(plan, records.range(of), uid, acknowledged.get(of, bitmap.EMPTY))
            for of, plan in plans.items()
        ]
        numbers = dict.fromkeys(_NUMBERS, 0)
        for part in parts:
            for name, number in zip(_NUMBERS, part, strict=True):
                numbers[name] += number
        refusals = tuple(itertools.islice(_refusals(plans), SHOWN))
        return cls(**numbers, refusals=refusals, skipped_records=records.skipped)

    def to_status(self) -> dict[str, Any]:
        """Write it as fields of `status.run` of the Replay."""
        return {
            "counts": {name: getattr(self, name) for name in _NUMBERS},
            "progress": f"{self.matched - self.left}/{self.matched}",
            "refusals": [
                {"entry": str(entry), "messages": messages, "cause": cause}
                for entry, messages, cause in self.refusals
            ],
            "skippedRecords": self.skipped_records or None,
        }


def moved_by_others(record: RangeRecord, uid: str) -> int:
    """Return what has been moved, but not by Replay *uid*."""
    others = unite(bits for other, bits in record.moved.items() if other != uid)
    return others & ~record.moved.get(uid, 0)


def _of_range(plan: RangePlan, record: RangeRecord, uid: str, acknowledged: int) -> tuple[int, ...]:
    moved = plan.selected & record.moved.get(uid, 0)
    skipped = plan.selected & ~moved & (plan.skipped | moved_by_others(record, uid))
    if record.leased:
        moved |= plan.selected & acknowledged & ~skipped
    return (
        plan.scanned,
        plan.matched,
        plan.messages(moved),
        plan.messages(skipped),
        sum(refusal.messages for refusal in plan.refused),
        plan.messages(plan.selected & ~moved & ~skipped),
        plan.unevaluated,
        plan.discarded,
        plan.batched(plan.selected & ~skipped),
    )


def _refusals(plans: Mapping[Range, RangePlan]) -> Iterator[RefusedEntry]:
    for of in sorted(plans):
        yield from plans[of].refused

"""Plans of a run: ranges, preview and progress while it is planned."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pulsar
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.api.replay import ReplayStatus
from redrive.policy.envelope import REPLAYS
from redrive.policy.model import Policy, SubscriptionType
from redrive.policy.naming import TopicName
from redrive.reading import bitmap
from redrive.reading.positions import NOWHERE, EntryId, Position
from redrive.reading.ranges import RANGE_ENTRIES, Acknowledged, Partition, Range
from redrive.reading.rows import DeadLetterRow
from redrive.replay.job import plan, run
from redrive.replay.job.plan import PlannedRange, Rest, RunPreview, Scan, Scanned, Sighting, Wish
from redrive.replay.job.plan import plan as plan_range
from redrive.replay.job.run import (
    REPORT_SECONDS,
    plan_ranges,
    reporting_progress,
    takes_all,
    unread_ranges,
)
from redrive.replay.lookup import by_entry, read_first, refusal
from redrive.replay.outcome import RangeOutcome, RangeResult
from redrive.replay.records import Account, RangeRecord, Records
from redrive.replay.spec import Choice, ReplayJob
from redrive.replay.task import RangeTask

POLICY = Policy(TopicName("shop", "prod", "orders"), "fulfilment")
KEYS = (None, "eu", "us")


class Place(NamedTuple):
    """An entry of a partition; many lie on the border of a range."""

    partition: int
    entry: EntryId


Entries = Mapping[Place, Sequence[DeadLetterRow]]


def letter(
    partition: int, position: Position, size: int, key: str | None, at: int
) -> DeadLetterRow:
    """Make a message that was replayed as often as its publish time says."""
    return DeadLetterRow(
        partition, position, size, pulsar.MessageId(partition, *position), None,
        encrypted=False, unreadable=False, schema_version=None, key=key, ordering_key=None,
        value=b"order", properties={REPLAYS: str(at)}, publish_time=at, event_time=None,
    )  # fmt: skip


offsets = st.sampled_from([0, 1, 2, RANGE_ENTRIES - 1, RANGE_ENTRIES, 2 * RANGE_ENTRIES + 3])
# Two partitions never share a ledger.
places = st.builds(
    lambda partition, ledger, offset: Place(partition, EntryId(2 * ledger + partition, offset)),
    st.integers(0, 1), st.integers(0, 2), offsets,
)  # fmt: skip


@st.composite
def topics(draw: st.DrawFn) -> Entries:
    """Return what rests, entry by entry."""
    found = {}
    for place in sorted(draw(st.sets(places, max_size=10))):
        messages = draw(
            st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, 5)), min_size=1, max_size=3)
        )
        found[place] = [
            letter(place.partition, Position(*place.entry, index), len(messages), key, at)
            for index, (key, at) in enumerate(messages)
        ]
    return found


def ids(letters: Iterable[DeadLetterRow]) -> list[str]:
    """Name each message in every form, some with an index of all."""
    return [
        text
        for each in letters
        for ledger, entry, index in [each.position]
        for text in (
            f"{ledger}:{entry}",
            f"{ledger}:{entry}:{each.partition}",
            f"{ledger}:{entry}:{each.partition}:{index}",
            f"{ledger}:{entry}:-1:-1",
        )
    ]


@st.composite
def choices(draw: st.DrawFn, letters: Sequence[DeadLetterRow]) -> Choice:
    named = draw(st.lists(st.sampled_from([*ids(letters), "99:0", "0:1:0:7"]), max_size=5))
    return Choice(
        tuple(named),
        tuple(draw(st.sets(st.sampled_from(["eu", "us", "none"])))),
        draw(st.none() | st.integers(0, 5)),
        draw(st.none() | st.integers(0, 5)),
        draw(st.none() | st.integers(1, 12)),
        draw(st.none() | st.integers(1, 5)),
    )


def takes(choice: Choice, each: DeadLetterRow) -> bool:
    """Whether a message is selected: the oracle."""
    ledger, entry, index = each.position
    forms = {
        f"{ledger}:{entry}",
        f"{ledger}:{entry}:{each.partition}",
        f"{ledger}:{entry}:-1:-1",
        f"{ledger}:{entry}:{each.partition}:{index}",
    }
    return (
        (not choice.ids or not forms.isdisjoint(choice.ids))
        and (not choice.keys or each.key in choice.keys)
        and (choice.since is None or each.publish_time >= choice.since)
        and (choice.until is None or each.publish_time < choice.until)
    )


def expected(choice: Choice, rests: Entries) -> dict[Place, str]:
    """Return which entries are selected, and why some are refused: the oracle."""
    found = {}
    room = choice.limit or 1_000
    for (partition, entry), letters in sorted(rests.items()):
        count = sum(takes(choice, each) for each in letters)
        if count > room:
            break
        room -= count
        if count:
            often = max(each.publish_time for each in letters) >= (choice.max_replays or 9)
            cause = "ReplayedTooOften" if often else ""
            whole = count == len(letters)
            found[Place(partition, entry)] = cause if whole else "PartOfBatch"
    return found


@dataclass
class Held:
    """An engine whose topic is in memory; it notes what is read."""

    rests: Entries
    slots: int
    read: int = 0
    scanned: Scanned = field(default_factory=Scanned)

    @property
    def capacity(self) -> int:
        return self.slots

    def scan(self, scans: Sequence[Scan]) -> Iterable[PlannedRange]:
        for each in reversed(scans):  # in whatever order
            yield plan.scanned(each, self._letters(each), lambda _version: "")

    def move(self, task: RangeTask) -> RangeResult:
        raise AssertionError(task)

    def _letters(self, what: Scan) -> Iterable[DeadLetterRow]:
        of = what.piece.range
        for (partition, entry), letters in sorted(self.rests.items()):
            here = partition == of.partition and of.holds(letters[0].position)
            resting = what.piece.resting & ~what.moved
            if here and bitmap.contains(resting, entry.entry - of.first):
                assert entry > what.piece.after
                self.read += 1
                yield from letters


def partitions(rests: Entries) -> list[Partition]:
    found = []
    for index, group in itertools.groupby(sorted(rests), key=lambda place: place[0]):
        sizes: dict[int, int] = {}
        for _, entry in group:
            sizes[entry.ledger] = max(sizes.get(entry.ledger, 0), entry.entry + 1)
        found.append(Partition(index, tuple(sorted(sizes.items())), Acknowledged(NOWHERE)))
    return found


def job(choice: Choice) -> ReplayJob:
    return ReplayJob("shop", "now", "uid", POLICY, "pulsar://p", "http://p", None, choice=choice)


@given(topics(), st.integers(1, 3), st.data())
def test_a_selection_takes_what_the_oracle_takes(
    rests: Entries, slots: int, data: st.DataObject
) -> None:
    choice = data.draw(choices([each for letters in rests.values() for each in letters]))
    assert ReplayJob.decode(job(choice).encode()).choice == choice

    found = {}
    for each in plan_ranges(job(choice), Held(rests, slots), Records(), partitions(rests)):
        of = each.range
        for offset in bitmap.members(each.plan.selected):
            found[Place(of.partition, of.entry_id(offset))] = ""
        for refused in each.plan.refused:
            found[Place(of.partition, refused.entry)] = refused.cause

    assert found == expected(choice, rests)


@pytest.fixture
def long() -> Entries:
    """A topic of a hundred ranges."""
    places = [Place(0, EntryId(1, number * RANGE_ENTRIES)) for number in range(100)]
    return {
        place: [letter(place.partition, Position(*place.entry, 0), 1, None, 0)] for place in places
    }


def test_with_ids_only_their_entries_are_read(long: Entries) -> None:
    held = Held(long, slots=2)
    choice = Choice(ids=(f"1:{70 * RANGE_ENTRIES}", f"1:{80 * RANGE_ENTRIES}:0:0"))
    (first, second) = plan_ranges(job(choice), held, Records(), partitions(long))
    assert [each.plan.matched for each in (first, second)] == [1, 1]
    assert held.read == 2


def test_with_a_limit_no_more_is_read_than_about_twice_as_much(long: Entries) -> None:
    held = Held(long, slots=2)
    found = list(plan_ranges(job(Choice(limit=10)), held, Records(), partitions(long)))
    assert sum(each.plan.matched for each in found) == 10
    assert held.read == 2 + 4 + 8


def test_what_is_moved_has_no_part_in_a_limit(long: Entries) -> None:
    records = Records()
    for number in range(3):
        records.ranges[Range.of(0, Position(1, number * RANGE_ENTRIES, 0))] = RangeRecord(
            moved={"other": 1}
        )
    found = plan_ranges(job(Choice(limit=1)), Held(long, slots=1), records, partitions(long))
    assert [each.range.first for each in found if each.plan.selected] == [3 * RANGE_ENTRIES]


@given(topics(), st.none() | st.integers(1, 5))
def test_what_tasks_read_of_an_unread_plan_is_what_a_scan_would_have_planned(
    rests: Entries, max_replays: int | None
) -> None:
    of_all, resting = job(Choice(max_replays=max_replays)), partitions(rests)
    held = Held(rests, slots=2)

    def cause_of(entry: Sequence[DeadLetterRow]) -> str:
        return refusal(entry, len(entry), max_replays)

    scanned = {each.range: each.plan for each in plan_ranges(of_all, held, Records(), resting)}
    unread = dict(unread_ranges(Records(), resting))
    assert takes_all(of_all)
    assert unread.keys() == scanned.keys()
    for of, by_scan in scanned.items():
        outcome = RangeOutcome({}, "uid")
        there = [each for letters in rests.values() for each in letters if is_in(of, each)]
        there.sort(key=lambda each: each.position)
        for entry in by_entry(there):
            offset = entry[0].position.entry - of.first
            if read_first(entry, offset, outcome, bitmap.EMPTY, cause_of):
                for each in entry:
                    outcome.store((offset, each.position.batch_index), each.batch_size)
        outcome.miss(bitmap.EMPTY, bitmap.EMPTY, outcome.unseen(unread[of].unread, of))
        result = outcome.result(of, {})
        by_task = unread[of].read(result.read).after(of, result.refused, result.gone, done=True)
        assert (by_task.scanned, by_task.matched) == (by_scan.scanned, by_scan.matched)
        assert (by_task.selected, by_task.unread) == (by_scan.selected, bitmap.EMPTY)
        assert by_task.refused == by_scan.refused
        assert result.moved.get("uid", bitmap.EMPTY) == by_scan.selected


def is_in(of: Range, each: DeadLetterRow) -> bool:
    return each.partition == of.partition and of.holds(each.position)


@pytest.mark.parametrize(
    "changed",
    [
        {"where": "size > 0"},
        {"approval_above": 5},
        {"choice": Choice(ids=("1:2",))},
        {"choice": Choice(keys=("eu",))},
        {"choice": Choice(since=1)},
        {"choice": Choice(until=1)},
        {"choice": Choice(limit=1)},
    ],
)
def test_what_selects_or_needs_a_number_has_all_read_first(changed: dict[str, Any]) -> None:
    assert not takes_all(replace(job(Choice(max_replays=3)), **changed))


UID = "uid-1"
ORDERED = replace(POLICY, subscription_type=SubscriptionType.KEY_SHARED, ordered=True)


def sighting(entry: int, cause: str = "", **more: object) -> Sighting:
    fields = {
        "position": Position(7, entry, 0),
        "batch_size": 1,
        "first_chunk": None,
        "encrypted": False,
        "unreadable": False,
        "schema_version": None,
        "cause": cause,
        "size": 100,
        "replays": 0,
        "selected": True,
        **more,
    }
    return Sighting(**fields)  # type: ignore[arg-type]


def planned(*seen: Sighting, first: int = 0) -> PlannedRange:
    of = Range(0, 7, first, first + 9_999)
    return plan_range(of, seen, lambda version: "SchemaNotFound" if version == 5 else "")


def preview_of(
    *ranges: PlannedRange, slots: int = 2, rate: float | None = None, policy: Policy = POLICY
) -> RunPreview:
    records = Records()
    records.plans[UID] = {each.range: each.plan for each in ranges}
    job = ReplayJob("shop", "a", UID, policy, "pulsar://p", "http://p", None, rate_limit=rate)
    return RunPreview.of(Account.of(UID, records), ranges, job, slots)


def test_unevaluated_messages_are_counted_and_not_planned() -> None:
    of = planned(
        sighting(0),
        sighting(1, selected=False, evaluated=False),
        sighting(2, selected=False),
        sighting(3, selected=False, evaluated=False),
    )
    account = preview_of(of).account
    assert (account.scanned, account.matched, account.unevaluated, account.left) == (4, 1, 2, 1)
    assert account.to_status()["unevaluated"] == 2
    assert (Scanned.of(of) + Scanned.of(of)).unevaluated == 4


def test_batch_with_an_unevaluated_message_is_refused_in_part() -> None:
    of = planned(
        sighting(0, batch_size=2),
        sighting(0, position=Position(7, 0, 1), batch_size=2, selected=False, evaluated=False),
    )
    account = preview_of(of).account
    assert (account.matched, account.unevaluated, account.refused) == (1, 1, 1)
    assert [each.cause for each in account.refusals] == ["PartOfBatch"]


def test_unevaluated_messages_behind_a_limit_do_not_count() -> None:
    seen = [sighting(at, selected=at < 3, evaluated=at < 3) for at in range(5)]
    seen[0] = sighting(0, selected=False, evaluated=False)
    limited = plan_range(Range(0, 7, 0, 9_999), seen, lambda _: "", Choice(limit=1))
    assert (limited.plan.matched, limited.plan.unevaluated) == (1, 1)


def test_what_would_be_moved_and_what_not_is_counted_by_cause() -> None:
    first = planned(
        sighting(0, "TimeoutError"),
        sighting(1, "ValueError", selected=False),
        sighting(2, "TimeoutError", encrypted=True),
        sighting(3),
    )
    second = planned(
        sighting(10_000, "TimeoutError"), sighting(10_001, schema_version=5), first=10_000
    )

    found = preview_of(first, second)

    account = found.account
    assert (account.scanned, account.matched, account.refused, account.left) == (6, 5, 2, 3)
    assert found.causes == {"TimeoutError": 2, "": 1}
    assert found.refused == {"Encrypted": 1, "SchemaNotFound": 1}
    assert found.samples == ("7:0:0:0", "7:3:0:0", "7:10000:0:0")
    shown = ReplayStatus.model_validate(found.to_status())
    assert shown.preview is not None
    assert shown.preview.causes[0].cause == "TimeoutError"


def test_a_status_holds_so_much_whatever_producers_have_written() -> None:
    ranges = [
        planned(
            *(sighting(first + entry, f"{entry}{'x' * 5_000}", size=2**20) for entry in range(500)),
            first=first,
        )
        for first in (0, 10_000)
    ]
    found = preview_of(*ranges)
    written = found.to_status()["preview"]
    assert len(written["causes"]) == 20
    assert len(written["samples"]) == 10
    assert max(len(each["cause"]) for each in written["causes"]) == 256
    ReplayStatus.model_validate(found.to_status())
    assert found.seconds == 50  # 1 000 MiB by two slots of 10 MiB a second
    assert preview_of(*ranges, slots=1).seconds == 100
    assert preview_of(*ranges, policy=ORDERED).seconds == 100, "one range after the other"


def test_what_scans_find_holds_so_much_whatever_producers_have_written() -> None:
    often = Counter(TimeoutError=10_000)
    found = Scanned()
    for first in range(0, 5_000, 100):
        rare = Counter({f"x{number}": 1 for number in range(first, first + 99)})
        found += Scanned(10_099, often + rare, Counter(Encrypted=1))
    assert found.messages == 50 * 10_099
    assert len(found.causes) == 100
    assert found.causes["TimeoutError"] == 500_000
    assert found.refused == {"Encrypted": 50}


def test_a_rate_that_is_limited_bounds_the_time() -> None:
    found = planned(*(sighting(entry) for entry in range(500)))
    assert preview_of(found).seconds == 1
    assert preview_of(found, rate=10.0).seconds == 50


def test_a_limit_takes_the_first_ones_whatever_came_late() -> None:
    """As a message in chunks that a reader has lost."""
    seen = [sighting(1), sighting(2), sighting(0)]
    found = plan_range(Range(0, 7, 0, 9_999), seen, lambda _version: "", Choice(limit=2))
    assert found.plan.selected == 0b11


def test_of_a_message_in_chunks_the_plan_notes_where_it_begins() -> None:
    found = planned(sighting(5, first_chunk=EntryId(6, 49_999)))
    assert found.plan.chunks == {5: EntryId(6, 49_999)}


WAIT_SECONDS = 60.0


class Counted:
    """An engine that is asked how far it is."""

    slots = capacity = 2

    def __init__(self) -> None:
        self.scanned = Scanned()

    def scan(self, scans: Sequence[Scan]) -> Iterable[PlannedRange]:
        raise AssertionError(scans)

    def move(self, task: RangeTask) -> RangeResult:
        raise AssertionError(task)


class Status:
    """Notes what is reported; the API server refuses the first report."""

    def __init__(self) -> None:
        self.written: list[Scanned] = []
        self._refused = 0
        self.has_changed = threading.Condition()

    def take_over(self, _: EntryId) -> None:
        pass

    def report(self, account: Account, *, rests: Rest | None = None) -> Wish:
        raise AssertionError(account, rests)

    def report_scan(self, scanned: Scanned) -> None:
        if not self._refused:
            self._refused += 1
            raise OSError("no connection to the API server")
        with self.has_changed:
            self.written.append(scanned)
            self.has_changed.notify_all()

    def waits_for(self, scanned: Scanned) -> None:
        with self.has_changed:
            assert self.has_changed.wait_for(
                lambda: self.written and self.written[-1] == scanned, WAIT_SECONDS
            )


def test_what_scans_find_is_reported_while_the_run_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert REPORT_SECONDS <= 1
    monkeypatch.setattr(run, "REPORT_SECONDS", 0.01)
    monkeypatch.setattr(run, "LOOK_SECONDS", 0.01)
    engine, status = Counted(), Status()
    some = Scanned(10_000, Counter(TimeoutError=9_000), Counter(Encrypted=1_000))
    more = some + Scanned(5_000, Counter(ValueError=1, TimeoutError=4_999))
    with reporting_progress(engine, status):
        for scanned in (some, more):
            engine.scanned = scanned
            status.waits_for(scanned)
    engine.scanned += some
    assert status.written == [some, more]  # each once
    assert more.causes == {"TimeoutError": 13_999, "ValueError": 1}


def test_an_error_of_the_scan_is_the_one_that_is_raised() -> None:
    with pytest.raises(ZeroDivisionError), reporting_progress(Counted(), Status()):
        raise ZeroDivisionError

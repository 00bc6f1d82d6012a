"""Plans of a run: ranges, preview and progress while it is planned."""

from __future__ import annotations

import itertools
import pickle
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.admin.model import TopicSubscriptions
from redrive.api.replay_status import Preview, ReplayRun
from redrive.errors import RedriveError
from redrive.policy.envelope import CAUSE_FINGERPRINT, CAUSE_TYPE, REPLAYS
from redrive.policy.model import Policy, SubscriptionType
from redrive.policy.naming import TopicName
from redrive.reading import bitmap, broker
from redrive.reading.positions import NOWHERE, EntryId, Position
from redrive.reading.ranges import RANGE_ENTRIES, Acknowledged, Partition, Piece, Range
from redrive.reading.rows import DeadLetterRow
from redrive.reading.stored import MAX_READ_CONTENT, MessagePlace, ReadMessage, StoredEntry
from redrive.replay import account
from redrive.replay.account import Account, CauseFigures, Leaders
from redrive.replay.job import plan, run
from redrive.replay.job.children import Children
from redrive.replay.job.plan import (
    DesiredState,
    Pause,
    PlannedRange,
    RunEndedError,
    RunPreview,
    Scan,
    Scanned,
)
from redrive.replay.job.plan import plan as plan_range
from redrive.replay.job.run import (
    REPORT_SECONDS,
    plan_ranges,
    reporting_progress,
    takes_all,
    unread_ranges,
)
from redrive.replay.job.scanned import ScannedMessage
from redrive.replay.lookup import by_entry, read_first, refusal
from redrive.replay.outcome import RangeOutcome, RangeResult
from redrive.replay.records import RangeRecord, Records
from redrive.replay.spec import FOLLOWER, Choice, FailureCause, PodSize, ReplayJob
from redrive.replay.task import RangeTask, TaskFailure
from tests.support.raw_entries import RawEntry, bytes_of, numbers
from tests.support.reasons import raises

POLICY = Policy(TopicName("shop", "prod", "orders"), "fulfilment")
KEYS = (None, "eu", "us")


class Place(NamedTuple):
    """An entry of a partition; many lie on the border of a range."""

    partition: int
    entry: EntryId


Entries = Mapping[Place, Sequence[DeadLetterRow]]


def dead_letter(
    partition: int, position: Position, size: int, key: str | None, at: int
) -> DeadLetterRow:
    """Make a message that was replayed as often as its publish time says.

    Every second one has a cause.
    """
    cause = {CAUSE_TYPE: "TimeoutError"} if at % 2 else {}
    return DeadLetterRow(
        partition, position, size, MessagePlace(partition, (position[:2],)), None,
        encrypted=False, unreadable=False, schema_version=None, key=key, ordering_key=None,
        value=b"order", properties={REPLAYS: str(at), **cause}, publish_time=at, event_time=None,
    )  # fmt: skip


offsets = st.sampled_from([0, 1, 2, RANGE_ENTRIES - 1, RANGE_ENTRIES, 2 * RANGE_ENTRIES + 3])
# Two partitions never share a ledger.
places = st.builds(
    lambda partition, ledger, offset: Place(partition, EntryId(2 * ledger + partition, offset)),
    st.integers(0, 1), st.integers(0, 2), offsets,
)  # fmt: skip


@st.composite
def topics(draw: st.DrawFn) -> Entries:
    """Return the dead letters by entry."""
    entries = {}
    for place in sorted(draw(st.sets(places, max_size=10))):
        messages = draw(
            st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, 5)), min_size=1, max_size=3)
        )
        entries[place] = [
            dead_letter(place.partition, Position(*place.entry, index), len(messages), key, at)
            for index, (key, at) in enumerate(messages)
        ]
    return entries


def ids(letters: Iterable[DeadLetterRow]) -> list[str]:
    """Name each message in every form, some with an index of all."""
    return [
        text
        for row in letters
        for ledger, entry, index in [row.position]
        for text in (
            f"{ledger}:{entry}",
            f"{ledger}:{entry}:{row.partition}",
            f"{ledger}:{entry}:{row.partition}:{index}",
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
        causes=tuple(draw(st.sets(st.sampled_from(["", "TimeoutError", "ValueError"])))),
    )


def takes(choice: Choice, candidate: DeadLetterRow) -> bool:
    """Return True if a message is selected: the oracle."""
    ledger, entry, index = candidate.position
    forms = {
        f"{ledger}:{entry}",
        f"{ledger}:{entry}:{candidate.partition}",
        f"{ledger}:{entry}:-1:-1",
        f"{ledger}:{entry}:{candidate.partition}:{index}",
    }
    return (
        (not choice.ids or not forms.isdisjoint(choice.ids))
        and (not choice.keys or candidate.key in choice.keys)
        and (not choice.causes or candidate.properties.get(CAUSE_TYPE, "") in choice.causes)
        and (choice.since is None or candidate.publish_time >= choice.since)
        and (choice.until is None or candidate.publish_time < choice.until)
    )


def expected(choice: Choice, rests: Entries) -> dict[Place, str]:
    """Return which entries are selected, and why some are refused: the oracle."""
    causes: dict[Place, str] = {}
    room = choice.limit or 1_000
    for (partition, entry), letters in sorted(rests.items()):
        count = sum(takes(choice, candidate) for candidate in letters)
        if count > room and causes:
            break
        room -= count
        if count:
            often = max(candidate.publish_time for candidate in letters) >= (
                choice.max_replays or 9
            )
            cause = "ReplayedTooOften" if often else ""
            whole = count == len(letters)
            causes[Place(partition, entry)] = cause if whole else "PartOfBatch"
    return causes


@dataclass
class Held:
    """An engine whose topic is in memory; it counts the entries read."""

    rests: Entries
    slots: int
    read: int = 0
    scanned: Scanned = field(default_factory=Scanned)

    @property
    def capacity(self) -> int:
        return self.slots

    def scan(self, scans: Sequence[Scan]) -> Iterable[PlannedRange]:
        for scan in reversed(scans):  # in whatever order
            yield plan.plan_dead_letters(scan, self._rows(scan), lambda _version: "")

    def cancel(self, error: RedriveError) -> None:
        raise AssertionError(error)

    def move(self, task: RangeTask) -> RangeResult:
        raise AssertionError(task)

    def move_all(self, tasks: Sequence[RangeTask]) -> Sequence[RangeResult]:
        raise AssertionError(tasks)

    def _rows(self, scan: Scan) -> Iterable[DeadLetterRow]:
        piece = scan.piece.range
        for (partition, entry), letters in sorted(self.rests.items()):
            here = partition == piece.partition and piece.holds(letters[0].position)
            resting = scan.piece.pending & ~scan.moved
            if here and bitmap.contains(resting, entry.entry - piece.first):
                assert entry > scan.piece.after
                self.read += 1
                yield from letters


def partitions(rests: Entries) -> list[Partition]:
    result = []
    for index, group in itertools.groupby(sorted(rests), key=lambda place: place[0]):
        sizes: dict[int, int] = {}
        for _, entry in group:
            sizes[entry.ledger] = max(sizes.get(entry.ledger, 0), entry.entry + 1)
        result.append(Partition(index, tuple(sorted(sizes.items())), Acknowledged(NOWHERE)))
    return result


def job(choice: Choice) -> ReplayJob:
    return ReplayJob("shop", "now", "uid", POLICY, "pulsar://p", "http://p", None, choice=choice)


@pytest.mark.parametrize("subscriptions", [{"analytics"}, {"analytics", "fulfilment"}, None])
@pytest.mark.parametrize("local", ["orders", "orders-fulfilment-RETRY", "checked"])
def test_source_and_retry_topic_need_subscription_of_policy(
    monkeypatch: pytest.MonkeyPatch, local: str, subscriptions: set[str] | None
) -> None:
    """The consumers of the policy receive nothing of a subscription of others."""
    complete = frozenset({"fulfilment", "analytics"})
    partial = None if subscriptions is None else frozenset(subscriptions)
    stored = TopicSubscriptions((complete, partial))
    monkeypatch.setattr(broker, "_asked", lambda *_: stored)
    target = POLICY.topic.sibling(local)
    to_target = replace(job(Choice()), target=None if target == POLICY.retry_topic else target)
    ledger = SimpleNamespace(
        records=SimpleNamespace(headers={"uid": SimpleNamespace(target_partitions=2)})
    )
    route = run._route(to_target, cast("Any", ledger), "uid/1")  # noqa: SLF001
    expected = subscriptions if local == "checked" else "fulfilment" in (subscriptions or ())
    assert route.is_subscribed() is bool(expected)


@given(topics(), st.integers(1, 3), st.data())
def test_selection_matches_the_oracle(rests: Entries, slots: int, data: st.DataObject) -> None:
    choice = data.draw(choices([row for letters in rests.values() for row in letters]))
    assert ReplayJob.decode(job(choice).encode()).choice == choice

    causes = {}
    for planned_range in plan_ranges(job(choice), Held(rests, slots), Records(), partitions(rests)):
        piece = planned_range.range
        for offset in bitmap.members(planned_range.plan.selected):
            causes[Place(piece.partition, piece.entry_id(offset))] = ""
        for refused in planned_range.plan.refused:
            causes[Place(piece.partition, refused.entry)] = refused.cause

    assert causes == expected(choice, rests)


@pytest.fixture
def long() -> Entries:
    """A topic of a hundred ranges."""
    places = [Place(0, EntryId(1, number * RANGE_ENTRIES)) for number in range(100)]
    return {
        place: [dead_letter(place.partition, Position(*place.entry, 0), 1, None, 0)]
        for place in places
    }


def test_selection_by_ids_reads_only_their_entries(long: Entries) -> None:
    held = Held(long, slots=2)
    choice = Choice(ids=(f"1:{70 * RANGE_ENTRIES}", f"1:{80 * RANGE_ENTRIES}:0:0"))
    (first, second) = plan_ranges(job(choice), held, Records(), partitions(long))
    assert [planned_range.plan.matched for planned_range in (first, second)] == [1, 1]
    assert held.read == 2


def test_selection_with_limit_reads_about_twice_as_much(long: Entries) -> None:
    held = Held(long, slots=2)
    ranges = list(plan_ranges(job(Choice(limit=10)), held, Records(), partitions(long)))
    assert sum(planned_range.plan.matched for planned_range in ranges) == 10
    assert held.read == 2 + 4 + 8


@pytest.mark.parametrize(("limit", "matched"), [(2, [3]), (3, [3]), (5, [3]), (6, [3, 3])])
def test_first_batch_is_selected_also_beyond_the_limit(limit: int, matched: list[int]) -> None:
    batches: Entries = {
        Place(0, EntryId(1, number * RANGE_ENTRIES)): [
            dead_letter(0, Position(1, number * RANGE_ENTRIES, index), 3, None, 0)
            for index in range(3)
        ]
        for number in range(4)
    }
    ranges = plan_ranges(job(Choice(limit=limit)), Held(batches, 1), Records(), partitions(batches))
    assert [planned.plan.matched for planned in ranges if planned.plan.matched] == matched


def test_moved_entries_do_not_count_for_limit(long: Entries) -> None:
    records = Records()
    for number in range(3):
        records.ranges[Range.of(0, Position(1, number * RANGE_ENTRIES, 0))] = RangeRecord(
            moved={"other": 1}
        )
    ranges = plan_ranges(job(Choice(limit=1)), Held(long, slots=1), records, partitions(long))
    assert [
        planned_range.range.first for planned_range in ranges if planned_range.plan.selected
    ] == [3 * RANGE_ENTRIES]


@given(topics(), st.none() | st.integers(1, 5))
def test_unread_plan_read_by_tasks_equals_scanned_plan(
    rests: Entries, max_replays: int | None
) -> None:
    of_all, resting = job(Choice(max_replays=max_replays)), partitions(rests)
    held = Held(rests, slots=2)

    def cause_of(entry: Sequence[DeadLetterRow]) -> str:
        return refusal(entry, len(entry), max_replays)

    scanned = {row.range: row.plan for row in plan_ranges(of_all, held, Records(), resting)}
    unread = dict(unread_ranges(Records(), resting))
    assert takes_all(of_all)
    assert unread.keys() == scanned.keys()
    for piece, by_scan in scanned.items():
        outcome = RangeOutcome({}, "uid")
        messages = [row for letters in rests.values() for row in letters if is_in(piece, row)]
        messages.sort(key=lambda row: row.position)
        for entry in by_entry(messages):
            offset = entry[0].position.entry - piece.first
            if read_first(entry, offset, outcome, bitmap.EMPTY, cause_of):
                for row in entry:
                    outcome.store((offset, row.position.batch_index), row.batch_size)
        outcome.miss(bitmap.EMPTY, bitmap.EMPTY, outcome.unseen(unread[piece].unread, piece))
        result = outcome.result(piece, {}, frozenset())
        by_task = (
            unread[piece].read(result.read).after(piece, result.refused, result.gone, done=True)
        )
        assert (by_task.scanned, by_task.matched) == (by_scan.scanned, by_scan.matched)
        assert (by_task.selected, by_task.unread) == (by_scan.selected, bitmap.EMPTY)
        assert by_task.refused == by_scan.refused
        assert result.moved.get("uid", bitmap.EMPTY) == by_scan.selected


def is_in(piece: Range, message: DeadLetterRow) -> bool:
    return message.partition == piece.partition and piece.holds(message.position)


@pytest.mark.parametrize(
    "changed",
    [
        {"where": "size > 0"},
        {"approval_above": 5},
        {"choice": Choice(ids=("1:2",))},
        {"choice": Choice(keys=("eu",))},
        {"choice": Choice(causes=("TimeoutError",))},
        {"choice": Choice(fingerprints=("0" * 16,))},
        {"choice": Choice(since=1)},
        {"choice": Choice(until=1)},
        {"choice": Choice(limit=1)},
    ],
)
def test_selective_run_is_scanned_first(changed: dict[str, Any]) -> None:
    assert not takes_all(replace(job(Choice(max_replays=3)), **changed))


UID = "uid-1"
ORDERED = replace(POLICY, subscription_type=SubscriptionType.KEY_SHARED, ordered=True)


PRINTS = {"TimeoutError": "0f4a9c31d2be7755"}
"""Fingerprints of causes that record one."""


def failed(cause: str) -> FailureCause:
    return FailureCause.of({CAUSE_TYPE: cause, CAUSE_FINGERPRINT: PRINTS.get(cause, "")})


def figures(messages: int, replayed: int = 0) -> CauseFigures:
    return CauseFigures(messages, replayed, 1_000, 1_000)


def sighting(entry: int, cause: str = "", **more: object) -> ScannedMessage:
    fields = {
        "position": Position(7, entry, 0),
        "batch_size": 1,
        "first_chunk": None,
        "encrypted": False,
        "unreadable": False,
        "schema_version": None,
        "failure": failed(cause),
        "published": 1_000,
        "size": 100,
        "replays": 0,
        "selected": True,
        **more,
    }
    return ScannedMessage(**fields)  # type: ignore[arg-type]


def planned(*seen: ScannedMessage, first: int = 0, keys: str = "") -> PlannedRange:
    """Return the plan of messages, whose keys are the characters of *keys* unless that is empty."""
    leaders = Leaders()
    messages = [
        message._replace(failure=leaders.counted(message.failure, key, follows=message.follows))
        for message, key in itertools.zip_longest(seen, keys)
    ]
    piece = Range(0, 7, first, first + 9_999)
    refusals = {5: "SchemaNotFound"}
    return plan_range(piece, messages, lambda n: refusals.get(n or 0, ""), leaders=leaders.causes)


def preview_of(
    *ranges: PlannedRange, slots: int = 2, rate: float | None = None, policy: Policy = POLICY
) -> RunPreview:
    records = Records()
    records.plans[UID] = {planned_range.range: planned_range.plan for planned_range in ranges}
    job = ReplayJob("shop", "a", UID, policy, "pulsar://p", "http://p", None, rate_limit=rate)
    return RunPreview.of(Account.of(UID, records), ranges, job, slots)


def test_unevaluated_messages_are_counted_and_not_planned() -> None:
    planned_range = planned(
        sighting(0),
        sighting(1, selected=False, evaluated=False),
        sighting(2, selected=False),
        sighting(3, selected=False, evaluated=False),
    )
    account = preview_of(planned_range).account
    assert (account.scanned, account.matched, account.unevaluated, account.left) == (4, 1, 2, 1)
    assert account.to_status()["counts"]["unevaluated"] == 2
    assert (Scanned.of(planned_range) + Scanned.of(planned_range)).unevaluated == 4


def test_batch_with_an_unevaluated_message_is_refused_in_part() -> None:
    planned_range = planned(
        sighting(0, batch_size=2),
        sighting(0, position=Position(7, 0, 1), batch_size=2, selected=False, evaluated=False),
    )
    account = preview_of(planned_range).account
    assert (account.matched, account.unevaluated, account.refused) == (1, 1, 1)
    assert [refused.cause for refused in account.refusals] == ["PartOfBatch"]


def test_messages_of_batches_are_counted() -> None:
    planned_range = planned(
        sighting(0, batch_size=2),
        sighting(0, position=Position(7, 0, 1), batch_size=2),
        sighting(1),
        sighting(2, batch_size=2, selected=False),
    )
    account = preview_of(planned_range).account
    assert (account.left, account.batched) == (3, 2)
    assert account.to_status()["counts"]["batched"] == 2


def test_unevaluated_messages_behind_a_limit_do_not_count() -> None:
    seen = [sighting(at, selected=at < 3, evaluated=at < 3) for at in range(5)]
    seen[0] = sighting(0, selected=False, evaluated=False)
    limited = plan_range(Range(0, 7, 0, 9_999), seen, lambda _: "", Choice(limit=1))
    assert (limited.plan.matched, limited.plan.unevaluated) == (1, 1)


def test_preview_counts_messages_by_cause() -> None:
    first = planned(
        sighting(0, "TimeoutError", published=5_000),
        sighting(1, "ValueError", selected=False),
        sighting(2, "TimeoutError", encrypted=True),
        sighting(3, published=2**64),
    )
    second = planned(
        sighting(10_000, "TimeoutError", published=3_000, replays=2),
        sighting(10_001, schema_version=5),
        first=10_000,
    )

    preview = preview_of(first, second)

    account = preview.account
    assert (account.scanned, account.matched, account.refused, account.left) == (6, 5, 2, 3)
    assert preview.causes == {
        failed("TimeoutError"): CauseFigures(2, replayed=1, first=3_000, last=5_000),
        failed(""): CauseFigures(1, replayed=0, first=2**64, last=2**64),
    }
    assert preview.refused == {"Encrypted": 1, "SchemaNotFound": 1}
    assert preview.samples == ("7:0:0:0", "7:3:0:0", "7:10000:0:0")
    run = ReplayRun.model_validate(preview.to_status())
    assert (run.progress, run.counts.left) == ("2/5", 3)
    assert run.preview is not None
    assert [cause.to_manifest() for cause in run.preview.causes] == [
        {
            "cause": "TimeoutError",
            "messages": 2,
            "fingerprint": "0f4a9c31d2be7755",
            "replayed": 1,
            "firstTime": "1970-01-01T00:00:03Z",
            "lastTime": "1970-01-01T00:00:05Z",
        },
        {"cause": "", "messages": 1, "replayed": 0},  # published after the year 9999
    ]


def test_followers_count_with_the_cause_of_their_key() -> None:
    """Also of another range, whatever the order in which ranges are scanned."""
    first = planned(
        sighting(0, "PaymentRejected", selected=False),
        sighting(1, follows=True),
        sighting(2, follows=True, selected=False),
        sighting(3, "TimeoutError"),
        keys="aaab",
    )
    second = planned(
        sighting(10_000, follows=True),
        sighting(10_001, "TimeoutError"),
        sighting(10_002, follows=True),
        first=10_000,
        keys="aac",
    )
    preview = preview_of(second, first)
    assert {name: figures.messages for name, figures in preview.causes.items()} == {
        failed("PaymentRejected"): 2,
        failed("TimeoutError"): 2,
        FOLLOWER: 1,
    }
    assert preview.following == 1
    assert Scanned.of(second).causes[FOLLOWER].messages == 2


def test_preview_in_status_is_bounded() -> None:
    ranges = [
        planned(
            *(sighting(first + entry, f"{entry}{'x' * 5_000}", size=2**20) for entry in range(500)),
            first=first,
        )
        for first in (0, 10_000)
    ]
    preview = preview_of(*ranges)
    written = preview.to_status()["preview"]
    assert len(written["causes"]) == 20
    assert len(written["samples"]) == 10
    assert max(len(cause["cause"]) for cause in written["causes"]) == 256
    Preview.model_validate(written)
    assert preview.seconds == 50  # 1 000 MiB by two slots of 10 MiB a second
    assert preview_of(*ranges, slots=1).seconds == 100
    assert preview_of(*ranges, policy=ORDERED).seconds == 100, "one range after the other"


def test_causes_of_a_range_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "MAX_CAUSES", 2 * account.CAUSES)
    seen = (sighting(entry, "Often" if entry % 2 else f"E{entry}") for entry in range(10_000))
    tracemalloc.start()
    try:
        causes = plan.plan(Range(0, 7, 0, 9_999), seen, lambda _: "").causes
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert causes[failed("Often")].messages == 5_000
    assert len(causes) == account.CAUSES
    assert peak < 2**20


def test_scan_counts_are_bounded() -> None:
    often = {failed("TimeoutError"): figures(10_000)}
    total = Scanned()
    for first in range(0, 5_000, 100):
        rare = {failed(f"x{number}"): figures(1) for number in range(first, first + 99)}
        total += Scanned(10_099, often | rare, Counter(Encrypted=1))
    assert total.messages == 50 * 10_099
    assert len(total.causes) == 100
    assert total.causes[failed("TimeoutError")] == figures(500_000)
    assert total.refused == {"Encrypted": 50}


def test_rate_limit_bounds_the_estimated_time() -> None:
    planned_range = planned(*(sighting(entry) for entry in range(500)))
    assert preview_of(planned_range).seconds == 1
    assert preview_of(planned_range, rate=10.0).seconds == 50


def test_limit_takes_first_positions_in_any_order() -> None:
    """As a message in chunks that a reader has lost."""
    seen = [sighting(1), sighting(2), sighting(0)]
    planned_range = plan_range(Range(0, 7, 0, 9_999), seen, lambda _version: "", Choice(limit=2))
    assert planned_range.plan.selected == 0b11


def test_plan_notes_first_chunk_of_message() -> None:
    planned_range = planned(sighting(5, first_chunk=EntryId(6, 49_999)))
    assert planned_range.plan.chunks == {5: EntryId(6, 49_999)}


WAIT_SECONDS = 60.0


class Counted:
    """An engine that is asked how far it is."""

    slots = capacity = 2

    def __init__(self) -> None:
        self.scanned = Scanned()
        self.canceled = threading.Event()

    def scan(self, scans: Sequence[Scan]) -> Iterable[PlannedRange]:
        raise AssertionError(scans)

    def cancel(self, error: RedriveError) -> None:
        assert error.reason == "Canceled"
        self.canceled.set()

    def move(self, task: RangeTask) -> RangeResult:
        raise AssertionError(task)

    def move_all(self, tasks: Sequence[RangeTask]) -> Sequence[RangeResult]:
        raise AssertionError(tasks)


class Status:
    """Records reports; the API server refuses the first one."""

    def __init__(self) -> None:
        self.written: list[Scanned] = []
        self._refused = 0
        self.has_changed = threading.Condition()

    def rate_limit(self, job: ReplayJob) -> float | None:
        return job.rate_limit

    def take_over(self, _: EntryId) -> None:
        pass

    def report(self, account: Account, *, pause: Pause | None = None) -> DesiredState:
        raise AssertionError(account, pause)

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


def test_scan_progress_is_reported_while_planning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert REPORT_SECONDS <= 1
    monkeypatch.setattr(run, "REPORT_SECONDS", 0.01)
    monkeypatch.setattr(run, "POLL_SECONDS", 0.01)
    engine, status = Counted(), Status()
    timeouts, others = failed("TimeoutError"), failed("ValueError")
    some = Scanned(10_000, {timeouts: figures(9_000)}, Counter(Encrypted=1_000))
    more = some + Scanned(5_000, {others: figures(1), timeouts: figures(4_999, replayed=7)})
    with reporting_progress(engine, status):
        for scanned in (some, more):
            engine.scanned = scanned
            status.waits_for(scanned)
    engine.scanned += some
    assert status.written == [some, more]  # each once
    assert more.causes == {timeouts: figures(13_999, replayed=7), others: figures(1)}


class Canceled(Status):
    """The Replay is canceled, or reaches its deadline, while the run is planned."""

    def report_scan(self, scanned: Scanned) -> None:  # noqa: ARG002
        raise RunEndedError("the run has ended", remedy="none", reason="Canceled")


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_canceled_replay_ends_its_plan(
    monkeypatch: pytest.MonkeyPatch, *, is_interrupted: bool
) -> None:
    """Also while a scan has no results, and if it ends before it is canceled."""
    monkeypatch.setattr(run, "IDLE_SECONDS", 0.01)
    engine = Counted()
    with raises("Canceled"), reporting_progress(engine, Canceled()):
        assert engine.canceled.wait(WAIT_SECONDS)
        if is_interrupted:
            raise OSError("Spark ended the job")


def test_canceled_children_begin_no_task() -> None:
    children = Children(PodSize(1, 2**30))
    children.cancel(RunEndedError("the run has ended", remedy="none", reason="Canceled"))
    with raises("Canceled"):
        children.run(str, 1)


def test_scan_error_is_raised_unchanged() -> None:
    with pytest.raises(ZeroDivisionError), reporting_progress(Counted(), Status()):
        raise ZeroDivisionError


class CompressedEntries:
    """In the place of a client and its reader: entries that are decompressed one by one."""

    def __init__(self, content: bytes, count: int, size: int | None = None) -> None:
        fields = numbers(compression=3, uncompressed=len(content) if size is None else size)
        stored = pa.Codec("zstd").compress(content, asbytes=True)
        self._entry, self._count, self._read = bytes_of(RawEntry(fields, stored)), count, 0
        self._max_content = 0

    def open_entry_reader(
        self,
        *_: object,
        max_content: int,
        **__: object,
    ) -> CompressedEntries:
        self._max_content = max_content
        return self

    def read_next(self, _timeout: int) -> ReadMessage:
        entry, place = StoredEntry.read(self._entry), (7, self._read)
        self._read += 1
        (message,) = entry.of(entry.content, (place,), 0, self._max_content)
        return message

    def close(self) -> None:
        assert self._read == self._count

    def plan(self) -> PlannedRange:
        piece = Piece(Range(0, 7, 0, 9_999), (1 << self._count) - 1, EntryId(7, -1))
        scan = Scan("", "http://p", POLICY.dead_letter_topic, piece, bitmap.EMPTY, 10)
        messages = plan.read_dead_letters(cast("broker.ReadingClient", self), scan)
        return plan.plan_dead_letters(scan, messages, lambda _: "")


def test_plan_holds_one_decompressed_message_at_a_time() -> None:
    content = bytes(2**24)
    entries = CompressedEntries(content, 3)
    tracemalloc.start()
    try:
        matched = entries.plan().plan.matched
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert matched == 3
    assert len(content) < peak < 1.5 * len(content)


def test_plan_refuses_content_above_its_limit() -> None:
    assert CompressedEntries(b"small", 2).plan().refused == {}
    large = CompressedEntries(b"", 2, size=MAX_READ_CONTENT + 1)
    assert large.plan().refused == {"ContentTooLarge": 2}


def test_error_of_a_task_keeps_its_reason_in_another_process() -> None:
    error = RedriveError("no", remedy="wait", reason="DeduplicationOff")
    received = pickle.loads(pickle.dumps(TaskFailure.of(error))).error()  # noqa: S301
    assert (type(received), received.reason, str(received)) == (
        RedriveError, "DeduplicationOff", "no; wait",
    )  # fmt: skip

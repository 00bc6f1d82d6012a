"""Records of a ledger, its account, its audit, and the list of refused messages."""

from __future__ import annotations

import base64
import itertools
import json
import zlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pulsar
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from redrive.api.replay import DeadLetterId
from redrive.errors import RedriveError
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.reading import bitmap, broker
from redrive.reading.broker import ReadingClient
from redrive.reading.positions import EntryId, Position, Tail, TargetPartition
from redrive.reading.ranges import Range
from redrive.reading.stored import MessagePlace
from redrive.replay import ledger as ledger_module
from redrive.replay import records, refused
from redrive.replay.account import Account
from redrive.replay.audit import AuditFindings, TargetMessages, compare, moved_entries
from redrive.replay.evidence import CODE, NUMBER, LedgerKey, SignedRecord
from redrive.replay.evidence import KEY as KEY_PROPERTY
from redrive.replay.evidence import OWNER as OWNER_PROPERTY
from redrive.replay.job import run as runs
from redrive.replay.job.plan import Engine
from redrive.replay.ledger import FencedError, Lease, Ledger
from redrive.replay.ledger import read as read_ledger
from redrive.replay.records import (
    PERMIT,
    EntriesRead,
    Header,
    Permit,
    RangePlan,
    RangeRecord,
    Records,
    RefusedEntry,
)
from redrive.replay.spec import ReplayJob

OF = Range(0, 7, 0, 9_999)
ABOVE = Range(0, 7, 10_000, 19_999)
UID = "uid-1"
HEADER = Header(
    "shop/again",
    3,
    reason="it is up again",
    ticket="OPS-1432",
    began={TargetPartition(TopicName("shop", "prod", "ü-RETRY"), -1): EntryId(7, -1)},
    held={-1: frozenset({7, 9})},
)
bits = st.sets(st.integers(0, 40)).map(lambda numbers: bitmap.of(numbers, 41))
entries = st.builds(EntryId, st.integers(0, 99), st.integers(-1, 99))
uids = st.sampled_from([UID, "uid-2", "uid-3"])
counts = st.integers(0, 9)
places = st.builds(
    TargetPartition,
    st.sampled_from([TopicName("shop", "prod", "orders"), TopicName("a", "b", "ü-RETRY")]),
    st.integers(-1, 3),
)
range_records = st.builds(
    RangeRecord,
    generation=st.integers(0, 9),
    leased=st.booleans(),
    moved=st.dictionaries(uids, bits),
    partly=st.dictionaries(uids, st.dictionaries(st.integers(0, 40), st.integers(1, 7))),
    tails=st.dictionaries(
        places,
        st.builds(Tail, entries, counts, st.none() | counts, st.none() | bits),
    ),
    replays=st.none() | st.frozensets(uids),
    unproven=st.dictionaries(st.tuples(places, st.none() | counts), bits),
    chunks=st.dictionaries(st.integers(0, 40), entries),
)
refused_entries = st.lists(
    st.builds(RefusedEntry, entries, st.integers(1, 9), st.just("Encrypted")), max_size=3
).map(tuple)
plans = st.builds(
    RangePlan,
    scanned=st.integers(0, 99),
    selected=bits,
    sizes=st.dictionaries(st.integers(0, 40), st.integers(2, 9)),
    refused=refused_entries,
    skipped=bits,
    done=st.booleans(),
    chunks=st.dictionaries(st.integers(0, 40), entries),
    unread=bits,
)


def with_records(record: RangeRecord, plan: RangePlan) -> Records:
    """Return a ledger with these two, read from their JSON."""
    ledger = Records()
    written: Mapping[str, object] = {
        records.range_key(OF): record.to_json(),
        records.plan_key(UID, OF): plan.to_json(),
        records.header_key(UID): HEADER.to_json(),
    }
    for key, value in written.items():
        ledger.apply(key, json.dumps(value).encode())
    return ledger


@given(range_records, plans)
def test_record_is_read_as_written_and_removed_by_tombstone(
    record: RangeRecord, plan: RangePlan
) -> None:
    ledger = with_records(record, plan)
    assert ledger.range(OF) == record
    assert ledger.plans == {UID: {OF: plan}}
    assert ledger.headers == {UID: HEADER}
    for key in (records.range_key(OF), records.plan_key(UID, OF), records.header_key(UID)):
        ledger.apply(key, b"")
    assert (ledger.ranges, ledger.headers, ledger.plans[UID]) == ({}, {}, {})


@given(range_records, plans)
def test_records_are_written_again_as_they_were_read(record: RangeRecord, plan: RangePlan) -> None:
    ledger, again = with_records(record, plan), Records()
    for key, value in ledger.items():
        again.apply(key, json.dumps(value).encode())
    assert vars(again) == vars(ledger)


RECORD = RangeRecord(3, moved={UID: 1}).to_json()
PLAN = RangePlan(3, 7, {0: 2}, (RefusedEntry(EntryId(7, 1), 1, "Encrypted"),)).to_json()
HUGE_SET = base64.b64encode(zlib.compress(bytes(2**22))).decode()
INVALID_RECORDS: dict[str, tuple[str, object]] = {
    "no JSON": (records.range_key(OF), b"\xff{"),
    "endless nesting": (records.range_key(OF), b"[" * 100_000),
    "null": (records.range_key(OF), None),
    "another shape": (records.range_key(OF), ["moved"]),
    "missing field": (records.range_key(OF), {"generation": 4}),
    "text for a number": (records.range_key(OF), RECORD | {"generation": "4"}),
    "number out of bounds": (records.range_key(OF), RECORD | {"generation": 2**63}),
    "no set": (records.range_key(OF), RECORD | {"moved": {UID: "all"}}),
    "huge set": (records.range_key(OF), RECORD | {"moved": {UID: HUGE_SET}}),
    "no entry": (records.range_key(OF), RECORD | {"chunks": {"1": "7"}}),
    "no topic": (records.range_key(OF), RECORD | {"tails": {"orders 0": ["7:8", 1, 0, 0]}}),
    "short list": (records.range_key(OF), RECORD | {"tails": {"persistent://a/b/c 0": ["7:8"]}}),
    "offset of no entry": (records.range_key(OF), RECORD | {"partly": {UID: {"-1": 1}}}),
    "no range": ("range/0.7", RECORD),
    "huge range": ("range/0.7.0.99999999999", RECORD),
    "plan of another shape": (records.plan_key(UID, OF), PLAN | {"refused": [["7:1", 1]]}),
    "plan of no range": (f"plan/{UID}/all", PLAN),
    "header of another shape": (records.header_key(UID), {"replay": 4, "target_partitions": 1}),
    "owner of another shape": ("owner", {}),
    "unknown kind": ("secret", {}),
    "no key": ("", {}),
}


@pytest.mark.parametrize(("key", "value"), INVALID_RECORDS.values(), ids=INVALID_RECORDS)
def test_invalid_record_is_skipped_and_counted(key: str, value: object) -> None:
    ledger, before = (with_records(RangeRecord(3), RangePlan(1, 1, {}, ())) for _ in range(2))
    ledger.apply(key, value if isinstance(value, bytes) else json.dumps(value).encode())
    assert vars(ledger) == vars(before) | {"skipped": 1}
    assert Account.of(UID, ledger).skipped_records == 1
    ledger.apply(records.range_key(OF), json.dumps(RECORD).encode())
    assert ledger.range(OF).generation == 3
    assert ledger.range(OF).moved == {UID: 1}


@given(range_records, st.sampled_from(sorted(RECORD)), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
))  # fmt: skip
def test_mutated_record_is_read_or_skipped(record: RangeRecord, field: str, value: object) -> None:
    ledger = Records()
    written = record.to_json() | {field: value}
    ledger.apply(records.range_key(OF), json.dumps(written).encode())
    assert (ledger.skipped, len(ledger.ranges)) in {(1, 0), (0, 1)}
    assert dict(ledger.items()).keys() - {records.OWNER} == set(
        map(records.range_key, ledger.ranges)
    )


@given(range_records, plans)
def test_matched_messages_equal_the_sum_of_the_account(
    record: RangeRecord, plan: RangePlan
) -> None:
    account = Account.of(UID, with_records(record, plan))
    together = account.moved + account.skipped + account.refused + account.left
    assert account.matched == together
    assert account.refused == sum(entry.messages for entry in plan.refused)
    others = record.moved_by_any & ~record.moved.get(UID, 0)
    remaining = plan.selected & ~record.moved.get(UID, 0) & ~plan.skipped & ~others
    assert account.left == plan.messages(remaining)
    several = bitmap.of(plan.sizes, OF.size)
    moved = plan.selected & record.moved.get(UID, 0)
    assert account.batched == plan.messages((moved | remaining) & several)


@given(range_records, plans, bits)
def test_acknowledged_entries_count_as_moved_during_lease(
    record: RangeRecord, plan: RangePlan, acknowledged: int
) -> None:
    ledger = with_records(record, plan)
    before, after = (Account.of(UID, ledger, seen) for seen in ({}, {OF: acknowledged}))
    moved = after.moved - before.moved
    assert moved == before.left - after.left
    assert (before.matched, before.skipped) == (after.matched, after.skipped)
    selected = plan.selected & ~plan.skipped & ~record.moved_by_any
    assert moved == (plan.messages(selected & acknowledged) if record.leased else 0)


@given(range_records, plans, st.sets(st.integers(0, 40)), bits)
def test_refused_entries_found_later_stay_in_the_account(
    record: RangeRecord, plan: RangePlan, offsets: set[int], gone: int
) -> None:
    before = Account.of(UID, with_records(record, plan))
    selected = [offset for offset in offsets if bitmap.contains(plan.selected, offset)]
    after = plan.after(OF, [(OF.entry_id(at), "TooBig") for at in selected], gone, done=True)
    account = Account.of(UID, with_records(record, after))
    assert after.done
    assert account.matched == before.matched
    assert account.matched == account.moved + account.skipped + account.refused + account.left


@given(range_records, bits, bits, st.data())
def test_entries_read_by_tasks_keep_the_account_equal(
    record: RangeRecord, unread: int, seen: int, data: st.DataObject
) -> None:
    read = unread & seen
    sizes = {at: data.draw(st.integers(2, 9)) for at in bitmap.members(read)}
    empty = data.draw(bits) & unread & ~read & ~record.moved_by_any
    before = RangePlan.of_unread(unread)
    assert before.scanned == before.matched == unread.bit_count()

    after = before.read(EntriesRead(read, sizes, {}, empty))

    assert after.scanned == after.matched
    assert after.matched == sum(sizes.values()) + (unread & ~read & ~empty).bit_count()
    assert after.unread == unread & ~read & ~empty
    account = Account.of(UID, with_records(record, after))
    assert account.matched == account.moved + account.skipped + account.refused + account.left
    whole = after.read(EntriesRead(after.unread))
    assert whole.unread == bitmap.EMPTY
    assert whole.read(EntriesRead(unread, sizes, {}, unread)) == whole


@given(range_records, plans)
def test_outdated_records_are_other_plans_and_trimmed_ranges(
    record: RangeRecord, plan: RangePlan
) -> None:
    ledger = with_records(record, plan)
    assert list(ledger.outdated(UID, [(0, 7)])) == []
    # The account of a run that continues contains its moved messages.
    assert list(ledger.outdated(UID, [(0, 8), (1, 7)])) == []
    others = list(ledger.outdated("uid-2", [(0, 7)]))
    # The header first: a rest after a crash in between must not pass for a plan.
    assert others == [records.header_key(UID), records.plan_key(UID, OF)]
    trimmed = list(ledger.outdated("uid-2", [(0, 8), (1, 7)]))
    assert trimmed == [records.range_key(OF), *others]


FIRST, SECOND = Range(0, 7, 0, 9_999), Range(0, 8, 0, 9_999)


def ledger_of(**range_records_by_name: RangeRecord) -> Records:
    """Return a ledger with a record for `of`, for `other`."""
    ledger = Records()
    for name, record in range_records_by_name.items():
        key = records.range_key({"of": FIRST, "other": SECOND}[name])
        ledger.apply(key, json.dumps(record.to_json()).encode())
    return ledger


def stored(*places: tuple[int, ...]) -> TargetMessages:
    """Return messages of a target, by ledger, entry and index."""
    messages = TargetMessages()
    for ledger, entry, *index in places:
        messages.add(0, Position(ledger, entry, *(index or [0])))
    return messages


def test_audit_of_consistent_ledger_has_no_findings() -> None:
    ledger = ledger_of(of=RangeRecord(moved={"uid": 0b101}))
    messages = stored((7, 0), (7, 2))
    assert compare(moved_entries(ledger), ledger, messages, {FIRST: 0b010}) == AuditFindings()


def test_audit_reports_each_disagreement_with_position() -> None:
    ledger = ledger_of(of=RangeRecord(moved={"uid": 0b111}), other=RangeRecord(leased=True))
    messages = stored((7, 0), (7, 0), (7, 1), (7, 5), (8, 3))
    backlog = {FIRST: 0b10_0010, SECOND: 0b1000}
    findings = compare(moved_entries(ledger), ledger, messages, backlog)
    assert findings == AuditFindings(
        doubled={(FIRST, 0): 0b1},
        unrecorded={FIRST: 0b10_0000},
        missing={FIRST: 0b100},
        returned={FIRST: 0b10},
        open=(SECOND,),
    )
    assert findings.result(("orders-RETRY",), 5).to_manifest() == {
        "topics": ["orders-RETRY"],
        "messages": 5, "doubled": 1, "missing": 1, "unrecorded": 1, "returned": 1, "open": 1,
        "doubledExamples": ["7:0:0:0"], "unrecordedExamples": ["7:5:0"],
    }  # fmt: skip


def test_audit_beside_a_replay_finds_open_ranges_only() -> None:
    """Meanwhile entry 1 was sent and recorded, entry 2 sent, and entry 3 recorded and consumed."""
    before = ledger_of(of=RangeRecord(leased=True, moved={"uid": 0b1}))
    after = ledger_of(of=RangeRecord(leased=True, moved={"uid": 0b1011}))
    messages = stored((7, 0), (7, 1), (7, 2))
    findings = compare(moved_entries(before), after, messages, {FIRST: 0b1110})
    assert findings == AuditFindings(open=(FIRST,))


def test_audit_leaves_out_what_no_replay_sends_again() -> None:
    """The next one searches after tails, refuses unproven messages, and sends no settled ones."""
    tails = {TargetPartition(TopicName("shop", "prod", "orders-RETRY"), -1): EntryId(9, 4)}
    ended = RangeRecord(tails={place: Tail(entry, 0) for place, entry in tails.items()})
    messages = stored((7, 1), (7, 2))
    assert compare({}, ledger_of(of=ended), messages, {FIRST: 0b110}) == AuditFindings(
        open=(FIRST,)
    )
    (place,) = tails
    unproven = RangeRecord(unproven={(place, None): 0b11})
    findings = compare({}, ledger_of(of=unproven), messages, {FIRST: 0b110})
    assert findings == AuditFindings(unrecorded={FIRST: 0b100})
    assert compare({}, Records(), messages, {}) == AuditFindings()


def test_message_moved_by_two_replays_is_doubled() -> None:
    ledger = ledger_of(of=RangeRecord(moved={"uid": 0b1, "uid-2": 0b1}))
    findings = compare(moved_entries(ledger), ledger, stored((7, 0), (7, 0)), {})
    assert findings == AuditFindings(doubled={(FIRST, 0): 0b1})


def test_audit_compares_each_message_of_a_partly_moved_entry() -> None:
    ledger = ledger_of(of=RangeRecord(partly={"uid": {4: 0b1}}))
    backlog = {FIRST: 0b1_0000}
    assert compare({}, ledger, stored((7, 4, 0)), backlog) == AuditFindings()
    findings = compare({}, ledger, stored((7, 4, 0), (7, 4, 1)), backlog)
    assert findings == AuditFindings(unrecorded=backlog)


def plan_refusing(*entries: int) -> RangePlan:
    refusals = tuple(RefusedEntry(EntryId(7, entry), 2, "PartOfBatch") for entry in entries)
    return RangePlan(100, 0, {}, refusals)


def test_refused_list_has_an_id_on_every_line() -> None:
    records = Records()
    records.headers["uid"] = Header("shop/again", 0)
    records.plans["uid"] = {
        Range(-1, 7, 10_000, 19_999): plan_refusing(*range(10_000, 10_150)),
        Range(-1, 7, 0, 9_999): plan_refusing(8, 3),
    }
    lines = list(refused.lines(records))
    assert len(lines) == 152
    assert lines[:3] == [
        "7:3:-1 2 PartOfBatch shop/again",
        "7:8:-1 2 PartOfBatch shop/again",
        "7:10000:-1 2 PartOfBatch shop/again",
    ]
    for line in lines:
        TypeAdapter(DeadLetterId).validate_python(line.split()[0])


def test_refused_list_omits_incomplete_plans() -> None:
    records = Records()
    records.plans["uid"] = {Range(-1, 7, 0, 9_999): plan_refusing(3)}
    assert list(refused.lines(records)) == []


LEDGER = TopicName("shop", "prod", "orders-billing-DLQ-LEDGER")
DROPPED = pulsar.MessageId(-1, -1, -1, -1)
"""The receipt of a record that the broker takes for a duplicate."""


KEY = LedgerKey(b"key of the ledger of this test")


Receive = Callable[[pulsar.Result, pulsar.MessageId], None]


class LedgerRecord(NamedTuple):
    """A stored record, as a reader shows it."""

    place: MessagePlace
    content: bytes
    options: dict[str, Any]

    def data(self) -> bytes:
        return self.content

    def partition_key(self) -> str:
        return str(self.options["partition_key"])

    def properties(self) -> dict[str, str]:
        return dict(self.options.get("properties", {}))


class LedgerTopic:
    """The part of `ReadingClient` for one topic: producers that fence off others, and readers."""

    def __init__(self) -> None:
        self.stored: list[LedgerRecord] = []
        self.drops = 0
        self.is_full = False
        self.owner: object = None

    def as_client(self) -> ReadingClient:
        return cast("ReadingClient", self)

    def create_producer(self, _topic: str, **options: object) -> LedgerProducer:
        producer = LedgerProducer(self)
        if options["access_mode"] == pulsar.ProducerAccessMode.ExclusiveWithFencing:
            self.owner = producer
        return producer

    def open_entry_reader(
        self, _topic: object, _index: int, after: EntryId, **_: object
    ) -> LedgerReader:
        return LedgerReader(self, after.entry + 1)

    def store(self, content: bytes, **options: Any) -> pulsar.MessageId:  # noqa: ANN401
        """Store a message of any producer."""
        entry = len(self.stored)
        self.stored.append(LedgerRecord(MessagePlace(-1, ((7, entry),)), content, options))
        return pulsar.MessageId(-1, 7, entry, -1)


class LedgerProducer:
    """A producer, until another one fences it off."""

    def __init__(self, topic: LedgerTopic) -> None:
        self._topic = topic

    def send(self, content: bytes, **options: Any) -> pulsar.MessageId:  # noqa: ANN401
        topic = self._topic
        if topic.owner not in {None, self}:
            raise pulsar.ProducerFenced
        if topic.is_full:
            raise pulsar.ProducerBlockedQuotaExceededException("Pulsar error: Quota")
        if topic.drops:
            topic.drops -= 1
            return DROPPED
        return topic.store(content, **options)

    def send_async(self, content: bytes, receive: Receive, **options: Any) -> None:  # noqa: ANN401
        result, stored = pulsar.Result.Ok, DROPPED
        try:
            stored = self.send(content, **options)
        except pulsar.ProducerFenced:
            result = pulsar.Result.ProducerFenced
        receive(result, stored)


class LedgerReader:
    """A reader of all records from one on."""

    def __init__(self, topic: LedgerTopic, start: int) -> None:
        self._topic = topic
        self._next = start

    def next_stored(self, _milliseconds: int) -> LedgerRecord | None:
        if self._next == len(self._topic.stored):
            return None
        self._next += 1
        return self._topic.stored[self._next - 1]

    def close(self) -> None:
        """Do nothing."""


def open_ledger(topic: LedgerTopic, owner: str) -> Ledger:
    return Ledger(topic.as_client(), LEDGER, owner, KEY)


def test_ledger_record_without_entry_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "time", SimpleNamespace(monotonic=lambda: 0, sleep=int))
    topic = LedgerTopic()
    ledger = open_ledger(topic, "first")
    topic.drops = 2
    stored = ledger.write(records.header_key(UID), HEADER.to_json())
    assert stored.ledger_id() >= 0
    assert ledger.records.headers == {UID: HEADER}
    assert read_ledger(topic.as_client(), LEDGER, KEY).headers == {UID: HEADER}


@pytest.mark.parametrize("count", [0, 1, ledger_module.IN_FLIGHT, 2 * ledger_module.IN_FLIGHT + 3])
def test_records_are_written_together_in_their_order(count: int) -> None:
    topic = LedgerTopic()
    ledger = open_ledger(topic, "first")
    begun = len(topic.stored)
    plans = [Range(-1, 7, at * 10, at * 10 + 9) for at in range(count)]
    written = ledger.write_all(
        (records.range_key(piece), RangeRecord(1).to_json()) for piece in plans
    )
    assert [at.entry_id() for at in written] == list(range(begun, begun + count))
    assert list(ledger.records.ranges) == plans
    assert read_ledger(topic.as_client(), LEDGER, KEY).ranges == ledger.records.ranges


@pytest.mark.parametrize("failed", range(4))
def test_records_after_a_failed_one_are_written_again(
    monkeypatch: pytest.MonkeyPatch, failed: int
) -> None:
    """The last value of each key counts, so the order of keys and values must hold."""
    topic = LedgerTopic()
    ledger = open_ledger(topic, "first")
    values = [
        (OF, RangeRecord(1)),
        (ABOVE, RangeRecord(1)),
        (OF, RangeRecord(2)),
        (OF, RangeRecord(3)),
    ]
    attempts = itertools.count()
    store = topic.store
    monkeypatch.setattr(
        topic,
        "store",
        lambda *args, **options: DROPPED if next(attempts) == failed else store(*args, **options),
    )
    written = ledger.write_all(
        (records.range_key(piece), value.to_json()) for piece, value in values
    )
    assert written == sorted(written)
    read = read_ledger(topic.as_client(), LEDGER, KEY)
    assert (read.ranges, read.skipped) == ({OF: RangeRecord(3), ABOVE: RangeRecord(1)}, 0)
    assert ledger.records.ranges == read.ranges


def test_plan_replaces_more_plans_than_are_written_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger, planned = open_ledger(LedgerTopic(), "first"), RangePlan.of_unread(0b1)
    pieces = [Range(-1, 7, at * 10, at * 10 + 9) for at in range(ledger_module.IN_FLIGHT + 3)]
    ledger.write_all((records.plan_key(UID, piece), planned.to_json()) for piece in pieces)
    monkeypatch.setattr(runs, "all_plans", lambda *_: [(OF, planned)])
    monkeypatch.setattr(broker, "read_partitions", lambda *_: ())
    policy = Policy(TopicName("shop", "prod", "orders"), "billing")
    job = ReplayJob("shop", "a", UID, policy, "pulsar://p", "http://p", None)
    runs._plan(job, cast("Engine", None), ledger, [], None)  # noqa: SLF001 - the step in question
    assert (ledger.records.plans[UID], list(ledger.records.headers)) == ({OF: planned}, [UID])


def test_fenced_ledger_writes_none_of_several_records() -> None:
    topic = LedgerTopic()
    first = open_ledger(topic, "first")
    open_ledger(topic, "second")
    begun = len(topic.stored)
    with pytest.raises(FencedError):
        first.write_all([(records.range_key(OF), RangeRecord(1).to_json())] * 3)
    assert len(topic.stored) == begun


def test_ledger_over_its_quota_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ages = itertools.count(step=400)
    clock = SimpleNamespace(monotonic=lambda: next(ages), sleep=int)
    monkeypatch.setattr(ledger_module, "time", clock)
    topic = LedgerTopic()
    ledger = open_ledger(topic, "first")
    topic.is_full = True
    with pytest.raises(RedriveError, match="raise its backlog quota by size or by age") as shown:
        ledger.write(records.header_key(UID), HEADER.to_json())
    assert shown.value.reason == "LimitReached"


def test_open_transaction_ends_a_read_of_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    topic = LedgerTopic()
    open_ledger(topic, "first")
    for is_open in (True, False):
        monkeypatch.setattr(broker, "has_open_transaction", lambda *_, is_open=is_open: is_open)
        with pytest.raises(RedriveError, match="transaction is open") if is_open else nullcontext():
            read_ledger(topic.as_client(), LEDGER, KEY, "http://pulsar:8080")


def test_ledger_takeover_ends_writes_and_leases_of_others() -> None:
    topic = LedgerTopic()
    first = open_ledger(topic, "first")
    lease = lease_of(topic, first, "first")
    first.write(PERMIT, Permit(40.0).to_json())
    lease.check()
    assert lease.permit == Permit(40.0)
    first.write(PERMIT, {"rate": "all"})
    lease.check()
    assert lease.permit == Permit(40.0)
    second = open_ledger(topic, "second")
    assert second.fencing_token > first.fencing_token
    with pytest.raises(FencedError):
        first.write(records.header_key(UID), HEADER.to_json())
    with pytest.raises(FencedError):
        lease.check()
    lease_of(topic, second, "second").check()


def lease_of(topic: LedgerTopic, ledger: Ledger, owner: str) -> Lease:
    """Return a lease of `OF` that *ledger* gives."""
    at = ledger.write(records.range_key(OF), RangeRecord(3, leased=True).to_json())
    since = EntryId(at.ledger_id(), at.entry_id())
    return Lease(topic.as_client(), LEDGER, owner, KEY, [OF], since, ledger.number, Permit())


def test_lease_ends_when_its_range_is_leased_again() -> None:
    topic = LedgerTopic()
    ledger = open_ledger(topic, "first")
    lease = lease_of(topic, ledger, "first")
    ledger.write(records.range_key(Range(-1, 8, 0, 9)), RangeRecord(1).to_json())
    lease.check()
    lease_of(topic, ledger, "first").check()
    with pytest.raises(FencedError):
        lease.check()


FORGERIES = {
    "unsigned": {"partition_key": records.range_key(OF)},
    "signed with another key": {
        "partition_key": LedgerKey(b"other").topic_key(records.range_key(OF)),
        "properties": LedgerKey(b"other").properties(
            SignedRecord(records.range_key(OF), b"", "first", 99)
        ),
    },
    "with a copied message key": {"partition_key": KEY.topic_key(records.range_key(OF))},
    "with the code of another record": {
        "partition_key": KEY.topic_key(records.range_key(OF)),
        "properties": KEY.properties(SignedRecord(records.range_key(OF), b"{}", "first", 99)),
    },
    "with an endless number": {
        "partition_key": KEY.topic_key(records.range_key(OF)),
        "properties": {"redrive-number": "9" * 5_000},
    },
}
"""Messages that a role without the key of the ledger may store in its topic."""


@pytest.mark.parametrize("options", FORGERIES.values(), ids=FORGERIES)
def test_forged_ledger_record_is_skipped_and_counted(options: dict[str, Any]) -> None:
    topic = LedgerTopic()
    ledger = open_ledger(topic, "first")
    lease = lease_of(topic, ledger, "first")
    before = dict(ledger.records.items())
    topic.store(json.dumps(RangeRecord(9).to_json()).encode(), **options)
    lease.check()
    read = read_ledger(topic.as_client(), LEDGER, KEY)
    assert (dict(read.items()), read.skipped) == (before, 1)
    taken = open_ledger(topic, "second")
    assert dict(taken.records.items()) == before | {records.OWNER: "second"}


def test_copy_of_an_older_record_is_skipped() -> None:
    topic = LedgerTopic()
    ledger = open_ledger(topic, "first")
    lease = lease_of(topic, ledger, "first")
    ledger.write(records.range_key(OF), RangeRecord(4, moved={UID: 1}).to_json())
    written = list(topic.stored)
    for old in written:
        topic.store(old.content, **old.options)
    read = read_ledger(topic.as_client(), LEDGER, KEY)
    assert read.range(OF) == RangeRecord(4, moved={UID: 1})
    assert open_ledger(topic, "second").records.range(OF) == RangeRecord(4, moved={UID: 1})
    with pytest.raises(FencedError):  # its range was leased again, and not before
        lease.check()


def test_takeover_writes_records_with_copied_keys_again() -> None:
    """Compaction keeps the last message of a key, whoever wrote it."""
    topic = LedgerTopic()
    ledger = open_ledger(topic, "first")
    ledger.write(records.range_key(OF), RangeRecord(4, moved={UID: 1}).to_json())
    topic.store(b"", partition_key=KEY.topic_key(records.range_key(OF)))
    open_ledger(topic, "second")
    last = {message.partition_key(): message for message in topic.stored}
    topic.stored = [message for message in topic.stored if message in last.values()]
    read = read_ledger(topic.as_client(), LEDGER, KEY)
    assert read.range(OF) == RangeRecord(4, moved={UID: 1})


TEXTS = st.text(max_size=9) | st.sampled_from(["owner", "range/0.7.0.9", "a", "\x00", "\u202e"])
SIGNED = st.builds(SignedRecord, TEXTS, st.binary(max_size=9), TEXTS, st.integers(0, 10**18 - 1))
OTHER_CODES = st.text(max_size=33) | st.from_regex("[0-9a-f]{32}", fullmatch=True)


@given(SIGNED, SIGNED, st.sampled_from(["key", "value", "owner", "number", "code", "message key"]),
       OTHER_CODES)  # fmt: skip
def test_record_with_any_changed_part_is_not_verified(
    record: SignedRecord, other: SignedRecord, part: str, code: str
) -> None:
    names = {"key": KEY_PROPERTY, "owner": OWNER_PROPERTY, "number": NUMBER, "code": CODE}
    topic_key, value, properties = KEY.topic_key(record.key), record.value, KEY.properties(record)
    assert KEY.verify(topic_key, value, properties) == record
    changed = {"value": other.value} if part == "value" else {}
    if part == "message key":
        topic_key = KEY.topic_key(other.key)
        assume(topic_key != KEY.topic_key(record.key))
    elif part == "value":
        assume(changed["value"] != value)
    else:
        forged = code if part == "code" else KEY.properties(other)[names[part]]
        assume(forged != properties[names[part]])
        properties |= {names[part]: forged}
    assert KEY.verify(topic_key, changed.get("value", value), properties) is None


@given(st.text(max_size=60), OTHER_CODES, st.text(max_size=9), st.integers())
def test_proof_of_a_move_is_for_one_source_and_target(
    source: str, forged: str, suffix: str, sequence_id: int
) -> None:
    """Producer names and sequence ids are no evidence: the code is."""
    proof = KEY.proof(source, LEDGER)
    assert KEY.proves(proof, source, LEDGER)
    other = f"{source}{suffix or sequence_id}"
    assert not KEY.proves(proof, other, LEDGER)
    assert not KEY.proves(proof, source, LEDGER.sibling("other"))
    assert KEY.proves(forged, source, LEDGER) is (forged == proof)
    assert LedgerKey(b"other" * 8).proof(source, LEDGER) != proof


def test_codes_differ_by_key_purpose_and_each_part() -> None:
    target = TopicName("shop", "prod", "orders")
    other, elsewhere = (
        LedgerKey.derive(b"master", name, str(LEDGER)) for name in ("shop", "other")
    )
    codes = [
        KEY.id, KEY.topic_key("id"), KEY.topic_key("owner"), other.topic_key("owner"), other.id,
        KEY.proof("u@0:1:2:0", LEDGER), KEY.proof("u@0:1:2:0", target),
        KEY.proof("u@0:1:2:1", target), KEY.producer_name("a 1", 0, 1),
        KEY.producer_name("a 1", 1, 1), KEY.producer_name("a 1", 0, 11),
        KEY.producer_name("a 10", 0, 1), LedgerKey.derive(b"master", "shop", str(target)).id,
        elsewhere.id,
    ]  # fmt: skip
    assert len(set(codes)) == len(codes)
    assert KEY.proves(KEY.proof("u@0:1:2:0", target), "u@0:1:2:0", target)
    assert not KEY.proves("é\udc80", "u@0:1:2:0", target)
    assert "secret" not in repr(KEY)

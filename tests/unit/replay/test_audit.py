"""An audit finds each kind of disagreement, and none where all agrees."""

from __future__ import annotations

import json
from collections import Counter

from redrive.reading.positions import EntryId, Position, Source
from redrive.reading.ranges import Range
from redrive.replay import audit, records
from redrive.replay.audit import AuditFindings
from redrive.replay.records import RangeRecord, Records

OF, OTHER = Range(0, 7, 0, 9_999), Range(0, 8, 0, 9_999)
HELD = {(0, 7), (0, 8)}


def ledger_of(**found: RangeRecord) -> Records:
    """Return a ledger with a record for `of`, for `other`."""
    ledger = Records()
    for name, record in found.items():
        key = records.range_key({"of": OF, "other": OTHER}[name])
        ledger.apply(key, json.dumps(record.to_json()).encode())
    return ledger


def stored(*entries: int, ledger: int = 7) -> Counter[Source]:
    return Counter(Source("uid", 0, Position(ledger, entry, 0)) for entry in entries)


def test_nothing_is_found_where_all_agrees() -> None:
    ledger = ledger_of(of=RangeRecord(moved={"uid": 0b101}))
    assert audit.compare(ledger, stored(0, 2), {OF: 0b010}, HELD) == AuditFindings()


def test_each_disagreement_is_found_with_its_position() -> None:
    ledger = ledger_of(of=RangeRecord(moved={"uid": 0b111}), other=RangeRecord(leased=True))
    sources = stored(0, 0, 1, 5) + stored(3, ledger=8)
    found = audit.compare(ledger, sources, {OF: 0b010}, HELD)
    assert found == AuditFindings(
        doubled=(Source("uid", 0, Position(7, 0, 0)),),
        missing=((0, EntryId(7, 2)),),
        unrecorded=((0, EntryId(7, 5)),),
        returned=((0, EntryId(7, 1)),),
        open=(OTHER,),
    )


def test_an_entry_that_is_moved_in_part_is_on_record() -> None:
    ledger = ledger_of(of=RangeRecord(partly={"uid": {4: 0b1}}))
    assert audit.compare(ledger, stored(4), {}, HELD) == AuditFindings()


def test_what_the_dead_letter_topic_has_trimmed_needs_no_record() -> None:
    assert audit.compare(Records(), stored(4), {}, {(0, 8)}) == AuditFindings()

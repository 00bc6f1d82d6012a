"""All that was refused is listed, by ids that a selection takes."""

from __future__ import annotations

from pydantic import TypeAdapter

from redrive.api.replay import LetterId
from redrive.reading.positions import EntryId
from redrive.reading.ranges import Range
from redrive.replay import refused
from redrive.replay.records import Header, RangePlan, Records, RefusedEntry


def plan(*entries: int) -> RangePlan:
    found = tuple(RefusedEntry(EntryId(7, entry), 2, "PartOfBatch") for entry in entries)
    return RangePlan(100, 0, {}, found)


def test_more_than_the_status_shows_is_listed_and_each_line_begins_with_an_id() -> None:
    records = Records()
    records.headers["uid"] = Header("shop/again", 0)
    records.plans["uid"] = {
        Range(-1, 7, 10_000, 19_999): plan(*range(10_000, 10_150)),
        Range(-1, 7, 0, 9_999): plan(8, 3),
    }
    found = list(refused.lines(records))
    assert len(found) == 152
    assert found[:3] == [
        "7:3:-1 2 PartOfBatch shop/again",
        "7:8:-1 2 PartOfBatch shop/again",
        "7:10000:-1 2 PartOfBatch shop/again",
    ]
    for line in found:
        TypeAdapter(LetterId).validate_python(line.split()[0])


def test_a_plan_that_is_not_complete_is_left_out() -> None:
    records = Records()
    records.plans["uid"] = {Range(-1, 7, 0, 9_999): plan(3)}
    assert list(refused.lines(records)) == []

"""A reading of a topic of Pulsar: content that is too large, and open transactions."""

from __future__ import annotations

from contextlib import nullcontext
from typing import cast

import pytest

from redrive.auth.files import BrokerCredentials
from redrive.inspection.payloads import HIDDEN
from redrive.inspection.reader import InspectedTopic, TopicReading
from redrive.inspection.record import Recorder
from redrive.inspection.summary import Summary
from redrive.policy.envelope import CAUSE_MESSAGE, CAUSE_TYPE
from redrive.policy.naming import TopicName
from redrive.reading import broker
from redrive.reading.positions import EntryId
from redrive.reading.ranges import Partition
from redrive.replay.spec import Choice
from tests.support.entry_readers import LEDGER, StoredEntries, oversized
from tests.support.raw_entries import RawEntry
from tests.support.reasons import raises

TOPIC = TopicName.parse("persistent://shop/prod/orders-DLQ")
SHOWN = cast("BrokerCredentials", object())


def planned(
    monkeypatch: pytest.MonkeyPatch, stored: StoredEntries, count: int, sent: int
) -> TopicReading:
    """Plan to read *count* entries, of which the broker has sent those up to *sent*."""

    def read_through(*_: object, shown: BrokerCredentials) -> EntryId:
        assert shown is SHOWN
        return EntryId(LEDGER, sent)

    monkeypatch.setattr(broker, "read_partitions", lambda *_: (Partition(-1, ((LEDGER, count),)),))
    monkeypatch.setattr(broker, "connect", lambda *_: nullcontext(stored))
    monkeypatch.setattr(broker, "read_through", read_through)
    return InspectedTopic(TOPIC, "redrive", "", "", SHOWN).plan(Choice())


@pytest.mark.parametrize("reveals", [False, True])
def test_oversized_message_is_shown_without_content(
    monkeypatch: pytest.MonkeyPatch, *, reveals: bool
) -> None:
    stored = StoredEntries(oversized(CAUSE_TYPE, "WarehouseDown"), RawEntry(b"", b"small"))
    reading = planned(monkeypatch, stored, count=2, sent=1)
    recorder = Recorder(lambda _: None, reveals=reveals)
    summary = Summary(recorder)

    rows = list(reading.selected(list))
    for row in rows:
        summary.add(row)
    large, small = map(recorder, rows)

    assert (large["payload"], large["payloadForm"], large["payloadSize"]) == (
        "too large to be shown", "oversized", 0,
    )  # fmt: skip
    assert small["payloadForm"] == "text"
    assert (reading.messages, reading.entries, summary.messages) == (2, 2, 2)
    assert "WarehouseDown" in {group.cause for group in summary.ordered}


def test_oversized_message_hides_the_text_of_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = StoredEntries(oversized(CAUSE_MESSAGE, "no customer Ann"))
    (row,) = planned(monkeypatch, stored, count=1, sent=0).selected(list)
    assert Recorder(lambda _: None)(row)["causeMessage"] == HIDDEN


def test_reading_behind_an_open_transaction_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker delivers nothing after its first message, and the client reports no more."""
    stored = StoredEntries(RawEntry(b"", b"before"))
    rows = planned(monkeypatch, stored, count=3, sent=0).selected(list)
    assert next(rows).value == b"before"
    with raises("TransactionOpen", match=TOPIC.local):
        list(rows)

"""Sends whose receipts are lost, refused or wrong: whatever counts as stored is stored."""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import suppress

import pulsar
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.delivery.concurrency import SendWatchdog
from redrive.delivery.sender import PartitionSender, open_producer
from tests.support.fake_topics import FakeTopics, Fate

TOPIC = "orders"


def sender(topics: FakeTopics, *, chunked: bool = False) -> PartitionSender:
    def make(name: str) -> pulsar.Producer:
        return open_producer(topics.as_pulsar(), TOPIC, name, {})

    return PartitionSender(make, "shop", SendWatchdog(), chunked=chunked)


def send_until_stored(sending: PartitionSender, content: str) -> pulsar.MessageId | None:
    sending.begin()
    while True:
        with suppress(pulsar.exceptions.PulsarException):
            return sending.send(content, {}, 30)


@given(
    fates=st.lists(st.sampled_from(Fate), max_size=30),
    deduplicates=st.booleans(),
    chunked=st.booleans(),
)
def test_message_that_counts_as_stored_is_stored(
    *, fates: list[Fate], deduplicates: bool, chunked: bool
) -> None:
    script = itertools.chain(fates, itertools.repeat(Fate.STORED))
    topics = FakeTopics(lambda: next(script))
    topics.deduplicates = deduplicates
    sending = sender(topics, chunked=chunked)
    sent = [f"m{number}" for number in range(5)]
    for content in sent:
        send_until_stored(sending, content)
    sending.end()
    copies = Counter(topics.contents)
    assert set(copies) == set(sent)
    if deduplicates and not chunked and not {Fate.FORGOTTEN, Fate.CONTRADICTED} & set(fates):
        assert copies == Counter(sent)


def test_lost_receipt_is_proven_by_the_last_sequence_id() -> None:
    script = iter([Fate.STORED, Fate.UNANSWERED, Fate.STORED, Fate.STORED])
    topics = FakeTopics(lambda: next(script))
    sending = sender(topics)
    assert send_until_stored(sending, "m1") is not None
    assert send_until_stored(sending, "m2") is None
    assert send_until_stored(sending, "m3") is not None
    sending.end()
    assert topics.contents == ["m1", "m2", "m3"]
    assert {producer.name for producer in topics.producers} == {"shop"}
    assert all(producer.closed.is_set() for producer in topics.producers)


def test_contradicted_receipt_leads_to_another_name() -> None:
    script = iter([Fate.CONTRADICTED, Fate.STORED])
    topics = FakeTopics(lambda: next(script))
    assert send_until_stored(sender(topics), "m1") is not None
    assert topics.contents == ["m1"]
    assert [copy.producer for copy in topics.stored] == ["shop.2"]


def test_receipts_without_an_entry_are_never_proof() -> None:
    topics = FakeTopics(lambda: Fate.CONTRADICTED)
    sending = sender(topics)
    sending.begin()
    with pytest.raises(pulsar.exceptions.PulsarException, match="prove nothing"):
        sending.send("m1", {}, 30)
    assert topics.stored == []


def test_large_message_without_receipt_gets_another_name() -> None:
    """The broker recognises the last chunk alone: it proves nothing about the others."""
    script = iter([Fate.UNANSWERED, Fate.STORED])
    topics = FakeTopics(lambda: next(script))
    assert send_until_stored(sender(topics, chunked=True), "large") is not None
    assert [copy.producer for copy in topics.stored] == ["shop", "shop.2"]

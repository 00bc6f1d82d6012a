"""Sequences of dead letters: numbering, the topic that records them, and dead keys."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import cast

import pulsar
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive import Policy
from redrive.delivery.concurrency import Deadline
from redrive.delivery.middleware import sequencing
from redrive.delivery.middleware.sequencing import STILL_SECONDS, SequenceTopic
from redrive.messages import NotSentError
from redrive.policy import sequences as sequences_module
from redrive.policy.envelope import for_replay
from redrive.policy.model import SubscriptionType
from redrive.policy.naming import TopicName
from redrive.policy.sequences import Entry, Sequences, record_name
from redrive.testing.consumers import InMemoryConsumer
from tests.support.fake_client import FakeTopics
from tests.support.waiting import wait_until

POLICY = Policy(
    TopicName("shop", "prod", "orders"), "billing", max_retries=0, ordered=True, sequenced=True,
    subscription_type=SubscriptionType.KEY_SHARED,
)  # fmt: skip


def replay(consumer: InMemoryConsumer, *contents: bytes) -> None:
    """Move dead letters to the retry topic, as a Replay does."""
    letters = {letter.data(): letter for letter in consumer.dead_letters}
    for content in contents:
        headers = for_replay(letters[content].properties(), replay="shop/fix", source="test")
        copy = replace(letters[content], headers=headers)
        consumer.broker.store(POLICY.retry_topic, copy)
        consumer.broker.dead_letters.remove(letters[content])


def test_replayed_dead_letter_waits_for_its_predecessor() -> None:
    consumer, handled = InMemoryConsumer(POLICY), list[bytes]()

    def handle(message: pulsar.Message) -> None:
        handled.append(message.data())

    def fail(_message: object) -> None:
        raise ConnectionError

    copied = {"ORIGIN_MESSAGE_ID": "12:34:0", "REDRIVE_FIRST_ID": "12:34:0"}
    for content in (b"1", b"2", b"3"):
        consumer.send(content, partition_key="a", properties=copied)
    consumer.run(fail)
    replay(consumer, b"2")
    consumer.run(handle)
    assert handled == []
    replay(consumer, b"1", b"2", b"3")
    consumer.run(handle)
    assert handled == [b"1", b"2", b"3"]
    assert (consumer.dead_letters, consumer.dead_keys) == ([], 0)


def test_dead_letters_behind_one_that_fails_wait_once() -> None:
    consumer, contents = InMemoryConsumer(POLICY), [b"%d" % number for number in range(10)]

    def fail(message: pulsar.Message) -> None:
        if message.data() in bad:
            raise ConnectionError

    bad = contents
    for content in contents:
        consumer.send(content, partition_key="a")
    consumer.run(fail)
    replay(consumer, *contents)
    bad, began = [b"1"], consumer.broker.clock.now()
    consumer.run(fail)
    assert [letter.data() for letter in consumer.dead_letters] == contents[1:]
    waited = (consumer.broker.clock.now() - began).total_seconds()
    assert STILL_SECONDS <= waited < 2 * STILL_SECONDS
    replay(consumer, *contents[1:])
    bad = []
    consumer.run(fail)
    assert (consumer.dead_letters, consumer.dead_keys) == ([], 0)


def test_wait_of_dead_letters_ends_beside_slow_handlers() -> None:
    """Waiting messages are polled only when a worker takes the next message."""
    consumer, slow = InMemoryConsumer(POLICY), timedelta(seconds=STILL_SECONDS + 10)

    def fail(_message: object) -> None:
        raise ConnectionError

    def handle(_message: object) -> None:
        consumer.broker.clock.advance(slow)
        if len(returned) < 9:
            returned.append(len(consumer.dead_letters))
            consumer.send(b"other", partition_key="b")

    for content in (b"1", b"2", b"3"):
        consumer.send(content, partition_key="a")
    consumer.run(fail)
    replay(consumer, b"2", b"3")
    returned: list[int] = []
    consumer.send(b"other", partition_key="b")
    consumer.run(handle)
    assert returned.index(3) <= 3


def test_full_sequences_take_only_recorded_dead_letters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sequencing, "MAX_ENTRIES", 2)
    consumer = InMemoryConsumer(POLICY)

    def fail(_message: object) -> None:
        raise ConnectionError

    for key in ("a", "b", "c"):
        consumer.send(key.encode(), partition_key=key)
    consumer.run(fail)
    assert [letter.data() for letter in consumer.dead_letters] == [b"a", b"b"]
    assert [message.data() for message in consumer.broker.unsettled()] == [b"c"]
    replay(consumer, b"a")
    consumer.run(fail)
    assert [letter.data() for letter in consumer.dead_letters] == [b"b", b"a"]
    replay(consumer, b"a")
    consumer.run(lambda _: None)
    assert [letter.data() for letter in consumer.dead_letters] == [b"b", b"c"]
    assert consumer.broker.unsettled() == []


THREADS = 20
LONG = 30.0


class Reader:
    """A reader without new messages, which answers once the test permits it."""

    def __init__(self) -> None:
        self.reads = 0
        self.was_read, self.may_answer = threading.Event(), threading.Event()
        self.error: pulsar.PulsarException | None = None

    def create_reader(self, *_args: object, **_options: object) -> Reader:
        return self

    def has_message_available(self) -> bool:
        self.reads += 1
        self.was_read.set()
        assert self.may_answer.wait(LONG)
        if self.error is not None:
            raise self.error
        return False

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize("error", [None, pulsar.Timeout()])
def test_waiting_threads_share_one_read(
    error: pulsar.PulsarException | None,
) -> None:
    reader = Reader()
    reader.error = error
    topic = SequenceTopic(cast("pulsar.Client", reader), TopicName("shop", "prod", "records"))
    answers: list[type[Exception] | None] = []

    def ask() -> None:
        try:
            topic.read()
        except NotSentError as refused:
            answers.append(type(refused))
        else:
            answers.append(None)

    first = threading.Thread(target=ask)
    first.start()
    assert reader.was_read.wait(LONG)  # this read may be too old for the others
    others = [threading.Thread(target=ask) for _ in range(THREADS)]
    for other in others:
        other.start()
    reader.may_answer.set()
    for thread in (first, *others):
        thread.join(LONG)
    assert answers == [None if error is None else NotSentError] * (THREADS + 1)
    assert reader.reads < THREADS  # two, unless a thread begins late


def test_producer_of_records_idle_for_long_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Topics(FakeTopics):
        def create_reader(self, *_args: object, **_options: object) -> object:
            return SimpleNamespace(has_message_available=lambda: False, close=lambda: None)

    monkeypatch.setattr(sequencing, "IDLE_SECONDS", 0.2)
    topics = Topics()
    records = SequenceTopic(topics.as_pulsar(), TopicName("shop", "prod", "records"))
    records.write("a", b"1")
    wait_until(topics.producers[0].closed.is_set)
    records.write("a", b"2")
    assert topics.contents == [b"1", b"2"]
    assert len(topics.producers) == 2
    records.close(Deadline(10))


KEYS = st.sampled_from("ab")
ORIGINS = st.sampled_from(["1:0:-1", "1:1:-1", "1:2:-1"])


def add(sequences: Sequences, key: str, origin: str, replays: int = 0) -> None:
    letter = sequences.enter(key, origin, replays)
    sequences.apply(record_name(key, origin), letter.encode())


def test_sequence_is_handled_in_order_after_a_replay() -> None:
    sequences = Sequences()
    assert sequences.may_be_handled("k", "1:0:-1", 0)
    add(sequences, "k", "1:0:-1")
    add(sequences, "k", "1:1:-1")
    assert not sequences.may_be_handled("k", "1:0:-1", 0)  # it comes again: a crash
    assert not sequences.may_be_handled("k", "1:2:-1", 0)  # it comes later
    assert not sequences.may_be_handled("k", "1:1:-1", 1)  # replayed before the first
    assert sequences.may_be_handled("k", "1:0:-1", 1)
    assert sequences.may_be_handled("other", "1:9:-1", 0)
    sequences.apply(record_name("k", "1:0:-1"), b"")
    assert sequences.may_be_handled("k", "1:1:-1", 1)
    sequences.apply(record_name("k", "1:1:-1"), b"")
    assert sequences.may_be_handled("k", "1:2:-1", 0)
    assert (len(sequences), sequences.keys) == (0, 0)


def test_dead_letter_that_fails_again_keeps_its_place() -> None:
    sequences = Sequences()
    for origin in ("1:0:-1", "1:1:-1"):
        add(sequences, "k", origin)
    add(sequences, "k", "1:0:-1", replays=1)
    assert sequences.find("k", "1:0:-1") == Entry(1, 1)
    assert not sequences.may_be_handled("k", "1:0:-1", 1)
    assert sequences.may_be_handled("k", "1:0:-1", 2)


@pytest.mark.parametrize(
    ("name", "content"),
    [("", b"[1, 0]"), ("k/1:0:-1", b"[1, 0]"), (record_name("k", "1"), b"{}"),
     pytest.param(record_name("k", "1"), b"[" * 100_000, id="deep list"),
     (record_name("k", "1"), b"\xff"), (record_name("k", "1"), b'["1", 0]'),
     pytest.param(record_name("k", "1"), b"[%s, 0]" % (b"9" * 4_300), id="long place"),
     (record_name("k", "1"), b"[0, 0]"), (record_name("k", "1"), b"[1, -1]")],
)  # fmt: skip
def test_invalid_sequence_record_is_ignored(name: str, content: bytes) -> None:
    sequences = Sequences()
    sequences.apply(name, content)
    assert len(sequences) == 0


def test_records_of_a_flood_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences_module, "_MAX_APPLIED", 2)
    sequences = Sequences()
    for origin in ("1", "2", "3"):
        sequences.apply(record_name("k", origin), b"[1, 0]")
    assert [sequences.find("k", origin) is None for origin in ("1", "2", "3")] == [0, 0, 1]
    sequences.apply(record_name("k", "1"), b"[1, 1]")
    sequences.apply(record_name("k", "2"), b"")
    sequences.apply(record_name("k", "3"), b"[3, 0]")
    assert sequences.find("k", "1") == Entry(1, 1)
    assert sequences.find("k", "3") == Entry(3, 0)


def test_sequence_record_does_not_contain_the_key() -> None:
    assert "customer" not in record_name("customer 42", "1:0:-1")


@given(st.lists(st.tuples(KEYS, ORIGINS, st.booleans())))
def test_compacted_records_give_the_same_sequences(
    records: list[tuple[str, str, bool]],
) -> None:
    sequences, stored = Sequences(), dict[str, bytes]()
    out = defaultdict[str, set[str]](set)
    for key, origin, enters in records:
        name = record_name(key, origin)
        content = sequences.enter(key, origin, 0).encode() if enters else b""
        sequences.apply(name, content)
        stored.pop(name, None)
        stored[name] = content
        (out[key].add if enters else out[key].discard)(origin)
    compacted = Sequences()
    for name, content in stored.items():
        if content:
            compacted.apply(name, content)
    assert len(compacted) == len(sequences) == sum(map(len, out.values()))
    for key in "ab":
        for origin in ("1:0:-1", "1:1:-1", "1:2:-1"):
            assert compacted.find(key, origin) == sequences.find(key, origin)
            for replays in (0, 1):
                assert compacted.may_be_handled(key, origin, replays) == sequences.may_be_handled(
                    key, origin, replays
                )

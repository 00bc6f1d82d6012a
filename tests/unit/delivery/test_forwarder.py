"""Producers of a consumer: races of sends, and topics that accept nothing for a while."""

from __future__ import annotations

import gc
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import cast

import pulsar
import pytest

from redrive import CrashLog, Event, Policy, PolicyFile, RetryProducer
from redrive.delivery import forwarder as module
from redrive.delivery import processor
from redrive.delivery.concurrency import Deadline
from redrive.delivery.forwarder import Producers
from redrive.delivery.middleware.poison_guard import CrashLogFile
from redrive.delivery.middleware.sequencing import SequenceTopic
from redrive.delivery.reporting import Name
from redrive.messages import NotSentError, id_text
from redrive.policy import codec
from redrive.policy.ladder import Ladder
from redrive.policy.model import SubscriptionType
from redrive.policy.naming import TopicName
from redrive.testing.broker import InMemoryBroker
from redrive.testing.consumers import InMemoryConsumer
from tests.support.consumers import leave_notes
from tests.support.fake_client import FakeProducer, FakeTopics, Fate
from tests.support.waiting import wait_until

TOPIC = TopicName("shop", "prod", "orders-fulfilment-RETRY")
OTHER = TopicName("shop", "prod", "orders-fulfilment-DLQ")


class Message:
    """The part of a message that a hop reads."""

    def __init__(self, number: int = 0, key: str = "", order: str = "") -> None:
        self._number = number
        self._key = key
        self._order = order

    def has_null_value(self) -> bool:
        return False

    def data(self) -> bytes:
        return b"%d" % self._number

    def topic_name(self) -> str:
        return "persistent://shop/prod/orders"

    def message_id(self) -> pulsar.MessageId:
        return pulsar.MessageId(-1, 1, self._number)

    def partition_key(self) -> str:
        return self._key

    def ordering_key(self) -> str:
        return self._order

    def schema_version(self) -> str:
        return ""

    def event_timestamp(self) -> int:
        return 0


def send(
    producers: Producers,
    number: int = 0,
    topic: TopicName = TOPIC,
    key: str = "",
    order: str = "",
) -> pulsar.MessageId | None:
    return producers.send(topic, cast("pulsar.Message", Message(number, key, order)), {}, None)


def scripted(fates: Iterable[Fate], *, partitions: int = 0) -> FakeTopics:
    script = itertools.chain(fates, itertools.repeat(Fate.STORED))
    return FakeTopics(lambda: next(script), partitions=partitions)


@pytest.mark.parametrize("partitions", [0, 3])
def test_repeated_hop_keeps_its_identity(partitions: int) -> None:
    """While others are sent, before and after it, by the same consumer."""
    topics = scripted([Fate.STORED, Fate.UNANSWERED, Fate.UNANSWERED], partitions=partitions)
    producers = Producers(topics.as_pulsar(), name="c")
    send(producers, 0)
    for number in (1, 2):
        with pytest.raises(NotSentError):
            send(producers, number)
    assert send(producers, 3) is not None
    assert [send(producers, number) for number in (2, 1)] == [None, None]
    assert send(producers, 4) is not None
    producers.close(Deadline(10))
    assert topics.contents == [b"0", b"1", b"2", b"3", b"4"]


def test_refused_hop_is_not_taken_for_stored() -> None:
    topics = scripted([Fate.STORED, Fate.REFUSED])
    producers = Producers(topics.as_pulsar(), name="c")
    send(producers, 0)
    with pytest.raises(NotSentError):
        send(producers, 1)
    send(producers, 2)  # a higher sequence id under the same name would hide the first
    assert send(producers, 1) is not None
    producers.close(Deadline(10))
    assert topics.contents == [b"0", b"2", b"1"]


def test_hop_to_a_missing_partition_is_sent_to_another() -> None:
    topics = scripted([Fate.REFUSED], partitions=2)
    producers = Producers(topics.as_pulsar(), name="c")
    with pytest.raises(NotSentError):
        send(producers)
    topics.partitions = 0
    send(producers)
    assert [copy.topic for copy in topics.stored] == [str(TOPIC)]
    producers.close(Deadline(10))


JAVA_HASHES = {
    "customer-7": 566298120,
    "größe": 98762257,
    "\N{GRINNING FACE}": 1772899,
    "invoice": 1960198957,
    "zürich": 1581500318,
}
"""`key.hashCode() & Integer.MAX_VALUE` of Java, of up to 31 bits; two of the keys need all 31."""


@pytest.mark.parametrize("count", [3, 4])
def test_key_selects_the_partition_that_java_selects(count: int) -> None:
    topics = scripted([], partitions=count)
    producers = Producers(topics.as_pulsar(), name="c")
    for number, key in enumerate([*JAVA_HASHES, *JAVA_HASHES]):
        send(producers, number, key=key)
    for number in range(count):
        send(producers, number)
    producers.close(Deadline(10))
    partitions = [int(copy.topic.rpartition("-")[2]) for copy in topics.stored]
    assert partitions[:-count] == [code % count for code in JAVA_HASHES.values()] * 2
    assert sorted(partitions[-count:]) == list(range(count))


def test_ordering_key_selects_the_partition_before_the_key() -> None:
    topics = scripted([], partitions=3)
    producers = Producers(topics.as_pulsar(), name="c")
    for number, key in enumerate(JAVA_HASHES):
        send(producers, number, key=key, order="invoice")
    producers.close(Deadline(10))
    partition = f"{TOPIC}-partition-{JAVA_HASHES['invoice'] % 3}"
    assert {copy.topic for copy in topics.stored} == {partition}
    assert len({code % 3 for code in JAVA_HASHES.values()}) > 1


def test_producer_idle_for_long_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.2)
    topics = scripted([])
    producers = Producers(topics.as_pulsar(), name="c")
    send(producers, 1)
    wait_until(topics.producers[0].closed.is_set)
    assert send(producers, 2) is not None
    assert len(topics.producers) == 2
    producers.close(Deadline(10))


@pytest.mark.parametrize(
    ("refusal", "remedy"),
    [
        (pulsar.ProducerBusy, "set maxProducersPerTopic"),
        (pulsar.TopicTerminated, "the topic was terminated: .* then delete it"),
        (pulsar.ProducerBlockedQuotaExceededError, "over its backlog quota, by size or by age"),
        (pulsar.ProducerBlockedQuotaExceededException, "over its backlog quota, by size or by"),
        (pulsar.Timeout, "the topic has no maxMessageSize of its own"),
    ],
)
def test_refused_producer_has_the_remedy_of_its_cause(
    refusal: type[Exception], remedy: str
) -> None:
    class Refusing(FakeTopics):
        def create_producer(self, *_: object, **__: object) -> FakeProducer:
            raise refusal

    client = Refusing(lambda: Fate.STORED).as_pulsar()
    producers, records = Producers(client, name="c"), SequenceTopic(client, OTHER)
    with pytest.raises(NotSentError, match=remedy):
        send(producers)
    with pytest.raises(NotSentError, match=remedy):
        records.write("k", b"")
    with pytest.raises(NotSentError, match=remedy):
        RetryProducer(client, str(TOPIC))
    producers.close(Deadline(10))
    records.close(Deadline(10))


def test_idle_producers_beyond_the_limit_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_IDLE", 2)
    topics = scripted([], partitions=4)
    producers = Producers(topics.as_pulsar(), name="c")
    for number in range(12):
        send(producers, number)
    wait_until(lambda: sum(not one.closed.is_set() for one in topics.producers) == 2)
    producers.close(Deadline(10))
    assert topics.contents == [b"%d" % number for number in range(12)]
    assert all(one.closed.is_set() for one in topics.producers)


class SlowTopics(FakeTopics):
    """Topics of which TOPIC takes until *go_on* to open a producer."""

    def __init__(self) -> None:
        super().__init__()
        self.opening = threading.Event()
        self.go_on = threading.Event()

    def create_producer(self, topic: str, **options: str) -> FakeProducer:  # type: ignore[override]
        if topic == str(TOPIC):
            self.opening.set()
            assert self.go_on.wait(60)
        return super().create_producer(topic, producer_name=options["producer_name"])


def test_slow_topic_does_not_delay_others() -> None:
    topics = SlowTopics()
    producers = Producers(topics.as_pulsar(), name="c")
    with ThreadPoolExecutor() as threads:
        slow = [threads.submit(send, producers, number) for number in range(3)]
        assert topics.opening.wait(60)
        threads.submit(send, producers, 4, OTHER).result(60)
        assert not any(sending.done() for sending in slow)
        topics.go_on.set()
        for sending in slow:
            sending.result(60)
    producers.close(Deadline(10))


def test_producer_opened_during_close_is_closed() -> None:
    topics = SlowTopics()
    producers = Producers(topics.as_pulsar(), name="c")
    with ThreadPoolExecutor() as threads:
        sending = threads.submit(send, producers)
        assert topics.opening.wait(60)
        producers.close(Deadline(10))
        topics.go_on.set()
        with pytest.raises(NotSentError, match="a consumer that is closed"):
            sending.result(60)
    with pytest.raises(NotSentError, match="a consumer that is closed"):
        send(producers)
    (opened,) = topics.producers
    assert opened.closed.wait(60)
    assert topics.stored == []


def test_sends_share_one_partition_lookup() -> None:
    lookup, go_on = threading.Event(), threading.Event()
    questions: list[str] = []

    class Refusing(FakeTopics):
        def get_topic_partitions(self, topic: str) -> list[str]:
            questions.append(topic)
            lookup.set()
            assert go_on.wait(60)
            raise pulsar.ConnectError

    producers = Producers(Refusing().as_pulsar(), name="c")
    with ThreadPoolExecutor() as threads:
        sending = [threads.submit(send, producers, number) for number in range(4)]
        assert lookup.wait(60)
        while any(not one.running() for one in sending):
            threading.Event().wait(0.01)
        go_on.set()
        for one in sending:
            with pytest.raises(NotSentError):
                one.result(60)
    assert questions == [str(TOPIC)]
    producers.close(Deadline(10))


def test_stopped_consumer_waits_once_for_a_refusing_topic() -> None:
    sends: list[str] = []

    class Unanswering(FakeTopics):
        def create_producer(self, topic: str, **_options: object) -> FakeProducer:
            sends.append(topic)
            raise pulsar.Timeout

    producers = Producers(Unanswering().as_pulsar(), name="c")

    def fail(topic: TopicName) -> None:
        with pytest.raises(NotSentError):
            send(producers, topic=topic)

    fail(TOPIC)
    fail(TOPIC)
    producers.stop()
    for topic in (TOPIC, TOPIC, OTHER, OTHER):
        fail(topic)
    assert sends == [str(TOPIC)] * 3 + [str(OTHER)]
    producers.close(Deadline(10))


POLICY = Policy(
    TopicName("shop", "prod", "orders"), "billing", max_retries=2, ladder=Ladder.from_fixed("10m")
)
MINUTE = timedelta(minutes=1)
TAKING = [Name.TAKING_STOPPED, Name.TAKING_RESUMED]


class Failing:
    """A handler that always fails, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, _message: object) -> None:
        self.calls += 1
        raise LookupError


def test_refusing_retry_topic_uses_up_no_attempt() -> None:
    consumer, handle = InMemoryConsumer(POLICY), Failing()
    consumer.broker.refused.add(POLICY.retry_topic)
    consumer.send(b"x")
    consumer.run(handle)
    consumer.advance(60 * MINUTE)
    assert handle.calls == 1
    assert [message.topic for message in consumer.broker.unsettled()] == [POLICY.topic]

    consumer.broker.refused.clear()
    consumer.advance(MINUTE)
    (moved,) = consumer.broker.unsettled()
    assert moved.topic == POLICY.retry_topic
    assert moved.properties()["RECONSUMETIMES"] == "1"
    consumer.run(handle)
    assert handle.calls == 3
    assert len(consumer.dead_letters) == 1


def test_refusing_dead_letter_topic_causes_no_handling() -> None:
    consumer, handle = InMemoryConsumer(replace(POLICY, max_retries=0)), Failing()
    consumer.broker.refused.add(POLICY.dead_letter_topic)
    consumer.send(b"x")
    consumer.run(handle)
    consumer.broker.refused.clear()
    consumer.advance(MINUTE)
    assert handle.calls == 1
    (dead,) = consumer.dead_letters
    assert dead.properties()["RECONSUMETIMES"] == "1"
    assert consumer.broker.unsettled() == []


def test_unsent_hops_are_retried_with_back_off_up_to_a_minute() -> None:
    tried: list[float] = []
    consumer = InMemoryConsumer(
        POLICY,
        on_event=lambda event: (
            tried.append(consumer.broker.clock.monotonic())
            if event.event == "redrive.unsent"
            else None
        ),
    )
    consumer.broker.refused.add(POLICY.retry_topic)
    consumer.send(b"x")
    consumer.reconsume_later(consumer.receive())
    consumer.advance(4 * MINUTE)
    assert tried == [0, 5, 15, 35, 75, 135, 195]


def test_waiting_hops_follow_the_first_sent_one() -> None:
    consumer = InMemoryConsumer(POLICY)
    consumer.broker.refused.add(POLICY.retry_topic)
    for content in (b"1", b"2", b"3"):
        consumer.send(content)
    for _ in range(3):
        consumer.reconsume_later(consumer.receive(), cause=LookupError())
    consumer.broker.refused.clear()
    consumer.advance(timedelta(seconds=5))
    moved = consumer.broker.unsettled()
    assert [message.topic for message in moved] == [POLICY.retry_topic] * 3


def test_failed_attempt_is_reported_once_for_many_sends() -> None:
    events: list[Event] = []
    consumer, handle = InMemoryConsumer(POLICY, on_event=events.append), Failing()
    consumer.broker.refused.add(POLICY.retry_topic)
    consumer.send(b"x")
    consumer.run(handle)
    names = [str(event.event) for event in events]
    assert (names.count("redrive.attempt_failed"), names[1:]) == (
        1,
        ["redrive.unsent"] * (len(names) - 1),
    )
    assert len(names) > 10


def test_too_many_unsent_hops_stop_new_messages(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "redrive")
    monkeypatch.setattr(processor, "MAX_UNSENT", 3)
    events: list[Event] = []
    consumer, handle = InMemoryConsumer(POLICY, on_event=events.append), Failing()
    consumer.broker.refused.add(POLICY.retry_topic)
    for _ in range(10):
        consumer.send(b"x")
    consumer.run(handle)
    assert handle.calls == 3
    assert [event.event for event in events if event.event in TAKING] == TAKING[:1]

    consumer.broker.refused.clear()
    consumer.run(handle)
    assert handle.calls == 30
    assert [event.event for event in events if event.event in TAKING] == TAKING
    assert [text for text in caplog.messages if "receiving" in text] == [
        "3 messages wait to be sent; receiving is suspended until fewer than 3 of them wait",
        "2 messages wait to be sent, fewer than 3; receiving resumes",
    ]
    assert len(consumer.dead_letters) == 10


def test_unsent_failure_keeps_no_variables_of_its_handler() -> None:
    consumer, decoded = InMemoryConsumer(POLICY), weakref.WeakSet[Failing]()
    consumer.broker.refused.add(POLICY.retry_topic)
    consumer.send(b"x")

    def handle(message: pulsar.Message) -> None:
        variable = Failing()
        decoded.add(variable)
        try:
            variable(message)
        except LookupError as error:
            raise ExceptionGroup("all", [error]) from None

    consumer.run(handle)
    gc.collect()
    assert [bool(consumer.broker.unsettled()), len(decoded)] == [True, 0]


def test_key_waits_for_its_unsent_dead_letter() -> None:
    policy = replace(
        POLICY, max_retries=0, ordered=True, subscription_type=SubscriptionType.KEY_SHARED
    )
    consumer, handle = InMemoryConsumer(policy), Failing()
    consumer.broker.refused.add(policy.dead_letter_topic)
    for content in (b"1", b"2"):
        consumer.send(content, partition_key="k")
    consumer.run(handle)
    assert handle.calls == 1
    consumer.broker.refused.clear()
    consumer.run(handle)
    assert [dead.data() for dead in consumer.dead_letters] == [b"1", b"2"]


@pytest.fixture
def followed(tmp_path: Path) -> Callable[[Policy], PolicyFile]:
    """A policy file that can be changed, by its next generation."""

    def write(policy: Policy) -> PolicyFile:
        (tmp_path / "new.json").write_text(codec.encode(policy))
        (tmp_path / "new.json").replace(tmp_path / "policy.json")
        return PolicyFile(tmp_path / "policy.json")

    return write


def test_changed_policy_decides_unsent_hops_again(
    followed: Callable[[Policy], PolicyFile],
) -> None:
    consumer, handle = InMemoryConsumer(followed(POLICY)), Failing()
    consumer.broker.refused.add(POLICY.retry_topic)
    consumer.send(b"x")
    consumer.run(handle)
    followed(replace(POLICY, generation=2, ladder=Ladder.from_fixed("30s")))
    consumer.broker.refused.clear()
    consumer.advance(MINUTE)
    (moved,) = consumer.broker.unsettled()
    assert moved.properties()["DELAY_TIME"] == "30000"
    assert moved.properties()["RECONSUMETIMES"] == "1"
    assert handle.calls == 1


def test_changed_policy_keeps_the_requested_delay(
    followed: Callable[[Policy], PolicyFile],
) -> None:
    consumer = InMemoryConsumer(followed(POLICY))
    consumer.broker.refused.add(POLICY.retry_topic)
    consumer.send(b"x")
    consumer.reconsume_later(consumer.receive(), delay=7)
    followed(replace(POLICY, generation=2, ladder=Ladder.from_fixed("30s")))
    consumer.broker.refused.clear()
    consumer.advance(MINUTE)
    (moved,) = consumer.broker.unsettled()
    assert moved.properties()["DELAY_TIME"] == "7000"


def test_unsent_dead_letters_go_to_the_new_topic(
    followed: Callable[[Policy], PolicyFile],
) -> None:
    old = replace(POLICY, max_retries=0, dead_letter_topic=POLICY.topic.sibling("old"))
    new = replace(POLICY, generation=2, max_retries=0)
    consumer, handle = InMemoryConsumer(followed(old), broker=InMemoryBroker(new)), Failing()
    consumer.broker.refused.add(new.dead_letter_topic)
    for _ in range(3):
        consumer.send(b"x")
    consumer.run(handle)
    followed(new)
    consumer.advance(10 * MINUTE)
    assert consumer.dead_letters == []
    consumer.broker.refused.clear()
    consumer.advance(MINUTE)
    assert len(consumer.dead_letters) == 3
    assert consumer.broker.unsettled() == []
    assert handle.calls == 3


def test_unsent_dead_letter_is_discarded_by_a_changed_policy(
    followed: Callable[[Policy], PolicyFile],
) -> None:
    events: list[str] = []
    policy = replace(POLICY, max_retries=0)
    consumer = InMemoryConsumer(followed(policy), on_event=lambda event: events.append(event.event))
    consumer.broker.refused.add(POLICY.dead_letter_topic)
    consumer.send(b"x")
    consumer.run(Failing())
    followed(replace(policy, generation=2, dead_letters=False))
    consumer.advance(2 * MINUTE)
    assert consumer.broker.unsettled() == []
    assert (events.count("redrive.attempt_failed"), events[-1]) == (1, "redrive.discarded")


def test_recorded_dead_letter_stays_dead_after_a_policy_change(
    followed: Callable[[Policy], PolicyFile],
) -> None:
    policy = replace(
        POLICY, max_retries=0, ordered=True, sequenced=True,
        subscription_type=SubscriptionType.KEY_SHARED,
    )  # fmt: skip
    consumer, handle = InMemoryConsumer(followed(policy)), Failing()
    consumer.broker.refused.add(policy.dead_letter_topic)
    for content in (b"1", b"2"):
        consumer.send(content, partition_key="k")
    consumer.run(handle)
    followed(replace(policy, generation=2, max_retries=3))
    consumer.advance(2 * MINUTE)
    consumer.broker.refused.clear()
    consumer.run(handle)
    assert [dead.data() for dead in consumer.dead_letters] == [b"1", b"2"]
    assert consumer.broker.unsettled() == []
    assert handle.calls == 1


def test_closed_consumer_leaves_unsent_messages_to_others() -> None:
    consumer = InMemoryConsumer(POLICY)
    consumer.broker.refused.add(POLICY.retry_topic)
    consumer.send(b"x")
    consumer.reconsume_later(consumer.receive())
    consumer.close()
    consumer.broker.refused.clear()
    consumer.advance(10 * MINUTE)
    other = InMemoryConsumer(POLICY, broker=consumer.broker)
    message = other.receive()
    assert other.attempt_of(message).number == 1


def test_poison_message_keeps_its_notes_while_unsent(tmp_path: Path) -> None:
    consumer = InMemoryConsumer(POLICY)
    key = id_text(consumer.send(b"x"))
    for _ in range(2):
        leave_notes(tmp_path, POLICY, key)

    guarded = InMemoryConsumer(
        POLICY, broker=consumer.broker, crash_log=CrashLog(tmp_path, max_redeliveries=0)
    )
    guarded.broker.refused.add(POLICY.dead_letter_topic)
    assert guarded.receive(MINUTE) is None
    guarded.close()
    with closing(CrashLogFile(tmp_path, POLICY)) as note:
        assert note.crashes(key) == 2


def test_poison_message_loses_its_notes_when_dead_lettered(tmp_path: Path) -> None:
    consumer = InMemoryConsumer(POLICY)
    leave_notes(tmp_path, POLICY, id_text(consumer.send(b"x")))
    guarded = InMemoryConsumer(
        POLICY, broker=consumer.broker, crash_log=CrashLog(tmp_path, max_redeliveries=0)
    )
    guarded.broker.refused.add(POLICY.dead_letter_topic)
    assert guarded.receive(MINUTE) is None
    guarded.broker.refused.clear()
    guarded.advance(MINUTE)
    (dead,) = guarded.dead_letters
    assert dead.properties()["REDRIVE_CAUSE_TYPE"] == "ConsumerCrashError"
    guarded.close()
    assert not list(tmp_path.glob("*.notes"))

"""In-flight messages of a consumer: copies that a client holds, and counts of attempts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import cast

import pulsar
import pytest

from redrive import Policy
from redrive.delivery import in_flight
from redrive.delivery.arrivals import REDELIVERED_SECONDS, REMEMBERED_SECONDS, Arrivals
from redrive.delivery.decisions import MAX_COUNTED, Attempts
from redrive.delivery.in_flight import InFlightMessages, Settled
from redrive.delivery.middleware.chain import Failure
from redrive.delivery.parts import MAX_IN_FLIGHT_BYTES, SystemClock
from redrive.policy.model import SubscriptionType
from redrive.policy.naming import TopicName
from redrive.testing.broker import InMemoryMessage, VirtualClock
from redrive.testing.consumers import InMemoryConsumer
from tests.support.fake_client import BurstMessage
from tests.support.waiting import wait_until

START = datetime(2026, 1, 1, tzinfo=UTC)
BEHIND, REMEMBERED = 100, 1_000
SECOND = timedelta(seconds=1)
LATER = timedelta(seconds=REMEMBERED_SECONDS + 1)


class Incoming:
    """A count of received messages, and the connection of their topic."""

    def __init__(self, clock: VirtualClock) -> None:
        self.received = 0
        self.arrivals: Arrivals | None = None
        self._clock = clock

    @property
    def disconnected_since(self) -> float:
        if self.arrivals is None:
            return self._clock.monotonic()
        return self.arrivals.disconnected_since


class World:
    """The in-flight messages of a consumer, on a topic with partitions unless *behind* is 0."""

    def __init__(self, behind: int = BEHIND, max_bytes: int = 1_000) -> None:
        self.clock = VirtualClock(START)
        self.incoming = Incoming(self.clock)
        self.arrivals = (
            Arrivals("orders", behind, monotonic=self.clock.monotonic) if behind else None
        )
        self.acknowledged: list[pulsar.Message] = []
        self.settled = Settled(self.incoming, self.clock, behind)  # type: ignore[arg-type]
        self.holds: list[bool] = []
        self.together = False
        self.in_hand = InFlightMessages(
            self.settled, self.acknowledged.append, self.holds.append,
            max_bytes=max_bytes,
        )  # fmt: skip

    def handle(self, number: int) -> bool:
        """Take a message and settle it; return True if it was handed out."""
        self.incoming.received += 1
        message = numbered(number)
        if self.arrivals is not None:
            message = BurstMessage(message.topic, message.id, b"", START)
            self.arrivals.one(cast("pulsar.Message", message))
        handed_out = self.in_hand.begin(message)
        if handed_out:
            self.in_hand.end(message)
        return handed_out


def numbered(number: int, index: int = -1) -> InMemoryMessage:
    message_id = pulsar.MessageId(0, 1, number, index)
    return InMemoryMessage(TopicName("shop", "prod", "orders"), message_id, b"", START)


@pytest.fixture(params=[timedelta(), LATER], ids=["at once", "later"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(in_flight, "MAX_REMEMBERED", REMEMBERED)
    world = World()
    assert all(world.handle(number) for number in range(BEHIND))
    world.clock.advance(request.param)
    return world


def test_redelivered_queue_is_handed_out_once(world: World) -> None:
    for _ in range(3):  # and again behind that
        assert not any(world.handle(number) for number in range(BEHIND))
    assert len(world.acknowledged) == 3 * BEHIND
    assert world.handle(BEHIND)


@pytest.mark.parametrize("evidence", ["queue was empty", "more were received than wait"])
def test_subscription_moved_back_delivers_again(evidence: str) -> None:
    world = World()
    assert world.arrivals is not None
    assert all(world.handle(number) for number in range(BEHIND))
    assert not any(world.handle(number) for number in range(BEHIND))  # recently
    world.clock.advance(LATER)
    if evidence == "queue was empty":
        world.arrivals.was_empty(world.clock.monotonic())
    else:
        assert all(world.handle(number) for number in range(BEHIND, 3 * BEHIND))
        assert not world.handle(2 * BEHIND)
    assert all(world.handle(number) for number in range(BEHIND))
    assert not any(world.handle(number) for number in range(BEHIND))


@pytest.mark.parametrize("behind", [0, BEHIND])
def test_message_settled_without_connection_is_handed_out_once(behind: int) -> None:
    world = World(behind)
    arrivals = Arrivals("orders", behind, monotonic=world.clock.monotonic)
    world.arrivals = world.incoming.arrivals = arrivals
    assert all(world.handle(number) for number in range(10))
    for number in range(10, 200):
        world.clock.advance(SECOND)
        arrivals.note_connection(connected=False)
        assert world.handle(number)
    arrivals.note_connection(connected=True)
    arrivals.was_empty(world.clock.monotonic())
    world.clock.advance(SECOND)
    assert not any(world.handle(number) for number in range(200))
    assert len(world.acknowledged) == 200
    world.clock.advance(timedelta(seconds=REDELIVERED_SECONDS + 1))
    arrivals.was_empty(world.clock.monotonic())
    assert all(world.handle(number) for number in range(200))  # the subscription was moved back


def test_moved_message_is_remembered_for_some_seconds() -> None:
    world = World(behind=0)
    message = numbered(1)
    assert world.in_hand.begin(message)
    world.in_hand.end(message, moved=True)
    assert not world.handle(1)
    world.clock.advance(LATER)
    assert world.handle(1)


@pytest.mark.parametrize("ids_are_read", [False, True])
def test_copy_taken_while_original_is_settled_is_dropped(
    monkeypatch: pytest.MonkeyPatch, *, ids_are_read: bool
) -> None:
    world, copy = World(behind=0), numbered(1)
    original = numbered(1)
    assert world.in_hand.begin(original)
    if ids_are_read:
        assert len(world.in_hand) == 1
    handed_out: list[bool] = []
    taker = threading.Thread(target=lambda: handed_out.append(world.in_hand.begin(copy)))
    add = world.settled.add

    def add_while_taking(key: bytes) -> None:
        taker.start()
        taker.join(0.2)
        add(key)

    monkeypatch.setattr(world.settled, "add", add_while_taking)
    world.in_hand.end(original, moved=True)
    taker.join()
    assert handed_out == [False]
    assert world.acknowledged == [copy]


def test_remembered_messages_are_limited(world: World) -> None:
    assert all(world.handle(number) for number in range(BEHIND, 2 * REMEMBERED))
    assert world.handle(BEHIND)
    assert not world.handle(2 * REMEMBERED - 1)


def test_copy_of_in_flight_message_is_acknowledged_with_it() -> None:
    world = World()
    message, copies = numbered(1, 5), [numbered(1, 5), numbered(1, 5)]
    assert world.in_hand.begin(message)
    assert not any(map(world.in_hand.begin, copies))
    assert len(world.in_hand) == 1
    world.in_hand.end(message)
    assert [id(copy) for copy in world.acknowledged] == [id(copies[-1])]


def test_copies_of_redelivered_or_dropped_messages_are_forgotten() -> None:
    world = World()
    message = numbered(1, 5)
    assert world.in_hand.begin(message)
    assert not world.in_hand.begin(numbered(1, 5))
    world.in_hand.let_go(message)
    again = numbered(1, 5)
    assert world.in_hand.begin(again)
    assert not world.in_hand.begin(numbered(1, 5))
    del again
    assert len(world.in_hand) == 0
    assert world.handle(1)
    assert not world.acknowledged


def test_broker_may_not_redeliver_unsettled_messages() -> None:
    world = World(behind=0)
    message = numbered(1)
    assert world.in_hand.begin(message)
    assert not world.in_hand.may_redeliver()
    world.in_hand.end(message)
    assert world.in_hand.may_redeliver()


def test_broker_may_not_redeliver_dropped_messages() -> None:
    world = World(behind=0)
    for number in range(2):
        assert world.in_hand.begin(numbered(number))  # and let go, without being settled
    assert not world.in_hand.may_redeliver()


def test_copy_of_a_handled_message_is_dropped() -> None:
    world = World(behind=0)
    assert world.in_hand.may_redeliver()
    assert world.handle(1)
    assert not world.handle(1)
    assert [str(message.message_id()) for message in world.acknowledged] == ["(1,1,0,-1)"]


SIZE = 40


def burst_of(first: int = 0) -> list[BurstMessage]:
    """A burst of one entry as a consumer receives it, its messages from number *first* on."""
    topic = TopicName("shop", "prod", "orders")
    messages = [
        BurstMessage(topic, pulsar.MessageId(-1, 1, 0, first + index), b"", START)
        for index in range(SIZE)
    ]
    Arrivals(str(topic)).burst(messages)
    return messages


def copies_of(messages: Sequence[InMemoryMessage]) -> list[InMemoryMessage]:
    return [InMemoryMessage(one.topic, one.id, b"", START) for one in messages]


@pytest.fixture(params=["alone", "together"])
def bursty(request: pytest.FixtureRequest) -> World:
    """A world whose bursts may be open, and whose messages are settled alone or together."""
    world = World(behind=0, max_bytes=MAX_IN_FLIGHT_BYTES)
    world.together = request.param == "together"
    return world


def settle(world: World, messages: Sequence[InMemoryMessage]) -> None:
    if world.together:
        world.in_hand.end_all(messages)
        return
    for message in messages:
        world.in_hand.end(message)


def begin(world: World, messages: Sequence[InMemoryMessage]) -> list[bool]:
    return [world.in_hand.begin(message) for message in messages]


@pytest.mark.parametrize("seconds", [0, 2], ids=["as a whole", "one by one"])
def test_settled_burst_is_remembered_for_some_seconds(bursty: World, seconds: float) -> None:
    messages = burst_of()
    copies = copies_of(messages)
    assert all(begin(bursty, messages))
    bursty.clock.advance(timedelta(seconds=seconds))
    settle(bursty, messages)
    bursty.clock.advance(timedelta(seconds=REMEMBERED_SECONDS - 1))
    assert not any(begin(bursty, copies))
    assert bursty.acknowledged == copies
    bursty.clock.advance(timedelta(seconds=2))
    assert all(begin(bursty, copies_of(copies)))


def test_early_settlement_of_a_slow_burst_is_forgotten(bursty: World) -> None:
    messages = burst_of()
    for message in messages:
        assert bursty.in_hand.begin(message)
        settle(bursty, [message])
        bursty.clock.advance(timedelta(seconds=1))
    handed_out = begin(bursty, copies_of(messages))
    remembered = int(REMEMBERED_SECONDS) - 1
    assert handed_out == [True] * (SIZE - remembered) + [False] * remembered


def test_copies_of_a_partly_settled_burst_are_dropped(bursty: World) -> None:
    messages = burst_of()
    settled, in_hand, waiting = messages[:10], messages[10:20], messages[20:]
    assert all(begin(bursty, messages[:20]))
    settle(bursty, settled)
    assert not any(begin(bursty, copies_of(settled + in_hand)))
    assert len(bursty.in_hand) == 10
    assert all(begin(bursty, waiting))
    assert not any(begin(bursty, copies_of(waiting)))
    settle(bursty, in_hand + waiting)
    assert len(bursty.in_hand) == 0
    assert not any(begin(bursty, copies_of(messages)))


@pytest.mark.parametrize("unsettled", ["given back", "dropped", "never taken"])
def test_unsettled_message_of_a_burst_is_handed_out(bursty: World, unsettled: str) -> None:
    messages = burst_of()
    last = messages.pop()
    (again,) = copies_of([last])
    if unsettled != "never taken":
        assert bursty.in_hand.begin(last)
    if unsettled == "given back":
        bursty.in_hand.let_go(last)
    del last
    assert all(begin(bursty, messages))
    settle(bursty, messages)
    settle(bursty, messages[:5])  # once more, by mistake
    assert bursty.in_hand.begin(again)
    assert not any(begin(bursty, copies_of(messages)))


def test_broker_may_not_redeliver_a_dropped_burst_message(bursty: World) -> None:
    messages = burst_of()
    assert bursty.in_hand.begin(messages.pop())
    assert not bursty.in_hand.may_redeliver()


def test_copy_of_a_message_received_alone_is_dropped(bursty: World) -> None:
    messages, arrivals = burst_of()[:2], Arrivals("orders")
    for message in messages:
        arrivals.one(message)
    others = burst_of(SIZE)
    assert all(begin(bursty, [*others[:5], *messages]))
    assert others[0].redrive.open
    settle(bursty, messages[:1])
    copies = copies_of(messages)
    assert not any(begin(bursty, copies))
    assert bursty.acknowledged == copies[:1]
    settle(bursty, messages[1:])
    assert bursty.acknowledged == copies
    assert not any(begin(bursty, copies_of(others[:5])))


def test_open_bursts_are_bounded(bursty: World) -> None:
    messages = [message for number in range(100) for message in burst_of(number * SIZE)]
    assert all(begin(bursty, messages))
    assert len(bursty.in_hand._open) <= 32  # noqa: SLF001 - the memory in question
    settle(bursty, messages)
    assert len(bursty.in_hand) == 0
    assert not any(begin(bursty, copies_of(messages)))


def test_message_is_settled_while_ids_of_others_are_read(
    bursty: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = burst_of()
    assert all(begin(bursty, messages))
    worker = threading.Thread(target=bursty.in_hand.end, args=(messages[1],))

    def read(message: pulsar.Message) -> bytes:
        monkeypatch.undo()
        worker.start()
        wait_until(lambda: id(messages[1]) not in bursty.in_hand._new)  # noqa: SLF001 - the moment
        return in_flight._id_of(message)  # noqa: SLF001 - as without this

    monkeypatch.setattr(in_flight, "_id_of", read)
    assert len(bursty.in_hand) == SIZE - 1
    worker.join()
    settle(bursty, [messages[0], *messages[2:]])
    assert bursty.in_hand.may_redeliver()
    assert not any(begin(bursty, copies_of(messages)))


def test_handed_out_again_burst_message_is_counted_once(bursty: World) -> None:
    messages = burst_of()
    assert all(begin(bursty, messages[:2]))
    assert bursty.in_hand.begin(messages[0])
    assert len(bursty.in_hand) == 2
    assert all(begin(bursty, messages[:3]))
    assert len(bursty.in_hand) == 3
    settle(bursty, messages[:3])
    assert len(bursty.in_hand) == 0


def sized(number: int, size: int) -> InMemoryMessage:
    message_id = pulsar.MessageId(0, 1, number, -1)
    return InMemoryMessage(TopicName("shop", "prod", "orders"), message_id, b"x" * size, START)


def test_byte_limit_stops_new_messages() -> None:
    world = World(behind=0)
    messages = [sized(number, 300) for number in range(4)]
    for message in messages:
        assert world.in_hand.begin(message)
    assert world.holds == [True]
    world.in_hand.end(messages[0])
    assert world.holds == [True]  # until a tenth is settled
    world.in_hand.let_go(messages[1])
    assert world.holds == [True, False]


def test_dropped_messages_free_the_byte_limit() -> None:
    world = World(behind=0)
    messages = [sized(number, 300) for number in range(5)]
    for message in messages[:4]:
        assert world.in_hand.begin(message)
    assert world.holds == [True]
    del message
    del messages[:2]
    assert world.holds[-1] is False
    assert world.in_hand.begin(messages[-1])
    assert world.holds[-1] is False
    assert len(world.in_hand) == 3


def test_consumer_stops_receiving_at_its_byte_limit() -> None:
    policy = Policy(TopicName("shop", "prod", "orders"), "billing")
    consumer = InMemoryConsumer(policy, max_in_flight_bytes=1_000)
    for _ in range(10):
        consumer.send(b"x" * 400)
    messages = [consumer.receive(), consumer.receive(), consumer.receive()]
    assert consumer.receive(timedelta(seconds=1)) is None
    consumer.acknowledge(messages.pop())
    assert consumer.receive(timedelta(seconds=1)) is not None


def test_properties_of_unsent_messages_are_bounded() -> None:
    policy = Policy(TopicName("shop", "prod", "orders"), "billing", max_retries=0)
    consumer, taken = InMemoryConsumer(policy, max_in_flight_bytes=128_000), 0
    consumer.broker.refused.add(policy.dead_letter_topic)
    for _ in range(1_000):
        consumer.send(b"", properties={"trace": "x" * 995})
    while (message := consumer.receive(SECOND)) is not None:
        taken += 1
        consumer.reconsume_later(message)
    assert taken == 128


TOPIC = TopicName("shop", "prod", "orders")


class Uncounted(InMemoryMessage):
    """A message as a broker delivers it that counts no redeliveries."""

    def redelivery_count(self) -> int:
        return 0


@pytest.mark.parametrize("kind", [SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER])
def test_redeliveries_not_counted_by_broker_are_counted(
    kind: SubscriptionType,
) -> None:
    consumer = InMemoryConsumer(Policy(TOPIC, "billing", kind, max_retries=2))
    broker = consumer.broker
    for content in (b"bad", b"worse"):
        sent = Uncounted(TOPIC, pulsar.MessageId(-1, 0, 0), content, broker.clock.now())
        broker.store(TOPIC, sent)

    for received in range(1, 4):
        for _ in range(2):
            message = consumer.receive()
            assert consumer.attempt_of(message).number == received  # as where the broker counts
            if message.data() == b"bad" and received == 3:
                consumer.acknowledge(message)
            else:
                consumer.negative_acknowledge(message)

    (dead,) = consumer.dead_letters
    assert (dead.data(), dead.properties()["RECONSUMETIMES"]) == (b"worse", "3")
    assert broker.unsettled() == []
    assert not consumer._processor.decisions.attempts.times_given_back  # noqa: SLF001 - settled messages take no memory


def test_redelivery_counts_take_bounded_memory() -> None:
    policy = Policy(TOPIC, "billing", SubscriptionType.EXCLUSIVE)
    attempts = Attempts(lambda: policy, SystemClock())
    kept = message_with(0)
    for number in range(MAX_COUNTED + 10):
        attempts.give_back(message_with(number))
        if number % 1_000 == 0:
            attempts.give_back(kept)
    assert len(attempts.times_given_back) == MAX_COUNTED
    assert attempts.given_back(kept) == 12
    assert attempts.given_back(message_with(1)) == 0


def message_with(entry: int) -> pulsar.Message:
    """A message that is known by its id."""
    message = InMemoryMessage(TOPIC, pulsar.MessageId(-1, 1, entry), b"", SystemClock().now())
    return cast("pulsar.Message", message)


def test_unsettled_failures_take_bounded_memory() -> None:
    policy = Policy(TOPIC, "billing")
    attempts = Attempts(lambda: policy, SystemClock())
    for number in range(MAX_COUNTED + 10):
        message = message_with(number)
        failure = Failure(attempts.of(message), policy, None, None, raised=True)
        attempts.remember(message, failure)
    assert len(attempts.failed_here) == MAX_COUNTED
    assert attempts.of(message).number == 2
    assert attempts.of(message_with(1)).number == 1

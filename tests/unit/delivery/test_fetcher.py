"""Fetching in threads, and reports of lost connections."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pulsar
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive import Event, Policy, RetryConsumer
from redrive.delivery.arrivals import (
    AHEAD_SECONDS,
    BURST,
    RETRIES_MEASURED,
    Arrivals,
    ConnectionWatch,
    EarlyRetries,
)
from redrive.delivery.concurrency import Deadline, SignalSafeToken, Timer
from redrive.delivery.fetcher import ConsumerStoppedError, Fetcher
from redrive.delivery.middleware.ack_timeouts import AckTimeouts
from redrive.delivery.parts import SystemClock
from redrive.delivery.reporting import Name
from redrive.policy.naming import TopicName
from redrive.testing.broker import InMemoryMessage, VirtualClock
from tests.support.fake_client import BurstMessage, FakeClient, FakeSubscription
from tests.support.waiting import wait_until

POLICY = Policy(TopicName("shop", "prod", "orders"), "billing")


class Counting(SignalSafeToken):
    """A token that counts its waiters."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = threading.Semaphore(0)

    def take(self, timeout: float | None = None) -> bool:
        self.waiting.release()
        return super().take(timeout)


@pytest.fixture
def fetcher() -> Any:  # noqa: ANN401 - an inbox that takes anything for a message
    fetcher = Fetcher([])
    yield fetcher
    fetcher.close(Deadline(10))


def test_waiting_threads_get_messages_handed_out_again(fetcher: Any) -> None:  # noqa: ANN401
    waking = fetcher._waking = Counting()  # noqa: SLF001
    messages: queue.SimpleQueue[str] = queue.SimpleQueue()
    takers = [
        threading.Thread(target=lambda: messages.put(fetcher.take()), daemon=True) for _ in range(3)
    ]
    for taker in takers:
        taker.start()
    for _ in takers:
        assert waking.waiting.acquire(timeout=30)
    for message in "abc":
        fetcher.again(message, 0)
    assert sorted(messages.get(timeout=30) for _ in takers) == ["a", "b", "c"]


def test_hastened_message_is_handed_out_at_once(fetcher: Any) -> None:  # noqa: ANN401
    for message, seconds in (("later", 60), ("waiting", 90)):
        fetcher.again(message, seconds)
    fetcher.hasten("waiting")
    fetcher.hasten("not waiting")
    assert [fetcher.take(0), fetcher.take(0)] == ["waiting", None]


def test_thread_that_stops_waiting_wakes_another(fetcher: Any) -> None:  # noqa: ANN401
    fetcher.again("a", 60)
    assert fetcher.take(0) is None
    assert fetcher._waking.take(0)  # noqa: SLF001


def test_wait_of_microseconds_ends() -> None:
    """`SimpleQueue.get` did not return from one of some thousand of these."""
    token = SignalSafeToken()
    for number in range(20_000):
        token.put()
        assert token.take()
        assert not token.take(number % 50 * 1e-7)


class Interposing(FakeSubscription):
    """A subscription that makes a call before it returns each message."""

    call: Callable[[], None] = staticmethod(lambda: None)

    def receive(self, milliseconds: int) -> InMemoryMessage:
        message = super().receive(milliseconds)
        self.call()
        return message


@pytest.fixture
def subscription() -> Interposing:
    return Interposing(str(POLICY.topic))


@pytest.fixture
def flowing(subscription: Interposing) -> Iterator[Fetcher]:
    """A fetcher whose next messages are received by the thread that takes them."""
    fetcher = Fetcher([cast("pulsar.Consumer", subscription)])
    subscription.waiting.put(message_of("first"))
    assert taken(fetcher, 30) == "first"
    yield fetcher
    fetcher.close(Deadline(10))


def message_of(content: str) -> InMemoryMessage:
    published = datetime(2026, 11, 21, tzinfo=UTC)
    return InMemoryMessage(POLICY.topic, pulsar.MessageId(-1, 1, 0), content.encode(), published)


def taken(fetcher: Fetcher, timeout: float) -> str | None:
    message = fetcher.take(timeout)
    return None if message is None else message.data().decode()


def test_held_fetcher_hands_out_no_new_message(subscription: Interposing, flowing: Fetcher) -> None:
    flowing.hold_new(subscription, held=True)
    subscription.waiting.put(message_of("new"))
    assert taken(flowing, 0.1) is None
    flowing.again(cast("pulsar.Message", message_of("again")), 0)
    assert taken(flowing, 30) == "again"
    flowing.hold_new(subscription, held=False)
    assert taken(flowing, 30) == "new"


def test_message_received_during_a_pause_is_handed_out_after_it(
    subscription: Interposing, flowing: Fetcher
) -> None:
    subscription.call = flowing.pause
    for content in ("second", "third"):
        subscription.waiting.put(message_of(content))
    assert taken(flowing, 0.1) is None
    subscription.call = lambda: None
    flowing.resume()
    assert [taken(flowing, 30), taken(flowing, 30)] == ["second", "third"]


def test_message_received_during_a_stop_is_not_handed_out(
    subscription: Interposing, flowing: Fetcher
) -> None:
    subscription.call = flowing.stop
    subscription.waiting.put(message_of("second"))
    with pytest.raises(ConsumerStoppedError):
        flowing.take(30)
    assert subscription.waiting.empty()


@pytest.fixture
def fast(subscription: Interposing) -> Iterator[Fetcher]:
    """A fetcher whose next messages are received in bursts."""
    fetcher = Fetcher([cast("pulsar.Consumer", subscription)], [Arrivals("orders", in_bursts=True)])
    deliver(subscription, range(400))
    (topic,) = fetcher._topics  # noqa: SLF001 - how it receives
    topic._fast = True  # noqa: SLF001 - however slow the machine is
    yield fetcher
    fetcher.close(Deadline(10))


def deliver(subscription: FakeSubscription, numbers: Iterable[int]) -> None:
    published = datetime(2026, 11, 21, tzinfo=UTC)
    for number in numbers:
        message_id, content = pulsar.MessageId(-1, 1, number), b"%d" % number
        subscription.waiting.put(BurstMessage(POLICY.topic, message_id, content, published))


def test_fast_messages_come_in_bursts_and_in_order(
    fast: Fetcher, subscription: Interposing
) -> None:
    messages = [fast.take(30) for _ in range(400)]
    assert [message.data() for message in messages if message] == [b"%d" % n for n in range(400)]
    sizes = Counter(id(one.redrive) for one in messages if one and not one.redrive.alone)
    assert set(sizes.values()) >= {BURST}
    assert all(size <= BURST for size in sizes.values())
    assert fast.take(0.05) is None
    deliver(subscription, [400])
    assert taken(fast, 30) == "400"


@pytest.mark.parametrize("end", ["pause", "hold", "stop"])
def test_rest_of_a_burst_is_not_handed_out(fast: Fetcher, end: str) -> None:
    messages = [taken(fast, 30) for _ in range(3)]
    if end == "stop":
        fast.stop()
        with pytest.raises(ConsumerStoppedError):
            fast.take(30)
        return
    (fast.pause if end == "pause" else lambda: fast.hold_new(fast, held=True))()
    assert fast.take(0.05) is None
    (fast.resume if end == "pause" else lambda: fast.hold_new(fast, held=False))()
    messages += [taken(fast, 30) for _ in range(397)]
    assert messages == [f"{number}" for number in range(400)]


def test_taker_gets_messages_of_a_burst_that_another_received(
    subscription: Interposing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It found none itself just before. Else they wait until the handler of the other ends."""
    fetcher = Fetcher([cast("pulsar.Consumer", subscription)], [Arrivals("orders", in_bursts=True)])
    deliver(subscription, [0])
    assert taken(fetcher, 30) == "0"
    others: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def receive(_milliseconds: int) -> InMemoryMessage:
        monkeypatch.undo()
        deliver(subscription, range(1, 100))
        (topic,) = fetcher._topics  # noqa: SLF001 - how it receives
        topic._fast = True  # noqa: SLF001 - however slow the machine is
        other = threading.Thread(target=lambda: others.put(taken(fetcher, 30)))
        other.start()
        other.join()
        raise pulsar.Timeout

    monkeypatch.setattr(subscription, "receive", receive)
    fetcher._waking.take(0)  # noqa: SLF001 - as below
    message = fetcher._wait(time.monotonic() + 3)  # noqa: SLF001 - as a taker that was woken
    assert message
    assert message.data() == b"2"
    assert others.get_nowait() == "1"
    fetcher.close(Deadline(10))


def test_topics_take_turns_within_their_bursts(subscription: Interposing) -> None:
    retries = Interposing(str(POLICY.retry_topic))
    deliver(subscription, range(300))
    deliver(retries, range(1_000, 1_300))
    subscriptions = [cast("pulsar.Consumer", one) for one in (subscription, retries)]
    fetcher = Fetcher(
        subscriptions, [Arrivals(name, in_bursts=True) for name in ("orders", "retries")]
    )
    wait_until(lambda: len(fetcher._flowing) == 2)  # noqa: SLF001 - both have a message
    for topic in fetcher._topics:  # noqa: SLF001 - as above
        topic._fast = True  # noqa: SLF001 - however slow the machine is
    sources = [int(taken(fetcher, 30) or 0) >= 1_000 for _ in range(500)]
    assert all(first != second for first, second in itertools.pairwise(sources))
    fetcher.close(Deadline(10))


def test_slow_messages_are_received_one_by_one(
    subscription: Interposing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redrive.delivery.fetcher._FAST_SECONDS", -1.0)
    fetcher = Fetcher([cast("pulsar.Consumer", subscription)], [Arrivals("orders", in_bursts=True)])
    deliver(subscription, range(200))
    messages = [fetcher.take(30) for _ in range(200)]
    assert len({id(message.redrive) for message in messages if message}) == 1
    fetcher.close(Deadline(10))


def test_waiting_messages_of_slow_handlers_come_in_bursts(
    subscription: Interposing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redrive.delivery.fetcher._FAST_SECONDS", -1.0)
    fetcher = Fetcher([cast("pulsar.Consumer", subscription)], [Arrivals("orders", in_bursts=True)])
    deliver(subscription, range(600))
    messages = [fetcher.take(30) for _ in range(600)]
    assert [message.data() for message in messages if message] == [b"%d" % n for n in range(600)]
    assert any(message and not message.redrive.alone for message in messages)
    fetcher.close(Deadline(10))


def test_empty_queue_is_noted_without_a_call_of_take(
    subscription: Interposing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redrive.delivery.fetcher._POLL_MS", 100)
    arrivals = Arrivals("orders", queue=10)
    noted = threading.Event()
    monkeypatch.setattr(arrivals, "was_empty", lambda _: noted.set())
    fetcher = Fetcher([cast("pulsar.Consumer", subscription)], [arrivals])
    deliver(subscription, range(3))
    assert [taken(fetcher, 30) for _ in range(3)] == ["0", "1", "2"]
    noted.clear()
    assert noted.wait(30)
    deliver(subscription, range(3, 6))
    assert [taken(fetcher, 30) for _ in range(3)] == ["3", "4", "5"]
    fetcher.close(Deadline(10))


SENT = datetime(2026, 11, 21, tzinfo=UTC)


def retry_of(number: int, delay: str) -> BurstMessage:
    message_id = pulsar.MessageId(-1, 1, number)
    properties = {"DELAY_TIME": delay}
    return BurstMessage(POLICY.retry_topic, message_id, b"%d" % number, SENT, properties)


class Retries:
    """A fetcher of a retry topic whose broker delays nothing, on a clock that a test sets."""

    def __init__(self) -> None:
        self.subscription = Interposing(str(POLICY.retry_topic))
        self.clock = VirtualClock(SENT)
        self.early = EarlyRetries(self.clock)
        arrivals = Arrivals("retries", in_bursts=True, early=self.early)
        self.fetcher = Fetcher([cast("pulsar.Consumer", self.subscription)], [arrivals])
        (self.topic,) = self.fetcher._topics  # noqa: SLF001 - how it receives

    def deliver(self, *retries: BurstMessage) -> None:
        for retry in retries:
            self.subscription.waiting.put(retry)


@pytest.fixture
def retries() -> Iterator[Retries]:
    retries = Retries()
    yield retries
    retries.fetcher.close(Deadline(10))


@pytest.mark.parametrize("in_bursts", [False, True])
def test_early_retry_is_kept_until_its_delay_is_over(retries: Retries, *, in_bursts: bool) -> None:
    retries.topic._fast = in_bursts  # noqa: SLF001 - however slow the machine is
    began = time.monotonic()
    retries.deliver(retry_of(0, "0"), retry_of(1, "400"), retry_of(2, "200"), retry_of(3, "no"))
    order = []
    for _ in range(4):
        order.append(taken(retries.fetcher, 30))
        if len(order) == 3:
            assert time.monotonic() - began >= 0.2
    assert order == ["0", "3", "2", "1"]
    assert time.monotonic() - began >= 0.4
    assert len(retries.early) == 0


def test_copy_of_a_kept_retry_takes_its_place(retries: Retries) -> None:
    copies = [retry_of(1, "300") for _ in range(3)]
    retries.deliver(*copies)
    kept, key = retries.early._kept, copies[2].id.serialize()  # noqa: SLF001 - which one
    wait_until(lambda: key in kept and kept[key][0] is copies[2])
    assert retries.fetcher.take(30) is copies[2]
    assert retries.fetcher.take(0.4) is None


def test_kept_retries_are_limited(retries: Retries, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redrive.delivery.arrivals.MAX_KEPT", 3)
    retries.deliver(*(retry_of(number, "60000") for number in range(3)), retry_of(3, "0"))
    wait_until(lambda: not retries.early.has_room)
    assert taken(retries.fetcher, 0.2) is None
    retries.early.release(cast("pulsar.Message", retry_of(0, "60000")))
    assert taken(retries.fetcher, 30) == "3"


@pytest.mark.parametrize(
    ("written", "clock", "seconds"),
    [
        ("3000", 1, 2), ("3000", 4, 0), ("3000", -60, 3), ("864000001", 1, 0), ("", 0, 0),
        ("-1", 0, 0), ("1e9", 0, 0), ("9" * 5_000, 0, 0), ("\u0663", 0, 0),
        ("0" * 21 + "9" * 4_000, 0, 0),
    ],
)  # fmt: skip
def test_early_retry_is_kept_for_its_delay_at_most(
    written: str, clock: float, seconds: float
) -> None:
    early = EarlyRetries(VirtualClock(SENT + timedelta(seconds=clock)))
    assert early.seconds_left(cast("pulsar.Message", retry_of(0, written))) == seconds


@pytest.mark.parametrize(
    ("late", "apart", "reported"),
    [
        ([60, 61, 62, 63], 100, []), ([60, 61, 62, 63, 61], 100, [60]), ([9] * 9, 100, []),
        ([-2] * 9, 100, []), ([60, 60, 1, 60, 60, 60, 60], 100, []),
        ([60, 60, 1, 60, 60, 60, 60, 60], 100, [60]), ([60] * 40, 100, [60]),
        ([60] * 5 + [7_200] * 40, 100, [60, 7_200]), ([60] * 40, 1, []), ([60] * 41, 1, [60]),
        # A queue at the broker: due together, at different times, and a burst that is late.
        (list(range(10, 900, 10)), 10, []), ([n / 10 for n in range(900)], 1, []),
        ([60, 59, 58, 57, 55, 51, 46, 40, 33, 25, 16], 12, []),
    ],
)  # fmt: skip
def test_clock_is_ahead_if_last_retries_are_late_alike(
    late: list[float], apart: int, reported: list[int]
) -> None:
    clock = VirtualClock(SENT)
    clock.advance(timedelta(hours=3))
    early = EarlyRetries(clock)
    reports = []
    for number, seconds in enumerate(late):
        clock.advance(timedelta(seconds=apart))
        delay = (clock.now() - SENT) - timedelta(seconds=seconds)
        retry = retry_of(number, f"{delay.total_seconds() * 1_000:.0f}")
        reports.append(early.clock_ahead(cast("pulsar.Message", retry)))
    assert [report for report in reports if report is not None] == reported


@given(
    st.floats(-600_000, 600_000),
    st.lists(st.floats(0, 2.9), min_size=RETRIES_MEASURED, max_size=3 * RETRIES_MEASURED),
    st.floats(11, 200),
)
def test_clock_ahead_by_any_time_is_reported_once(
    skew: float, jitter: list[float], apart: float
) -> None:
    """A clock that is behind, or ahead by less than a tick of the broker, is not reported."""
    clock = VirtualClock(SENT)
    clock.advance(timedelta(days=9))
    early, reports = EarlyRetries(clock), []
    for number, late in enumerate(jitter):
        clock.advance(timedelta(seconds=apart))
        delay = (clock.now() - SENT) - timedelta(seconds=skew + late)
        retry = retry_of(number, f"{max(0.0, delay.total_seconds()) * 1_000:.0f}")
        reports.append(early.clock_ahead(cast("pulsar.Message", retry)))
    reported = [report for report in reports if report is not None]
    if skew < AHEAD_SECONDS - 3:
        assert reported == []
    elif skew > AHEAD_SECONDS + 1:
        assert [round(report - skew) in range(4) for report in reported] == [True]


def test_message_without_delay_shows_no_clock() -> None:
    early = EarlyRetries(VirtualClock(SENT + timedelta(hours=2)))
    messages = [cast("pulsar.Message", retry_of(number, "")) for number in range(9)]
    assert [early.clock_ahead(message) for message in messages] == [None] * 9


def test_receive_accepts_an_unlimited_timeout() -> None:
    client = FakeClient()
    with RetryConsumer(client.as_pulsar(), POLICY, ack_timeout=timedelta.max) as consumer:
        threading.Timer(0.1, client.deliver, (POLICY.topic, b"x")).start()
        message = consumer.receive(timedelta.max)
        assert message is not None
        assert message.data() == b"x"
        assert [m.data() for m in consumer.receive_batch(0, timedelta.max)] == []
        assert consumer.receive(timedelta.min) is None


def test_batches_take_each_message_of_a_burst_in_order() -> None:
    client, contents = FakeClient(), [b"%d" % number for number in range(400)]
    with RetryConsumer(client.as_pulsar(), POLICY) as consumer:
        for topic in cast("Any", consumer)._assembled.parts.incoming._topics:  # noqa: SLF001
            topic._fast = True  # noqa: SLF001 - however slow the machine is
        client.deliver(POLICY.topic, *contents)
        batches = [consumer.receive_batch(100, 30) for _ in range(4)]
        messages = [message for batch in batches for message in batch]
        assert [message.data() for message in messages] == contents
        assert consumer.in_flight == 400
        for message in messages:
            consumer.acknowledge(message)
        assert consumer.in_flight == 0


def test_timer_accepts_an_unlimited_time_and_an_earlier_one() -> None:
    ack_timeouts = AckTimeouts(timedelta.max, SystemClock())
    ack_timeouts.begin(object())
    calls = threading.Semaphore(0)

    def next_due() -> float | None:
        calls.release()
        return ack_timeouts.next_end()

    timer = Timer(next_due, lambda: None)
    for _ in range(3):
        assert calls.acquire(timeout=30)
        timer.reschedule()
    timer.close()


NAMED_POLICY = Policy(TopicName("shop", "prod", "orders"), "billing", name="shop/orders")


@pytest.fixture
def reports() -> list[tuple[str, bool]]:
    return []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    moments = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: moments[0])
    yield moments
    monkeypatch.undo()


@pytest.fixture
def watch(reports: list[tuple[str, bool]]) -> ConnectionWatch:
    return ConnectionWatch("orders", 30, lambda topic, back, _: reports.append((topic, back)))


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([(0, True), (1, False), (30, False), (31, True), (90, True)], []),
        (
            [(1, False), (31, False), (500, False), (501, True), (502, True)],
            [("orders", False), ("orders", True)],
        ),
    ],
    ids=["short", "long"],
)
def test_only_a_long_connection_loss_is_reported_once(
    watch: ConnectionWatch,
    reports: list[tuple[str, bool]],
    clock: list[float],
    states: list[tuple[float, bool]],
    expected: list[tuple[str, bool]],
) -> None:
    for clock[0], connected in states:
        watch.check(connected=connected)
    assert reports == expected


def test_each_connection_loss_is_reported(
    reports: list[tuple[str, bool]], clock: list[float]
) -> None:
    watch = ConnectionWatch("orders", 0.5, lambda topic, back, _: reports.append((topic, back)))
    for moment, connected in enumerate([False, True] * 3):
        for clock[0] in (moment, moment + 0.5):
            watch.check(connected=connected)
    assert reports == [("orders", False), ("orders", True)] * 3


def test_lost_connection_is_reported_while_all_workers_are_busy() -> None:
    client, events = FakeClient(), list[Event]()
    free = threading.Event()
    with RetryConsumer(
        client.as_pulsar(), NAMED_POLICY, on_event=events.append, disconnect_timeout=0.1
    ) as consumer:
        running = threading.Thread(
            target=consumer.run, args=(lambda _: free.wait(60),), kwargs={"timeout": 90}
        )
        running.start()
        client.deliver(NAMED_POLICY.topic, b"x")
        client.wait_until_taken(NAMED_POLICY.topic)
        assert consumer.connected
        client.connect(NAMED_POLICY.topic, connected=False)
        assert not consumer.connected
        wait_until(lambda: [event.event for event in events] == [Name.DISCONNECTED])
        client.connect(NAMED_POLICY.topic, connected=True)
        wait_until(lambda: len(events) == 2)
        free.set()
        consumer.stop()
        running.join()
    assert not consumer.connected
    assert [(event.event, event.topic, event.policy) for event in events] == [
        (Name.DISCONNECTED, str(NAMED_POLICY.topic), NAMED_POLICY.name),
        (Name.RECONNECTED, str(NAMED_POLICY.topic), NAMED_POLICY.name),
    ]


@pytest.mark.parametrize(
    ("error", "ends"),
    [(SystemExit(1), False), (KeyboardInterrupt("of the hook"), True)],
    ids=["exit", "interrupt"],
)
def test_thread_of_a_topic_never_ends_silently(error: BaseException, *, ends: bool) -> None:
    client, reports = FakeClient(), list[Event]()

    def report(event: Event) -> None:
        reports.append(event)
        raise error

    with RetryConsumer(
        client.as_pulsar(), NAMED_POLICY, on_event=report, disconnect_timeout=0.1
    ) as consumer:
        client.connect(NAMED_POLICY.topic, connected=False)
        wait_until(lambda: [event.event for event in reports] == [Name.DISCONNECTED])
        client.deliver(NAMED_POLICY.topic, b"after")
        if ends:
            with pytest.raises(KeyboardInterrupt, match="of the hook"):
                consumer.receive(timedelta(seconds=60))
        else:
            message = consumer.receive(timedelta(seconds=60))
            assert message is not None
            consumer.acknowledge(message)

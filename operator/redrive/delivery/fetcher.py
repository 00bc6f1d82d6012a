"""Several subscriptions as one stream of messages.

The topics with messages take turns, so that neither a busy source topic nor a flood of retries
delays the other by more than one message.

While a topic has messages, a taker gets them from the client in its own thread: handing a message
over from another thread costs more than most handlers do. Once the client has none, a thread of
the topic waits there and hands over the next message, so that a taker can wait for several topics.

The client drops the chunks of a message that it cannot assemble: if more chunked messages arrive at
a time than it keeps, or if the connection was lost between two chunks. It neither acknowledges
these chunks nor requests them again. So if a topic delivers nothing and no message is unsettled,
the fetcher asks the broker to redeliver every unacknowledged message. The client acknowledges a set
of chunks that stays incomplete for one minute: its producer ended before the last one.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import pulsar

from redrive.delivery.arrivals import BURST, Arrivals, ConnectionWatch
from redrive.delivery.concurrency import (
    CLOSE_TIMEOUT,
    Deadline,
    OwnThread,
    SignalSafeEvent,
    SignalSafeToken,
    all_within,
)
from redrive.delivery.forking import OwnerProcess
from redrive.delivery.parts import Postponed
from redrive.errors import RedriveError

if TYPE_CHECKING:
    from redrive.delivery.connection import Renewal

_LINGER_MS = 20
"""Time for which a taker waits in the only topic that flows before it leaves that to its thread."""


class ConsumerStoppedError(RedriveError):
    """The consumer was stopped or closed: it hands out no further message."""

    reason = "ConsumerStopped"


def check_open(*, closed: bool) -> None:
    """Raise `ConsumerStoppedError` if a consumer was *closed*."""
    if closed:
        raise ConsumerStoppedError("this consumer was closed", remedy="make a new one to continue")


class SubscriptionLostError(RedriveError):
    """The client ended a subscription, for example because the client was closed."""

    reason = "SubscriptionLost"


class Fetcher:
    """The messages of all *consumers*, each in the order in which its subscription delivers them.

    It owns the consumers: `close` closes them.

    Args:
        arrivals: those of each consumer; none for readers, to which nothing is delivered again.
        renewals: likewise.
    """

    def __init__(
        self,
        consumers: Sequence[pulsar.Consumer],
        arrivals: Sequence[Arrivals] = (),
        renewals: Sequence[Renewal] = (),
    ) -> None:
        # Wakes a taker, which wakes the next if there may be more.
        self._waking = SignalSafeToken()
        self._changing = threading.Lock()
        self._flowing: list[TopicFetcher] = []
        self._turns: Iterator[Sequence[TopicFetcher]] = itertools.repeat(())
        self._turn: Sequence[TopicFetcher] = ()
        self._linger_ms = 0
        self._again = Postponed[float]()
        self._holders: set[object] = set()  # while there are any, nothing new is handed out
        self._stopping = False
        self._stopped = SignalSafeEvent()
        self._lost: BaseException | None = None
        self._pause: SignalSafeEvent | None = None  # closed while nothing is handed out
        self._owner = OwnerProcess("consumer")
        subscriptions = itertools.zip_longest(consumers, arrivals, renewals)
        self._topics = [TopicFetcher(self, *subscription) for subscription in subscriptions]
        atexit.register(self._close_at_exit)

    def take(self, timeout: float | None = None) -> pulsar.Message | None:
        """Return the next message, or None if none came within *timeout* seconds.

        Raises:
            ConsumerStoppedError: `stop` was called.
            SubscriptionLostError: the client ended a subscription.
        """
        if (message := self.ready(receive=True)) is not None:
            return message
        end = None if timeout is None else time.monotonic() + timeout
        message = self._wait(end)
        # The taker may have been woken for more than it takes, or have kept the time of another.
        if self._flowing or self._again:
            self._waking.put()
        return message

    def ready(self, *, receive: bool = False) -> pulsar.Message | None:
        """Return a message that waits here; else, if *receive* is set, ask the client for one."""
        if self._stopping or self._pause or self._again or self._lost or self._holders:
            return None
        topics = self._turn
        if topics and topics[0].handed_over:
            self._turn = next(self._turns)
            try:
                return topics[0].handed_over.popleft()
            except IndexError:  # another taker was faster
                pass
        return self._next() if receive else None

    @property
    def waiting(self) -> deque[pulsar.Message]:
        """Return the messages that `ready` would return next; none if topics take turns."""
        return self._turn[0].handed_over if len(self._turn) == 1 else deque()

    @property
    def received(self) -> int:
        """Return the number of messages that the client has handed over."""
        return sum(topic.arrivals.received for topic in self._topics if topic.arrivals is not None)

    @property
    def disconnected_since(self) -> float:
        """Return the moment at which the first topic lost its connection; see `Arrivals`."""
        arrivals = (topic.arrivals for topic in self._topics)
        moments = (one.disconnected_since for one in arrivals if one is not None)
        return min(moments, default=time.monotonic())

    @property
    def connected(self) -> bool:
        """Return True if the client has a connection for each topic; False once it is closed.

        Raises:
            InheritedError: this process was forked from the consumer's.
        """
        self._owner.check()
        return bool(self._topics) and all(topic.connected for topic in self._topics)

    def watch(self, seconds: float, report: Callable[[str, bool, float], None]) -> None:
        """Report each connection that is lost for so many *seconds*; see `ConnectionWatch`."""
        for topic in self._topics:
            topic.watches.append(ConnectionWatch(topic.name, seconds, report).check)

    def recover(
        self,
        may: Callable[[], bool],
        recovered: Callable[[str], None],
        remove: Callable[[pulsar.Message, int], None],
    ) -> None:
        """Have messages that the client has dropped delivered again; see `TopicFetcher`."""
        for topic in self._topics:
            topic.may_recover, topic.recovered = may, recovered
            if topic.renewal is not None:
                topic.renewal.remove = remove

    def watch_clock(self, report: Callable[[str, float], None]) -> None:
        """Call *report* from a thread if this clock is ahead; see `TopicFetcher.clock_ahead`."""
        for topic in self._topics:
            topic.clock_ahead = report

    def again(self, message: pulsar.Message, seconds: float) -> None:
        """Hand *message* out once more after so many *seconds*; it stays unacknowledged."""
        with self._changing:
            self._again.add(message, time.monotonic() + seconds)
        self._waking.put()

    def hasten(self, message: pulsar.Message) -> None:
        """Hand *message* out at once if it waits to be handed out once more."""
        with self._changing:
            self._again.hasten(message, time.monotonic())
        self._waking.put()

    def hold_new(self, holder: object, *, held: bool) -> None:
        """Hand out only repeated messages while *held* by any *holder*."""
        if held:
            self._holders.add(holder)
        elif holder in self._holders:
            self._holders.discard(holder)
            self._waking.put()

    def pause(self) -> None:
        """Hand out nothing until `resume`."""
        if self._pause is None:
            self._pause = SignalSafeEvent()

    def resume(self) -> None:
        """Continue after `pause`."""
        pause, self._pause = self._pause, None
        if pause is not None:
            pause.set()

    def sleep(self, seconds: float) -> None:
        """Wait for *seconds*.

        Raises:
            ConsumerStoppedError: `stop` was called meanwhile.
        """
        if self._stopped.wait(seconds):
            self._check_running()

    def stop(self) -> None:
        """Hand out nothing more; may be called from a signal handler."""
        self._stopping = True
        self._stopped.set()
        self._waking.put()
        self.resume()

    def close(self, deadline: Deadline) -> None:
        """Stop, and give back to the broker whatever was not acknowledged; once is enough."""
        self.stop()
        atexit.unregister(self._close_at_exit)
        with self._changing:
            topics, self._topics = self._topics, []
        all_within(deadline, [topic.close for topic in topics])

    def _next(self) -> pulsar.Message | None:
        topics, self._turn = self._turn, next(self._turns)
        for topic in topics:
            message = topic.take(self._linger_ms)
            if message is None:
                self.leave_to_thread(topic)
            elif self._pause or self._stopping:  # since this thread went to the client
                self.again(message, 0)
                return None
            else:
                return message
        return None

    def _wait(self, end: float | None) -> pulsar.Message | None:
        while True:
            self._check_running()
            remaining = None if end is None else max(0.0, end - time.monotonic())
            if (pause := self._pause) is not None:
                if not pause.wait(remaining):
                    return None
                continue
            message = self._due() or (None if self._holders else self._next())
            if message is not None:
                return message
            if self._flowing and not self._holders:  # another taker has received some meanwhile
                continue
            wait = self._until_due(remaining)
            if not self._waking.take(wait) and wait == remaining:
                return None

    def _until_due(self, longest: float | None) -> float | None:
        """Return how long to wait at most: until a message is due, but no longer than *longest*."""
        with self._changing:
            due = self._again.due
        if due is None:
            return longest
        wait = max(0.0, due - time.monotonic())
        return wait if longest is None else min(longest, wait)

    def _due(self) -> pulsar.Message | None:
        with self._changing:
            if (due := self._again.due) is None or due > time.monotonic():
                return None
            message = self._again.pop_first()
        for topic in self._topics:
            if topic.early:  # with messages
                message = topic.early.release(message)
        return message

    def flows(self, topic: TopicFetcher) -> None:
        """Have takers take from *topic*: it has a message, and maybe more."""
        with self._changing:
            self._flowing.append(topic)
            self._arrange()
        self._waking.put()

    def leave_to_thread(self, topic: TopicFetcher) -> None:
        """Have the thread of *topic* wait for its next message: no taker has got one."""
        with self._changing:
            # Another taker has seen it too; and the thread may have brought something since.
            if topic not in self._flowing or topic.handed_over:
                return
            self._flowing.remove(topic)
            self._arrange()
        topic.leave_to_thread()

    def _arrange(self) -> None:
        flowing = self._flowing
        orders = [flowing[n:] + flowing[:n] for n in range(len(flowing))]
        # Several threads may call `next` at a time.
        self._turns = itertools.cycle(orders or [[]])
        self._turn = next(self._turns)
        self._linger_ms = _LINGER_MS if len(flowing) == 1 else 0

    def lose(self, error: BaseException) -> None:
        """Record the end of a subscription, or of its thread: no message follows."""
        self._lost = error
        self._waking.put()

    def _close_at_exit(self) -> None:
        if not self._owner.is_parent:
            self.close(Deadline(CLOSE_TIMEOUT))

    def _check_running(self) -> None:
        if self._stopping:
            self._waking.put()  # wakes the next of several takers
            raise ConsumerStoppedError(
                "this consumer was stopped", remedy="make a new one to continue"
            )
        if self._lost is not None:
            self._waking.put()
            if not isinstance(self._lost, pulsar.PulsarException):
                raise self._lost
            raise SubscriptionLostError(
                "the client ended a subscription of this consumer",
                got=str(self._lost),
                remedy="keep the client open for as long as its consumers; make a new consumer",
            ) from self._lost


_POLL_MS = 1_000
"""Time of the thread in the client when nothing comes, and between checks of the connection."""

_FAST_MESSAGES = 8
_FAST_SECONDS = 0.0005
"""Messages are received in bursts once so many came within so long, one by one …"""
_TRY_AFTER = 256
_MAX_TRY_AFTER = 4_096
"""… or so many without a time-out, as handlers may be slow; twice as many after each burst that
turns out to be small."""
_FAST_BURST = BURST // 8
"""A smaller burst ends that: it has waited for messages that did not come."""

_LOOK_EVERY_SECONDS = 0.001
"""Interval in which `close` checks that the takers have left the client."""

_WAITED_SECONDS = 0.05
"""A message for which the client has waited this long came from the broker just now."""

_RECOVER_AFTER_SECONDS = (15.0, 30.0, 180.0)
"""After so long without a message the broker delivers again, and then from the start. Each second
delivery has the client begin an incomplete set of chunks again or drop it, in turn; in one of two
cycles it keeps the set for the longest time, within which it acknowledges it."""


class TopicFetcher:
    """One subscription, whose *consumer* it owns. It flows once its thread has said so.

    Args:
        fetcher: the thread and takers report changes to it.
        arrivals: None for a reader, to which nothing is delivered again.
        renewal: of the subscription; None for a reader.

    Attributes:
        watches: called about each second with the state of the connection.
        may_recover: returns True if nothing that the broker has delivered is unsettled, and nothing
            is handled twice if it is delivered again.
        recovered: called with the topic once a message has come that the client had dropped.
        clock_ahead: called with the topic, and the seconds by which this clock is ahead.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        consumer: pulsar.Consumer,
        arrivals: Arrivals | None,
        renewal: Renewal | None,
    ) -> None:
        self._consumer = consumer
        self.renewal = renewal
        self.arrivals = arrivals
        self.early = None if arrivals is None else arrivals.early
        self._keeps = None if self.early is None else self._keeps_early
        self._fetcher = fetcher
        self._receiving_burst = threading.Lock()
        self._fast = False
        # Messages received one by one, and since when the last of them.
        self._alone, self._alone_since = 0, 0.0
        self._try_after = _TRY_AFTER
        self._received = 0
        self.watches = [] if arrivals is None else [arrivals.note_connection]
        self.may_recover: Callable[[], bool] = lambda: False
        self.recovered: Callable[[str], None] = lambda _: None
        self.clock_ahead: Callable[[str, float], None] = lambda *_: None
        self._pauses = _pauses()
        self._recover_at = 0.0
        self.handed_over: deque[pulsar.Message] = deque()
        self._inside: list[None] = []  # an entry for each taker who is in the client
        self._closing = False
        self._thread_takes = True  # and no taker does
        self._dry = threading.Semaphore()
        self._thread = OwnThread(target=self._watch, name="redrive-fetcher", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """Return the name of the topic."""
        return str(self._consumer.topic())

    @property
    def connected(self) -> bool:
        """Return True if the client has a connection for the topic, and for all its partitions."""
        return not self._closing and bool(self._consumer.is_connected())

    def take(self, timeout_ms: int) -> pulsar.Message | None:
        """Return the next message of a topic that flows, or None if it turned out to be dry."""
        if self.handed_over:
            try:
                return self.handed_over.popleft()
            except IndexError:  # another taker was faster
                pass
        self._inside.append(None)
        try:
            if self._thread_takes or self._closing:
                return None
            if self.early is not None and not self.early.has_room:
                return None
            return (self._receive_burst() if self._fast else None) or self._receive_one(timeout_ms)
        except pulsar.Interrupted:
            raise  # the client's word for KeyboardInterrupt
        except pulsar.exceptions.PulsarException:
            return None  # a time-out, or else an error that the thread gets as well
        finally:
            self._inside.pop()

    def _receive_burst(self) -> pulsar.Message | None:
        """Return the first message of the next burst; the others are handed over.

        One taker at a time, so that they stay in their order.
        """
        arrivals = self.arrivals
        with self._receiving_burst:
            if not self.handed_over and arrivals is not None:
                burst = self._consumer.batch_receive()
                self._fast = len(burst) >= _FAST_BURST
                after = _TRY_AFTER if self._fast else 2 * self._try_after
                self._alone, self._try_after = 0, min(after, _MAX_TRY_AFTER)
                if burst:
                    arrivals.burst(burst)
                    self.handed_over.extend(
                        burst if self._keeps is None else itertools.filterfalse(self._keeps, burst)
                    )
            with contextlib.suppress(IndexError):  # no more, or another taker was faster
                return self.handed_over.popleft()
            return None

    def _withholds(self, message: pulsar.Message) -> bool:
        """Keep *message* also if it can't be decrypted: a renewed consumer gets such messages."""
        withheld = self.renewal is not None and self.renewal.withholds(message)
        return withheld or self._keeps_early(message)

    def _keeps_early(self, message: pulsar.Message) -> bool:
        """Keep *message* if it came before its time, and have it handed out then."""
        if self.early is None or not (seconds := self.early.seconds_left(message)):
            return False
        if self.early.keep(message, seconds):
            self._fetcher.again(message, seconds)
        return True

    def _receive_one(self, timeout_ms: int) -> pulsar.Message | None:
        """Return the next message; None if it is kept until later."""
        arrivals = self.arrivals
        if arrivals is None:
            return self._consumer.receive(timeout_ms)
        began = time.monotonic() if arrivals.queue else 0.0
        try:
            message = self._consumer.receive(timeout_ms)
        except pulsar.Timeout:
            self._alone = 0
            arrivals.was_empty(began)
            raise
        arrivals.one(message)
        if arrivals.in_bursts:
            self._alone += 1
            if not self._alone % _FAST_MESSAGES:
                now = time.monotonic()
                came_fast = now - self._alone_since < _FAST_SECONDS
                self._fast = came_fast or self._alone >= self._try_after
                self._alone_since = now
        return None if self._keeps is not None and self._keeps(message) else message

    def leave_to_thread(self) -> None:
        """Have the thread wait for the next message: no other takes until it calls *flows*."""
        self._thread_takes = True
        self._dry.release()

    def close(self) -> None:
        """Give back to the broker whatever was not acknowledged."""
        self._closing = True
        while self._inside:  # a thread in the client when the interpreter goes away aborts it
            time.sleep(_LOOK_EVERY_SECONDS)
        # A client that was closed first has closed its consumers: the end that was wanted.
        with contextlib.suppress(pulsar.exceptions.PulsarException):  # nor one without an answer
            self._consumer.close()  # wakes the thread if it is in receive()
        self._dry.release()  # … or if it has nothing to do
        self._thread.join()

    def _watch(self) -> None:
        try:
            while True:
                while not self._dry.acquire(timeout=_POLL_MS / 1_000):
                    self._check_connection()
                    self._look_after_idle_queue()
                while self._inside and not self._closing:  # their messages come first
                    time.sleep(_LOOK_EVERY_SECONDS)
                self.handed_over.append(self._receive())
                self._thread_takes = False
                self._fetcher.flows(self)
        except BaseException as error:  # noqa: BLE001 - raised by takers, also if it is of a hook
            self._fetcher.lose(error)

    def _look_after_idle_queue(self) -> None:
        """Take over if no message was taken since the previous call: no call sees it empty then.

        Without partitions that does not matter, see `Arrivals`.
        """
        arrivals = self.arrivals
        if arrivals is None or not arrivals.queue or self.handed_over or self._inside:
            return
        received, self._received = self._received, arrivals.received
        if received == arrivals.received:
            self._fetcher.leave_to_thread(self)

    def _receive(self) -> pulsar.Message:
        # Never without a timeout: the client forgets a receive that begins while it closes.
        self._recover_at = max(self._recover_at, time.monotonic() + _RECOVER_AFTER_SECONDS[0])
        recovering, settled, renewal = False, False, self.renewal
        while not self._closing:  # which takes long where the broker doesn't answer
            if self.early is not None and not self.early.wait_for_room(_POLL_MS / 1_000):
                self._check_connection()
                settled = False
                continue
            with contextlib.suppress(pulsar.Timeout):
                began = time.monotonic()
                message = self._receive_one(_POLL_MS)
                if message is None:
                    settled = False
                    continue
                renewed = renewal is not None and renewal.had_effect()
                if recovering and (renewed or message.redelivery_count()):
                    self._pauses, self._recover_at = _pauses(), 0.0
                    self.recovered(self.name)
                if time.monotonic() - began >= _WAITED_SECONDS:
                    self._check_clock(message)
                return message
            self._check_connection()
            is_short = renewal is not None and renewal.is_short
            is_time = is_short or time.monotonic() >= self._recover_at
            due = is_time and not self.early and self.may_recover()
            # One poll after all was settled: the client sends acknowledgements 0.1 s late, and the
            # broker would deliver these messages to other consumers.
            if due and settled:
                self._deliver_again()
                self._recover_at, recovering = time.monotonic() + next(self._pauses), True
            settled = due
        raise pulsar.AlreadyClosed

    def _deliver_again(self) -> None:
        """Have all that is unsettled delivered again, to a new consumer if this one lacks permits.

        This thread alone takes messages, so none is taken meanwhile.
        """
        if self.renewal is not None and self.connected and self.renewal.is_due():
            self._keeps = self._withholds
            self.renewal.renew(lambda: self._closing, self._check_connection)
        else:
            self._consumer.redeliver_unacknowledged_messages()

    def _check_clock(self, message: pulsar.Message) -> None:
        if self.early is None or message.redelivery_count():
            return
        ahead = self.early.clock_ahead(message)
        if ahead is not None:
            self.clock_ahead(self.name, ahead)

    def _check_connection(self) -> None:
        if not self._closing:
            connected = self.connected
            for watch in self.watches:
                watch(connected=connected)


def _pauses() -> Iterator[float]:
    """Yield how long to wait after each delivery; before the first it was the first of them."""
    first, *others = _RECOVER_AFTER_SECONDS
    return itertools.cycle([*others, first])

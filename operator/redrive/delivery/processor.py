"""The path of a message through a consumer, from reception to settlement: the spine of delivery.

    receive ─▶ handle ─▶ verdict ─▶ settle: acknowledge
                                    or forward, and acknowledge after the receipt

Called by the consumers. `middleware` wraps each stage; `decisions` returns the verdict.

At least once: send → receipt → acknowledge, in this order. A crash in between duplicates the
message, under the same origin and count, and never loses it. A message that can't be sent is kept,
unacknowledged, and sent again later. With the topic policies of `provision.desired` brokers delete
no retry and no dead letter before the time to live that the policy sets.

A message is given up on request: `deadLetter.mode: Discard` drops it after its last retry, a time
to live of the policy expires it, a `BroadcastConsumer` has no second attempt, and a Replay with
`DiscardUnreadable` acknowledges entries that no client can read. Otherwise only the client can lose
a message: chunks and entries that it cannot decompress, see the limits in
docs/design/delivery-guarantees.md.

While the broker is down, for ten minutes as well, `run` continues, and that time counts as no
attempt. For the operator see `admin.guards`, for Replays `replay.job.run`.

- The client tries to connect without limit. After `disconnect_timeout` the consumer reports the
  lost connection.
- Messages that the client has prefetched are handled. The client drops their acknowledgements.
- A failed message is kept by `UnsentMessages`, and sent on within a minute after the broker
  answers. With `MAX_UNSENT` of them the consumer takes nothing new.
- Afterwards the broker redelivers every unacknowledged message. The consumer drops copies of
  in-flight or recently settled messages, and acknowledges those of settled ones, see `in_flight`. A
  message that the broker delivers to another consumer is handled again.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import pulsar

from redrive.delivery.arrivals import Burst
from redrive.delivery.concurrency import (
    Deadline,
    UnderWay,
    all_within,
    ends_run,
    ends_thread,
    log_of,
)
from redrive.delivery.decisions import Decisions, drop_tracebacks
from redrive.delivery.forking import OwnerProcess
from redrive.delivery.forwarder import destination, forward, hop_of
from redrive.delivery.in_flight import (
    InFlightMessages,
    Settled,
    SubscriptionsByTopic,
    check_message,
)
from redrive.delivery.middleware.chain import (
    DONE,
    HANDLE_AGAIN_AFTER,
    Acknowledge,
    Forward,
    HandBack,
    Middleware,
    Ready,
    Receive,
    Redeliver,
    RetryInPlace,
    Settle,
    Settlement,
    compose,
    receive_accepted,
)
from redrive.delivery.middleware.scheduling import OneAttempt
from redrive.delivery.parts import AnyTimer, Parts
from redrive.delivery.reporting import Reporting
from redrive.messages import NotSentError, id_text, message_id_text
from redrive.policy.naming import TopicName
from redrive.policy.verdict import Dead, Discard, Done, Retry

if TYPE_CHECKING:
    from redrive.delivery.middleware.outage_breaker import OutageGuard
    from redrive.delivery.middleware.outage_circuit import Outage

_log = log_of(__name__)


class Processor:
    """Receives, handles and settles the messages of one consumer.

    Attributes:
        owner: the process that may use it.
        receive: returns the next message, as `Incoming.take` does.
        acknowledge: settles a message as handled; without a `Settlement` where no middleware needs
            one. Raises InvalidSpecError if it is not a message of this consumer, and InheritedError
            if this process was forked from the consumer's; likewise `settle`.
        late: reports a message that was handled well, but after its time.
        one_attempt: for consumers that call handlers.
        ready: returns the next message if that takes no waiting; None if middleware may wait then.
            See also `add_ready`.
        closed: True after `close`.

    Args:
        guard: the one of *middleware* that pauses the consumer in outages; None without one.
        handle_again: have messages that could not be sent handled again, instead of sent again.
    """

    def __init__(  # noqa: PLR0913 - the parts of a consumer
        self,
        parts: Parts,
        decisions: Decisions,
        middleware: Sequence[Middleware],
        reporting: Reporting,
        guard: OutageGuard | None,
        *,
        handle_again: bool,
    ) -> None:
        self.parts = parts
        self.owner = OwnerProcess("consumer")
        self.decisions = decisions
        self.middleware = middleware
        self.late = reporting.late
        self.one_attempt = OneAttempt(parts.incoming, decisions.attempts)
        self._guard = guard
        self._handle_again = handle_again
        self._subscriptions = SubscriptionsByTopic(parts.subscriptions)
        settled = Settled(parts.incoming, parts.clock, parts.behind)
        self._in_flight = InFlightMessages(
            settled, self._tell_broker, self._hold_new, max_bytes=parts.max_in_flight_bytes
        )
        self._settled_at_work = self.one_attempt.at_work.settled
        self._handed_over = parts.incoming.ready
        self._outages = () if guard is None else guard.open
        self._copy_dropped = reporting.copy_dropped
        self._left_unsettled = reporting.left_unsettled
        self._negatively_acknowledged = reporting.negatively_acknowledged
        self._settling = UnderWay()
        self.closed = False
        self._nacked_until = 0.0
        receive: Receive = self._take
        settle: Settle = self._carry_out
        send: Forward = functools.partial(forward, parts.outgoing)
        self.receive = compose([m.receive for m in middleware], receive)
        self._settle = compose([m.settle for m in middleware], settle)
        self._unsent = UnsentMessages(parts, self._settle, decisions, reporting.taking)
        self.ready: Ready | None = self._ready
        succeed: Acknowledge | None = self._acknowledge
        for wrapper in reversed(middleware):
            self.ready = None if self.ready is None else wrapper.ready(self.ready)
            succeed = None if succeed is None else wrapper.acknowledge(succeed)
        self._wrapped = succeed is None
        wraps_ready = any(
            m is not guard and type(m).ready is not Middleware.ready for m in middleware
        )
        self._has_batches = self.ready is not None and not wraps_ready
        self.acknowledge: Acknowledge = succeed or self._settle_done
        self._end = reporting.settle(self._end_failed)
        self._forward = compose([m.forward for m in middleware], send)
        parts.incoming.recover(self._may_recover, reporting.recovered, self._remove)
        parts.incoming.watch_clock(reporting.clock_ahead)

    @property
    def in_flight(self) -> int:
        """Return how many messages were taken and are not settled."""
        return len(self._in_flight)

    @property
    def connected(self) -> bool:
        """Return True if there is a connection for the source and the retry topic."""
        return not self.closed and self.parts.incoming.connected

    @property
    def outages(self) -> tuple[Outage, ...]:
        """Return the outages for which the consumer has paused."""
        return () if self._guard is None else self._guard.outages

    @property
    def dead_keys(self) -> int:
        """Return how many keys have dead letters, as was read last."""
        return 0 if self.parts.sequence_log is None else self.parts.sequence_log.sequences.keys

    @property
    def may_wait(self) -> bool:
        """Return True if more than to acknowledge is done for a success, which may take time."""
        return self._wrapped or (self._guard is not None and self._guard.limits is not None)

    def ignore_outages(self) -> None:
        """Continue in spite of them."""
        if self._guard is not None:
            self._guard.ignore()

    def check_own(self, message: pulsar.Message) -> None:
        """Pass if *message* came to this consumer.

        Raises:
            InvalidSpecError: it did not, or is no message.
        """
        check_message(message)
        self._subscriptions[message.topic_name()]

    def settle(self, settlement: Settlement) -> None:
        """End an attempt as was decided.

        Without a receipt nothing is acknowledged: the message stays in this consumer, and is sent
        again later, or handled again if that was asked for. It keeps its identity, so a topic that
        deduplicates stores it once, see `sender`; another may store it twice. Should the process
        end before, the broker delivers it again at once. A message that can't be copied as it is
        becomes an encoded dead letter at once.

        Raises:
            InvalidSpecError: it is not a message of this consumer.
        """
        self.owner.check()
        self.one_attempt.at_work.note_settlement(settlement.message)
        try:
            with self._settling:
                self._settle(settlement)
        except NotSentError as error:
            encoded = self.decisions.not_copied(settlement, error)
            if encoded is not None:
                self.settle(encoded)
                return
            message, verdict, failure = settlement.message, settlement.verdict, settlement.failed()
            if self._handle_again or not isinstance(verdict, (Retry, Dead)):
                # Not by the broker: it delivers no chunked message again while its consumer lives.
                self.decisions.attempts.remember(message, failure)
                self.parts.incoming.again(message, HANDLE_AGAIN_AFTER.total_seconds())
            else:
                drop_tracebacks(failure.error)
                self._unsent.keep(settlement._replace(failure=failure._replace(raised=False)))

    def _carry_out(self, settlement: Settlement) -> pulsar.MessageId | None:
        message, verdict, _ = settlement
        match verdict:
            case Done():
                self._acknowledge(message)
            case Redeliver(counted, reason):
                attempt = self.decisions.attempts.of(message)
                if not counted:
                    self.decisions.attempts.give_back(message)
                self._subscriptions[message.topic_name()].negative_acknowledge(message)
                self._in_flight.let_go(message)
                self._nacked_until = self.parts.clock.monotonic() + self.parts.nack_seconds
                self._negatively_acknowledged(message, attempt, reason)
            case HandBack():
                self.parts.incoming.again(message, 0)
            case _:
                return self._end(settlement)
        return None

    def _end_failed(self, settlement: Settlement) -> pulsar.MessageId | None:
        message, verdict, failure = settlement.message, settlement.verdict, settlement.failed()
        receipt = None
        match verdict:
            case RetryInPlace(delay=delay):
                self.decisions.attempts.remember(message, failure)
                self.parts.incoming.again(message, delay.total_seconds())
                return None
            case Retry() | Dead():
                receipt = self._forward(hop_of(message, verdict, failure))
            case Discard():
                pass  # acknowledged without a copy: the policy keeps no dead letters
        self._acknowledge(message, moved=True)  # only after the receipt
        return receipt

    def _take(self, timeout: float | None) -> pulsar.Message | None:
        message = self.parts.incoming.take(timeout)
        if message is None or self._in_flight.begin(message):
            return message
        self._copy_dropped(message)
        # The time begins only now, since to look at the clock costs each message.
        return receive_accepted(
            self.parts.incoming.take, self._accepts, self.parts.clock.monotonic, timeout
        )

    def _ready(self) -> pulsar.Message | None:
        if self._settled_at_work or self._outages:  # of which one may be next
            return None
        message = self._handed_over()
        if message is None or self._in_flight.begin(message):
            return message
        self._copy_dropped(message)
        return None

    def add_ready(self, messages: list[pulsar.Message], size: int) -> None:
        """Add messages that need no wait, up to *size*, right after one that was `ready`."""
        if not self._has_batches or self._settled_at_work or self._outages:
            return
        waiting, begin = self.parts.incoming.waiting, self._in_flight.begin
        with contextlib.suppress(IndexError):  # no more, or another taker was faster
            while len(messages) < size:
                message = waiting.popleft()
                if begin(message):
                    messages.append(message)
                else:
                    self._copy_dropped(message)

    def _accepts(self, message: pulsar.Message) -> bool:
        accepted = self._in_flight.begin(message)
        if not accepted:
            self._copy_dropped(message)
        return accepted

    def _hold_new(self, held: bool) -> None:  # noqa: FBT001
        self.parts.incoming.hold_new(self._in_flight, held=held)

    def _may_recover(self) -> bool:
        waits = self.parts.clock.monotonic() < self._nacked_until
        return not waits and self._in_flight.may_redeliver()

    def _remove(self, message: pulsar.Message, messages: int) -> None:
        """Dead-letter an undecryptable entry.

        Runs in a thread that exceptions of middleware must not end.
        """
        if not self._in_flight.begin(message):
            return
        try:
            self.settle(self.decisions.undecryptable(message, messages))
        except BaseException as error:  # of a middleware
            if ends_run(error):
                raise
            _log.exception("entry %s was not removed", id_text(message.message_id()))
            self._in_flight.let_go(message)

    def _tell_broker(self, message: pulsar.Message) -> None:
        self._subscriptions[message.topic_name()].acknowledge(message)

    def _settle_done(self, message: pulsar.Message) -> None:
        self.settle(Settlement(message, DONE))

    def _acknowledge(self, message: pulsar.Message, *, moved: bool = False) -> None:
        if self.owner.is_parent:
            self.owner.check()
        if self.closed:  # by a thread that no longer waited for this one
            return
        burst: Burst | None = getattr(message, "redrive", None)
        topic = message.topic_name() if burst is None else burst.topic
        try:
            self._subscriptions[topic].acknowledge(message)
        except pulsar.Interrupted:
            raise  # the client's word for KeyboardInterrupt
        except pulsar.exceptions.PulsarException:
            if not moved:
                raise
            # Handled again here, it would be sent on twice.
            _log.exception(
                "message %s was sent on, and could not be acknowledged; the broker delivers it "
                "again after the next connection",
                id_text(message.message_id()),
            )
        self._in_flight.end(message, moved=moved)
        # Most messages need none of these calls, each of which takes 2 % of the time of a message.
        attempts, guard = self.decisions.attempts, self._guard
        if attempts.failed_here or attempts.times_given_back:
            attempts.forget(message)
        if guard is not None and guard.limits is not None and not moved:
            guard.succeeded(message)

    def acknowledge_all(self, messages: Sequence[pulsar.Message]) -> None:
        """Settle each of *messages* as `acknowledge` does, with fewer calls."""
        if self.acknowledge != self._acknowledge:
            for message in messages:
                self.acknowledge(message)
            return
        if self.owner.is_parent:
            self.owner.check()
        latest, acknowledged = None, []
        try:
            for message in messages:
                if self.closed:
                    return
                burst: Burst | None = getattr(message, "redrive", None)
                if burst is None or burst is not latest:
                    topic = message.topic_name() if burst is None else burst.topic
                    acknowledge, latest = self._subscriptions[topic].acknowledge, burst
                acknowledge(message)
                acknowledged.append(message)
        finally:
            self._end_all(acknowledged)

    def _end_all(self, messages: Sequence[pulsar.Message]) -> None:
        self._in_flight.end_all(messages)
        attempts, guard = self.decisions.attempts, self._guard
        if attempts.failed_here or attempts.times_given_back:
            for message in messages:
                attempts.forget(message)
        if guard is not None and guard.limits is not None:
            for message in messages:
                guard.succeeded(message)

    def close(self, deadline: Deadline, *first: Callable[[], object]) -> None:
        """Stop, end *first* and all middleware, and leave the subscriptions, until *deadline*.

        Other threads end the settlements that they have begun. Other messages stay
        unacknowledged, and their number is reported. In a forked child this does nothing.
        """
        if self.owner.is_parent:
            return
        self.parts.stop()
        closing = [*first, self._unsent.close, *(link.close for link in self.middleware)]
        try:
            all_within(deadline, closing)
        finally:
            self._settling.wait(deadline)  # else their sends would lose their producers
            self._close_parts(deadline)

    def _close_parts(self, deadline: Deadline) -> None:
        if self.closed:
            return
        self.closed = True
        unsettled = len(self._in_flight)
        self.parts.close(deadline)
        if unsettled:
            self._left_unsettled(unsettled)


MAX_UNSENT = 1_000
"""Number of messages that wait to be sent at which receiving is suspended."""
_RESUME_SHARE = 0.9
"""Share of `MAX_UNSENT` below which receiving resumes."""

_FIRST_SECONDS = 5.0
_LONGEST_SECONDS = 60.0


@dataclass
class _Waiting:
    """Messages that wait to be sent to one topic."""

    next_attempt: float
    pause: float = _FIRST_SECONDS
    settlements: deque[Settlement] = field(default_factory=deque)


class _Report(Protocol):
    def __call__(self, waiting: int, limit: int, *, stopped: bool) -> None: ...


class UnsentMessages:
    """Keeps settlements whose message could not be sent, and tries the send again.

    For each topic one message is tried after 5 s, then with back-off up to a minute. When one is
    sent the others follow at once. All stay unacknowledged: a crash loses none, and the broker
    delivers them again. The policy in force then decides. May be used by several threads.

    Args:
        send: settles again; raises NotSentError if there is no receipt.
        decisions: decide once more about a settlement.
        taking: reports suspension and resumption of receiving.
    """

    def __init__(
        self,
        parts: Parts,
        send: Callable[[Settlement], object],
        decisions: Decisions,
        taking: _Report,
    ) -> None:
        self._parts = parts
        self._send = send
        self._decisions = decisions
        self._taking = taking
        self._full = False
        self._waiting: dict[TopicName, _Waiting] = {}
        self._timer: AnyTimer | None = None
        self._closed = False
        self._changing = threading.Lock()

    def keep(self, settlement: Settlement) -> None:
        """Carry out *settlement* later, which sends its message to another topic."""
        with self._changing:
            self._append(settlement)
            if self._timer is None and not self._closed:
                self._timer = self._parts.timer(self._next_attempt, self._try)
            timer = self._timer
        self._bound()
        if timer is not None:
            timer.reschedule()

    def close(self) -> None:
        """Send nothing more, once a send that has begun has ended."""
        with self._changing:
            self._closed = True
            timer = self._timer
        if timer is not None:
            timer.close()

    def _append(self, settlement: Settlement) -> None:
        topic = destination(settlement.verdict, settlement.failed().policy)
        if topic not in self._waiting:
            self._waiting[topic] = _Waiting(self._now() + _FIRST_SECONDS)
        self._waiting[topic].settlements.append(settlement)

    def _now(self) -> float:
        return self._parts.clock.monotonic()

    def _next_attempt(self) -> float | None:
        with self._changing:
            return min((topic.next_attempt for topic in self._waiting.values()), default=None)

    def _try(self) -> None:
        """Send one message to a topic that is due."""
        with self._changing:
            topic, waiting = min(self._waiting.items(), key=lambda entry: entry[1].next_attempt)
            settlement = waiting.settlements.popleft()
        unsent = self._send_again(settlement)
        with self._changing:
            if unsent is None:
                waiting.pause = _FIRST_SECONDS
            else:  # the others first: it may be this message that can't be sent
                self._append(unsent)
                waiting.pause = min(2 * waiting.pause, _LONGEST_SECONDS)
                waiting.next_attempt = self._now() + waiting.pause
            if not waiting.settlements:
                del self._waiting[topic]
        self._bound()

    def _send_again(self, settlement: Settlement) -> Settlement | None:
        """Carry out *settlement* by the policy in force; return the settlement to try again."""
        try:
            settlement = self._decisions.again(settlement)
            self._send(settlement)
        except NotSentError as error:
            return self._decisions.not_copied(settlement, error) or settlement
        except BaseException as error:  # of the program; else this and the others would stay
            if ends_thread(error):
                raise
            message_id = message_id_text(settlement.message)
            _log.exception("message %s is kept, and settled again later", message_id)
            return settlement
        return None

    def _bound(self) -> None:
        with self._changing:
            count = sum(len(topic.settlements) for topic in self._waiting.values())
            # A broker that accepts few does not suspend and resume receiving with each of them.
            resumed_below = math.ceil(MAX_UNSENT * _RESUME_SHARE)
            full = count >= (resumed_below if self._full else MAX_UNSENT)
            if full == self._full:
                return
            self._full = full
            self._parts.incoming.hold_new(self, held=full)  # in the order of the counts
        self._taking(count, resumed_below, stopped=full)

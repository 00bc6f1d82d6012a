"""`SimpleConsumer`: the application requests messages, each for an invisible duration.

receive ─ acknowledged in time ──────────▶ settled
        ├ failed explicitly ─ retries left ▶ to the retry topic, with the ladder's delay
        │                   └ none ▶ dead-letter topic, or discarded
        └ its invisible duration ends, or the consumer closes
                            ─ retries left ▶ to the retry topic, with no delay
                            └ none ▶ dead-letter topic, or discarded

`InFlight` decides whose a message is, `decisions` its verdict. Each message in flight is
invisible to others until its time ends:

Ready ▶ in flight ─ settled in time ▶ Committed
                  └ its time ends ─── retries left ▶ Ready
                                    └ none ▶ DeadLetter, or Discarded

A duration counts from the moment it was asked for. So a message that fails comes again after its
invisible duration less the time already spent on it.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, TypeVar, Unpack

import pulsar

from redrive.delivery.assembly import Options, assemble, check_options
from redrive.delivery.concurrency import CLOSE_TIMEOUT, Deadline, UnderWay, all_within, to_seconds
from redrive.delivery.consumers.consumer import PolicyConsumer
from redrive.delivery.forking import cancel_close_at_end, close_at_end
from redrive.delivery.in_flight import check_message
from redrive.delivery.middleware.ack_timeouts import fail_each
from redrive.delivery.middleware.chain import HAND_BACK, Settlement
from redrive.delivery.parts import BrokerConnection
from redrive.delivery.policy_file import PolicyFile, at_first
from redrive.errors import InvalidSpecError, RedriveError
from redrive.messages import id_text
from redrive.policy.model import Policy
from redrive.policy.values import check_count, to_timedelta
from redrive.policy.verdict import check_request

_PREFETCH = 1


class InvisibleDurationEndedError(RedriveError, TimeoutError):
    """A message was not settled within its invisible duration, or before the consumer closed."""

    reason = "InvisibleDurationEnded"


class SimpleConsumer(PolicyConsumer):
    """Consumes a topic on request: each message is the caller's for as long as was asked for.

    A message that is not acknowledged in time has failed, and turns visible at once: it is moved to
    the retry topic, without delay, with its number of retries one higher; or to the dead-letter
    topic, when these are used up. So the count outlives every process. `close` does the same with
    messages in flight, so that each reception counts: call `hand_back` before for those that were
    not begun. It is called too when the interpreter goes away, and at SIGTERM, unless the program
    does something of its own then or made the consumer in another thread than the main one. A
    process that is killed while messages are in flight leaves them visible at once, as the same
    attempt: *crash_log* counts those. One that is killed between sending a message on and
    acknowledging it leaves two copies. Nothing is ever lost.

    Up to two messages of each partition wait in this consumer between calls of `receive`, and no
    other consumer gets them.

    Use it as a context manager, within the life of *client*. May be used by several threads.

    Args:
        client: connects as a role that the policy lists among its consumer roles.
        policy: see `RetryConsumer`; its ladder applies to `fail` only.
        name: see `RetryConsumer`, as for *schema*, *crypto*, *redaction*, *on_event*,
            *disconnect_timeout*, *max_in_flight_bytes*, *crash_log*, *tracing* and *middleware*.

    Raises:
        SubscribeError: the broker refused one of the two subscriptions.
        InvalidSpecError: the policy is ordered, an option is out of bounds or of another type, or
            there is no such option.
    """

    def __init__(
        self,
        client: pulsar.Client | BrokerConnection,
        policy: Policy | PolicyFile,
        **options: Unpack[Options],
    ) -> None:
        check_options(options, Options)
        check_unordered(at_first(policy))
        self._assembled = assemble(
            self, client, policy, nack_delay=timedelta(), prefetch=_PREFETCH, **options
        )
        self._clock = self._processor.parts.clock
        self._in_flight = InFlight[pulsar.Message]()
        self._changing = threading.Lock()
        self._closed = False
        self._ending = UnderWay()
        self._timer = self._processor.parts.timer(self._next_end, self._expire)
        if not isinstance(client, BrokerConnection):  # in memory
            close_at_end(self.close)

    def receive(
        self,
        max_messages: int,
        invisible: float | timedelta,
        timeout: float | timedelta | None = None,
    ) -> list[pulsar.Message]:
        """Return up to *max_messages*, which no other consumer gets while they are invisible.

        Waits for the first message, but no longer than *timeout*; then takes those that are there.

        Args:
            invisible: 10 s … 12 h, from now.
            timeout: None sets no limit.

        Raises:
            InvalidSpecError: an argument is out of bounds.
            ConsumerStoppedError: `stop` or `close` was called.
            SubscriptionLostError: the client was closed.
        """
        self._assembled.owner.check()
        invisible = check_invisible(invisible)
        check_count(max_messages, "max_messages")
        messages: list[pulsar.Message] = []
        wait = None if timeout is None else to_seconds(timeout)
        try:
            while len(messages) < max_messages:
                message = self._processor.receive(wait)
                if message is None:
                    break
                messages.append(message)
                wait = self._processor.parts.linger
        except BaseException:
            for message in messages:  # which were not handed out
                self._processor.settle(Settlement(message, HAND_BACK))
            raise
        with self._changing:
            now = self._clock.monotonic()
            for message in messages:
                self._in_flight.begin(_key(message), message, now, invisible)
        self._timer.reschedule()
        return messages

    def acknowledge(self, message: pulsar.Message) -> None:
        """Settle *message* as handled. It may come again if this does not reach the broker.

        Raises:
            NotInFlightError: its invisible duration has ended, or it was settled before. What was
                done with it will be done again.
            InvalidSpecError: it is not a message of this consumer.
        """
        self._settle(message, self._processor.acknowledge)

    def fail(
        self,
        message: pulsar.Message,
        *,
        delay: float | timedelta | None = None,
        cause: BaseException | None = None,
    ) -> None:
        """Settle *message* as failed: it is retried later, or dead-lettered with retries used up.

        On return it is stored on its next hop, or kept and sent later; see
        `RetryConsumer.reconsume_later`.

        Args:
            delay: retry after this long, 1 s … 864 000 s. Defaults to the ladder's next delay.
            cause: why it failed; its class and text travel with the message.

        Raises:
            NotInFlightError: its invisible duration has ended, or it was settled before.
            InvalidSpecError: the delay is out of bounds, *cause* is no exception, or it is not a
                message of this consumer. Nothing has been settled then.
        """
        delay = None if delay is None else to_timedelta(delay, "the delay of a retry")
        check_request(delay, None)
        decisions = self._processor.decisions
        self._settle(
            message,
            lambda message: self._processor.settle(
                decisions.asked(message, cause, delay=delay, level=None)
            ),
        )

    def change_invisible_duration(
        self, message: pulsar.Message, invisible: float | timedelta
    ) -> None:
        """Have *message* stay invisible for *invisible* from now, longer or shorter than before.

        A message that is neither acknowledged nor failed comes again after the rest of its
        duration.

        Args:
            invisible: 10 s … 12 h.

        Raises:
            NotInFlightError: its invisible duration has ended, or it was settled. Nothing changes.
            InvalidSpecError: the duration is out of bounds.
        """
        self._assembled.owner.check()
        check_message(message)
        invisible = check_invisible(invisible)
        with self._changing:
            self._in_flight.change(_key(message), self._clock.monotonic(), invisible)
        self._timer.reschedule()

    def hand_back(self, message: pulsar.Message) -> None:
        """Undo its reception: `receive` hands *message* out again, as the same attempt.

        Raises:
            NotInFlightError: its invisible duration has ended, or it was settled before.
            InvalidSpecError: it is not a message of this consumer.
        """
        self._settle(
            message, lambda message: self._processor.settle(Settlement(message, HAND_BACK))
        )

    def stop(self) -> None:
        """Make every `receive` raise ConsumerStoppedError; callable from a signal handler."""
        if not self._assembled.owner.is_parent:
            self._processor.parts.stop()

    def close(self, timeout: float | timedelta | None = CLOSE_TIMEOUT) -> None:
        """Stop, end the reception of messages in flight, and leave the subscriptions.

        Messages in flight are visible at once, as their next attempt, or dead-lettered with
        retries used up. Those that are not sent on within *timeout* stay unacknowledged, as the
        same attempt; the event `redrive.left_unsettled` counts them.

        Args:
            timeout: for all of that, the send of a message that has begun included.
        """
        self._closed = True
        if self._assembled.owner.is_parent:
            return
        deadline = Deadline(timeout)
        self.stop()
        all_within(deadline, [functools.partial(self._end_receptions, deadline)])
        self._ending.wait(deadline)  # by another thread, at SIGTERM
        self._assembled.close(deadline, self._timer.close)
        cancel_close_at_end(self.close)

    def _settle(self, message: pulsar.Message, settle: Callable[[pulsar.Message], None]) -> None:
        """Take *message* out of flight and *settle* it; after an error it is in flight again."""
        self._processor.check_own(message)
        key = _key(message)
        with self._changing:
            hold = self._in_flight.settle(key, self._clock.monotonic())
        try:
            settle(message)
        except BaseException:
            with self._changing:
                self._in_flight.put_back(key, hold)
            self._timer.reschedule()
            raise

    def _end_receptions(self, deadline: Deadline) -> None:
        error = InvisibleDurationEndedError(
            "the message was not settled before its consumer was closed",
            remedy="acknowledge each message that was received, fail it, or hand it back",
        )
        with self._ending:
            with self._changing:
                messages = self._in_flight.expired(math.inf)
            self._fail_each(messages, error, lambda: not deadline.left())

    def _next_end(self) -> float | None:
        with self._changing:
            return self._in_flight.next_end()

    def _expire(self) -> None:
        with self._changing:
            over = self._in_flight.expired(self._clock.monotonic())
        error = InvisibleDurationEndedError(
            "the message was not settled within its invisible duration",
            remedy="ask for more time, or change it while handling",
        )
        self._fail_each(over, error, lambda: self._closed)

    def _fail_each(
        self, messages: list[pulsar.Message], error: Exception, closing: Callable[[], bool]
    ) -> None:
        def fail(message: pulsar.Message) -> None:
            self._processor.settle(self._processor.decisions.expired(message, error))

        fail_each(messages, fail, self._processor.parts.incoming, closing)


def _key(message: pulsar.Message) -> str:
    return id_text(message.message_id())


MIN_INVISIBLE = timedelta(seconds=10)
MAX_INVISIBLE = timedelta(hours=12)
_Item = TypeVar("_Item")


class NotInFlightError(RedriveError):
    """The message has timed out or was settled: the caller can no longer settle it."""

    reason = "NotInFlight"


def check_invisible(duration: float | timedelta) -> timedelta:
    """Return *duration* if a message can be invisible for so long.

    Raises:
        InvalidSpecError: it is not from 10 s to 12 h, ApsaraMQ's bounds, or no duration.
    """
    duration = to_timedelta(duration, "an invisible duration")
    if not MIN_INVISIBLE <= duration <= MAX_INVISIBLE:
        raise InvalidSpecError(
            "an invisible duration is from 10 s to 12 h",
            got=str(duration),
            remedy="give the longest time that handling may take, and change it while handling",
        )
    return duration


def check_unordered(policy: Policy) -> Policy:
    """Return *policy* if a simple consumer can consume by it.

    Raises:
        InvalidSpecError: it is ordered, and several messages of a key would be in flight at once.
    """
    if policy.ordered:
        raise InvalidSpecError(
            "a simple consumer cannot keep the order of an ordered policy",
            got=f"the ordered policy {policy.name or policy.subscription}",
            remedy="use RetryConsumer, or a policy with ordering None",
        )
    return policy


@dataclass(frozen=True)
class _Hold(Generic[_Item]):
    item: _Item
    end: float


class InFlight(Generic[_Item]):
    """Items in flight, by their keys. Moments are seconds since any moment that stays the same."""

    def __init__(self) -> None:
        self._holds: dict[Hashable, _Hold[_Item]] = {}

    def begin(self, key: Hashable, item: _Item, now: float, invisible: timedelta) -> None:
        """Make *item* invisible; one that was in flight already starts over."""
        self._holds[key] = _Hold(item, now + invisible.total_seconds())

    def change(self, key: Hashable, now: float, invisible: timedelta) -> None:
        """Have an item stay invisible for *invisible* from *now*, whatever it was before.

        Raises:
            NotInFlightError: its time has ended, or it was settled. Nothing changes.
        """
        self.begin(key, self._held(key, now).item, now, invisible)

    def settle(self, key: Hashable, now: float) -> _Hold[_Item]:
        """Take an item out, for good or until it is put back.

        Raises:
            NotInFlightError: its time has ended, or it was settled before.
        """
        self._held(key, now)
        return self._holds.pop(key)

    def put_back(self, key: Hashable, hold: _Hold[_Item]) -> None:
        """Have an item that was not settled stay invisible until its time ends."""
        self._holds[key] = hold

    def expired(self, now: float) -> list[_Item]:
        """Take out the items whose time has ended, in the order of their ends."""
        over = [key for key, hold in self._holds.items() if hold.end <= now]
        return [hold.item for hold in sorted(map(self._holds.pop, over), key=_end)]

    def next_end(self) -> float | None:
        """Return when the next item's time ends; None if none is in flight."""
        return min((hold.end for hold in self._holds.values()), default=None)

    def _held(self, key: Hashable, now: float) -> _Hold[_Item]:
        hold = self._holds.get(key)
        if hold is None or hold.end <= now:
            raise NotInFlightError(
                "the message is not in flight: its invisible duration has ended, or it was settled",
                got=str(key),
                remedy="leave it to whoever receives it next; ask for more time before it ends",
            )
        return hold


def _end(hold: _Hold[_Item]) -> float:
    return hold.end

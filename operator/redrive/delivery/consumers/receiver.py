"""Receives messages and settles them: the spine of the second journey; what `consumer` is based on.

receive → verdict → settle: a message comes from the source or the retry topic, the application
handles it, and if that fails, `retry_handler` finds the verdict and `forwarder` carries it out.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import overload

import pulsar

from redrive.delivery import durations
from redrive.delivery.closing import Closing
from redrive.delivery.in_flight.crash_log import CrashLog
from redrive.delivery.in_flight.holding import Holding, MakeTimer
from redrive.delivery.parts import Parts
from redrive.delivery.policy_file import PolicyFile, in_force
from redrive.delivery.receiving.key_ordering import KeyOrdering
from redrive.delivery.receiving.origin import SubscriptionsByTopic
from redrive.delivery.retrying.forwarder import Forwarder
from redrive.delivery.retrying.retry_handler import RetryHandler
from redrive.delivery.telemetry.events import Events, Hook
from redrive.delivery.telemetry.tracing import MessageTracing
from redrive.policy.cause import Redaction
from redrive.policy.envelope import Attempt
from redrive.policy.model import Policy
from redrive.policy.verdict import check_asked


class Receiver(Closing):
    """Receives from source and retry topic, and settles; see `RetryConsumer`."""

    def _assemble(  # noqa: PLR0913, PLR0917 - all that a consumer is made of
        self,
        parts: Parts,
        policy: Policy | PolicyFile,
        name: str,
        redaction: Redaction,
        on_event: Hook | None,
        tracing: MessageTracing,
    ) -> None:
        self.name = name
        self._parts = parts
        in_force_now = in_force(policy, parts.clock)
        key_ordering = KeyOrdering(parts.incoming, parts.clock) if in_force_now().ordered else None
        self._retry_handler = RetryHandler(
            in_force_now,
            Forwarder(parts.outgoing, parts.incoming, Events(on_event), tracing),
            parts.clock,
            name,
            redaction,
            key_ordering,
        )
        self._tracing = tracing
        self._subscriptions = SubscriptionsByTopic(parts.subscriptions)
        take = parts.incoming.take if key_ordering is None else key_ordering.take
        self._holding = Holding(take, parts, self._subscriptions, self._retry_handler)

    def _guard(
        self, crash_log: CrashLog | None, ack_timeout: timedelta | None, make_timer: MakeTimer
    ) -> None:
        """Add ack time-out and crash log, where they are wanted; close if that fails."""
        try:
            if crash_log is not None:
                self._holding.guard_against_poison(crash_log)
            if ack_timeout is not None:
                self._holding.limit(ack_timeout, make_timer)
        except BaseException:
            self.close()  # else the subscriptions would hold messages that are never handed out
            raise

    @overload
    def receive(self) -> pulsar.Message: ...
    @overload
    def receive(self, timeout: timedelta | None) -> pulsar.Message | None: ...
    def receive(self, timeout: timedelta | None = None) -> pulsar.Message | None:
        """Return the next message of the source or the retry topic, or None after *timeout*.

        The two topics take turns while both have messages.

        Raises:
            ConsumerStoppedError: `stop` or `close` was called.
            SubscriptionLostError: the client was closed.
        """
        return self._holding.take(None if timeout is None else durations.seconds(timeout))

    def receive_batch(self, size: int, wait: timedelta) -> list[pulsar.Message]:
        """Return up to *size* messages: as soon as there are so many, or what came within *wait*.

        Raises:
            ConsumerStoppedError: `stop` or `close` was called.
            SubscriptionLostError: the client was closed.
        """
        end = self._parts.clock.monotonic() + durations.seconds(wait)
        messages: list[pulsar.Message] = []
        try:
            while len(messages) < size:
                message = self._holding.take(max(0.0, end - self._parts.clock.monotonic()))
                if message is None:
                    break
                messages.append(message)
        except BaseException:
            for message in messages:  # which were not handed out
                self.hand_back(message)
            raise
        return messages

    def attempt_of(self, message: pulsar.Message) -> Attempt:
        """Return which attempt at *message* this is, where it came from, and why it failed before.

        A message of the source topic is at its first attempt, whatever its properties claim.
        """
        return self._retry_handler.attempt_of(message)

    def acknowledge(self, message: pulsar.Message) -> None:
        """Settle *message* as handled. It may come again if the broker doesn't hear of this.

        One that is out of its ack time-out has failed already and is not acknowledged: it is
        reported as the event `redrive.late_success`.

        Raises:
            InvalidSpecError: it is not a message of this consumer.
        """
        subscription = self._subscriptions[message.topic_name()]
        if not self._holding.settles(message):
            self._retry_handler.late(message)
            return
        subscription.acknowledge(message)
        self._retry_handler.forget(message)

    def negative_acknowledge(
        self, message: pulsar.Message, *, cause: BaseException | None = None
    ) -> None:
        """Leave *message* unacknowledged at the broker, which delivers it again after `nack_delay`.

        For failures that concern this consumer rather than the message, and for applications that
        want no retry topic: order and redelivery are the broker's. A message that comes again for
        the `max_retries`-th time and is given here once more is dead-lettered. The count is the
        broker's, which keeps it in memory: it begins again when the last consumer of the
        subscription has gone. On an Exclusive or Failover subscription no broker counts: there it
        is this consumer's own, and the broker delivers again all else that is not acknowledged.

        Args:
            cause: travels with the message if it is dead-lettered.

        Raises:
            InvalidSpecError: it is not a message of this consumer.
        """
        subscription = self._subscriptions[message.topic_name()]
        self._retry_handler.refused(message, subscription, cause, self._holding.settles)

    def reconsume_later(
        self,
        message: pulsar.Message,
        *,
        delay: timedelta | None = None,
        level: int | None = None,
        cause: BaseException | None = None,
    ) -> None:
        """Settle *message* as failed: it is retried later, or dead-lettered with retries used up.

        A policy with dead-lettering switched off discards it instead of dead-lettering it.

        With neither *delay* nor *level* the policy's ladder says how long to wait. On return the
        message is in the hands of the broker: either stored on its next hop and acknowledged, or,
        if that could not be had within some seconds, logged as an error and handed out again by
        `receive` after 5 s, as the next attempt. In both cases the caller is done with it.

        Args:
            delay: wait this long, 1 s … 864 000 s.
            level: k waits as long as delay level k says, or the highest if k is above it;
                0 leaves it to the ladder; below 0 the message is dead-lettered now.
            cause: why it failed; its class and text travel with the message.

        Raises:
            InvalidSpecError: both were given, the delay is out of bounds, or the message is not
                one of this consumer. Nothing has been settled then.
        """
        subscription = self._subscriptions[message.topic_name()]
        check_asked(delay, level)
        self._retry_handler.asked(
            message, subscription, self._holding.settles, delay=delay, level=level, error=cause
        )

    def hand_back(self, message: pulsar.Message) -> None:
        """Undo its reception: `receive` hands *message* out again, as the same attempt.

        For a message that this consumer can't take now. It stays unacknowledged, with this process.

        Raises:
            InvalidSpecError: it is not a message of this consumer.
        """
        self._subscriptions[message.topic_name()]  # refuses what is not its own
        self._holding.hand_back(message)

    @property
    def policy(self) -> Policy:
        """Return the policy in force; its `generation` tells which."""
        return self._retry_handler.policy()

    def pause(self) -> None:
        """Hand out no message until `resume`; those in hand are finished.

        Messages that have come to this consumer stay with it, unacknowledged; other consumers of
        the subscription get the rest.
        """
        self._parts.incoming.pause()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._parts.incoming.resume()

    def stop(self) -> None:
        """Make every `run` return once its messages in hand are settled; callable from a signal."""
        self._parts.incoming.stop()

    def close(self) -> None:
        """Stop, and leave the subscriptions."""
        self.stop()
        with contextlib.ExitStack() as closing:
            closing.callback(self._parts.outgoing.close)
            closing.callback(self._parts.incoming.close)
            closing.callback(self._holding.close)

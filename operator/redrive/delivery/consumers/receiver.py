"""Receives messages and settles them by hand; what `consumer` is based on.

Each method makes one `Settlement`, and `processor` carries it out.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Unpack, overload

import pulsar

from redrive.delivery import durations
from redrive.delivery.assembly import RetryOptions, assemble
from redrive.delivery.consumers.policy_consumer import PolicyConsumer
from redrive.delivery.middleware.settlement import HAND_BACK, Settlement
from redrive.delivery.parts import BrokerConnection
from redrive.delivery.policy_file import PolicyFile
from redrive.policy.durations import given
from redrive.policy.model import Policy
from redrive.policy.verdict import check_asked


class Receiver(PolicyConsumer):
    """Receives from source and retry topic, and settles; see `RetryConsumer`."""

    def __init__(
        self,
        client: pulsar.Client | BrokerConnection,
        policy: Policy | PolicyFile,
        **options: Unpack[RetryOptions],
    ) -> None:
        self._assembled = assemble(self, client, policy, **options)

    @overload
    def receive(self) -> pulsar.Message: ...
    @overload
    def receive(self, timeout: float | timedelta | None) -> pulsar.Message | None: ...
    def receive(self, timeout: float | timedelta | None = None) -> pulsar.Message | None:
        """Return the next message of the source or the retry topic, or None after *timeout*.

        The two topics take turns while both have messages. Durations are seconds, or timedeltas.

        Raises:
            ConsumerStoppedError: `stop` or `close` was called.
            SubscriptionLostError: the client was closed.
        """
        return self._processor.receive(None if timeout is None else durations.seconds(timeout))

    def receive_batch(self, size: int, wait: float | timedelta) -> list[pulsar.Message]:
        """Return up to *size* messages: as soon as there are so many, or what came within *wait*.

        Raises:
            ConsumerStoppedError: `stop` or `close` was called.
            SubscriptionLostError: the client was closed.
        """
        clock = self._processor.parts.clock
        end = clock.monotonic() + durations.seconds(wait)
        messages: list[pulsar.Message] = []
        try:
            while len(messages) < size:
                message = self._processor.receive(max(0.0, end - clock.monotonic()))
                if message is None:
                    break
                messages.append(message)
        except BaseException:
            for message in messages:  # which were not handed out
                self.hand_back(message)
            raise
        return messages

    def acknowledge(self, message: pulsar.Message) -> None:
        """Settle *message* as handled. It may come again if this does not reach the broker.

        One that is out of its ack time-out has failed already and is not acknowledged: it is
        reported as the event `redrive.late_success`.

        Raises:
            InvalidSpecError: it is not a message of this consumer.
        """
        self._processor.acknowledge(message)

    def negative_acknowledge(
        self, message: pulsar.Message, *, cause: BaseException | None = None
    ) -> None:
        """Leave *message* unacknowledged at the broker, which delivers it again after `nack_delay`.

        For failures that concern this consumer rather than the message, and for applications that
        want no retry topic: order and redelivery are the broker's. A message that comes again for
        the `max_retries`-th time and is given here once more is dead-lettered. The count is the
        broker's, which keeps it in memory: it begins again when the last consumer of the
        subscription has gone. On an Exclusive or Failover subscription no broker counts, and of a
        batch it counts all messages as one: there the count is this consumer's own, so that each
        consumer gives a message back as often as this. The broker delivers again all else that is
        not acknowledged, of the subscription or of the batch.

        Args:
            cause: travels with the message if it is dead-lettered.

        Raises:
            InvalidSpecError: it is not a message of this consumer.
        """
        self._processor.check_own(message)
        self._processor.settle(self._processor.decisions.refused(message, cause))

    def reconsume_later(
        self,
        message: pulsar.Message,
        *,
        delay: float | timedelta | None = None,
        level: int | None = None,
        cause: BaseException | None = None,
    ) -> None:
        """Settle *message* as failed: it is retried later, or dead-lettered with retries used up.

        A policy with dead-lettering switched off discards it instead of dead-lettering it.

        With neither *delay* nor *level* the policy's ladder says how long to wait. On return the
        message is either stored on its next hop and acknowledged, or, if that could not be had
        within some seconds, kept by this consumer, unacknowledged, and sent later: after 5 s, then
        with back-off up to a minute; each try that fails is the event `redrive.unsent`. With 1 000
        of them nothing new is received: the event `redrive.taking_stopped`. In both cases the
        caller is done with it.

        Args:
            delay: wait this long, 1 s … 864 000 s.
            level: k waits as long as delay level k says, or the highest if k is above it;
                0 leaves it to the ladder; below 0 the message is dead-lettered now.
            cause: why it failed; its class and text travel with the message.

        Raises:
            InvalidSpecError: both were given, the delay is out of bounds, or the message is not
                one of this consumer. Nothing has been settled then.
        """
        self._processor.check_own(message)
        delay = None if delay is None else given(delay, "the delay of a retry")
        check_asked(delay, level)
        self._processor.settle(
            self._processor.decisions.asked(message, cause, delay=delay, level=level)
        )

    def hand_back(self, message: pulsar.Message) -> None:
        """Undo its reception: `receive` hands *message* out again, as the same attempt.

        For a message that this consumer can't take now. It stays unacknowledged, with this process.

        Raises:
            InvalidSpecError: it is not a message of this consumer.
        """
        self._processor.check_own(message)
        self._processor.settle(Settlement(message, HAND_BACK))

    def pause(self) -> None:
        """Hand out no message until `resume`; those in hand are finished.

        Messages that have come to this consumer stay with it, unacknowledged; other consumers of
        the subscription get the rest.
        """
        self._processor.parts.incoming.pause()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._processor.parts.incoming.resume()

    def stop(self) -> None:
        """Make every `run` return once its messages in hand are settled; callable from a signal."""
        if not self._assembled.owner.is_parent:
            self._processor.parts.stop()

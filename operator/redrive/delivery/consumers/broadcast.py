"""`BroadcastConsumer`: every consumer gets every message, and none is retried.

Each reads with a non-durable subscription of its own, which the broker forgets with it: so it needs
no policy, no retry topic, and no right but to consume the topic.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypedDict, Unpack, overload

import pulsar
import pulsar.schema

from redrive.delivery.assembly import check_options
from redrive.delivery.concurrency import (
    CLOSE_TIMEOUT,
    Closing,
    Deadline,
    identity,
    to_seconds,
)
from redrive.delivery.connection import PREFETCH, SubscribeError
from redrive.delivery.consumers.consumer import HANDLER_TIMEOUT
from redrive.delivery.fetcher import Fetcher, check_open
from redrive.delivery.forking import OwnerProcess, release_at_exit
from redrive.delivery.in_flight import check_message
from redrive.delivery.middleware.scheduling import RateLimiter
from redrive.delivery.parts import Crypto, SystemClock, check_names, check_prefetch, for_consumer
from redrive.delivery.reporting import (
    CONNECTION_TEXTS,
    DISCONNECT_TIMEOUT,
    Event,
    Events,
    Hook,
    Name,
    check_hooks,
)
from redrive.delivery.run import Handler, Run, single_handler
from redrive.messages import BYTES, id_text
from redrive.policy.envelope import Attempt, Cause, Redaction
from redrive.policy.values import check_instance, to_limit


class BroadcastOptions(TypedDict, total=False):
    """Options of a `BroadcastConsumer`, with asyncio too."""

    name: str | None
    schema: pulsar.schema.Schema
    crypto: Crypto | None
    redaction: Redaction
    on_event: Hook | None
    disconnect_timeout: float | timedelta | None
    prefetch: int


class BroadcastConsumer(Closing):
    """Gets every message that is sent to a topic from now on, as every other consumer does.

    A message whose handler fails is dropped, with a warning and the event `redrive.dropped`: there
    is no second attempt. It gets no message that is sent while it does not live. After a lost
    connection or an unload the client continues behind the last message of each partition. A
    partition without one is read from its end again: messages sent to it meanwhile are lost. So are
    those that the topic no longer keeps. Use it for facts that each process should know soon, such
    as that a cache is out of date, and let caches expire too; work belongs to a `RetryConsumer`.

    Use it as a context manager, within the life of *client*. May be used by several threads.

    Args:
        client: connects as a role that may consume *topic*.
        topic: partitioned or not. Partitions added later are read from their end, after about a
            minute.
        name: names this consumer in the broker's statistics; by default the host's name and
            something random.
        schema: decodes messages for `message.value()`; by default they are bytes.
        crypto: decrypts messages.
        redaction: text to hide in the log of a failure.
        on_event: called with every message that was dropped, or handled too late; see `Event`.
        disconnect_timeout: after so long without a connection the consumer reports the event
            `redrive.disconnected`; see `connected`. By default 30 s.
        prefetch: at most so many messages of each partition wait in this consumer; by default
            1,000.

    It takes no middleware: that is bound to a policy, and to attempts that are settled.

    Raises:
        SubscribeError: the broker refused to let this role read.
        InvalidSpecError: an option is out of bounds or of another type, or there is no such option.
    """

    def __init__(
        self, client: pulsar.Client, topic: str, **options: Unpack[BroadcastOptions]
    ) -> None:
        check_options(options, BroadcastOptions)
        self._open(client, topic, **options)

    def _open(  # noqa: PLR0913 - each is a choice of its own, with a default
        self,
        client: pulsar.Client,
        topic: str,
        *,
        name: str | None = None,
        schema: pulsar.schema.Schema = BYTES,
        crypto: Crypto | None = None,
        redaction: Redaction = Redaction(),
        on_event: Hook | None = None,
        disconnect_timeout: float | timedelta | None = DISCONNECT_TIMEOUT,
        prefetch: int = PREFETCH,
    ) -> None:
        check_prefetch(prefetch)
        check_instance(topic, str, "topic")
        check_names(name, schema)
        check_hooks(redaction, on_event)
        name = name or identity()
        self.name = name
        self.topic = topic
        release_at_exit(client)
        self._clock = SystemClock()
        options = {
            "reader_name": name,
            "receiver_queue_size": prefetch,
            "schema": schema,
            **for_consumer(crypto),
        }
        self._owner = OwnerProcess("consumer")
        self._fetcher = Fetcher([_Reading(_reader(client, topic, **options))])
        self._closed = False
        self._redact = redaction
        self._events = Events(on_event)
        self._incoming.watch(to_seconds(disconnect_timeout), self._connection)

    @property
    def connected(self) -> bool:
        """Return True if the client has a connection for the topic, and for each partition.

        See `RetryConsumer.connected`.
        """
        return self._incoming.connected

    @overload
    def receive(self) -> pulsar.Message: ...
    @overload
    def receive(self, timeout: float | timedelta | None) -> pulsar.Message | None: ...
    def receive(self, timeout: float | timedelta | None = None) -> pulsar.Message | None:
        """Return the next message, or None after *timeout*. There is nothing to settle.

        Raises:
            ConsumerStoppedError: `stop` or `close` was called.
            SubscriptionLostError: the client was closed.
        """
        return self._incoming.take(None if timeout is None else to_seconds(timeout))

    def run(
        self,
        handler: Handler,
        *,
        explicit: bool = False,
        workers: int = 1,
        timeout: float | timedelta | None = HANDLER_TIMEOUT,
        max_rate: float | None = None,
    ) -> None:
        """Handle messages until `stop` or `close` is called, or SIGTERM comes.

        As `RetryConsumer.run`, but that a message which fails is dropped.

        Raises:
            ConsumerStoppedError: `close` was called before.
        """
        check_open(closed=self._closed)
        limiter = RateLimiter(max_rate, self._clock, self._incoming.sleep)
        take = limiter.take(lambda: [self.receive()])
        handle = single_handler(handler, _only_attempt, explicit=explicit)
        limit = to_limit(timeout, "a handler's time-out")
        run = Run(take, handle, _ignore, self._drop, self._late, self.stop, workers, limit)
        run.until_stopped()

    def hand_back(self, message: pulsar.Message) -> None:
        """Undo its reception: `receive` hands *message* out again.

        Raises:
            InvalidSpecError: it is no message.
        """
        check_message(message)
        self._incoming.again(message, 0)

    def pause(self) -> None:
        """Hand out no message until `resume`: they wait in the topic, while it keeps them."""
        self._incoming.pause()

    def resume(self) -> None:
        """Continue after `pause`."""
        self._incoming.resume()

    def stop(self) -> None:
        """Make every `run` return once its in-flight messages are done; callable from a signal."""
        if not self._owner.is_parent:
            self._fetcher.stop()

    def close(self, timeout: float | timedelta | None = CLOSE_TIMEOUT) -> None:
        """Stop, and leave the topic, within *timeout* (seconds, or a timedelta)."""
        if not self._owner.is_parent:
            self._closed = True
            self._fetcher.close(Deadline(timeout))

    @property
    def _incoming(self) -> Fetcher:
        self._owner.check()
        return self._fetcher

    def _drop(self, message: pulsar.Message, failure: BaseException) -> None:
        cause = Cause.from_error(
            failure, failed_at=self._clock.now(), consumer=self.name, attempt=1, redact=self._redact
        )
        self._events.report(
            self._event(Name.DROPPED, message, cause.type),
            "dropped %s, for messages that are broadcast are never retried: %s: %s\n%s",
            id_text(message.message_id()), cause.type, cause.message, cause.trace,
        )  # fmt: skip

    def _late(self, message: pulsar.Message) -> None:
        self._events.report(
            self._event(Name.LATE_SUCCESS, message),
            "a handler ended well, but after its time: %s", id_text(message.message_id()),
        )  # fmt: skip

    def _connection(self, topic: str, connected: bool, seconds: float) -> None:  # noqa: FBT001
        name = Name.RECONNECTED if connected else Name.DISCONNECTED
        event = Event(
            name, origin="", message_id="", attempt=0, generation=0,
            source=self.topic, subscription="", topic=topic,
        )  # fmt: skip
        self._events.report(event, CONNECTION_TEXTS[name], topic, seconds)

    def _event(self, name: Name, message: pulsar.Message, reason: str = "") -> Event:
        message_id = id_text(message.message_id())
        return Event(
            name, origin=message_id, message_id=message_id, attempt=1, generation=0,
            source=self.topic, subscription="", reason=reason,
        )  # fmt: skip


def _ignore(_message: pulsar.Message) -> None:
    """Acknowledge nothing: a reader has no subscription."""


def _only_attempt(message: pulsar.Message) -> Attempt:
    return Attempt(0, id_text(message.message_id()))


class _Reading:
    """A reader with the methods of a consumer, for `Fetcher`."""

    def __init__(self, reader: pulsar.Reader) -> None:
        self.receive = reader.read_next
        self.close = reader.close
        self.topic = reader.topic
        self.is_connected = reader.is_connected


def _reader(
    client: pulsar.Client,
    topic: str,
    **options: Any,  # noqa: ANN401 - as the client takes them
) -> pulsar.Reader:
    try:
        return client.create_reader(topic, pulsar.MessageId.latest, **options)
    except pulsar.Interrupted:
        raise  # the client's word for KeyboardInterrupt
    except pulsar.exceptions.PulsarException as error:
        raise SubscribeError(
            f"{topic} can't be read",
            got=str(error),
            remedy="check that the topic exists, that this role may consume it, and that the "
            "broker answers",
        ) from error

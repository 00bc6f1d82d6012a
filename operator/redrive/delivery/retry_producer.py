"""`RetryProducer`: sends a message without a receipt again, without storing it twice.

For programs that produce to a source topic; independent of the consumers.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from queue import Empty, LifoQueue
from typing import TypedDict, Unpack

import pulsar
import pulsar.schema

from redrive.delivery.concurrency import (
    CLOSE_TIMEOUT,
    Closing,
    Deadline,
    SendWatchdog,
    all_within,
    identity,
    in_background,
)
from redrive.delivery.forking import OwnerProcess, release_at_exit
from redrive.delivery.parts import Crypto, check_names, for_producer
from redrive.delivery.sender import (
    PARTITIONS_SECONDS,
    REMEDY,
    Opening,
    SendSlot,
    partition_for,
    remedy_of,
)
from redrive.errors import InvalidSpecError, RedriveError
from redrive.messages import BYTES, NotSentError, WriterSchema
from redrive.policy.values import (
    check_count,
    check_instance,
    check_listed,
    to_limit,
    to_timedelta,
)

SEND_RETRIES = 3
SEND_TIMEOUT = timedelta(seconds=3)


class ProducerClosedError(RedriveError):
    """The producer was closed: it sends nothing more."""

    reason = "ProducerClosed"


class ProducerOptions(TypedDict, total=False):
    """Options of a `RetryProducer`, with asyncio too."""

    name: str | None
    schema: pulsar.schema.Schema | None
    compression: pulsar.CompressionType
    crypto: Crypto | None
    send_retries: int
    timeout: float | timedelta | None
    in_flight: int


_CLIENT_OPTIONS = {
    "producer_name": "use name",
    "compression_type": "use compression",
    "encryption_key": "use crypto",
    "crypto_key_reader": "use crypto",
    "send_timeout_millis": "use timeout",
    "max_pending_messages": "use in_flight",
}
"""Options of `pulsar.Client.create_producer` that have another name here."""


def check_producer_options(options: ProducerOptions) -> None:
    """Pass if these are options of a producer, and so many sends can be in flight.

    Raises:
        InvalidSpecError: one is not. The message has the nearest name.
    """
    names = ProducerOptions.__annotations__
    check_listed(options, names, "a producer", _CLIENT_OPTIONS)
    check_count(options.get("in_flight", 1), "in_flight")


class RetryProducer(Closing):
    """Produces to a topic, and sends a message again when no receipt came for it in time.

    Where the topic has deduplication switched on, a message is stored at most once however often it
    was sent, except for a fault of brokers that load the topic meanwhile (apache/pulsar#25954).
    Elsewhere, and where the broker has forgotten this producer, a send whose receipt was lost
    leaves a second copy. Nothing is kept when the process ends: a message whose `send` has not
    returned may or may not be stored. The module `sender` has the proof that a message is stored.

    Use it as a context manager, within the life of *client*. May be used by several threads.

    Args:
        client: connects as a role that may produce to *topic*.
        topic: partitioned or not. Partitions added later are used after about a minute.
        name: begins the name under which the broker lists this producer; something random follows.
        schema: of the messages; by default they are bytes.
        compression: of the contents, by default none; the broker's limit is on the compressed size.
        crypto: encrypts the contents.
        send_retries: a message is sent at most once more than this; by default 3.
        timeout: how long each send waits for its receipt, by default 3 s, and 1 s more for each
            MiB of the message. Where the client has lost its producer for good, making another
            takes up to 12 s on top.
        in_flight: at most so many messages are on their way at a time. With 1, the default, they
            are stored in the order of the calls; with more there is no order among calls at the
            same time.

    Raises:
        InvalidSpecError: an option is out of bounds or of another type, or there is no such option.
        NotSentError: the broker refused the producer.
    """

    def __init__(
        self, client: pulsar.Client, topic: str, **options: Unpack[ProducerOptions]
    ) -> None:
        check_producer_options(options)
        self._open(client, topic, **options)

    def _open(  # noqa: PLR0913 - each is a choice of its own, with a default
        self,
        client: pulsar.Client,
        topic: str,
        *,
        name: str | None = None,
        schema: pulsar.schema.Schema | None = None,
        compression: pulsar.CompressionType = pulsar.CompressionType.NONE,
        crypto: Crypto | None = None,
        send_retries: int = SEND_RETRIES,
        timeout: float | timedelta | None = SEND_TIMEOUT,
        in_flight: int = 1,
    ) -> None:
        limit = to_limit(timeout, "the time-out of a send")
        _check(send_retries, limit)
        self._schema = schema or BYTES
        check_instance(topic, str, "topic")
        check_names(name, self._schema)
        check_instance(compression, pulsar.CompressionType, "compression")
        self._owner = OwnerProcess("producer")
        self.name = identity(name)
        self._client, self._topic = client, topic
        self._turns = itertools.count()
        self._closed = False
        options = {
            # Contents are encoded once, so that repeated sends are equal.
            "schema": WriterSchema(self._schema.schema_info()),
            # The broker recognises no chunk but the last.
            "chunking_enabled": False,
            "compression_type": compression,
            **for_producer(crypto),
        }
        self._watchdog = SendWatchdog()
        release_at_exit(client)
        self._ending = threading.Event()
        opening = Opening(client, options, send_retries + 1, limit, self._watchdog, self._ending)
        self._slots = [SendSlot(opening, f"{self.name}-{number}") for number in range(in_flight)]
        self._free: LifoQueue[SendSlot] = LifoQueue()
        for slot in reversed(self._slots):
            self._free.put(slot)
        try:
            self._partitions: list[str] = client.get_topic_partitions(topic)
            self._read_at = time.monotonic()
            self._slots[0].sender(
                self._partitions[0]
            ).open()  # refused here rather than at a message
        except pulsar.Interrupted:
            raise  # the client's word for KeyboardInterrupt
        except pulsar.exceptions.PulsarException as error:
            raise NotSentError(
                f"no producer could be made for {topic}",
                got=str(error),
                remedy=remedy_of(error, REMEDY),
            ) from error

    def send(  # noqa: PLR0913 - parts of a message
        self,
        content: object,
        *,
        properties: Mapping[str, str] | None = None,
        partition_key: str = "",
        ordering_key: str = "",
        event_timestamp: int = 0,
        deliver_after: float | timedelta | None = None,
    ) -> pulsar.MessageId | None:
        """Send a message; on return the broker has stored it.

        Args:
            content: encoded by the schema; None for a null value.
            partition_key: messages of one key go to one partition, the one that Java's producers
                choose; producers of the bare Python client choose another. Messages without a key
                go to the partitions in turn.
            event_timestamp: in milliseconds since 1970; 0 for none.
            deliver_after: Shared and KeyShared subscriptions get the message so much later.

        Returns:
            The message's id; None if the broker proves that an earlier send had stored it, whose
            receipt was lost: the broker doesn't tell the id again.

        Raises:
            TooBigError: the broker takes no message that big. It is not stored.
            NotSentError: none of the sends got a receipt. Whether it is stored is not known.
            ProducerClosedError: `close` was called before this began. It is not stored.
            InheritedError: this process was forked from the producer's. It is not stored.
        """
        self._owner.check()
        encoded = None if content is None else self._schema.encode(content)
        fields = {
            "properties": dict(properties or {}),
            "partition_key": partition_key,
            "ordering_key": ordering_key,
            "event_timestamp": event_timestamp,
            "deliver_after": None
            if deliver_after is None
            else to_timedelta(deliver_after, "a delay"),
        }
        slot = self._free.get()
        try:
            if self._closed:
                raise ProducerClosedError(
                    "this producer was closed", remedy="make a new one to continue"
                )
            # Chosen once: another partition would not recognise a repeated send.
            return slot.send(self._partition(partition_key), encoded, fields)
        finally:
            self._free.put(slot)

    def close(self, timeout: float | timedelta | None = CLOSE_TIMEOUT) -> None:
        """Leave the broker, once every send in another thread has ended.

        Args:
            timeout: for all of that. A send that has not ended then raises NotSentError: whether
                its message is stored is not known.
        """
        if self._owner.is_parent:
            return
        deadline = Deadline(timeout)
        self._closed = True
        idle = [slot for _ in self._slots if (slot := self._next_idle(deadline)) is not None]
        self._ending.set()
        all_within(deadline, [*(slot.close for slot in self._slots), self._watchdog.close])
        for slot in idle:  # so that whoever comes late finds out that it is closed
            self._free.put(slot)

    def _partition(self, key: str) -> str:
        if time.monotonic() - self._read_at > PARTITIONS_SECONDS:
            self._read_at = time.monotonic()  # at once, so that one thread asks
            in_background(self._read_partitions)
        return partition_for(key, self._partitions, self._turns)

    def _read_partitions(self) -> None:
        with contextlib.suppress(pulsar.exceptions.PulsarException):  # a send finds out
            self._partitions = self._client.get_topic_partitions(self._topic)

    def _next_idle(self, deadline: Deadline) -> SendSlot | None:
        with contextlib.suppress(Empty):
            return self._free.get(timeout=deadline.left())
        return None


def _check(send_retries: int, timeout: timedelta) -> None:
    check_count(send_retries, "send_retries", least=0)
    if timeout < timedelta(milliseconds=1):
        raise InvalidSpecError(
            "the time-out of a send is a positive time",
            got=str(timeout),
            remedy="give how long a receipt may take, 1 ms or more",
        )

"""Transports of the messages of a range, the Pulsar client or the binary protocol, and their pace.

The client reconnects, repeats in-flight messages and sends large messages in chunks, and takes
twice the time per message. A broker that unloads a topic may store repeated messages twice
(apache/pulsar#25954). So the first attempt, and attempts after an unload, use the protocol. Other
attempts use the client.
"""

from __future__ import annotations

import functools
import logging
import queue
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import pulsar

from redrive.admin.errors import AdminError, refused_by_setting
from redrive.auth.files import job_credentials
from redrive.messages import BYTES, LATEST, WriterSchemas
from redrive.policy.naming import TopicName
from redrive.reading import broker
from redrive.reading.frames import OutgoingMessage
from redrive.reading.rows import DeadLetterRow
from redrive.reading.session import ProtocolError, Session
from redrive.reasons import Reason
from redrive.replay.outcome import Key

SEND_SECONDS = 30
"""Time without a receipt after which a message fails. A process that was stopped for longer sends
no in-flight messages again when it resumes."""

NAME_SECONDS = 20.0
"""Time after which a name in use counts as blocked by another client. The broker frees the name of
a stopped process within 6 s."""

SchemaAt = tuple[TopicName, int]
"""A topic and a version of its schema, such as `LATEST`."""

logger = logging.getLogger(__name__)


class StalledError(Exception):
    """The broker sends no receipts, or accepts no more messages.

    Attributes:
        unloaded: True if the broker unloads a topic.
    """

    def __init__(self, *, unloaded: bool = False) -> None:
        super().__init__()
        self.unloaded = unloaded


class NameTakenError(Exception):
    """Another client uses the name of a producer, or has sent with it.

    Consumers of the target see the name in each message. The next lease of the range uses other
    names.
    """


class OutgoingDeadLetter(NamedTuple):
    """An in-flight message.

    Attributes:
        key: key of the message within its range.
        row: the message.
        partition: partition of the target.
    """

    key: Key
    row: DeadLetterRow
    partition: int


class Receipt(NamedTuple):
    """Receipt of one message.

    Attributes:
        of: the message.
        result: result of the broker or the client.
        stored: True if the broker stored the message; False for a duplicate.
    """

    of: OutgoingDeadLetter
    result: pulsar.Result
    stored: bool


class OpenProducer(NamedTuple):
    """A producer of one partition, for one schema.

    Attributes:
        last_sequence_id: last stored sequence id when it was opened; -1 without one.
        send: function that sends a message with properties and a sequence id. The receipt comes
            later or never. Raises StalledError if no message can be sent.
        close: function that closes the producer in any state of its connection.
    """

    last_sequence_id: int
    send: Callable[[OutgoingDeadLetter, dict[str, str], int], None]
    close: Callable[[], None]


class Transport(Protocol):
    """Way to send messages to the broker."""

    def open(self, topic: TopicName, name: str, schema: SchemaAt | None) -> OpenProducer:
        """Open a producer.

        Args:
            topic: topic without partitions, or a partition.
            name: name of the producer.
            schema: schema of its messages; None for bytes.

        Raises:
            SchemaError: the schema does not exist.
            NameTakenError: another client has used the name for `NAME_SECONDS`.
            AdminError: a setting refuses each producer.
            RedriveError: the producer cannot be opened.
            StalledError: the producer cannot be opened by this transport.
        """

    def receive(self, seconds: float) -> Sequence[Receipt]:
        """Return available receipts; without any, wait for *seconds*.

        Raises:
            StalledError: no more receipts will come.
        """

    def close(self) -> None:
        """Discard messages that wait to be sent."""


class ClientTransport:
    """Transport by the Pulsar client, with one entry for each message.

    Args:
        client: client of this transport alone, because the broker closes its connection when it
            refuses a message.
    """

    def __init__(self, client: broker.ReadingClient) -> None:
        self._client = client
        self._schemas = WriterSchemas(client)
        self._receipts: queue.Queue[Receipt] = queue.Queue()

    def open(self, topic: TopicName, name: str, schema: SchemaAt | None) -> OpenProducer:
        """Open a producer, see `Transport`."""
        taken_until = time.monotonic() + NAME_SECONDS

        def create() -> pulsar.Producer:
            try:
                return self._client.create_producer(
                    str(topic),
                    schema=BYTES if schema is None else self._schemas.get(*schema),
                    producer_name=name,
                    batching_enabled=False,
                    # Messages that a consumer had to compress or send in chunks are too large
                    # otherwise. LZ4 takes half the time of zstd for small messages.
                    compression_type=pulsar.CompressionType.LZ4,
                    chunking_enabled=True,
                    # The window limits in-flight messages.
                    max_pending_messages=0,
                    send_timeout_millis=SEND_SECONDS * 1_000,
                )
            except pulsar.ProducerBusy as error:
                if time.monotonic() < taken_until:
                    raise
                broker.check_producer(self._client.service_url, topic)
                raise NameTakenError from error
            except pulsar.Timeout:
                try:
                    broker.check_producer(self._client.service_url, topic)
                except AdminError as error:
                    # A limit may be reached by the producer that is still being opened.
                    if error.reason != Reason.LIMIT_REACHED:
                        raise
                raise

        producer = broker.opened(f"open a producer on {topic}", "produce", create)
        return OpenProducer(
            producer.last_sequence_id(),
            functools.partial(self._send, producer),
            functools.partial(broker.close, producer),
        )

    def receive(self, seconds: float) -> Sequence[Receipt]:
        """Return receipts, see `Transport`."""
        receipts = []
        with suppress(queue.Empty):
            receipts.append(self._receipts.get(timeout=seconds))
            while True:
                receipts.append(self._receipts.get_nowait())
        return receipts

    def close(self) -> None:
        """Do nothing, because closed producers send no messages."""

    def _send(
        self,
        producer: pulsar.Producer,
        outgoing: OutgoingDeadLetter,
        properties: dict[str, str],
        sequence_id: int,
    ) -> None:
        def receive(result: pulsar.Result, stored_as: pulsar.MessageId) -> None:
            stored = result == pulsar.Result.Ok and stored_as.ledger_id() >= 0
            self._receipts.put(Receipt(outgoing, result, stored))

        row = outgoing.row
        producer.send_async(
            row.value,
            receive,
            properties=properties,
            partition_key=row.key,
            ordering_key=row.ordering_key,
            event_timestamp=row.event_time,
            sequence_id=sequence_id,
        )


class ProtocolTransport:
    """Transport by the binary protocol, which stalls at the first error.

    Args:
        service_url: URL of the cluster.
        batches: True to send batches of up to 1 000 messages or 128 KiB.
    """

    def __init__(self, service_url: str, *, batches: bool) -> None:
        shown = job_credentials().protocol()
        self._session: Session[OutgoingDeadLetter] = Session(service_url, shown, batches=batches)

    def open(self, topic: TopicName, name: str, schema: SchemaAt | None) -> OpenProducer:
        """Open a producer, see `Transport`."""
        schema_ref = None
        if schema is not None:
            owner, version = schema
            schema_ref = str(owner), None if version == LATEST else version
        try:
            producer = self._session.open(str(topic), name, schema_ref)
        except ProtocolError as error:
            by_setting = refused_by_setting(f"the broker refused a producer on {topic}", str(error))
            # A limit may pass when other tasks close their producers.
            if by_setting is not None and by_setting.reason != Reason.LIMIT_REACHED:
                raise by_setting from error
            raise _stalled(error) from error

        def send(
            outgoing: OutgoingDeadLetter, properties: dict[str, str], sequence_id: int
        ) -> None:
            row = outgoing.row
            message = OutgoingMessage(
                sequence_id,
                row.value,
                properties,
                row.key,
                row.ordering_key,
                row.event_time,
            )
            try:
                producer.send(message, outgoing)
            except ProtocolError as error:
                raise _stalled(error) from error

        def close() -> None:
            with suppress(ProtocolError):
                self._session.close_producer(producer)

        return OpenProducer(producer.last_sequence_id, send, close)

    def receive(self, seconds: float) -> Sequence[Receipt]:
        """Return receipts, see `Transport`."""
        try:
            entries = self._session.receive(seconds)
        except ProtocolError as error:
            raise _stalled(error) from error
        return [
            Receipt(outgoing, pulsar.Result.Ok, entry.stored)
            for entry in entries
            for outgoing in entry.tags
        ]

    @property
    def is_idle(self) -> bool:
        """Return True if it has no producers and no error, so that another range may use it."""
        return self._session.is_idle

    def close(self) -> None:
        """Close all connections, unless another range may use them."""
        if not self.is_idle:
            self.end()

    def end(self) -> None:
        """Close all connections."""
        self._session.close()


def _stalled(error: ProtocolError) -> StalledError:
    by_setting = refused_by_setting("the broker refused a message", str(error))
    logger.warning("binary protocol failed: %s", by_setting or error)
    return StalledError(unloaded=error.unloaded)


CATCH_UP_SECONDS = 1.0
"""Maximum delay, of the broker or a sleep, that is compensated by faster sending."""


class Pace:
    """Rate limit of one task. The time is an argument."""

    def __init__(self) -> None:
        self._due: float | None = None
        self._rate = 0.0

    def due_in(self, now: float, rate: float | None) -> float:
        """Return the seconds until the next message may be sent, or read.

        Args:
            now: monotonic time in seconds.
            rate: messages per second; None for no limit.
        """
        if rate is None or self._due is None:
            return 0.0
        if rate > self._rate and self._due > now:  # what was sent ahead takes less time now
            self._due = now + (self._due - now) * self._rate / rate
            self._rate = rate
        return max(0.0, self._due - now)

    def sent(self, now: float, rate: float | None) -> None:
        """Record that a message was sent."""
        if rate is not None:
            begin = now if self._due is None else max(self._due, now - CATCH_UP_SECONDS)
            self._due, self._rate = begin + 1 / rate, rate


def pause_after_read(pace: Pace, rate: float | None) -> None:
    """Record that a message was read, and sleep until the next may be."""
    now = time.monotonic()
    pace.sent(now, rate)
    if wait := pace.due_in(now, rate):
        time.sleep(wait)

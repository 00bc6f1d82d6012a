"""Two ways to the broker for the messages of a range: by the client, and by the protocol itself.

The client connects again, repeats what it had on the way, and cuts what is too large; it takes
twice the time for each message. And a broker that unloads a topic may store twice what a client
repeats (apache/pulsar#25954). So a first try goes by the protocol, as do the next ones after an
unload, and all else by the client.
"""

from __future__ import annotations

import functools
import logging
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol

import pulsar

from redrive.auth.files import job_credentials
from redrive.messages import BYTES, LATEST, WriterSchemas
from redrive.policy.naming import TopicName
from redrive.reading import broker
from redrive.reading.frames import OutgoingMessage
from redrive.reading.rows import DeadLetterRow
from redrive.reading.session import ProtocolError, Session
from redrive.replay.outcome import Key

SEND_SECONDS = 30
"""Without a receipt a message is given up after so long. A process that was stopped sends no more
of what it had on its way when it wakes: others may have the names of its producers by then."""

NAME_SECONDS = 20.0
"""A name that is taken for longer is not that of a process that was stopped: a broker looks after
such a one, and frees its name within 6 s."""

SchemaAt = tuple[TopicName, int]
"""A topic, and the version of its schema, such as `LATEST`."""

logger = logging.getLogger(__name__)


class StalledError(Exception):
    """The broker answers none of what is on its way, or takes nothing more.

    Attributes:
        unloaded: whether it unloads a topic.
    """

    def __init__(self, *, unloaded: bool = False) -> None:
        super().__init__()
        self.unloaded = unloaded


class NameTakenError(Exception):
    """Others use the name of a producer, or have sent with it.

    Consumers of the target see the name in each message. The next lease of the range has other
    names.
    """


class OutgoingLetter(NamedTuple):
    """A message on its way.

    Attributes:
        key: how it is called within its range.
        partition: of the target, the one it is sent to.
    """

    key: Key
    letter: DeadLetterRow
    partition: int


class Receipt(NamedTuple):
    """What the broker, or the client, answered to one message.

    Attributes:
        stored: whether the broker has stored it now; a duplicate is not.
    """

    of: OutgoingLetter
    result: pulsar.Result
    stored: bool


class OpenProducer(NamedTuple):
    """A producer of one partition, for one schema.

    Attributes:
        last_sequence_id: of what the broker knew to be stored when it was opened; -1 for nothing.
        send: takes a message, the properties it is to carry, and its sequence id. Its receipt
            comes later, or never. Raises StalledError if nothing can be sent any more.
        close: closes it, whatever the state of its connection.
    """

    last_sequence_id: int
    send: Callable[[OutgoingLetter, dict[str, str], int], None]
    close: Callable[[], None]


class Outlet(Protocol):
    """See the module."""

    def open(self, topic: TopicName, name: str, schema: SchemaAt | None) -> OpenProducer:
        """Open a producer.

        Args:
            topic: without partitions, or a partition.
            name: of the producer.
            schema: what its messages are encoded by; None for bytes.

        Raises:
            SchemaError: there is no such schema.
            NameTakenError: others have had the name for `NAME_SECONDS`.
            RedriveError: it can't be opened.
            StalledError: it can't be opened this way.
        """

    def receive(self, seconds: float) -> Sequence[Receipt]:
        """Return the receipts that are there; if there are none, wait for some so long.

        Raises:
            StalledError: none will come any more.
        """

    def close(self) -> None:
        """Send nothing more of what waits to be sent."""


class ByClient:
    """An outlet that sends each message by itself.

    Args:
        client: of its own: the connection breaks when the broker refuses a message.
    """

    def __init__(self, client: pulsar.Client) -> None:
        self._client = client
        self._schemas = WriterSchemas(client)
        self._receipts: queue.SimpleQueue[Receipt] = queue.SimpleQueue()

    def open(self, topic: TopicName, name: str, schema: SchemaAt | None) -> OpenProducer:
        """Open a producer, see `Outlet`."""
        taken_until = time.monotonic() + NAME_SECONDS

        def create() -> pulsar.Producer:
            try:
                return self._client.create_producer(
                    str(topic),
                    schema=BYTES if schema is None else self._schemas.get(*schema),
                    producer_name=name,
                    batching_enabled=False,
                    # What a hop had to compress, or to cut, is too big without. Not zstd as
                    # there: for small messages it takes twice the time.
                    compression_type=pulsar.CompressionType.LZ4,
                    chunking_enabled=True,
                    # The window bounds what is on its way.
                    max_pending_messages=0,
                    send_timeout_millis=SEND_SECONDS * 1_000,
                )
            except pulsar.ProducerBusy as error:
                if time.monotonic() < taken_until:
                    raise
                raise NameTakenError from error

        producer = broker.opened(f"open a producer on {topic}", "produce", create)
        return OpenProducer(
            producer.last_sequence_id(),
            functools.partial(self._send, producer),
            functools.partial(broker.close, producer),
        )

    def receive(self, seconds: float) -> Sequence[Receipt]:
        """Return receipts, see `Outlet`."""
        receipts = []
        with suppress(queue.Empty):
            receipts.append(self._receipts.get(timeout=seconds))
            while True:
                receipts.append(self._receipts.get_nowait())
        return receipts

    def close(self) -> None:
        """Do nothing: closed producers send nothing more."""

    def _send(
        self,
        producer: pulsar.Producer,
        outgoing: OutgoingLetter,
        properties: dict[str, str],
        sequence_id: int,
    ) -> None:
        def receive(result: pulsar.Result, stored_as: pulsar.MessageId) -> None:
            stored = result == pulsar.Result.Ok and stored_as.ledger_id() >= 0
            self._receipts.put(Receipt(outgoing, result, stored))

        letter = outgoing.letter
        producer.send_async(
            letter.value,
            receive,
            properties=properties,
            partition_key=letter.key,
            ordering_key=letter.ordering_key,
            event_timestamp=letter.event_time,
            sequence_id=sequence_id,
        )


class ByProtocol:
    """An outlet that ends with its first trouble.

    Args:
        service_url: of the cluster.
        batches: whether messages are put together, up to 1 000 of 128 KiB.
    """

    def __init__(self, service_url: str, *, batches: bool) -> None:
        shown = job_credentials().protocol()
        self._session: Session[OutgoingLetter] = Session(service_url, shown, batches=batches)

    def open(self, topic: TopicName, name: str, schema: SchemaAt | None) -> OpenProducer:
        """Open a producer, see `Outlet`."""
        of = None
        if schema is not None:
            at, version = schema
            of = str(at), None if version == LATEST else version
        with _stalling():
            producer = self._session.open(str(topic), name, of)

        def send(outgoing: OutgoingLetter, properties: dict[str, str], sequence_id: int) -> None:
            letter = outgoing.letter
            message = OutgoingMessage(
                sequence_id,
                letter.value,
                properties,
                letter.key,
                letter.ordering_key,
                letter.event_time,
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
        """Return receipts, see `Outlet`."""
        with _stalling():
            return [
                Receipt(outgoing, pulsar.Result.Ok, entry.stored)
                for entry in self._session.receive(seconds)
                for outgoing in entry.tags
            ]

    def close(self) -> None:
        """Close all connections."""
        self._session.close()


@contextmanager
def _stalling() -> Iterator[None]:
    try:
        yield
    except ProtocolError as error:
        raise _stalled(error) from error


def _stalled(error: ProtocolError) -> StalledError:
    logger.warning("sending by the protocol ends: %s", error)
    return StalledError(unloaded=error.unloaded)

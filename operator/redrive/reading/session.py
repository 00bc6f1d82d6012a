"""Sessions and connections of the Pulsar binary protocol; each for one thread.

A session has producers for some topics, and returns the receipts of their messages. No message is
sent twice: a lost connection, a producer that the broker closes, or a refused entry ends the
session. Messages without a receipt may be stored or not.

A connection leads to one broker, directly or through a proxy, and is never reopened.
"""

from __future__ import annotations

import math
import random
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Generic, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit

from redrive.auth.method import ShownCredentials
from redrive.reading import frames
from redrive.reading.frames import Command, OutgoingMessage
from redrive.reading.positions import encode_nested, encode_number, encode_varint, to_signed

MAX_REDIRECTS = 20
BATCH_MESSAGES, BATCH_BYTES = 1_000, 128 * 1024
_NOTHING = encode_number(1, 2**64 - 1)  # the ledger -1 means a duplicate
_SCHEMA = 4  # a field of a GET_SCHEMA_RESPONSE
# Fields of a LOOKUP_RESPONSE, and its values.
_URL, _URL_TLS, _RESPONSE, _AUTHORITATIVE, _BY_PROXY = 1, 2, 3, 5, 8
_REDIRECT, _CONNECT = 0, 1

T = TypeVar("T")


class Sent(NamedTuple, Generic[T]):
    """An entry with a receipt.

    Attributes:
        tags: tags of its messages.
        stored: True if the broker has stored it; False for a duplicate.
    """

    tags: Sequence[T]
    stored: bool


class ProtocolProducer(Generic[T]):
    """A producer; opened by `Session.open`.

    Attributes:
        connection: connection of the producer.
        number: id of the producer on the connection.
        last_sequence_id: highest stored one by the broker; -1 for none.
    """

    def __init__(
        self,
        connection: ProtocolConnection,
        number_of: int,
        name: str,
        opened: Command,
        *,
        batches: bool,
    ) -> None:
        self.connection = connection
        self.number = number_of
        self._head = encode_number(1, number_of)
        self._metadata = encode_nested(1, name.encode())
        if version := opened.nested.get(4):
            self._metadata += encode_nested(16, version)
        self._time = 0, b""
        self._batches = batches
        self._batch: list[tuple[int, T, bytes]] = []
        self._batch_bytes = 0
        # By the sequence id of the first message of an entry, which its receipt contains.
        self._sent: dict[int, Sequence[T]] = {}
        self.last_sequence_id = to_signed(opened.numbers.get(3, 2**64 - 1))

    def send(self, message: OutgoingMessage, tag: T) -> None:
        """Buffer a message for sending; `flush` sends all buffered ones.

        Args:
            message: sequence ids must rise.
            tag: returned with the receipt.

        Raises:
            ProtocolError: it is larger than the broker accepts without chunks; or as `Session`.
        """
        if self._batches:
            part = frames.in_batch(message)
            if self._batch_bytes + len(part) > BATCH_BYTES:
                self.end_batch()
            self._batch.append((message.sequence_id, tag, part))
            self._batch_bytes += len(part)
            if len(self._batch) == BATCH_MESSAGES:
                self.end_batch()
            return
        first = message.sequence_id
        self._store(first, (tag,), b"", frames.alone(message), message.value or b"")

    def end_batch(self) -> None:
        """Send the incomplete batch."""
        if self._batch:
            ids, tags, parts = zip(*self._batch, strict=True)
            first, last, count = ids[0], ids[-1], len(ids)
            self._batch.clear()
            self._batch_bytes = 0
            command = encode_number(3, count) + encode_number(6, last)
            self._store(first, tags, command, frames.batch(last, count), b"".join(parts))

    @property
    def awaits_receipts(self) -> bool:
        """True if messages are in-flight."""
        return bool(self._sent)

    def answered(self, receipt: Command) -> Sent[T]:
        """Return the entry of a receipt."""
        try:
            tags = self._sent.pop(receipt.numbers[2])
        except KeyError:
            raise ProtocolError(f"a receipt without a sent entry: {receipt}") from None
        stored_as = receipt.nested.get(3, _NOTHING)
        return Sent(tags, stored=not stored_as.startswith(_NOTHING))

    def _store(
        self, first: int, tags: Sequence[T], command: bytes, metadata: bytes, content: bytes
    ) -> None:
        content, compression = frames.compressed(content)
        now = time.time_ns() // 1_000_000
        if now != self._time[0]:
            self._time = now, encode_number(3, now)
        sequence_id = b"\x10" + encode_varint(first)
        always = self._metadata, sequence_id, self._time[1]
        metadata = b"%b%b%b%b%b" % (*always, metadata, compression)
        if len(metadata) + len(content) > self.connection.max_message_size:
            raise ProtocolError(
                f"an entry of {len(content)} bytes is too large without chunks: the broker accepts "
                f"{self.connection.max_message_size}"
            )
        self._sent[first] = tags
        command = b"%b%b%b" % (self._head, sequence_id, command)
        self.connection.send(frames.payload(command, metadata, content))


class Session(Generic[T]):
    """Connections to the brokers of some topics; see the module.

    Args:
        url: see `ProtocolConnection`; may contain several hosts, separated by commas.
        shown: see `ProtocolConnection`.
        batches: True to send messages in batches.

    Raises:
        ProtocolError: from every method except `close`, if the session has ended.
    """

    def __init__(self, url: str, shown: ShownCredentials, *, batches: bool = False) -> None:
        scheme, _, hosts = url.partition("://")
        self._services = [f"{scheme}://{host}" for host in hosts.strip("/").split(",")]
        random.shuffle(self._services)
        self._shown = shown
        self._batches = batches
        self._connections: dict[tuple[str, str], ProtocolConnection] = {}
        self._producers: dict[tuple[ProtocolConnection, int], ProtocolProducer[T]] = {}
        self._at: dict[str, ProtocolConnection] = {}
        self._schemas: dict[tuple[str, int | None], bytes] = {}
        self._selector = selectors.DefaultSelector()
        self._opened = 0
        self._trouble: ProtocolError | None = None

    def open(
        self, topic: str, name: str, schema: tuple[str, int | None] | None = None
    ) -> ProtocolProducer[T]:
        """Open a producer.

        Args:
            topic: a partition, or an unpartitioned topic.
            name: of the producer.
            schema: of its messages: a topic and the version of its schema, None for the latest
                version; None for bytes.
        """
        self._opened += 1
        number_of = self._opened
        with self._ending():
            self._check()
            definition = None if schema is None else self.schema(*schema)
            connection = self.connection_for(topic)
            opened = connection.ask(
                lambda request: frames.producer(topic, request, number_of, name, definition),
                frames.PRODUCER_SUCCESS,
            )
        batches = self._batches
        producer = ProtocolProducer[T](connection, number_of, name, opened, batches=batches)
        self._producers[connection, number_of] = producer
        return producer

    def receive(self, seconds: float) -> list[Sent[T]]:
        """Send all buffered messages, and return entries with receipts.

        Receipts of before an error are returned first; the next call raises the error.

        Args:
            seconds: time to wait for a first receipt.
        """
        if self._trouble is None:
            with suppress(ProtocolError), self._ending():
                for producer in self._producers.values():
                    producer.end_batch()
                for connection in self._connections.values():
                    connection.flush()
        deadline = time.monotonic() + seconds
        while not (sent := self._answered(deadline)):
            self._check()
            if time.monotonic() >= deadline:
                break
        return sent

    def close_producer(self, producer: ProtocolProducer[T]) -> None:
        """Close a producer, so that another can have its name.

        The broker answers after it has stored in-flight messages, so these end the session.
        """
        with self._ending():
            self._check()
            if producer.awaits_receipts:
                raise ProtocolError("a producer is closed before its receipts arrived")
            del self._producers[producer.connection, producer.number]
            producer.connection.ask(
                lambda request: frames.close_producer(producer.number, request),
                frames.SUCCESS,
            )

    @property
    def is_idle(self) -> bool:
        """Return True if the session has no producers, and no error."""
        return self._trouble is None and not self._producers

    def close(self) -> None:
        """Close all connections without sending buffered messages."""
        self._selector.close()
        for connection in self._connections.values():
            connection.close()

    def connection_for(self, topic: str) -> ProtocolConnection:
        """Return the connection to the broker of a topic or a partition, cached in the session."""
        if topic not in self._at:
            self._at[topic] = self._looked_up(topic)
        return self._at[topic]

    def _looked_up(self, topic: str) -> ProtocolConnection:
        at = service = self._reachable_service()
        authoritative = False
        for _ in range(MAX_REDIRECTS):
            answer = self._connection(at).ask(
                lambda request: frames.lookup(topic, request, authoritative=authoritative),  # noqa: B023
                frames.LOOKUP_RESPONSE,
            )
            scheme = BrokerAddress.parse(service).scheme
            url = answer.nested.get(_URL_TLS if scheme == TLS else _URL, b"")
            response, broker = answer.numbers.get(_RESPONSE), url.decode(errors="replace")
            if (
                not broker
                or response not in {_REDIRECT, _CONNECT}
                # Credentials for TLS are sent by TLS only.
                or BrokerAddress.parse(broker).scheme != scheme
            ):
                raise refusal(answer)
            if response == _CONNECT:
                if answer.numbers.get(_BY_PROXY):
                    return self._connection(service, broker.partition("://")[2].strip("/"))
                return self._connection(broker)
            at, authoritative = broker, bool(answer.numbers.get(_AUTHORITATIVE))
        raise ProtocolError(f"{topic} was not found: the brokers redirect endlessly")

    def _answered(self, deadline: float) -> list[Sent[T]]:
        """Return entries with receipts when data arrives."""
        sent: list[Sent[T]] = []
        ready = [link for link in self._connections.values() if link.is_to_be_read]
        if not ready and self._trouble is None:
            wait = max(0.0, deadline - time.monotonic())
            ready = [key.data for key, _ in self._selector.select(wait)]
        for connection in ready:
            with suppress(ProtocolError), self._ending():
                for command in connection.read():
                    producer = self._producers.get((connection, command.numbers.get(1, -1)))
                    if command.kind != frames.SEND_RECEIPT or producer is None:
                        raise refusal(command)
                    sent.append(producer.answered(command))
        return sent

    def _check(self) -> None:
        if self._trouble is not None:
            raise self._trouble

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Keep the first error, after which the session opens and sends no more."""
        try:
            yield
        except ProtocolError as error:
            self._trouble = self._trouble or error
            raise

    def _reachable_service(self) -> str:
        """Return the first reachable address of the cluster."""
        while len(self._services) > 1:
            with suppress(ProtocolError):
                self._connection(self._services[0])
                break
            del self._services[0]
        return self._services[0]

    def schema(self, topic: str, version: int | None) -> bytes:
        """Return a version of the schema of a topic, as a `Schema` of Pulsar's protocol.

        Args:
            topic: the topic, or a partition of it.
            version: None for the latest.

        Raises:
            ProtocolError: the topic has no such version, or the broker refuses.
        """
        if (topic, version) not in self._schemas:
            answer = self.connection_for(topic).ask(
                lambda request: frames.get_schema(topic, request, version),
                frames.GET_SCHEMA_RESPONSE,
            )
            if _SCHEMA not in answer.nested:
                raise refusal(answer)
            self._schemas[topic, version] = answer.nested[_SCHEMA]
        return self._schemas[topic, version]

    def _connection(self, url: str, broker: str = "") -> ProtocolConnection:
        """Return the connection to a broker or proxy, opened at the first call."""
        link = self._connections.get((url, broker))
        if link is None:
            link = self._connections[url, broker] = ProtocolConnection(url, self._shown, broker)
            self._selector.register(link, selectors.EVENT_READ, link)
        return link


ANSWER_SECONDS = 15.0
"""Time-out of a connect, of an answer, and of a send."""
_BUFFER_BYTES = 64 * 1024
_READ_BYTES = 256 * 1024
TLS = "pulsar+ssl"
_PORTS = {"pulsar": 6650, TLS: 6651}
_DEFAULT_MESSAGE_SIZE = 5 * 2**20
_OVERHEAD_BYTES = 2**20
"""Highest size of a frame beyond the largest message of a broker."""
_ERROR_FIELDS = {frames.ERROR: 2, frames.LOOKUP_RESPONSE: 6}
_NOT_READY = 6
_ANSWERED_AT_ONCE = {frames.PING, frames.AUTH_CHALLENGE}


class ProtocolError(Exception):
    """The broker refused, did not answer, or closed the connection.

    Attributes:
        code: number of the error of the refusal; None without a refusal.
        unloaded: True if it unloads the topic: it closed a producer, or opens none at this time.
    """

    code: int | None = None
    unloaded: bool = False


class ProtocolConnection:
    """A connection; see the module.

    Args:
        url: of a broker or proxy: `pulsar://host:port`, or `pulsar+ssl://`.
        shown: the credentials.
        broker: as `host:port`, if *url* is that of a proxy.

    Attributes:
        max_message_size: of metadata and payload of an entry, in bytes.
        heard: time of the last data from the broker, by `time.monotonic`.

    Raises:
        ProtocolError: from every method after an error.
    """

    def __init__(self, url: str, shown: ShownCredentials, broker: str = "") -> None:
        self._shown = shown
        self._received = bytearray()
        self._unread: list[Command] = []
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._requests = 0
        self._trouble: ProtocolError | None = None
        self._limit = frames.MAX_FRAME
        self.heard = time.monotonic()
        self._socket = _connected(url, shown)
        with self._ending("the broker refuses the connection"):
            self.write(frames.connect(shown.method, shown.token().encode(), broker))
            connected = self._answer(frames.CONNECTED)
        self.max_message_size = connected.numbers.get(3, _DEFAULT_MESSAGE_SIZE)
        self._limit = max(self._limit, self.max_message_size + _OVERHEAD_BYTES)

    def fileno(self) -> int:
        """Return the file descriptor, for selectors."""
        return self._socket.fileno()

    def ask(self, request: Callable[[int], bytes], kind: int) -> Command:
        """Send a request, and return its answer.

        Args:
            request: returns the request with a given number.
            kind: of the answer.
        """
        self._requests += 1
        self.write(request(self._requests))
        return self._answer(kind)

    @property
    def is_to_be_read(self) -> bool:
        """True if there are unread commands, or an error to raise."""
        return bool(self._unread) or self._trouble is not None

    def send(self, entry: bytes) -> None:
        """Buffer an entry for sending; `flush` sends all buffered ones."""
        self._buffer.append(entry)
        self._buffered += len(entry)
        if self._buffered >= _BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send all buffered entries."""
        if self._buffer:
            entries = b"".join(self._buffer)
            self._buffer.clear()
            self._buffered = 0
            self.write(entries)

    def read(self, seconds: float = 0.0, most: float = math.inf) -> list[Command]:
        """Return the received commands, without waiting for more.

        Commands of before an error are returned first.

        Args:
            seconds: time to wait for a first command.
            most: number of bytes after which to return, approximately; other data waits at its
                sender.
        """
        size = 0
        try:
            while size < most and (received := self._receive(0.0 if self._unread else seconds)):
                size += received
        except ProtocolError:
            if not self._unread:
                raise
        read, self._unread = self._unread, []
        return read

    def close(self) -> None:
        """Close the connection without sending buffered entries."""
        self._socket.close()

    def write(self, frames: bytes) -> None:
        """Send frames at once."""
        with self._ending("sending to the broker failed"):
            self._socket.settimeout(ANSWER_SECONDS)
            self._socket.sendall(frames)

    def _answer(self, kind: int) -> Command:
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            for index, command in enumerate(self._unread):
                if command.kind in {kind, frames.ERROR}:
                    del self._unread[index]
                    if command.kind == kind:
                        return command
                    raise refusal(command)
            with self._ending(f"no answer by command {kind}"):
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._receive(remaining):
                    raise TimeoutError(f"none within {ANSWER_SECONDS:g} s")

    def _receive(self, seconds: float) -> int:
        """Receive data within so many seconds; return the number of bytes, 0 for none."""
        with self._ending("the connection is lost"):
            self._socket.settimeout(seconds)
            try:
                received = self._socket.recv(_READ_BYTES)
            except (BlockingIOError, TimeoutError, ssl.SSLWantReadError):
                return 0
            if not received:
                raise EOFError("the broker has closed it")
            for kind in self._take_in(received):
                if kind == frames.PING:
                    self.write(frames.frame(frames.PONG))
                else:
                    shown = self._shown
                    self.write(frames.auth_response(shown.method, shown.token().encode()))
        return len(received)

    def _take_in(self, received: bytes) -> list[int]:
        """Keep received commands, and return the kinds of those to answer at once."""
        self.heard = time.monotonic()
        self._received += received
        commands = frames.take_frames(self._received, self._limit)
        self._unread += [c for c in commands if c.kind not in _ANSWERED_AT_ONCE]
        return [c.kind for c in commands if c.kind in _ANSWERED_AT_ONCE]

    @contextmanager
    def _ending(self, problem: str) -> Iterator[None]:
        """Close the connection at any error, because a frame may be sent or received in part."""
        if self._trouble is not None:
            raise self._trouble
        try:
            with _troubles(problem):
                yield
        except BaseException as error:
            if isinstance(error, ProtocolError):
                self._trouble = error
            # Earlier answers of the broker still count.
            with suppress(OSError, ValueError):
                self._socket.settimeout(0.0)
                while received := self._socket.recv(_READ_BYTES):
                    self._take_in(received)
            self.close()
            raise


class BrokerAddress(NamedTuple):
    """Address of a broker or proxy."""

    scheme: str
    host: str
    port: int

    @classmethod
    def parse(cls, url: str) -> Self:
        """Parse `pulsar://host:port`, or `pulsar+ssl://`; the port is optional.

        Raises:
            ProtocolError: it is something else.
        """
        with _troubles(f"{url} is no address of a broker"):
            parts = urlsplit(url)
            if not parts.hostname or parts.scheme not in _PORTS:
                raise ValueError("it has no host, or another scheme")
            return cls(parts.scheme, parts.hostname, parts.port or _PORTS[parts.scheme])


def _connected(url: str, shown: ShownCredentials) -> socket.socket:
    address = BrokerAddress.parse(url)
    with _troubles(f"{url} is unreachable"):
        connected = socket.create_connection((address.host, address.port), ANSWER_SECONDS)
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if address.scheme == TLS:
                tls = shown.tls or ssl.create_default_context()
                return tls.wrap_socket(connected, server_hostname=address.host)
        except BaseException:
            connected.close()
            raise
    return connected


def refusal(command: Command) -> ProtocolError:
    """Return the error of an unexpected command, such as ERROR."""
    text = b" ".join(command.nested.values()).decode(errors="replace")
    error = ProtocolError(f"command {command.kind} of the broker: {command.numbers} {text}")
    error.code = command.numbers.get(_ERROR_FIELDS.get(command.kind, 0))
    error.unloaded = command.kind == frames.CLOSE_PRODUCER or error.code == _NOT_READY
    return error


@contextmanager
def _troubles(problem: str) -> Iterator[None]:
    """Raise all errors of a socket, and of its data, as one error."""
    try:
        yield
    except (EOFError, OSError, ValueError) as error:
        raise ProtocolError(f"{problem}: {error}") from error

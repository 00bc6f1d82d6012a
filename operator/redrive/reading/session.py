"""A session of the Pulsar binary protocol.

Producers for some topics, and the receipts of what they send; for one thread.

Nothing is sent twice: what is lost on the way, a producer that is closed by the broker, or an entry
that it refuses, ends the session. What it had sent without a receipt may be stored or not.

One connection to a broker, or through a proxy to one; for one thread.

It is never opened again: whoever sends by it takes what has no receipt to be in doubt.
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
_NOTHING = encode_number(1, 2**64 - 1)  # the ledger -1 is that of a duplicate
_SCHEMA = 4  # a field of a GET_SCHEMA_RESPONSE
# Fields of a LOOKUP_RESPONSE, and what it says.
_URL, _URL_TLS, _RESPONSE, _AUTHORITATIVE, _BY_PROXY = 1, 2, 3, 5, 8
_REDIRECT, _CONNECT = 0, 1

T = TypeVar("T")


class Sent(NamedTuple, Generic[T]):
    """An entry the broker has answered to.

    Attributes:
        tags: those of its messages.
        stored: whether the broker has stored it now; what it takes for a duplicate it has not.
    """

    tags: Sequence[T]
    stored: bool


class ProtocolProducer(Generic[T]):
    """A producer; opened by `Session.open`.

    Attributes:
        connection: that it is opened on.
        number: what it is called there.
        last_sequence_id: of what the broker knows to be stored; -1 for nothing.
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
        # By the sequence id of the first message of an entry, which its receipt names.
        self._sent: dict[int, Sequence[T]] = {}
        self.last_sequence_id = to_signed(opened.numbers.get(3, 2**64 - 1))

    def send(self, message: OutgoingMessage, tag: T) -> None:
        """Send a message soon: `flush` sends what is left.

        Args:
            message: its sequence ids have to rise.
            tag: comes back when it is answered to.

        Raises:
            ProtocolError: it is larger than the broker accepts without chunks, or see the session.
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
        """Send the messages that wait for others to come."""
        if self._batch:
            ids, tags, parts = zip(*self._batch, strict=True)
            first, last, count = ids[0], ids[-1], len(ids)
            self._batch.clear()
            self._batch_bytes = 0
            command = encode_number(3, count) + encode_number(6, last)
            self._store(first, tags, command, frames.batch(last, count), b"".join(parts))

    @property
    def awaits_receipts(self) -> bool:
        """Whether something is on its way."""
        return bool(self._sent)

    def answered(self, receipt: Command) -> Sent[T]:
        """Return what a receipt is for."""
        try:
            tags = self._sent.pop(receipt.numbers[2])
        except KeyError:
            raise ProtocolError(f"a receipt of what was not sent: {receipt}") from None
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
            raise ProtocolError(f"an entry of {len(content)} bytes is too large without chunks")
        self._sent[first] = tags
        command = b"%b%b%b" % (self._head, sequence_id, command)
        self.connection.send(frames.payload(command, metadata, content))


class Session(Generic[T]):
    """Connections to the brokers of some topics; see the module.

    Args:
        url: see `ProtocolConnection`; it may name several hosts, separated by commas.
        shown: likewise.
        batches: whether messages are put together.

    Raises:
        ProtocolError: from every method but `close`, if the session has ended.
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
            topic: without partitions, or a partition.
            name: of the producer.
            schema: what it sends is encoded by: a topic, and the version of its schema, None for
                the latest; None for bytes.
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
        """Send what waits, and return what is answered to, within so many seconds.

        What was answered to before a trouble is returned first, and the trouble raised then.

        Args:
            seconds: how long to wait for a first answer.
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
        """Close a producer: another may have its name then.

        The broker answers when it has stored what is on its way, so with that the session ends.
        """
        with self._ending():
            self._check()
            if producer.awaits_receipts:
                raise ProtocolError("a producer is closed before its receipts have come")
            del self._producers[producer.connection, producer.number]
            producer.connection.ask(
                lambda request: frames.close_producer(producer.number, request),
                frames.SUCCESS,
            )

    def close(self) -> None:
        """Close all connections; what waits to be sent is not sent."""
        self._selector.close()
        for connection in self._connections.values():
            connection.close()

    def connection_for(self, topic: str) -> ProtocolConnection:
        """Connect to the broker that has a topic, or a partition, while the session lasts."""
        if topic not in self._at:
            self._at[topic] = self._looked_up(topic)
        return self._at[topic]

    def _looked_up(self, topic: str) -> ProtocolConnection:
        at = service = self._reachable_service()
        authoritative = False
        for _ in range(MAX_REDIRECTS):
            found = self._connection(at).ask(
                lambda request: frames.lookup(topic, request, authoritative=authoritative),  # noqa: B023
                frames.LOOKUP_RESPONSE,
            )
            scheme = BrokerAddress.parse(service).scheme
            url = found.nested.get(_URL_TLS if scheme == TLS else _URL, b"")
            response, there = found.numbers.get(_RESPONSE), url.decode(errors="replace")
            if not there or response not in {_REDIRECT, _CONNECT}:
                raise refusal(found)
            if BrokerAddress.parse(there).scheme != scheme:
                # Credentials that go by TLS go by nothing else.
                raise refusal(found)
            if response == _CONNECT:
                if found.numbers.get(_BY_PROXY):
                    return self._connection(service, there.partition("://")[2].strip("/"))
                return self._connection(there)
            at, authoritative = there, bool(found.numbers.get(_AUTHORITATIVE))
        raise ProtocolError(f"{topic} was not found: the brokers redirect without end")

    def _answered(self, deadline: float) -> list[Sent[T]]:
        """Return what is answered to when something comes in."""
        sent: list[Sent[T]] = []
        ready = [each for each in self._connections.values() if each.is_to_be_read]
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
        """Keep the first trouble, after which nothing more is opened or sent."""
        try:
            yield
        except ProtocolError as error:
            self._trouble = self._trouble or error
            raise

    def _reachable_service(self) -> str:
        """Return the first of the addresses of the cluster that can be reached."""
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
            found = self.connection_for(topic).ask(
                lambda request: frames.get_schema(topic, request, version),
                frames.GET_SCHEMA_RESPONSE,
            )
            if _SCHEMA not in found.nested:
                raise refusal(found)
            self._schemas[topic, version] = found.nested[_SCHEMA]
        return self._schemas[topic, version]

    def _connection(self, url: str, broker: str = "") -> ProtocolConnection:
        """Connect to a broker or proxy, once."""
        there = self._connections.get((url, broker))
        if there is None:
            there = self._connections[url, broker] = ProtocolConnection(url, self._shown, broker)
            self._selector.register(there, selectors.EVENT_READ, there)
        return there


ANSWER_SECONDS = 15.0
"""So long a broker may take to connect, to answer, and to take what is sent."""
_BUFFER_BYTES = 64 * 1024
_READ_BYTES = 256 * 1024
TLS = "pulsar+ssl"
_PORTS = {"pulsar": 6650, TLS: 6651}
_DEFAULT_MESSAGE_SIZE = 5 * 2**20
_OVERHEAD_BYTES = 2**20
"""So much more than its largest messages a broker's frames may have."""
_ERROR_FIELDS = {frames.ERROR: 2, frames.LOOKUP_RESPONSE: 6}
_NOT_READY = 6
_ANSWERED_AT_ONCE = {frames.PING, frames.AUTH_CHALLENGE}


class ProtocolError(Exception):
    """The broker refused, did not answer, or is gone.

    Attributes:
        code: the number of the error by which it refused; None if it did not.
        unloaded: whether it unloads a topic: it closed a producer, or opens none for now.
    """

    code: int | None = None
    unloaded: bool = False


class ProtocolConnection:
    """A connection; see the module.

    Args:
        url: of a broker or proxy: `pulsar://host:port`, or `pulsar+ssl://`.
        shown: the credentials.
        broker: as `host:port`, where *url* is that of a proxy.

    Attributes:
        max_message_size: of metadata and payload of an entry, in bytes.
        heard: when anything came from the broker, by `time.monotonic`.

    Raises:
        ProtocolError: from every method, if it is of no use any more.
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
        with self._ending("the broker does not let this client in"):
            self._write(frames.connect(shown.method, shown.token().encode(), broker))
            connected = self._answer(frames.CONNECTED)
        self.max_message_size = connected.numbers.get(3, _DEFAULT_MESSAGE_SIZE)
        self._limit = max(self._limit, self.max_message_size + _OVERHEAD_BYTES)

    def fileno(self) -> int:
        """Return what to wait for until something can be read."""
        return self._socket.fileno()

    def ask(self, request: Callable[[int], bytes], kind: int) -> Command:
        """Send a request, and return its answer.

        Args:
            request: written for the number that it is given.
            kind: of the answer.
        """
        self._requests += 1
        self._write(request(self._requests))
        return self._answer(kind)

    def post(self, command: bytes) -> None:
        """Send a command that is not answered, at once."""
        self._write(command)

    @property
    def is_to_be_read(self) -> bool:
        """Whether something has come in that was not read yet, or a trouble is to be raised."""
        return bool(self._unread) or self._trouble is not None

    def send(self, entry: bytes) -> None:
        """Send an entry, soon: `flush` sends what is left."""
        self._buffer.append(entry)
        self._buffered += len(entry)
        if self._buffered >= _BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send all that waits to be sent."""
        if self._buffer:
            entries = b"".join(self._buffer)
            self._buffer.clear()
            self._buffered = 0
            self._write(entries)

    def read(self, seconds: float = 0.0, most: float = math.inf) -> list[Command]:
        """Return the commands that have come in, without waiting for more.

        What came before a trouble is returned first.

        Args:
            seconds: how long to wait for a first one.
            most: bytes after which to return, a command more or less; what else has come in waits
                at its sender.
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
        """Close it; what waits to be sent is not sent."""
        self._socket.close()

    def _write(self, frames: bytes) -> None:
        with self._ending("the broker does not take what is sent"):
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
                left = deadline - time.monotonic()
                if left <= 0 or not self._receive(left):
                    raise TimeoutError(f"it did not come within {ANSWER_SECONDS:g} s")

    def _receive(self, seconds: float) -> int:
        """Receive what comes within so many seconds; return the number of bytes, 0 for none."""
        with self._ending("the broker is gone"):
            self._socket.settimeout(seconds)
            try:
                received = self._socket.recv(_READ_BYTES)
            except (BlockingIOError, TimeoutError, ssl.SSLWantReadError):
                return 0
            if not received:
                raise EOFError("it has closed the connection")
            for kind in self._take_in(received):
                if kind == frames.PING:
                    self._write(frames.frame(frames.PONG))
                else:
                    shown = self._shown
                    self._write(frames.auth_response(shown.method, shown.token().encode()))
        return len(received)

    def _take_in(self, received: bytes) -> list[int]:
        """Keep what is to be read, and return the kinds of what is to be answered at once."""
        self.heard = time.monotonic()
        self._received += received
        came = frames.take_frames(self._received, self._limit)
        self._unread += [each for each in came if each.kind not in _ANSWERED_AT_ONCE]
        return [each.kind for each in came if each.kind in _ANSWERED_AT_ONCE]

    @contextmanager
    def _ending(self, what: str) -> Iterator[None]:
        """Close the connection at any trouble: a frame may have been sent, or received, in part."""
        if self._trouble is not None:
            raise self._trouble
        try:
            with _troubles(what):
                yield
        except BaseException as error:
            if isinstance(error, ProtocolError):
                self._trouble = error
            # What the broker had answered before still counts.
            with suppress(OSError, ValueError):
                self._socket.settimeout(0.0)
                while received := self._socket.recv(_READ_BYTES):
                    self._take_in(received)
            self.close()
            raise


class BrokerAddress(NamedTuple):
    """Where a broker or proxy listens."""

    scheme: str
    host: str
    port: int

    @classmethod
    def parse(cls, url: str) -> Self:
        """Read `pulsar://host:port`, or `pulsar+ssl://`; the port may be left out.

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
    with _troubles(f"{url} can't be reached"):
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
    """Return what to raise at a command that was not wanted, such as ERROR."""
    text = b" ".join(command.nested.values()).decode(errors="replace")
    error = ProtocolError(f"command {command.kind} of the broker: {command.numbers} {text}")
    error.code = command.numbers.get(_ERROR_FIELDS.get(command.kind, 0))
    error.unloaded = command.kind == frames.CLOSE_PRODUCER or error.code == _NOT_READY
    return error


@contextmanager
def _troubles(what: str) -> Iterator[None]:
    """Tell of all that goes wrong with a socket, or with what comes from one, as one error."""
    try:
        yield
    except (EOFError, OSError, ValueError) as error:
        raise ProtocolError(f"{what}: {error}") from error

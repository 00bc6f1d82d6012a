"""One connection to a broker, or through a proxy to one; for one thread.

It is never opened again: whoever sends by it takes what has no receipt to be in doubt.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Self
from urllib.parse import urlsplit

from redrive.replay.protocol import commands
from redrive.replay.protocol.commands import Command

ANSWER_SECONDS = 15.0
"""So long a broker may take to connect, to answer, and to take what is sent."""
_BUFFER_BYTES = 64 * 1024
_READ_BYTES = 256 * 1024
TLS = "pulsar+ssl"
_PORTS = {"pulsar": 6650, TLS: 6651}
_DEFAULT_MESSAGE_SIZE = 5 * 2**20
_OVERHEAD_BYTES = 2**20
"""So much more than its largest messages a broker's frames may have."""
_ERROR_FIELDS = {commands.ERROR: 2, commands.LOOKUP_RESPONSE: 6}
_ANSWERED_AT_ONCE = {commands.PING, commands.AUTH_CHALLENGE}


class ProtocolError(Exception):
    """The broker refused, did not answer, or is gone.

    Attributes:
        code: the number of the error by which it refused; None if it did not.
    """

    code: int | None = None


@dataclass(frozen=True)
class ShownCredentials:
    """What a client shows to a broker, and how it speaks TLS.

    Attributes:
        method: `token`, `tls`, or empty for not at all.
        token: returns the token to show, a new one when the last is about to expire.
        tls: for addresses of `pulsar+ssl`.
    """

    method: str = ""
    token: Callable[[], str] = field(default=str, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)


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
        self._limit = commands.MAX_FRAME
        self.heard = time.monotonic()
        self._socket = _connected(url, shown)
        with self._ending("the broker does not let this client in"):
            self._write(commands.connect(shown.method, shown.token().encode(), broker))
            connected = self._answer(commands.CONNECTED)
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

    def read(self, seconds: float = 0.0) -> list[Command]:
        """Return the commands that have come in, without waiting for more.

        What came before a trouble is returned first.

        Args:
            seconds: how long to wait for a first one.
        """
        try:
            while self._receive(0.0 if self._unread else seconds):
                pass
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
                if command.kind in {kind, commands.ERROR}:
                    del self._unread[index]
                    if command.kind == kind:
                        return command
                    raise refusal(command)
            with self._ending(f"no answer by command {kind}"):
                left = deadline - time.monotonic()
                if left <= 0 or not self._receive(left):
                    raise TimeoutError(f"it did not come within {ANSWER_SECONDS:g} s")

    def _receive(self, seconds: float) -> bool:
        """Receive what comes within so many seconds, and return whether anything did."""
        with self._ending("the broker is gone"):
            self._socket.settimeout(seconds)
            try:
                received = self._socket.recv(_READ_BYTES)
            except (BlockingIOError, TimeoutError, ssl.SSLWantReadError):
                return False
            if not received:
                raise EOFError("it has closed the connection")
            for kind in self._take_in(received):
                if kind == commands.PING:
                    self._write(commands.frame(commands.PONG))
                else:
                    shown = self._shown
                    self._write(commands.auth_response(shown.method, shown.token().encode()))
        return True

    def _take_in(self, received: bytes) -> list[int]:
        """Keep what is to be read, and return the kinds of what is to be answered at once."""
        self.heard = time.monotonic()
        self._received += received
        came = commands.take_frames(self._received, self._limit)
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
    return error


@contextmanager
def _troubles(what: str) -> Iterator[None]:
    """Tell of all that goes wrong with a socket, or with what comes from one, as one error."""
    try:
        yield
    except (EOFError, OSError, ValueError) as error:
        raise ProtocolError(f"{what}: {error}") from error

"""One connection to a broker, or through a proxy to one; for one thread.

It is never opened again: whoever sends by it takes what has no receipt to be in doubt.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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


class ProtocolError(Exception):
    """The broker refused, did not answer, or is gone."""


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
        unread: what has come in, and was not asked for.

    Raises:
        ProtocolError: from every method, if it is of no use any more.
    """

    def __init__(self, url: str, shown: ShownCredentials, broker: str = "") -> None:
        self._shown = shown
        self._received = bytearray()
        self.unread: list[Command] = []
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._requests = 0
        address = urlsplit(url)
        with _troubles(f"{address.netloc} can't be reached"):
            port = address.port or _PORTS[address.scheme]
            self._socket = socket.create_connection((address.hostname, port), ANSWER_SECONDS)
        try:
            with _troubles(f"{address.netloc} can't be spoken to"):
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if address.scheme == TLS:
                    tls = shown.tls or ssl.create_default_context()
                    self._socket = tls.wrap_socket(self._socket, server_hostname=address.hostname)
            self._write(commands.connect(shown.method, shown.token().encode(), broker))
            connected = self._answer(commands.CONNECTED)
        except BaseException:
            self.close()
            raise
        self.max_message_size = connected.numbers.get(3, _DEFAULT_MESSAGE_SIZE)

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

    def read(self) -> list[Command]:
        """Return the commands that have come in, without waiting for more."""
        while self._receive(0.0):
            pass
        read, self.unread = self.unread, []
        return read

    def close(self) -> None:
        """Close it; what waits to be sent is not sent."""
        self._socket.close()

    def _write(self, frames: bytes) -> None:
        with _troubles("the broker does not take what is sent"):
            self._socket.settimeout(ANSWER_SECONDS)
            self._socket.sendall(frames)

    def _answer(self, kind: int) -> Command:
        while True:
            for index, command in enumerate(self.unread):
                if command.kind in {kind, commands.ERROR}:
                    del self.unread[index]
                    if command.kind == kind:
                        return command
                    raise refusal(command)
            if not self._receive(ANSWER_SECONDS):
                raise ProtocolError(f"no answer within {ANSWER_SECONDS:g} s: no command {kind}")

    def _receive(self, seconds: float) -> bool:
        """Receive what comes within so many seconds, and return whether anything did."""
        with _troubles("the broker is gone"):
            self._socket.settimeout(seconds)
            try:
                received = self._socket.recv(_READ_BYTES)
            except (BlockingIOError, TimeoutError, ssl.SSLWantReadError):
                return False
            if not received:
                raise EOFError("it has closed the connection")
            self._received += received
            for command in commands.take_frames(self._received):
                if command.kind == commands.PING:
                    self._write(commands.frame(commands.PONG))
                elif command.kind == commands.AUTH_CHALLENGE:
                    shown = self._shown
                    self._write(commands.auth_response(shown.method, shown.token().encode()))
                else:
                    self.unread.append(command)
        return True


def refusal(command: Command) -> ProtocolError:
    """Return what to raise at a command that was not wanted, such as ERROR."""
    text = b" ".join(command.nested.values()).decode(errors="replace")
    return ProtocolError(f"command {command.kind} of the broker: {command.numbers} {text}")


@contextmanager
def _troubles(what: str) -> Iterator[None]:
    """Tell of all that goes wrong with a socket, or with what comes from one, as one error."""
    try:
        yield
    except (EOFError, OSError, ValueError) as error:
        raise ProtocolError(f"{what}: {error}") from error

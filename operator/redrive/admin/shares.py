"""Shares of the processor time that namespaces use for the answers and the TLS of their brokers.

OpenSSL works in the event loop. A server with a long chain of slow certificates takes a second of
each handshake, and one that sends session tickets without end never gives the application a byte.
So handshakes and records count for the namespace, as the parsing of answers does. A namespace that
has used its share waits before it connects and before it reads. Handshakes that have begun can't
wait: they fail if their namespace is late.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

SHARE = 0.25
"""Share of the processor time that a namespace may use. A thousand answers of brokers in a second
take less."""
BURST_SECONDS = 0.1
"""Time whose share a namespace may use at once."""
TURN_SECONDS = 0.005
"""Time in which a connection that may read again parses what it has."""
LATE_SECONDS = 1.0
"""Pause of a namespace from which on its handshakes fail."""
MAX_HANDSHAKE = 2**15
"""Maximum bytes of a server's handshake: twenty certificates with RSA keys of 3072 bits and an
exponent as long take 0.25 s."""

namespace_of_call: ContextVar[str] = ContextVar("namespace_of_call", default="")
"""Namespace of the connection that the current task sends a call for."""
shares_of_call: ContextVar[Shares | None] = ContextVar("shares_of_call", default=None)
"""Shares in which the current task connects."""


class Shares:
    """Time that namespaces have used, and connections that wait for their share.

    Args:
        clock: monotonic seconds.

    Attributes:
        sockets: number by namespace.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.sockets = Counter[str]()
        self._clock = clock
        self._until: dict[str, float] = {}
        self._waiting = defaultdict[str, deque[Callable[[], None]]](deque)

    @contextmanager
    def using(self, namespace: str) -> Iterator[None]:
        """Record the processor time of the block."""
        start = time.thread_time()
        try:
            yield
        finally:
            seconds = time.thread_time() - start
            began = max(self._until.get(namespace, 0.0), self._clock() - BURST_SECONDS)
            self._until[namespace] = began + seconds / SHARE

    def pause_of(self, namespace: str) -> float:
        """Return the seconds for which a namespace must pause; 0 if it may work."""
        return max(0.0, self._until.get(namespace, 0.0) - self._clock())

    def wait(self, namespace: str, resume: Callable[[], None]) -> None:
        """Call *resume* once the namespace may work, after others that wait."""
        self._waiting[namespace].append(resume)
        if len(self._waiting[namespace]) == 1:
            self._continue_in(self.pause_of(namespace), namespace)

    async def turn(self, namespace: str) -> None:
        """Wait until the namespace may work."""
        if self.pause_of(namespace):
            resumed = asyncio.Event()
            self.wait(namespace, resumed.set)
            await resumed.wait()

    def _continue_in(self, seconds: float, namespace: str) -> None:
        asyncio.get_running_loop().call_later(seconds, self._continue, namespace)

    def _continue(self, namespace: str) -> None:
        waiting, pause = self._waiting[namespace], self.pause_of(namespace)
        if not pause:
            waiting.popleft()()
        if waiting:  # all at once would block the event loop
            self._continue_in(max(pause, TURN_SECONDS), namespace)


class FairTls(ssl.SSLObject):
    """TLS of one connection, in the share of its namespace.

    Attributes:
        incoming: bytes of the server that are not read yet.
        shares: in which its time counts.
        namespace: that uses it.
        stop: stops the reading until the namespace may read again; None during the handshake.
    """

    incoming: ssl.MemoryBIO
    shares: Shares
    namespace: str
    stop: Callable[[], None] | None = None
    _received = 0

    def do_handshake(self) -> None:
        """Continue the handshake.

        Raises:
            SSLError: the server's part is too long, or the namespace is late.
        """
        pending = self.incoming.pending
        if self._received + pending > MAX_HANDSHAKE:
            raise ssl.SSLError(f"a handshake of more than {MAX_HANDSHAKE} bytes")
        if self.shares.pause_of(self.namespace) > LATE_SECONDS:
            raise ssl.SSLError("handshakes of this namespace take too long")
        with self.shares.using(self.namespace):
            try:
                super().do_handshake()
            finally:
                self._received += pending - self.incoming.pending

    def read(self, len: int = 1024, buffer: Any = None) -> Any:  # noqa: A002, ANN401  as the library's
        """Return decrypted bytes; none while the namespace must pause."""
        if self.stop is not None and self.shares.pause_of(self.namespace):
            self.stop()
            raise ssl.SSLWantReadError
        with self.shares.using(self.namespace):
            return super().read(len, buffer)


def fair(context: ssl.SSLContext) -> ssl.SSLContext:
    """Return *context*, whose connections use the share of the namespace of their call."""
    wrap = context.wrap_bio

    def wrap_bio(incoming: ssl.MemoryBIO, *others: Any, **options: Any) -> ssl.SSLObject:  # noqa: ANN401
        made: Any = wrap(incoming, *others, **options)
        made.incoming, made.namespace = incoming, namespace_of_call.get()
        made.shares = shares_of_call.get() or Shares()
        return made  # type: ignore[no-any-return]

    context.sslobject_class = FairTls
    context.wrap_bio = wrap_bio  # type: ignore[method-assign]
    return context

"""A broker with settings of a test, and a TCP proxy that withholds chosen answers of a broker."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from sandbox import pulsar as brokers
from sandbox.process import Processes
from sandbox.pulsar import Broker


@contextmanager
def own_broker(version: str, state: Path, settings: Mapping[str, object]) -> Iterator[Broker]:
    """Run a broker of a release in `versions.PULSARS` with *settings* and its data in *state*."""
    processes = Processes(state)
    try:
        made = brokers.launch(state, processes, version, settings=settings)
        brokers.wait(made, processes)
        yield made
    finally:
        processes.stop_all()


SEND, SEND_RECEIPT, SUCCESS, PRODUCER_SUCCESS = 6, 7, 13, 17
"""The numbers of these commands in Pulsar's binary protocol."""

_LOOK_EVERY_SECONDS = 0.05


class WithholdingProxy:
    """Stands between clients and the broker on *port* of this machine.

    The broker tells clients its own address when they look a topic up; the proxy puts its own in
    its place, so that they stay with it.

    Attributes:
        seen: the number of received frames of each command, from both sides.
        withheld: the number of next frames of each command that never reach the client.
        halved: the commands of which a random half of the frames is withheld. Every second frame
            could always be of the same call, because a client repeats abandoned calls.
        refuses: close each new connection at once.
        frozen: pass nothing on, like a stopped or disconnected broker.
    """

    def __init__(self, port: int, closing: ExitStack) -> None:
        self.seen: Counter[int] = Counter()
        self.withheld: Counter[int] = Counter()
        self.halved: frozenset[int] = frozenset()
        self._chance = random.Random(0)  # noqa: S311 - the same in each run, no secret
        self.refuses = False
        self.frozen = False
        self._ends: list[socket.socket] = []
        self._broker = port
        self._listener = _listen_on_as_many_digits_as(port)
        closing.callback(self._listener.close)
        # Closing a socket wakes no thread in accept(); shutting it down does.
        closing.callback(self._listener.shutdown, socket.SHUT_RDWR)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()
        closing.callback(self.cut)

    def cut(self) -> None:
        """Close all connections."""
        while self._ends:
            _close(self._ends.pop())

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.refuses:
                    _close(client)
                    continue
                broker = socket.create_connection(("127.0.0.1", self._broker))
                for source, target in ((client, broker), (broker, client)):
                    self._ends.append(source)
                    threading.Thread(
                        target=self._forward, args=(source, target, source is broker), daemon=True
                    ).start()

    def _forward(self, source: socket.socket, target: socket.socket, answers: bool) -> None:  # noqa: FBT001
        mine, theirs = (f"127.0.0.1:{port}".encode() for port in (self.port, self._broker))
        with suppress(OSError):
            for frame in _frames(source):
                kind = frame[9]  # after the two sizes and the tag of the first field
                self.seen[kind] += 1
                while self.frozen:
                    time.sleep(_LOOK_EVERY_SECONDS)
                if answers and self._withholds(kind):
                    continue
                target.sendall(frame.replace(theirs, mine) if answers else frame)
        _close(target)

    def _withholds(self, kind: int) -> bool:
        if kind in self.halved:
            return self._chance.random() < 1 / 2
        if self.withheld[kind] > 0:
            self.withheld[kind] -= 1
            return True
        return False


@contextmanager
def proxy_of(port: int) -> Iterator[WithholdingProxy]:
    """Open a proxy of the broker on *port* of this machine."""
    with ExitStack() as closing:
        yield WithholdingProxy(port, closing)


def _listen_on_as_many_digits_as(port: int) -> socket.socket:
    while True:
        listener = socket.create_server(("127.0.0.1", 0))
        if len(str(listener.getsockname()[1])) == len(str(port)):
            return listener
        listener.close()


def _frames(source: socket.socket) -> Iterator[bytes]:
    """Yield frames, each with a length of four bytes."""
    stream = source.makefile("rb")
    while size := stream.read(4):
        yield size + stream.read(int.from_bytes(size, "big"))


def _close(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()

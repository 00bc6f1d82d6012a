"""Calls of the client that may take longer than is waited for; called by what opens and closes.

Where a broker doesn't answer the client waits for as long as its own operation time-out, 30 s
unless the program says otherwise, and can't be asked for less in a single call. So such a call gets
a thread of its own, which goes on when its caller no longer waits.
"""

from __future__ import annotations

import atexit
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Generic, TypeVar

import pulsar

from redrive.delivery import durations
from redrive.delivery.forking import check_client, is_inherited

OPEN_SECONDS = 12.0
"""How long a broker has to let a producer in, or to answer a question about a topic."""

_T = TypeVar("_T")
_LAST_SECONDS = 1.0

_going_on: set[threading.Thread] = set()
_clients: weakref.WeakSet[pulsar.Client] = weakref.WeakSet()


class Deadline:
    """The end of all that is done in one call, so many seconds from now."""

    def __init__(self, timeout: float | timedelta) -> None:
        self._end = time.monotonic() + durations.seconds(timeout)

    def left(self) -> float:
        """Return how many seconds are left; 0 when it is over."""
        return max(0.0, self._end - time.monotonic())


class Promise(Generic[_T]):
    """What comes of a call in another thread. As a future, whose module takes long to import."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._over = threading.Event()
        self._results: list[_T] = []
        self._error: BaseException = TimeoutError()

    def keep(self, result: _T) -> bool:
        """Give *result* to those who wait; tell whether any do, or will."""
        with self._changing:
            if self._over.is_set():
                return False
            self._results.append(result)
            self._over.set()
            return True

    def fail(self, error: BaseException) -> None:
        """Raise *error* in those who wait."""
        with self._changing:
            if not self._over.is_set():
                self._error = error
                self._over.set()

    def wait(self, seconds: float | None = None) -> _T:
        """Return what came of it; after so many *seconds* it is given up.

        Raises:
            TimeoutError: it was given up.
        """
        if not self._over.wait(seconds):
            self.fail(self._error)
        if self._results:
            return self._results[0]
        raise self._error


def within(seconds: float, call: Callable[[], _T], late: Callable[[_T], object]) -> _T:
    """Return what *call* returns within so many *seconds*; what comes later goes to *late*.

    Raises:
        TimeoutError: *call* goes on.
    """
    promise = Promise[_T]()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            promise.fail(error)
        else:
            if not promise.keep(result):
                late(result)

    _start(run)
    return promise.wait(seconds)


def all_within(deadline: Deadline, calls: Iterable[Callable[[], object]]) -> None:
    """Make all *calls* side by side, and wait until they have ended, or the *deadline* is over.

    Those that have not ended go on. Raises what the first of those raised that have.
    """
    errors: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [_start(functools.partial(run, call)) for call in calls]
    for thread in filter(None, threads):
        thread.join(deadline.left())
    for error in errors:
        raise error


def in_background(call: Callable[[], object]) -> None:
    """Make *call*, which must not raise, while its caller goes on."""
    _start(call)


def release_at_exit(client: pulsar.Client) -> None:
    """Have *client* end the calls that are still under way when the interpreter goes away.

    A thread that comes back from the client after that aborts the process. In a forked child the
    client has to be its own.

    Raises:
        InheritedError: the client was made by the parent of this process.
    """
    check_client(client)
    _clients.add(client)


def _start(call: Callable[[], object]) -> threading.Thread | None:
    """Make *call* in a thread; at once, and with None for the thread, where none can be started."""

    def run() -> None:
        try:
            call()
        finally:
            _going_on.discard(thread)

    thread = threading.Thread(target=run, name="redrive-bounded", daemon=True)
    _going_on.add(thread)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is going away
        run()
        return None
    return thread


def _release() -> None:
    left = [thread for thread in list(_going_on) if thread.is_alive()]  # none that a fork has ended
    if left:
        for client in list(_clients):
            if not is_inherited(client):
                client.shutdown()
    last = Deadline(_LAST_SECONDS)
    for thread in left:
        thread.join(last.left())


atexit.register(_release)

"""Deadlines, bounded calls, timers, and signals between threads.

If a broker doesn't answer, the client waits for its own operation time-out, 30 s by default, and a
single call can't be bounded further. So a call that must end earlier gets a thread of its own,
which continues when its caller no longer waits. In a send the client waits permanently while it
connects again and again, as it does when the broker refuses a delay for being too long. Only the
closing of the producer ends that.

Consumers call code of the program: handlers, middleware around them, rules, hooks, filters of logs.
It may raise exceptions that are no `Exception`: a panic in Rust (PyO3), `asyncio.CancelledError`, a
`gevent.Timeout`. A consumer that ended with these would get the same message first after each
restart. So only exceptions that concern the process, or a call of `run`, end it; all others fail
one message. A group concerns the process if one of its parts does.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, Generic, Self, TypeVar

import pulsar

from redrive.delivery.forking import OwnerProcess, bounded_threads
from redrive.errors import PROCESS_ERRORS
from redrive.policy.values import to_limit
from redrive.policy.verdict import is_a, parts

OPEN_SECONDS = 12.0
"""Time in which a broker has to open a producer, or to answer a request about a topic."""

_T = TypeVar("_T")


class Deadline:
    """Deadline of one call; None means no limit."""

    def __init__(self, timeout: float | timedelta | None) -> None:
        self._end = time.monotonic() + to_seconds(timeout)

    def left(self) -> float:
        """Return the remaining seconds; 0 after the deadline."""
        return max(0.0, self._end - time.monotonic())


class Promise(Generic[_T]):
    """Result of a call in another thread: a future, without its module, which imports slowly."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._over = threading.Event()
        self._results: list[_T] = []
        self._error: BaseException = TimeoutError()

    def keep(self, result: _T) -> bool:
        """Give *result* to the waiters; return True if they have not given up."""
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
        """Return its result; after so many *seconds* it is given up.

        Raises:
            TimeoutError: it was given up.
        """
        if not self._over.wait(seconds):
            self.fail(self._error)
        if self._results:
            return self._results[0]
        raise self._error


def within(seconds: float, call: Callable[[], _T], late: Callable[[_T], object]) -> _T:
    """Return the result of *call* within so many *seconds*; a later result goes to *late*.

    Raises:
        TimeoutError: *call* continues.
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

    Those that have not ended continue. Raises the first exception of those that have.
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
    """Make *call*, which must not raise, while its caller continues."""
    _start(call)


def _start(call: Callable[[], object]) -> threading.Thread | None:
    """Make *call* in a new thread; make it here and return None if no thread can be started."""

    def run() -> None:
        try:
            call()
        finally:
            bounded_threads.discard(thread)

    thread = threading.Thread(target=run, name="redrive-bounded", daemon=True)
    bounded_threads.add(thread)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is going away
        run()
        return None
    return thread


CLOSE_TIMEOUT = timedelta(seconds=15)
"""Time for which closing waits for a broker that doesn't answer, and for running handlers."""


class Closing(ABC):
    """Closes at the end of a `with` block, however that ends."""

    @abstractmethod
    def close(self, timeout: float | timedelta | None = CLOSE_TIMEOUT) -> None:
        """Release all that it holds at the broker, within *timeout* (seconds, or a timedelta)."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClosing(ABC):
    """Closes at the end of an `async with` block, however that ends."""

    @abstractmethod
    async def close(self) -> None:
        """Release all that it holds at the broker."""

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def to_seconds(duration: float | timedelta | None) -> float:
    """Return *duration*, a number of seconds or a timedelta, in seconds.

    At most 292 years, the longest wait of Python, as for `timedelta.max`. None is `UNLIMITED`.

    Raises:
        InvalidSpecError: it is neither.
    """
    seconds = to_limit(duration, "a time to wait").total_seconds()
    return min(max(0.0, seconds), threading.TIMEOUT_MAX)


def identity(called: str | None = None) -> str:
    """Return *called*, by default the host's name, followed by something random."""
    return f"{called or _host()}-{os.urandom(6).hex()}"


def _host() -> str:
    import platform  # noqa: PLC0415 - takes long, and only those without a name need it

    return platform.node()


class SignalSafeToken:
    """At most one token, which threads put and take.

    A signal handler may put it at any moment, even while the thread that it interrupts is inside
    one of these methods. `queue.SimpleQueue` would not do: `get` never returns if a timeout of
    microseconds passes between its two attempts.
    """

    def __init__(self) -> None:
        self._absent = threading.Lock()
        self._absent.acquire()

    def put(self) -> None:
        """Put the token, unless it is there."""
        if self._absent.locked():  # an error costs more than this look
            with contextlib.suppress(RuntimeError):  # another thread was faster
                self._absent.release()

    def take(self, timeout: float | None = None) -> bool:
        """Wait for the token and take it; False if none came within *timeout* seconds."""
        return self._absent.acquire(timeout=-1 if timeout is None else timeout)


class SignalSafeEvent:
    """Starts unset and is set once, for good.

    Unlike `threading.Event`, a signal handler may set it, see `SignalSafeToken`.
    """

    def __init__(self) -> None:
        self._token = SignalSafeToken()

    def set(self) -> None:
        """Let all threads through that wait, or will."""
        self._token.put()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set; False if it is not after *timeout* seconds."""
        if not self._token.take(timeout):
            return False
        self._token.put()  # for the next that waits
        return True


_POLL_SECONDS = 0.05
"""Polling interval of waiters; calls need no lock."""


class UnderWay:
    """Running calls, each a `with` block. May be used by several threads, and may be nested."""

    def __init__(self) -> None:
        self._threads: list[int] = []  # changed and copied in one step each

    def wait(self, deadline: Deadline) -> None:
        """Wait until all calls of other threads have ended, or until *deadline*."""
        here = threading.get_ident()
        while any(thread != here for thread in list(self._threads)) and deadline.left():
            time.sleep(min(_POLL_SECONDS, deadline.left()))

    def __enter__(self) -> None:
        self._threads.append(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        self._threads.remove(threading.get_ident())


class Timer:
    """Calls *fire*, in a thread of its own, at each moment that *next_due* returns.

    Attributes:
        closing: True once `close` was called, by the owner or at interpreter exit.

    Args:
        next_due: returns a moment of `time.monotonic`, or None for no call.
        fire: raises nothing.
    """

    def __init__(self, next_due: Callable[[], float | None], fire: Callable[[], None]) -> None:
        self._next_due = next_due
        self._fire = fire
        self.closing = False
        self._owner = OwnerProcess("timer")
        self._changed = threading.Event()
        self._thread = OwnThread(target=self._watch, name="redrive-timer", daemon=True)
        self._thread.start()
        # A thread that is inside the client when the interpreter goes away aborts the process.
        atexit.register(self.close)

    def reschedule(self) -> None:
        """Call *next_due* again, after its moment has changed."""
        self._changed.set()

    def close(self) -> None:
        """Fire no more; a call that has begun is waited for."""
        atexit.unregister(self.close)
        if self._owner.is_parent:  # whose thread may have had the lock of the event
            return
        self.closing = True
        self._changed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self.closing:
            due = self._next_due()
            wait = None if due is None else due - time.monotonic()
            if wait is None or wait > 0:
                self._changed.wait(wait)
                self._changed.clear()
                continue
            self._fire()


_FAST_SECONDS = 50e-6
"""A handler that is faster costs less than to switch between threads."""
_FAST_CALLS = 64
_MAX_DEBT_SECONDS = 0.005
_WATCH_SECONDS = 0.005


class Turnstile:
    """Lets one worker alone take messages while handlers are faster than a switch of threads.

    Threads that alternate in work of some microseconds spend most of their time on handing over
    the interpreter's lock. All work again once the one has spent 5 ms more than fast handlers need,
    or has ended no call for 5 ms: a slow handler keeps the others waiting for 10 ms at most.

    A call of `leave` costs no lock: lost updates of its figures delay a change by some messages.
    """

    def __init__(self) -> None:
        self._alone: int | None = None
        self._gate = threading.Event()  # not set while one works alone
        self._gate.set()
        self._narrowed = threading.Event()  # the opposite, and set at the end
        self._over = False
        self._fast = 0
        self._debt = 0.0
        self._ended = 0
        self._changing = threading.Lock()

    def enter(self, worker: int) -> None:
        """Wait while another worker works alone."""
        if self._alone is not None and self._alone != worker:
            self._gate.wait()

    def leave(self, worker: int, seconds: float, calls: int = 1) -> None:
        """Note that so many calls of *worker* took so long."""
        self._ended += 1
        if self._alone == worker:
            self._debt = max(0.0, self._debt + seconds - _FAST_SECONDS * calls)
            if self._debt > _MAX_DEBT_SECONDS:
                self._open()
        elif seconds > _FAST_SECONDS * calls:
            self._fast = 0
        else:
            self._fast += calls
            if self._fast > _FAST_CALLS:
                self._narrow(worker)

    def quit(self, worker: int) -> None:
        """Let the others work: *worker* ends."""
        if self._alone == worker:
            self._open()

    def watch(self) -> None:
        """Let all work whenever the one ends no call, until `close`."""
        while True:
            self._narrowed.wait()
            if self._over:
                return
            ended = self._ended
            time.sleep(_WATCH_SECONDS)
            if ended == self._ended:
                self._open()

    def close(self) -> None:
        """End `watch`, and let all through from now on."""
        self._over = True
        self._open()

    def _narrow(self, worker: int) -> None:
        with self._changing:
            if self._alone is None and not self._over:
                self._debt = 0.0
                self._gate.clear()
                self._alone = worker
                self._narrowed.set()

    def _open(self) -> None:
        with self._changing:
            self._alone, self._fast = None, 0
            self._gate.set()
            if self._over:
                self._narrowed.set()
            else:
                self._narrowed.clear()


_WATCH_EVERY_SECONDS = 1.0


class _WatchedCall:
    """A call of `SendWatchdog`, until the end of its `with` block.

    Attributes:
        given_up: True once it took too long.
    """

    __slots__ = ("_calls", "give_up", "given_up")

    def __init__(self, calls: dict[_WatchedCall, float], give_up: Callable[[], None]) -> None:
        self._calls = calls
        self.give_up = give_up
        self.given_up = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.pop(self, None)


class SendWatchdog:
    """Gives up calls that take too long, in a thread of its own.

    The calls stay in the threads that make them: a hand-over to another thread and back would cost
    more than all other work of a retry in the client.
    """

    def __init__(self) -> None:
        self._calls: dict[_WatchedCall, float] = {}  # until when
        self._next_look = 0.0
        self._sooner = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def during(self, seconds: float, give_up: Callable[[], None]) -> _WatchedCall:
        """Call *give_up*, which must not raise, if the block takes longer than *seconds*."""
        if self._thread is None:
            self._start()
        end = time.monotonic() + seconds
        call = _WatchedCall(self._calls, give_up)
        self._calls[call] = end
        if end < self._next_look:  # seldom: most calls have a second, within which it looks anyway
            self._sooner.set()
        return call

    def close(self) -> None:
        """End the thread; call when no more sends follow."""
        self._closed = True
        self._sooner.set()
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = OwnThread(
                    target=self._watch, name="redrive-send-watchdog", daemon=True
                )
                self._thread.start()

    def _watch(self) -> None:
        while True:
            self._sooner.clear()
            if self._closed:
                return
            now = time.monotonic()
            # First: a call that begins meanwhile, and ends before that, sets `_sooner`.
            self._next_look = now + _WATCH_EVERY_SECONDS
            # A copy, made in one step: calls begin and end meanwhile.
            for call, end in list(self._calls.items()):
                if end > now:
                    self._next_look = min(self._next_look, end)
                elif self._calls.pop(call, None) is not None:
                    call.given_up = True
                    call.give_up()
            self._sooner.wait(max(0.0, self._next_look - now))


class RunCancelled(BaseException):
    """The call of `run` was cancelled and its handlers with it, which settles no message."""


# The client raises Interrupted in place of KeyboardInterrupt.
_ENDINGS = (*PROCESS_ERRORS, pulsar.Interrupted, RunCancelled)


class OwnThread(threading.Thread):
    """A thread of a consumer, which works for all its messages.

    Python ignores a SystemExit in any thread but the main one: this one would end silently, and
    with it its work. So here SystemExit of the program's code is a failure like others.
    """


def ends_run(error: BaseException) -> bool:
    """Return True if *error* is no failure of a message, and has to be raised again."""
    ends = any(is_a(part, _ENDINGS) for part in parts(error))
    return ends and not (isinstance(threading.current_thread(), OwnThread) and exits(error))


def exits(error: BaseException) -> bool:
    """Return True if the program has asked for its own end, as `sys.exit` does."""
    return any(is_a(part, SystemExit) for part in parts(error))


def ends_thread(error: BaseException) -> bool:
    """Return True if *error* ends an `OwnThread`, or what does its work in memory."""
    return ends_run(error) and not exits(error)


@contextlib.contextmanager
def printing_errors() -> Iterator[None]:
    """Print exceptions of the program's filters and handlers of logs, which can't show them."""
    try:
        yield
    except BaseException as error:
        if ends_run(error):
            raise
        traceback.print_exc()


class GuardedLog(logging.LoggerAdapter[logging.Logger]):
    """A log whose filters and handlers, which are the program's, fail no message."""

    def log(self, level: int, msg: object, *args: object, **options: Any) -> None:  # noqa: ANN401
        """Log as a `Logger` does; an exception is printed."""
        with printing_errors():
            self.logger.log(level, msg, *args, **{"stacklevel": 2, **options})


def log_of(name: str) -> GuardedLog:
    """Return the log of a module that the program's handlers and messages depend on."""
    return GuardedLog(logging.getLogger(name))

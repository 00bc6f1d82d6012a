"""Forks, and the end of a process, by SIGTERM too.

Consumers, producers and their client belong to the process that made them.

A forked child has copies of all objects and of the messages in the client, none of the threads, and
shares the connections of its parent. There a call of the client hangs, and an object that goes away
writes into a connection of the parent, whose consumer the broker closes then. So each use of an
inherited object raises `InheritedError`, closing it does nothing, and the client's own objects,
those of the program too, are kept until the child ends.

SIGTERM stops what runs, so that the program ends in its own way. Where nothing runs it closes what
asked for that, and then ends the process as it would have done.

A thread that returns from the client while the interpreter ends aborts the process. So if a thread
is in a call of the client then, all clients are shut down first, which ends their calls.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pulsar

from redrive.errors import InvalidSpecError, RedriveError

REMEDY = "create the client, its consumers and its producers in the child, after the fork"

_handles: list[object] = []  # of the client, during a fork
_inherited: set[int] = set()  # the identities of clients, which are kept
_clients: weakref.WeakSet[pulsar.Client] = weakref.WeakSet()
_LAST_SECONDS = 1.0
_POLL_SECONDS = 0.01

bounded_threads: set[threading.Thread] = set()
"""Threads of bounded and of background calls, see `concurrency.within`: they call the client."""

_owners: weakref.WeakSet[OwnerProcess] = weakref.WeakSet()
_callbacks: set[weakref.WeakMethod[Callable[[], None]]] = set()


class InheritedError(RedriveError):
    """A forked process used an object of its parent."""

    reason = "Inherited"


class OwnerProcess:
    """The process that made an object.

    Args:
        kind: names the object in errors.

    Attributes:
        is_parent: True in a child that was forked since.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._process = os.getpid()
        self.is_parent = False
        _owners.add(self)

    def check(self) -> None:
        """Pass in the process that made the object.

        Raises:
            InheritedError: this is a child of it.
        """
        if self.is_parent:
            raise InheritedError(
                f"a {self._kind} can't be used by a process that was forked after it was made",
                got=f"process {os.getpid()}, made by process {self._process}",
                remedy=REMEDY,
            )

    def note_fork(self) -> None:
        """Note that this process was forked, before or after it made the object."""
        self.is_parent = self.is_parent or os.getpid() != self._process


def is_inherited(client: object) -> bool:
    """Return True if *client* was made by a parent of this process."""
    return id(client) in _inherited


def check_client(client: object) -> None:
    """Pass if *client* was made by this process.

    Raises:
        InheritedError: it was made by a parent.
        InvalidSpecError: it is another object.
    """
    can_connect = hasattr(client, "subscribe") or hasattr(client, "create_producer")
    if not can_connect or isinstance(client, type):
        raise InvalidSpecError(
            "client must be a pulsar.Client",
            got=client,
            remedy='give one such as pulsar.Client("pulsar://localhost:6650")',
        )
    if is_inherited(client):
        raise InheritedError(
            "a client can't be used by a process that was forked after it was made",
            got=f"process {os.getpid()}, a child of the process that made it",
            remedy=REMEDY,
        )


def release_at_exit(client: pulsar.Client) -> None:
    """Shut *client* down at interpreter exit if a thread is in a call of a client then.

    A forked child needs a client of its own.

    Raises:
        InheritedError: the client was made by the parent of this process.
    """
    check_client(client)
    _clients.add(client)


def _release() -> None:
    if not _clients or len(sys._current_frames()) == 1:  # noqa: SLF001 - documented
        return
    _suspend_terminated_threads()  # those that call the client after this, too
    if not _any_in_client():
        return
    for client in list(_clients):
        if not is_inherited(client):
            with contextlib.suppress(Exception):  # such as of a broken connection
                client.shutdown()
    end = time.monotonic() + _LAST_SECONDS
    while time.monotonic() < end and _any_in_client():
        time.sleep(_POLL_SECONDS)


def _any_in_client() -> bool:
    """Return True if another thread, of redrive or of the program, is in a call of the client.

    Bounded threads count from their start. Those of a parent are not alive in its forked child.
    """
    here = threading.get_ident()
    return any(thread.is_alive() for thread in list(bounded_threads)) or any(
        thread != here and frame.f_globals.get("__name__") == pulsar.__name__
        for thread, frame in sys._current_frames().items()  # noqa: SLF001 - documented
    )


def _suspend_terminated_threads() -> None:
    """Make threads in the client wait permanently, where they would abort the exiting process.

    A producer that cannot be opened for a passing reason keeps its thread in the client until the
    client's operation time-out, even if it is closed. Ten times a second this thread checks for
    signals. Before Python 3.14 an exiting interpreter then unwinds the stack of the thread, and C++
    functions on that stack call `std::terminate`.
    """
    if sys.version_info >= (3, 14):
        return
    with contextlib.suppress(OSError, AttributeError):  # without GNU's library for C++
        import ctypes  # noqa: PLC0415 - most programs end without it

        pause = ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p)
        set_terminate = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
        set_terminate(pause)


atexit.register(_release)


def call_in_children(method: Callable[[], None]) -> None:
    """Have *method*, bound to an object that still exists then, called in forked children."""
    _callbacks.add(weakref.WeakMethod(method, _callbacks.discard))


def _classes(kind: type) -> Iterator[type]:
    derived: type
    yield kind
    for derived in kind.__subclasses__():
        yield from _classes(derived)


def _before() -> None:
    """Find the objects of the client: it lists none of its own."""
    kinds = (pulsar.Client, pulsar.Consumer, pulsar.Producer, pulsar.Reader)
    classes = [subclass for kind in kinds for subclass in _classes(kind)]
    _handles[:] = [handle for handle in gc.get_referrers(*classes) if isinstance(handle, kinds)]
    if _handles:
        # While other threads run that may be importing it, a child could wait for it permanently.
        import ctypes  # noqa: F401, PLC0415 - few programs fork


def _in_child() -> None:
    for owner in list(_owners):  # first: nothing below may fail before
        owner.note_fork()
    if _handles:
        import ctypes  # noqa: PLC0415 - see `_before`

        for handle in _handles:  # a reference that nothing gives back, at the end of Python neither
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))
            _inherited.add(id(handle))
    _handles.clear()
    _forget()
    for reference in list(_callbacks):
        callback = reference()
        if callback is not None:
            callback()


_stops: list[Callable[[], None]] = []  # changed by the main thread only, which runs handlers too
_closes: list[Callable[[], object]] = []


@contextlib.contextmanager
def stopping_at_sigterm(stop: Callable[[], None]) -> Iterator[None]:
    """Call *stop* at SIGTERM, unless the program does something of its own then.

    Not in other threads than the main one, where Python handles no signals.
    """
    if not _is_ours():
        yield
        return
    # At no moment is the signal heeded with nothing to stop: that would lose it.
    _stops.append(stop)
    try:
        signal.signal(signal.SIGTERM, _at_sigterm)
        yield
    finally:
        if len(_stops) == 1 and not _closes and _is_ours():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if stop in _stops:  # else this is a forked child
            _stops.remove(stop)


def close_at_end(close: Callable[[], object]) -> None:
    """Call *close* when the interpreter goes away, and before SIGTERM ends the process.

    Not at SIGTERM if the program does something of its own then, or makes this call in another
    thread than the main one.
    """
    atexit.register(close)
    _closes.append(close)
    heed_sigterm()


def heed_sigterm() -> None:
    """In the main thread, have SIGTERM make the calls that other threads gave `close_at_end`."""
    if _closes and _is_ours():
        signal.signal(signal.SIGTERM, _at_sigterm)


def cancel_close_at_end(close: Callable[[], object]) -> None:
    """Undo `close_at_end`; nothing happens if it was undone."""
    atexit.unregister(close)
    with contextlib.suppress(ValueError):
        _closes.remove(close)
    if not _closes and not _stops and _is_ours():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _is_ours() -> bool:
    return threading.current_thread() is threading.main_thread() and signal.getsignal(
        signal.SIGTERM
    ) in {signal.SIG_DFL, _at_sigterm}


def _at_sigterm(*_: object) -> None:
    for stop in _stops:
        stop()
    if not _stops:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends the process at once
        # In a thread: the main one may have a lock that a close needs.
        with contextlib.suppress(RuntimeError):  # the interpreter is going away, and closes them
            threading.Thread(target=_close_and_end, name="redrive-end").start()


def _close_and_end() -> None:
    closing = [threading.Thread(target=close, daemon=True) for close in list(_closes)]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _forget() -> None:
    """Let SIGTERM end a forked child: its consumers belong to the parent."""
    _stops.clear()
    _closes.clear()
    if signal.getsignal(signal.SIGTERM) is _at_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(before=_before, after_in_parent=_handles.clear, after_in_child=_in_child)

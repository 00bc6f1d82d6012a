"""What SIGTERM stops; called by `run` and `async_consumer`.

Several calls of `run` can share the main thread: coroutines of one loop do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

_stops: list[Callable[[], None]] = []  # changed by the main thread only, which runs handlers too


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
        signal.signal(signal.SIGTERM, _stop_all)
        yield
    finally:
        if len(_stops) == 1 and _is_ours():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if stop in _stops:  # else this is a forked child
            _stops.remove(stop)


def _is_ours() -> bool:
    return threading.current_thread() is threading.main_thread() and signal.getsignal(
        signal.SIGTERM
    ) in {signal.SIG_DFL, _stop_all}


def _forget() -> None:
    """Let SIGTERM end a forked child: what it would stop belongs to the parent."""
    _stops.clear()
    if signal.getsignal(signal.SIGTERM) is _stop_all:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_forget)


def _stop_all(*_: object) -> None:
    for stop in _stops:
        stop()

"""How long something takes, without the time in which the machine held this process up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_TICK = 0.1


@contextmanager
def awake_time() -> Iterator[Callable[[], float]]:
    """Yield what tells the seconds since then, of which a pause of this process adds but a tick.

    On a busy machine it tells less than a clock would, never more.
    """
    ended, ticks = threading.Event(), 0

    def count() -> None:
        nonlocal ticks
        while not ended.wait(_TICK):
            ticks += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        yield lambda: ticks * _TICK
    finally:
        ended.set()
        thread.join()

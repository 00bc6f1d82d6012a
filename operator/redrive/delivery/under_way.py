"""Calls that have begun and not ended, in whichever thread; waited for by who closes."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from redrive.delivery.bounded import Deadline

_LOOK_EVERY_SECONDS = 0.05
"""Who waits looks: that costs the calls, one a message, no lock."""


class UnderWay:
    """A call is under way within `with`. May be used by several threads, and may be nested."""

    def __init__(self) -> None:
        self._threads: list[int] = []  # changed and copied in one step each

    def wait(self, deadline: Deadline) -> None:
        """Wait until all have ended but the caller's own, no longer than until *deadline*."""
        here = threading.get_ident()
        while any(thread != here for thread in list(self._threads)) and deadline.left():
            time.sleep(min(_LOOK_EVERY_SECONDS, deadline.left()))

    def __enter__(self) -> None:
        self._threads.append(threading.get_ident())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._threads.remove(threading.get_ident())

"""Calls that have begun and not ended, in whichever thread; waited for by who closes."""

from __future__ import annotations

import threading
from types import TracebackType

from redrive.delivery.bounded import Deadline


class UnderWay:
    """A call is under way within `with`. May be used by several threads, and may be nested."""

    def __init__(self) -> None:
        self._threads: list[int] = []
        self._changed = threading.Condition()

    def wait(self, deadline: Deadline) -> None:
        """Wait until all have ended but the caller's own, no longer than until *deadline*."""
        here = threading.get_ident()
        with self._changed:
            self._changed.wait_for(
                lambda: all(thread == here for thread in self._threads), deadline.left()
            )

    def __enter__(self) -> None:
        with self._changed:
            self._threads.append(threading.get_ident())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._changed:
            self._threads.remove(threading.get_ident())
            self._changed.notify_all()

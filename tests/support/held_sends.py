"""A run of a Replay whose last sends wait for the test. Programs include this text."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from redrive.replay.sending import Window


class Hold(threading.Event):
    """The event after which runs send the others."""

    def __init__(self) -> None:
        super().__init__()
        self._sending: dict[Window, bool] = {}
        self._waits = False

    def is_reached(self) -> bool:
        """Return True if a run waits, and each message that was sent has its receipt."""
        windows = list(self._sending.items())
        in_flight = [sending or window._in_flight for window, sending in windows]  # noqa: SLF001
        return self._waits and not any(in_flight)

    def pass_or_wait(self, window: Window, *, passes: bool) -> None:
        """Wait until the event is set, unless *window* may send; then it reads its lease."""
        self._sending[window] = True
        if not passes:
            window.drain()
            self._sending[window] = False
            self._waits = True
            if not self.is_set():
                self.wait()
                window._checked = -math.inf  # noqa: SLF001

    def has_sent(self, window: Window) -> None:
        """Note that a message of *window* is sent or refused, and perhaps waits for a receipt."""
        self._sending[window] = False


@contextmanager
def held_at(count: int) -> Iterator[Hold]:
    """Have the runs of this process send *count* messages, and the others after the event.

    Those before it are stored: none waits in a buffer or a batch for the next.
    """
    go_on, sent, send = Hold(), itertools.count(), Window.send

    def hold_or_send(window: Window, *message: Any) -> None:  # noqa: ANN401 - as it takes it
        try:
            go_on.pass_or_wait(window, passes=next(sent) < count)
            send(window, *message)
        finally:
            go_on.has_sent(window)

    with mock.patch.object(Window, "send", hold_or_send):
        try:
            yield go_on
        finally:
            go_on.set()

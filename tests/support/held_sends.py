"""A run of a Replay whose last sends wait for the test. Programs include this text."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from redrive.replay.sending import Window


@contextmanager
def held_at(count: int) -> Iterator[threading.Event]:
    """Have the runs of this process send *count* messages, and the others after the event.

    Those before it are stored: none waits in a buffer or a batch for the next.
    """
    go_on, sent, send = threading.Event(), itertools.count(), Window.send

    def hold_or_send(window: Window, *message: Any) -> None:  # noqa: ANN401 - as it takes it
        if next(sent) >= count:
            window.drain()
            go_on.wait()
        send(window, *message)

    with mock.patch.object(Window, "send", hold_or_send):
        try:
            yield go_on
        finally:
            go_on.set()

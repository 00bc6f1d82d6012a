"""How long a thread can wait; called wherever an application says how long that is."""

from __future__ import annotations

import threading
from datetime import timedelta


def seconds(duration: float | timedelta) -> float:
    """Return *duration*, a number of seconds or a timedelta, in seconds.

    Or what comes nearest to it of what Python can wait for, 292 years: whoever asks for
    `timedelta.max` wants no end of it.
    """
    if isinstance(duration, timedelta):
        duration = duration.total_seconds()
    return min(max(0.0, duration), threading.TIMEOUT_MAX)

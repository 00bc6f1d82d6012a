"""How long a thread can wait; called wherever an application says how long that is."""

from __future__ import annotations

import threading
from datetime import timedelta

from redrive.policy import durations


def seconds(duration: float | timedelta) -> float:
    """Return *duration*, a number of seconds or a timedelta, in seconds.

    Or what comes nearest to it of what Python can wait for, 292 years: whoever asks for
    `timedelta.max` wants no end of it.

    Raises:
        InvalidSpecError: it is neither.
    """
    found = durations.given(duration, "a time to wait").total_seconds()
    return min(max(0.0, found), threading.TIMEOUT_MAX)

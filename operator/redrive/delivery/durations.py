"""How long a thread can wait; called wherever an application says how long that is."""

from __future__ import annotations

import threading
from datetime import timedelta


def seconds(duration: timedelta) -> float:
    """Return *duration* in seconds, or what comes nearest to it of what Python can wait for.

    That is 292 years; whoever asks for `timedelta.max` wants no end of it.
    """
    return min(max(0.0, duration.total_seconds()), threading.TIMEOUT_MAX)

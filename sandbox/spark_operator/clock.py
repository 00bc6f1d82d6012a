"""The one place where the stand-in reads the clock; the pure parts get the time as an argument."""

from __future__ import annotations

import time
from datetime import UTC, datetime


def now() -> datetime:
    """Return the moment, to the second, as the API writes times."""
    return datetime.fromtimestamp(int(time.time()), UTC)

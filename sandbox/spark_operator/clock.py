"""The clock of the stand-in; the pure modules get the time as an argument."""

from __future__ import annotations

import time
from datetime import UTC, datetime


def now() -> datetime:
    """Return the current time in whole seconds, the resolution of the API."""
    return datetime.fromtimestamp(int(time.time()), UTC)

"""Lengths of time as manifests write them: `1s`, `5m`, `2h`, `10d`, or combined as in `1h30m`."""

from __future__ import annotations

import re
from datetime import timedelta

from redrive.errors import InvalidSpecError

_SECONDS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
# Eight digits: more days than that are beyond what a timedelta can hold.
PATTERN = r"^([0-9]{1,8}d)?([0-9]{1,8}h)?([0-9]{1,8}m)?([0-9]{1,8}s)?$"
_WRITTEN = re.compile(PATTERN)


def parse(text: str) -> timedelta:
    """Read a duration of whole seconds, largest unit first, each unit at most once.

    Raises:
        InvalidSpecError: *text* is not written that way.
    """
    written = _WRITTEN.fullmatch(text) if text.isascii() else None
    if not text or written is None:
        raise InvalidSpecError(
            "a duration is whole numbers with the units d, h, m, s, largest first",
            got=text[:64],
            remedy="write it like 90s, 1m30s, 2h or 10d",
        )
    return timedelta(seconds=sum(int(p[:-1]) * _SECONDS[p[-1]] for p in written.groups() if p))


def checked(text: str) -> str:
    """Return *text*, which `parse` can read.

    Raises:
        InvalidSpecError: it can't.
    """
    parse(text)
    return text


def given(duration: float | timedelta, what: str) -> timedelta:
    """Return what a program gave as a *duration*, in seconds or as a timedelta.

    Args:
        what: names it in the message.

    Raises:
        InvalidSpecError: it is neither, or no number that a timedelta can hold.
    """
    if isinstance(duration, timedelta):
        return duration
    try:
        if not isinstance(duration, bool):
            return timedelta(seconds=duration)
    except (TypeError, ValueError, OverflowError):
        pass
    raise InvalidSpecError(
        f"{what} is a number of seconds, or a timedelta",
        got=duration,
        remedy="give it like 1.5 or timedelta(minutes=5)",
    )


def text_of(duration: timedelta) -> str:
    """Write *duration*, cut to whole seconds, in its shortest form; `parse` reads it back."""
    seconds = int(duration.total_seconds())
    words = []
    for unit, size in _SECONDS.items():
        count, seconds = divmod(seconds, size)
        if count:
            words.append(f"{count}{unit}")
    return "".join(words) if words else "0s"

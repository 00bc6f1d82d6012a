"""What a driver's output shows: whether Spark runs, and in the end why it failed.

Fed by the pod with every line that the driver writes.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence

KEPT_LINES = 500
LONGEST_CAUSE = 1000

# Written once the SparkContext has its executor; until then the JVM is only starting.
_RUNNING = "Starting executor ID driver"
_TRACEBACK = "Traceback (most recent call last):"
_SPARK_LOG = re.compile(r"\d\d/\d\d/\d\d \d\d:\d\d:\d\d [A-Z]+ ")


class Output:
    """The last lines of a driver."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.running = False

    def add(self, line: bytes) -> None:
        """Take the next line."""
        text = line.decode(errors="replace").rstrip()
        self._lines.append(text)
        self.running = self.running or _RUNNING in text

    @property
    def cause(self) -> str:
        """The line that says why the driver failed; empty if it wrote nothing."""
        return cause(tuple(self._lines))


def cause(lines: Sequence[str]) -> str:
    """Return the exception line of the last traceback, else the last line that is not Spark's log.

    Cut to `LONGEST_CAUSE` characters.
    """
    plain = [line for line in lines if line and not _SPARK_LOG.match(line)]
    after = plain
    if _TRACEBACK in plain:
        after = plain[len(plain) - plain[::-1].index(_TRACEBACK) :]
        after = [line for line in after if not line[0].isspace()][:1]
    return after[-1].strip()[:LONGEST_CAUSE] if after else ""


def refusal(lines: Sequence[str]) -> str:
    """Return why spark-submit failed: the exception that ended it, else what `cause` finds.

    Cut to `LONGEST_CAUSE` characters.
    """
    raised = [line for line in lines if line.startswith('Exception in thread "main" ')]
    shown = raised[-1].removeprefix('Exception in thread "main" ') if raised else cause(lines)
    return shown.strip()[:LONGEST_CAUSE]

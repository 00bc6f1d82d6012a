"""What a Spark operator says of a failure → the line of it that tells why. Pure.

A failed submission comes as the whole output of spark-submit, the stack of its JVM included: a
dozen kilobytes, of which users need one line.
"""

from __future__ import annotations

import re

MAX_LENGTH = 500
"""A line is cut to so many characters."""

_HEAD = re.compile(r'^(?:Caused by: |Exception in thread "[^"]*" |.*StackTrace: )')
"""The line of a stack trace that has the error; what follows is its message."""
_THREAD = "Exception in thread "
_FRAME = re.compile(r"^\s+(?:at |\.\.\. \d+ )")
_ANSWER = re.compile(r"Failure executing: \w+ at: \S+ Message: (.+?)(?:\. Received status: .*)?$")
"""How the JVM client of Kubernetes repeats what the API server has answered."""
_OWN = re.compile(r"(?:^|: )(Error: .+)")
"""What spark-submit says itself, before its usage."""
_LOG = re.compile(
    r"^\d\d/\d\d/\d\d \d\d:\d\d:\d\d (?!ERROR )\w+ |^WARNING: |^Using Spark's default "
)


def root_cause(said: str, place: str) -> str:
    """Return the line of *said* that tells why something failed, and where to read the rest.

    Of a stack trace that is the answer of the API server, if there is one, else the root cause;
    else what spark-submit says itself; else the last line that is not a log of its progress.

    Args:
        said: as the Spark operator wrote it.
        place: the field of the SparkApplication that holds it; only named if something is left out.
    """
    whole = said.strip()
    line = " ".join(_essence(whole.splitlines()).split())
    if line == whole and len(line) <= MAX_LENGTH:
        return line
    shown = line if len(line) <= MAX_LENGTH else f"{line[:MAX_LENGTH]}…"
    return f"{shown} (the rest is in {place} of the SparkApplication)"


def _essence(lines: list[str]) -> str:
    errors = _errors(lines)
    if errors:
        answers = [match[1] for match in map(_ANSWER.search, errors) if match]
        return (answers or errors)[-1]
    own = [match[1] for match in map(_OWN.search, lines) if match]
    plain = [line for line in lines if line.strip() and not _LOG.match(line)]
    return next(iter((*own, *reversed(plain), *reversed(lines))), "")


def _errors(lines: list[str]) -> list[str]:
    """Return the errors of the last stack trace, each in one line; its root cause comes last."""
    threads = [number for number, line in enumerate(lines) if line.startswith(_THREAD)]
    found: list[str] = []
    within = False
    for line in lines[threads[-1] if threads else 0 :]:
        if head := _HEAD.match(line):
            found.append(line[head.end() :])
            within = True
        elif _FRAME.match(line):
            within = False
        elif within:  # a message of several lines
            found[-1] = f"{found[-1]} {line.strip()}"
    return found

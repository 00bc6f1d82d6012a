"""The plan of each message by its number, and the journals in which consumers record it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_RETRIES = 3
BURST = 1_000_000
"""The first number of bursts: messages sent many at a time, which all fail at first."""


@dataclass(frozen=True)
class Plan:
    """The planned handling of one message.

    Attributes:
        failures: the number of first attempts that fail.
        poison: handlers dead-letter it, if their consumer supports that.
        seconds: the duration of each attempt.
    """

    failures: int
    poison: bool
    seconds: float

    @property
    def dies(self) -> bool:
        """True if the message becomes a dead letter."""
        return self.failures > MAX_RETRIES

    @property
    def attempts(self) -> int:
        """The number of attempts, unless it is poison."""
        return min(self.failures, MAX_RETRIES) + 1


def plan(number: int) -> Plan:
    """Return the plan of a number. Of 100, 80 succeed at once, 12 later, 5 never; 3 are poison.

    In a burst each message fails, most of them once; every eighth becomes a dead letter.
    """
    kind, seconds = number % 100, number % 7 / 300
    if number >= BURST:
        failures = {3: 2, 5: MAX_RETRIES, 7: MAX_RETRIES + 1}.get(number % 8, 1)
        return Plan(failures, poison=False, seconds=seconds)
    if kind < 80:
        return Plan(0, poison=False, seconds=seconds)
    if kind < 92:
        return Plan(kind % MAX_RETRIES + 1, poison=False, seconds=seconds)
    return Plan(MAX_RETRIES + 1, poison=kind >= 97, seconds=seconds)


class Journal:
    """Lines of JSON, each written immediately, so that they outlive the process."""

    def __init__(self, file: Path) -> None:
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, event: str, **fields: object) -> None:
        """Record *event* with the current time."""
        line = json.dumps({"at": time.time(), "what": event, **fields})
        os.write(self._file, f"{line}\n".encode())


def read(file: Path) -> Iterator[dict[str, Any]]:
    """Return the complete lines; a kill may have cut the last one."""
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return

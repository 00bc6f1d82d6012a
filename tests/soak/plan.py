"""What becomes of the message of each number: known to the consumers, and to those who check."""

from __future__ import annotations

from dataclasses import dataclass

MAX_RETRIES = 3
BURST = 1_000_000
"""The first number of messages that are sent many at a time, all of which fail at first."""


@dataclass(frozen=True)
class Plan:
    """What handlers do about one message.

    Attributes:
        failures: so many attempts fail, the first ones.
        poison: handlers ask for its death, where their consumer offers that.
        seconds: how long a handler is at work on it.
    """

    failures: int
    poison: bool
    seconds: float

    @property
    def dies(self) -> bool:
        """Whether it ends in the dead-letter topic."""
        return self.failures > MAX_RETRIES

    @property
    def attempts(self) -> int:
        """How many attempts there are, if its death is not asked for."""
        return min(self.failures, MAX_RETRIES) + 1


def plan(number: int) -> Plan:
    """Of a hundred 80 are handled at once, 12 after failures, 5 never; and 3 are poison.

    Of a burst each one fails, most of them once, and every eighth dies.
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

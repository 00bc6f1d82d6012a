"""Messages in flight, each invisible to others until its time ends; obeyed by simple consumers.

Ready ▶ in flight ─ settled in time ▶ Committed
                  └ its time ends ─── retries left ▶ Ready
                                    └ none ▶ DeadLetter, or Discarded

A duration counts from the moment it was asked for. So a message that fails comes again after its
invisible duration less the time already spent on it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, TypeVar

from redrive.errors import InvalidSpecError, RedriveError
from redrive.policy import durations
from redrive.policy.model import Policy

MIN_INVISIBLE = timedelta(seconds=10)
MAX_INVISIBLE = timedelta(hours=12)
_Item = TypeVar("_Item")


class NotInFlightError(RedriveError):
    """The message has timed out or was settled: the caller can no longer settle it."""

    reason = "NotInFlight"


def check_invisible(duration: float | timedelta) -> timedelta:
    """Return *duration* if a message can be invisible for so long.

    Raises:
        InvalidSpecError: it is not from 10 s to 12 h, ApsaraMQ's bounds, or no duration.
    """
    duration = durations.given(duration, "an invisible duration")
    if not MIN_INVISIBLE <= duration <= MAX_INVISIBLE:
        raise InvalidSpecError(
            "an invisible duration is from 10 s to 12 h",
            got=str(duration),
            remedy="give the longest time that handling may take, and change it while handling",
        )
    return duration


def check_unordered(policy: Policy) -> Policy:
    """Return *policy* if a simple consumer can consume by it.

    Raises:
        InvalidSpecError: it is ordered, and several messages of a key would be in flight at once.
    """
    if policy.ordered:
        raise InvalidSpecError(
            "a simple consumer keeps no order, which the policy promises",
            got=f"the ordered policy {policy.name or policy.subscription}",
            remedy="use RetryConsumer, or a policy with ordering None",
        )
    return policy


@dataclass(frozen=True)
class _Hold(Generic[_Item]):
    item: _Item
    end: float


class InFlight(Generic[_Item]):
    """Items in flight, by their keys. Moments are seconds since any moment that stays the same."""

    def __init__(self) -> None:
        self._holds: dict[Hashable, _Hold[_Item]] = {}

    def begin(self, key: Hashable, item: _Item, now: float, invisible: timedelta) -> None:
        """Make *item* invisible; one that was in flight already starts over."""
        self._holds[key] = _Hold(item, now + invisible.total_seconds())

    def change(self, key: Hashable, now: float, invisible: timedelta) -> None:
        """Have an item stay invisible for *invisible* from *now*, whatever it was before.

        Raises:
            NotInFlightError: its time has ended, or it was settled. Nothing changes.
        """
        self.begin(key, self._held(key, now).item, now, invisible)

    def settle(self, key: Hashable, now: float) -> None:
        """Take an item out, for good.

        Raises:
            NotInFlightError: its time has ended, or it was settled before.
        """
        self._held(key, now)
        del self._holds[key]

    def expired(self, now: float) -> list[_Item]:
        """Take out the items whose time has ended, in the order of their ends."""
        over = [key for key, hold in self._holds.items() if hold.end <= now]
        return [hold.item for hold in sorted(map(self._holds.pop, over), key=_end)]

    def next_end(self) -> float | None:
        """Return when the next item's time ends; None if none is in flight."""
        return min((hold.end for hold in self._holds.values()), default=None)

    def _held(self, key: Hashable, now: float) -> _Hold[_Item]:
        hold = self._holds.get(key)
        if hold is None or hold.end <= now:
            raise NotInFlightError(
                "the message is not in flight: its invisible duration has ended, or it was settled",
                got=str(key),
                remedy="leave it to whoever receives it next; ask for more time before it ends",
            )
        return hold


def _end(hold: _Hold[_Item]) -> float:
    return hold.end

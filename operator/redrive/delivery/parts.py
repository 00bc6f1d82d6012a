"""What a consumer is put together from: at a broker by `consumer`, in memory by `testing`.

`fetcher`, `producers` and the client's own consumers are the real ones.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol

import pulsar

from redrive.policy.naming import TopicName


class Clock(Protocol):
    """Tells the time."""

    def now(self) -> datetime:
        """Return the time of day, with a time zone: to be written down."""

    def monotonic(self) -> float:
        """Return seconds since some moment: to wait by."""


class SystemClock:
    """The clock of this machine."""

    def now(self) -> datetime:
        """Return the time of day in UTC."""
        return datetime.now(UTC)  # noqa: TID251 - the one clock of this journey

    def monotonic(self) -> float:
        """Return seconds that no change of the time of day touches."""
        return time.monotonic()


class Subscription(Protocol):
    """Where messages come from and are settled."""

    def acknowledge(self, message: pulsar.Message) -> None:
        """Settle it for good."""

    def negative_acknowledge(self, message: pulsar.Message) -> None:
        """Have it delivered again, by the broker, after the subscription's own delay."""


class Incoming(Protocol):
    """All subscriptions as one stream; see `fetcher.Fetcher`."""

    def take(
        self, timeout: float | None = None, *, only_again: bool = False
    ) -> pulsar.Message | None:
        """Return the next message, or None if none came within *timeout* seconds.

        Args:
            only_again: of those alone that are handed out again.
        """

    def pause(self) -> None:
        """Hand out nothing until `resume`."""

    def resume(self) -> None:
        """Go on."""

    def again(self, message: pulsar.Message, seconds: float) -> None:
        """Hand *message* out once more after so long; it stays unacknowledged."""

    def sleep(self, seconds: float) -> None:
        """Wait, but no longer than until `stop`."""

    def stop(self) -> None:
        """Hand out nothing more."""

    def close(self) -> None:
        """Give back what was not settled."""


class Outgoing(Protocol):
    """The way to the retry and the dead-letter topic; see `producers.Producers`."""

    def send(
        self,
        topic: TopicName,
        message: pulsar.Message,
        properties: dict[str, str],
        deliver_after: timedelta | None,
    ) -> pulsar.MessageId:
        """Store a copy with *properties*, and return its id."""

    def close(self) -> None:
        """Close what was opened."""


@dataclass(frozen=True)
class Parts:
    """One of each."""

    clock: Clock
    subscriptions: Mapping[TopicName, Subscription]
    incoming: Incoming
    outgoing: Outgoing

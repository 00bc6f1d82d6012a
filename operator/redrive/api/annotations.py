"""Values of annotations by which people act on messages of a RetryPolicy. Pure.

`redrive.io/dead-letter-now` has requests, separated by spaces, each as `ORIGIN@TIME`: the consumer
dead-letters the message of that origin at its next failure, until that time. The time is needed
because a replayed dead letter keeps its origin.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import NamedTuple

from redrive.policy.envelope import ORIGIN_FORM

MAX_REQUESTS = 100
"""Requests that are obeyed; consumers mount all of them."""


class DeadLetterRequest(NamedTuple):
    """Request to dead-letter a message at its next failure.

    Attributes:
        origin: id that the message was first produced with, as `ledger:entry:partition`.
        end: time in UTC after which it has no effect.
    """

    origin: str
    end: datetime

    @classmethod
    def parse(cls, text: str) -> DeadLetterRequest | None:
        """Read one request; None for anything else."""
        origin, _, time = text.partition("@")
        try:
            end = datetime.fromisoformat(time)
            if end.tzinfo is None or not ORIGIN_FORM.fullmatch(origin):
                return None
            return cls(origin, end.astimezone(UTC))
        except (ValueError, OverflowError):  # outside of the years 1 to 9999 in UTC
            return None

    def __str__(self) -> str:
        return f"{self.origin}@{self.end.strftime('%Y-%m-%dT%H:%M:%SZ')}"


def dead_letter_requests(text: str, now: datetime) -> list[DeadLetterRequest]:
    """Return the requests of an annotation that are in force, at most `MAX_REQUESTS`."""
    requests = filter(None, map(DeadLetterRequest.parse, text.split()))
    return [request for request in requests if now < request.end][:MAX_REQUESTS]


def is_dead_letter_annotation(text: str) -> bool:
    """Return True if each request of an annotation has the form, and none is beyond the limit."""
    parts = text.split()
    return 0 < len(parts) <= MAX_REQUESTS and all(map(DeadLetterRequest.parse, parts))


def dead_letter_annotation(requests: Iterable[DeadLetterRequest]) -> str | None:
    """Return the value of the annotation; None removes it."""
    return " ".join(map(str, requests)) or None

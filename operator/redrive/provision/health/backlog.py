"""What waits in a policy's topics → its status, and when that is worth a write; pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from pydantic import ValidationError

from redrive.admin.model import SubscriptionStats
from redrive.api.retrypolicy_status import Backlog

SHARE = 0.1
"""A count that differs by more than this share of what is written is written at once."""
CHANGED_AFTER = timedelta(minutes=10)
"""A smaller difference is written once what is written is this old."""
UNCHANGED_AFTER = timedelta(hours=1)
"""Unchanged figures are written again once they are this old: they were confirmed since."""


def backlog_of(
    retry: SubscriptionStats | None,
    dead_letter: SubscriptionStats | None,
    *,
    discards: bool,
    now: datetime,
) -> Backlog:
    """Return what waits in the policy's own subscriptions; one that is missing has nothing.

    Args:
        retry: the policy's subscription on its retry topic.
        dead_letter: the one on its dead-letter topic.
        discards: whether the policy has no dead-letter topic.
        now: when the two were read.
    """
    dead = None if discards else dead_letter
    oldest = None if dead is None else dead.oldest
    return Backlog(
        retry=0 if retry is None else retry.backlog,
        dead_letter=None if discards else 0 if dead is None else dead.backlog,
        # In whole seconds, as it is written: else each look would find it changed.
        oldest_dead_letter=None if oldest is None else oldest.replace(microsecond=0),
        observed_at=now.replace(microsecond=0),
    )


def is_worth_writing(written: Backlog | None, found: Backlog) -> bool:
    """Whether *found* is to take the place of *written*.

    What begins, ends or moves much is written at once, a little more or less every ten minutes,
    and unchanged figures once an hour: a thousand policies would else be a thousand writes a
    minute.
    """
    if written is None or written.observed_at is None or found.observed_at is None:
        return True
    age = found.observed_at - written.observed_at
    if written == found.model_copy(update={"observed_at": written.observed_at}):
        return age >= UNCHANGED_AFTER
    return (
        age >= CHANGED_AFTER
        or _moved(written.retry, found.retry)
        or _moved(written.dead_letter, found.dead_letter)
    )


def written_in(status: Mapping[str, Any]) -> Backlog | None:
    """Return what a policy's *status* holds; None for what can't be read, to be written again."""
    written = status.get("backlog")
    try:
        return None if written is None else Backlog.model_validate(written)
    except ValidationError:
        return None


def to_patch(backlog: Backlog) -> dict[str, Any]:
    """Return the merge patch of a status: what is None has to be taken away."""
    return {"backlog": backlog.model_dump(mode="json", by_alias=True)}


def _moved(before: int | None, now: int | None) -> bool:
    if before is None or now is None:
        return before is not now
    return bool(before) != bool(now) or abs(now - before) > SHARE * before

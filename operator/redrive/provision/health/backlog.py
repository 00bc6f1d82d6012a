"""What waits in a policy's topics → its status, and when that is worth a write; pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from pydantic import ValidationError

from redrive.admin.model import SubscriptionStats
from redrive.api.retrypolicy import Backlog

SHARE = 0.1
"""A count that differs by more than this share of what is written is written at once."""
AT_LATEST = timedelta(minutes=10)
"""Whatever differs is written after this time, however little it is."""


def backlog_of(
    retry: SubscriptionStats | None, dead_letter: SubscriptionStats | None, *, discards: bool
) -> Backlog:
    """Return what waits in the policy's own subscriptions; one that is missing has nothing."""
    if discards:
        return Backlog(retry=0 if retry is None else retry.backlog)
    return Backlog(
        retry=0 if retry is None else retry.backlog,
        dead_letter=0 if dead_letter is None else dead_letter.backlog,
        # In whole seconds, as it is written: else each look would find it changed.
        oldest_dead_letter=(
            None
            if dead_letter is None or dead_letter.oldest is None
            else dead_letter.oldest.replace(microsecond=0)
        ),
    )


def is_worth_writing(written: Backlog | None, found: Backlog, since: timedelta) -> bool:
    """Whether *found* is to take the place of *written*, so long after that was written.

    What begins, ends or moves much is written at once, a little more or less every ten minutes:
    a thousand busy policies would else be a thousand writes a minute.
    """
    if written is None:
        return True
    if written == found:
        return False
    return (
        since >= AT_LATEST
        or _moved(written.retry, found.retry)
        or _moved(written.dead_letter, found.dead_letter)
    )


def written_in(status: Mapping[str, Any]) -> Backlog | None:
    """Return what a policy's *status* holds; None for what can't be read, to be written anew."""
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

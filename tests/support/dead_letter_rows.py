"""Rows of dead letters, as a reader makes them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from redrive.policy.envelope import (
    CAUSE_FINGERPRINT,
    CAUSE_MESSAGE,
    CAUSE_TYPE,
    CONSUMER,
    RECONSUMETIMES,
)
from redrive.reading.positions import EntryId, Position
from redrive.reading.rows import DeadLetterRow

SENT = 1_795_700_000_000
"""Publish time of the row at entry 0; each further one is sent a second later."""


def dead_letter(
    entry: int,
    cause: str = "",
    *,
    key: str | None = None,
    value: bytes = b"{}",
    properties: Mapping[str, str] = MappingProxyType({}),
) -> DeadLetterRow:
    """Return the row of an unbatched message of ledger 7, partition 0."""
    written = {}
    if cause:
        written = {
            CAUSE_TYPE: cause,
            CAUSE_FINGERPRINT: f"{len(cause):016x}",
            CAUSE_MESSAGE: f"no {key}",
            CONSUMER: "fulfilment-a",
            RECONSUMETIMES: "4",
        }
    row = DeadLetterRow.undelivered(0, EntryId(7, entry))
    return row._replace(
        position=Position(7, entry, 0),
        key=key,
        value=value,
        properties={**written, **properties},
        publish_time=SENT + entry * 1_000,
        delivered=True,
    )

"""Rows of dead letters, as a reader makes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType

from redrive.policy.envelope import (
    CAUSE_FINGERPRINT,
    CAUSE_MESSAGE,
    CAUSE_TRACE,
    CAUSE_TYPE,
    CONSUMER,
    DEAD_REASON,
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


def of_the_page(entry: int, consumer: str = "fulfilment-7d9c4-x2x9k") -> DeadLetterRow:
    """Return a dead letter of the outage that the page on reading shows."""
    customer = {"email": "ann.smith@shops.example"}
    order = {"items": [7], "needs": "warehouse", "customer": customer}
    properties = {
        CAUSE_FINGERPRINT: "9f31c2aa00112233",
        CAUSE_MESSAGE: "no answer from the warehouse within 500 ms",
        CAUSE_TRACE: "at fulfil._fulfil:61\nat client.get:88",
        CONSUMER: consumer,
        DEAD_REASON: "RetriesExhausted",
    }
    row = dead_letter(
        entry,
        "WarehouseDown",
        key="order-7",
        value=json.dumps(order).encode(),
        properties=properties,
    )
    return row._replace(position=Position(4711, entry, 0))

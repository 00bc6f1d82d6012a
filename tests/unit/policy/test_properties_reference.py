"""The reference of properties holds all that travel with a message, and what becomes of each."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from redrive.policy import envelope
from redrive.policy.envelope import (
    DEAD_REASON,
    DELAY_TIME,
    ENCODED,
    PAYLOAD_PREFIX,
    REPLAY,
    REPLAYS,
    SOURCE_MESSAGE_ID,
    Attempt,
    Cause,
)
from redrive.policy.ladder import MAX_DELAY
from redrive.policy.model import Policy
from redrive.policy.naming import MAX_NAME, TopicName
from redrive.policy.verdict import Dead, DeadReason, Retry

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "properties.md"
NAMES = {v for k, v in vars(envelope).items() if k.isupper() and isinstance(v, str)}
POLICY = Policy(TopicName("shop", "prod", "orders"), "s" * (MAX_NAME - len("orders--RETRY")))
LONG = "ä" * 5_000
MANY = 999_999_999  # the highest number that is read from a property
LATE = datetime(2026, 11, 21, 9, 8, 7, 654_321, tzinfo=UTC)
ODD_ZONE = timezone(timedelta(hours=23, minutes=59, seconds=59, microseconds=999_999))
CAUSE = Cause(LONG, LONG, LATE, consumer=LONG, attempt=MANY + 1, fingerprint="f" * 16, trace=LONG)
ATTEMPT = Attempt(MANY, "1" * 128, LATE.replace(tzinfo=ODD_ZONE), schema_version=2**64 - 1)
NOT_COPIED = {
    envelope.NOT_COPIED: "SchemaNotFound,SchemaUnsupported,TooBig,Unreadable",
    SOURCE_MESSAGE_ID: "1:2:3:4",
    ENCODED: "{}",
    PAYLOAD_PREFIX: "7",
}
"""Written by `forwarder` on a dead letter that is no copy of its message."""
REPLAYED = {
    REPLAYS: str(MANY), REPLAY: "shop/again", **dict.fromkeys(NOT_COPIED, "0")
}  # fmt: skip


def hop(verdict: Retry | Dead, before: dict[str, str]) -> dict[str, str]:
    return envelope.for_hop(before, ATTEMPT, policy=POLICY, verdict=verdict, cause=CAUSE)


RETRIED = hop(Retry(MAX_DELAY, 1_000), REPLAYED)
DEAD = [hop(Dead(reason, MANY + 1), RETRIED) | NOT_COPIED for reason in DeadReason]
AGAIN = envelope.for_replay(DEAD[0], replay="shop/more", source="u@0:1:2:0")


@pytest.fixture(scope="module")
def rows() -> dict[str, list[str]]:
    """What the reference says of each property: meaning, three ways to go on, and a limit."""
    cells = re.findall(r"^\| `(\w+)` \| (.*) \|$", REFERENCE.read_text("utf-8"), re.MULTILINE)
    table = {name: row.split(" | ") for name, row in cells}
    return {name: row for name, row in table.items() if len(row) == 5}


def test_every_property_is_documented_and_no_other(rows: dict[str, list[str]]) -> None:
    assert set(rows) == NAMES


@pytest.mark.parametrize(
    ("column", "before", "after"),
    [
        (1, REPLAYED, RETRIED),
        (2, REPLAYED | dict.fromkeys([DELAY_TIME], "1"), DEAD[0]),
        (3, DEAD[0], AGAIN),
    ],
    ids=["retry", "dead letter", "replay"],
)
def test_what_is_written_kept_and_taken_away_is_as_documented(
    rows: dict[str, list[str]], column: int, before: dict[str, str], after: dict[str, str]
) -> None:
    for name, row in rows.items():
        said = row[column].partition(":")[0]
        there_is = "kept" if after.get(name) == before.get(name) else "written"
        if name not in after:
            there_is = "no"
        assert (name, said) == (name, there_is)


def test_no_property_gets_bigger_than_documented(rows: dict[str, list[str]]) -> None:
    sizes = {
        name: max(len(sent.get(name, "").encode()) for sent in [RETRIED, *DEAD, AGAIN])
        for name in NAMES
    }
    limits = {name: row[-1].removesuffix(" bytes") for name, row in rows.items()}
    assert {name: size for name, size in sizes.items() if limits[name].isdigit()} == {
        name: int(limit) for name, limit in limits.items() if limit.isdigit()
    }


def test_every_reason_for_a_dead_letter_is_documented(rows: dict[str, list[str]]) -> None:
    listed = set(re.findall(r"`(\w+)`", rows[DEAD_REASON][0]))
    assert listed == set(DeadReason)

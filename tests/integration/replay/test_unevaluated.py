"""Messages for which a condition can't be computed: not selected, counted, and no end of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pulsar
import pyarrow as pa
import pytest
from pyspark.sql import Row, SparkSession

from redrive.reading import rows
from redrive.reading.positions import Position
from redrive.reading.rows import DeadLetterRow
from redrive.replay.job import run as jobs
from redrive.replay.spark import Spark, evaluated
from sandbox.kubernetes import Cluster

ProvisionPolicy = Callable[..., Any]
MakeJob = Callable[..., Any]
UINT64 = 2**64 - 1

CAUGHT = [
    ("properties['amount'] > 5", {"amount": "9"}, {"amount": "n/a"}),
    ("cast(properties['amount'] as int) = 9", {"amount": "9"}, {"amount": str(2**63)}),
    # A part that stands twice is computed once, before all else, where Spark is left to itself.
    (
        "cast(properties['amount'] as int) = 1 or cast(properties['amount'] as int) = 9",
        {"amount": "9"},
        {"amount": "n/a"},
    ),
    ("properties['amount'] between 5 and 10", {"amount": "9"}, {"amount": "NaN"}),
    ("properties['amount'] in (8, 9)", {"amount": "9"}, {"amount": ""}),
    ("not properties['amount'] <= 5", {"amount": "9"}, {"amount": "1e999999"}),
    ("cast(properties['ok'] as boolean)  = true", {"ok": "yes"}, {"ok": "maybe"}),
    (
        "9 / cast(properties['amount'] as int) = 3",
        {"amount": "3"},
        {"amount": "0"},
    ),
    ("9 % cast(properties['amount'] as int) = 0", {"amount": "3"}, {"amount": "0"}),
    (
        "cast(properties['amount'] as bigint) * 2 > 5",
        {"amount": "3"},
        {"amount": str(2**62)},
    ),
    (
        "- cast(properties['amount'] as bigint) < 0",
        {"amount": "3"},
        {"amount": str(-(2**63))},
    ),
    (
        "properties['text'] rlike properties['p']",
        {"text": "ab", "p": "a."},
        {"text": "a", "p": "["},
    ),
    (
        "properties['text'] like properties['p']",
        {"text": "ab", "p": "a_"},
        {"text": "a", "p": "\\a"},
    ),
    (
        "properties['text'] rlike properties['p']",
        {"text": "ab", "p": "a."},
        {"text": "", "p": "(" * 100_000},
    ),
    (
        "properties['text'] like properties['p']",
        {"text": "ab", "p": "a_"},
        {"text": "a" * 100_000, "p": "_" * 100_000},
    ),
    ("properties['text'] rlike '^(a|b)*$'", {"text": "ab"}, {"text": "ab" * 100_000}),
    ("properties['text'] rlike '.{2,}b$'", {"text": "aab"}, {"text": "a😀" * 100_000}),
    ("cast(event_time as int) = 1700000000", {"at": "1700000000000"}, {"at": str(UINT64)}),
]
"""Conditions, a message that is selected, and one for which it can't be computed."""


def letter(entry: int, properties: dict[str, str], **fields: Any) -> DeadLetterRow:  # noqa: ANN401
    event = int(properties["at"]) if "at" in properties else None
    plain = DeadLetterRow(
        0, Position(1, entry, 0), 1, pulsar.MessageId(0, 1, entry, -1), None,
        encrypted=False, unreadable=False, schema_version=None, key=None, ordering_key=None,
        value=b"{}", properties=properties, publish_time=1_700_000_000_000, event_time=event,
    )  # fmt: skip
    return plain._replace(**fields)


def evaluate(spark: SparkSession, where: str, letters: list[DeadLetterRow]) -> list[Row]:
    table = pa.Table.from_batches([rows.to_batch(letters, rows.COLUMNS)])
    frame = spark.createDataFrame(table, rows.ddl(rows.COLUMNS))
    found: list[Row] = evaluated(frame, where, ["entry"]).orderBy("entry").collect()
    return found


@pytest.mark.parametrize(("where", "good", "bad"), CAUGHT)
def test_condition_that_cannot_be_computed_is_counted(
    spark: SparkSession, where: str, good: dict[str, str], bad: dict[str, str]
) -> None:
    found = evaluate(spark, where, [letter(0, good), letter(1, bad), letter(2, {})])
    assert [tuple(row) for row in found] == [(0, True, True), (1, False, False), (2, False, True)]


PAYLOADS = [b"", b"{", b"\xff\xfe\x00", b"[" * 200_000, b'{"a": NaN}', b'{"a": 1e999999}', None]
PAYLOADS += [b'{"a":' * 50_000 + b"1" + b"}" * 50_000, b'{"a": ' + b"9" * 100_000 + b"}"]


def test_any_payload_is_evaluated(spark: SparkSession) -> None:
    """JSON that can't be read has no fields, so the comparison is NULL, and false."""
    where = "try_cast(get_json_object(cast(value as string), '$.a') as int) = 1 or size < 0"
    letters = [letter(at, {}, value=value) for at, value in enumerate([b'{"a": 1}', *PAYLOADS])]
    found = evaluate(spark, where, letters)
    assert [row.selected for row in found] == [True] + [False] * len(PAYLOADS)
    assert all(row.evaluated for row in found)


@pytest.mark.parametrize("time", [0, 253_402_300_800_000, 2**63 // 1_000, 2**63 - 1, UINT64])
def test_any_time_is_compared(spark: SparkSession, time: int) -> None:
    late = letter(0, {}, publish_time=time, event_time=time or None)
    (found,) = evaluate(spark, "publish_time > '9999-12-31T23:59:59Z'", [late])
    assert (found.selected, found.evaluated) == (time > 0, True)
    (found,) = evaluate(spark, "event_time >= '2026-11-20' and publish_time = event_time", [late])
    assert (found.selected, found.evaluated) == (time > 0, True)


def test_run_moves_the_others_and_counts_what_is_left(
    provision_policy: ProvisionPolicy, make_job: MakeJob, replay_api: Cluster, spark: SparkSession
) -> None:
    assert replay_api
    provisioned = provision_policy()
    for content in (b'{"amount": 9}', b'{"amount": "n/a"}', b'{"amount": 3}', b"no JSON"):
        provisioned.bury(5, content=content)
    provisioned.bury(1, content=b'{"amount": "n/a"}', event_timestamp=UINT64)
    provisioned.bury(1, content=b'{"amount": 9}', event_timestamp=UINT64)
    job, progress = make_job(
        provisioned,
        "get_json_object(cast(value as string), '$.amount') > 5 and publish_time > '2000-01-01'",
    )

    account = jobs.run(job, Spark(spark, job), progress)

    assert (account.scanned, account.matched, account.moved) == (22, 6, 6)
    assert (account.unevaluated, account.refused, account.left) == (6, 0, 0)
    status = progress.read()
    assert (status.scanned, status.matched, status.unevaluated) == (22, 6, 6)
    assert len(provisioned.resting()) == 16
    provisioned.check_audit()

"""What passed as a selection means to Spark what its author meant."""

from __future__ import annotations

import re

import pulsar
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession, functions
from sqlglot import exp

from redrive.policy.envelope import CAUSE_TYPE, FAILED_AT, RECONSUMETIMES, REPLAYS
from redrive.reading import rows
from redrive.reading.positions import Position
from redrive.reading.rows import DeadLetterRow
from redrive.replay import selection
from redrive.replay import spark as replay_spark

NASTY = [
    "it's",
    'say "hi"',
    "back\\slash",
    "\\'",
    "a\nb",
    "\t",
    "%_",
    "ü€😀",
    "--",
    "/* */",
    "${env:PATH}",
    "${system:user.home}",
]


def dead_letters(spark: SparkSession, *keys: str, **properties: str) -> DataFrame:
    """Return a dead letter for each of *keys*."""
    letters = [
        DeadLetterRow(
            0, Position(1, 2, 0), 1, pulsar.MessageId(0, 1, 2, -1), None,
            encrypted=False, unreadable=False, schema_version=None, key=key, ordering_key=None,
            value=b'{"needs": "warehouse"}', properties=properties, publish_time=1, event_time=None,
        )
        for key in keys
    ]  # fmt: skip
    table = pa.Table.from_batches([rows.to_batch(letters, rows.COLUMNS)])
    return spark.createDataFrame(table, rows.ddl(rows.COLUMNS))


def verdicts(frame: DataFrame, conditions: list[str]) -> list[list[bool]]:
    """Return for each row whether each of *conditions* selects it."""
    columns = [functions.expr(selection.to_sql(condition)) for condition in conditions]
    return [list(row) for row in frame.select(columns).collect()]


def test_every_text_is_compared_as_it_was_written(spark: SparkSession) -> None:
    conditions = [f"key = {exp.Literal.string(text).sql('spark')}" for text in NASTY]
    found = verdicts(dead_letters(spark, *NASTY), conditions)
    assert found == [[text == other for other in NASTY] for text in NASTY]


def test_a_cause_a_property_and_a_value_can_be_selected_by(spark: SparkSession) -> None:
    properties = {
        CAUSE_TYPE: "TimeoutError",
        FAILED_AT: "2026-11-20T10:00:00.5+01:00",
        REPLAYS: "2",
        RECONSUMETIMES: "not a number",
    }
    conditions = [
        "cause_type = 'TimeoutError' and consumer is null",
        "failed_at > timestamp '2026-11-20 09:00:00' and failed_at < '2026-11-20T10:00:01+01:00'",
        "replays = 2 and reconsume_times = 0",
        "properties['missing'] is null and size = 22",
        "get_json_object(cast(value as string), '$.needs') = 'warehouse'",
        "event_time is null",
    ]
    (found,) = verdicts(dead_letters(spark, "k", **properties), conditions)
    assert found == [True] * len(conditions)
    (forged,) = verdicts(dead_letters(spark, "k", **{FAILED_AT: "10:00:00"}), ["failed_at is null"])
    assert forged == [True]


@pytest.mark.parametrize(
    ("where", "read"),
    [
        ("cause_type = 'TimeoutError' and size > 5 and replays = 0", set()),
        ("consumer is null", {"properties"}),
        ("contains(cast(value as string), 'x')", {"value"}),
    ],
)
def test_values_and_properties_stay_out_of_the_jvm_unless_a_condition_reads_them(
    spark: SparkSession, where: str, read: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    replay_spark.selected_rows(spark, where, []).explain(extended=True)
    relation = re.findall(r"Relation.*?\[(.+?)\]", capsys.readouterr().out)[0]
    source = {column.partition("#")[0].strip() for column in relation.split(",")}
    assert source & {"value", "properties"} == read
    assert "cause_type" in source

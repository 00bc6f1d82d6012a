"""What passed as a selection means to Spark what its author meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyspark.sql import DataFrame, SparkSession, functions
from sqlglot import exp

from redrive.policy.properties import CAUSE_TYPE, FAILED_AT, RECONSUMETIMES, REPLAYS
from redrive.replay import selection
from redrive.replay.topic import rows

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
    fields = {
        "partition": 0, "ledger": 1, "entry": 2, "batch_index": 0, "batch_size": 1,
        "encrypted": False, "unreadable": False, "properties": properties,
        "value": bytearray(b'{"needs": "warehouse"}'),
    }  # fmt: skip
    return spark.createDataFrame([{"key": key, **fields} for key in keys], rows.DDL)


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


def test_the_source_is_good_on_its_own(
    provision_policy: Callable[..., Any], spark: SparkSession
) -> None:
    provisioned = provision_policy(dead_partitions=2)
    provisioned.bury(6)
    reading = spark.read.format("pulsar").options(
        serviceUrl=provisioned.broker.service_url,
        adminUrl=provisioned.broker.admin_url,
        topic=str(provisioned.policy.dead_letter_topic),
    )
    seen = reading.load().select("partition", "value", "properties").collect()
    assert {bytes(row.value) for row in seen} == {b"order"}
    assert len({row.properties["id"] for row in seen}) == 6
    assert len(provisioned.resting()) == 6

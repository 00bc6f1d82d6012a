"""Selections in SQL: their meaning, messages for which one fails, and an oracle in Python."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pulsar
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, Row, SparkSession, functions
from sqlglot import exp

from redrive.policy import envelope
from redrive.policy.envelope import CAUSE_TYPE, CONSUMER, FAILED_AT, RECONSUMETIMES, REPLAYS
from redrive.reading import rows
from redrive.reading.positions import Position
from redrive.reading.rows import DeadLetterRow
from redrive.replay import selection
from redrive.replay import spark as replay_spark
from redrive.replay.job import run as jobs
from redrive.replay.spark import Spark, evaluated
from sandbox.kubernetes import Cluster

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
    rows_found = verdicts(dead_letters(spark, *NASTY), conditions)
    assert rows_found == [[text == other for other in NASTY] for text in NASTY]


def test_selection_uses_cause_property_and_value(spark: SparkSession) -> None:
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
    (verdict,) = verdicts(dead_letters(spark, "k", **properties), conditions)
    assert verdict == [True] * len(conditions)
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
def test_unread_values_and_properties_stay_out_of_the_jvm(
    spark: SparkSession, where: str, read: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    replay_spark.selected_rows(spark, where, []).explain(extended=True)
    relation = re.findall(r"Relation.*?\[(.+?)\]", capsys.readouterr().out)[0]
    source = {column.partition("#")[0].strip() for column in relation.split(",")}
    assert source & {"value", "properties"} == read
    assert "cause_type" in source


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


def dead_letter(entry: int, properties: dict[str, str], **fields: Any) -> DeadLetterRow:  # noqa: ANN401
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
    selected: list[Row] = evaluated(frame, where, ["entry"]).orderBy("entry").collect()
    return selected


@pytest.mark.parametrize(("where", "good", "bad"), CAUGHT)
def test_condition_that_cannot_be_computed_is_counted(
    spark: SparkSession, where: str, good: dict[str, str], bad: dict[str, str]
) -> None:
    selected = evaluate(
        spark, where, [dead_letter(0, good), dead_letter(1, bad), dead_letter(2, {})]
    )
    assert [tuple(row) for row in selected] == [
        (0, True, True),
        (1, False, False),
        (2, False, True),
    ]


PAYLOADS = [b"", b"{", b"\xff\xfe\x00", b"[" * 200_000, b'{"a": NaN}', b'{"a": 1e999999}', None]


PAYLOADS += [b'{"a":' * 50_000 + b"1" + b"}" * 50_000, b'{"a": ' + b"9" * 100_000 + b"}"]


def test_any_payload_is_evaluated(spark: SparkSession) -> None:
    """JSON that can't be read has no fields, so the comparison is NULL, and false."""
    where = "try_cast(get_json_object(cast(value as string), '$.a') as int) = 1 or size < 0"
    letters = [
        dead_letter(at, {}, value=value) for at, value in enumerate([b'{"a": 1}', *PAYLOADS])
    ]
    selected = evaluate(spark, where, letters)
    assert [row.selected for row in selected] == [True] + [False] * len(PAYLOADS)
    assert all(row.evaluated for row in selected)


def test_condition_reads_no_value_that_is_too_large(spark: SparkSession) -> None:
    """A copy of it would not fit into the memory of a small pod."""
    sizes = [rows.MAX_VALUE, rows.MAX_VALUE + 1]
    letters = [dead_letter(at, {}, value=b"x" * size) for at, size in enumerate(sizes)]
    letters.append(dead_letter(2, {}, value=b"", oversized=True))
    large = evaluate(spark, "value is not null", letters)
    assert [(row.selected, row.evaluated) for row in large] == [
        (True, True), (False, False), (False, False)
    ]  # fmt: skip
    by_size = evaluate(spark, f"size > {rows.MAX_VALUE}", letters)
    assert [(row.selected, row.evaluated) for row in by_size] == [
        (False, True), (True, True), (False, True)
    ]  # fmt: skip


@pytest.mark.parametrize("time", [0, 253_402_300_800_000, 2**63 // 1_000, 2**63 - 1, UINT64])
def test_any_time_is_compared(spark: SparkSession, time: int) -> None:
    late = dead_letter(0, {}, publish_time=time, event_time=time or None)
    (row,) = evaluate(spark, "publish_time > '9999-12-31T23:59:59Z'", [late])
    assert (row.selected, row.evaluated) == (time > 0, True)
    (row,) = evaluate(spark, "event_time >= '2026-11-20' and publish_time = event_time", [late])
    assert (row.selected, row.evaluated) == (time > 0, True)


def test_run_moves_others_and_counts_the_rest(
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
    counts = progress.read().counts
    assert (counts.scanned, counts.matched, counts.unevaluated) == (22, 6, 6)
    assert len(provisioned.unacknowledged()) == 16
    provisioned.check_audit()


BEGIN = datetime(2026, 11, 20, tzinfo=UTC)


LETTERS, CONDITIONS, ROUNDS = 40, 40, 5


texts = st.text(alphabet="abB _%'\"\\ß€😀\n", max_size=4)


counts = st.sampled_from(["0", "1", "2", "007", "-1", "1.5", "many", ""])


minutes = st.integers(0, 6)


@dataclass(frozen=True)
class Expression:
    """A part of a condition.

    Attributes:
        sql: as an author writes it.
        value_of: returns its value for a message; None for NULL.
    """

    sql: str
    value_of: Callable[[DeadLetterRow], Any]


def written(text: str) -> str:
    return exp.Literal.string(text).sql("spark")


def at(minute: int) -> datetime:
    return BEGIN + timedelta(minutes=minute)


def millis(minute: int) -> int:
    return int(at(minute).timestamp() * 1_000)


@st.composite
def drawn_dead_letters(draw: st.DrawFn) -> DeadLetterRow:
    failed = draw(minutes)
    carried: dict[str, st.SearchStrategy[str]] = {
        CAUSE_TYPE: texts,
        CONSUMER: texts,
        "shop": texts,
        REPLAYS: counts,
        RECONSUMETIMES: counts,
        # The last two are no moments; the first is one by the clock of another place.
        FAILED_AT: st.sampled_from(
            [
                at(failed + 60).isoformat().replace("+00:00", "+01:00"),
                f"{at(failed):%Y-%m-%dT%H:%M:%SZ}",
                f"{at(failed):%H:%M:%S}",
                "now",
            ]
        ),
    }
    names = draw(st.sets(st.sampled_from(sorted(carried))))
    return DeadLetterRow(
        0, Position(1, 2, 0), 1, pulsar.MessageId(0, 1, 2, -1), None,
        encrypted=False, unreadable=False, schema_version=None,
        key=draw(st.none() | texts.filter(bool)), ordering_key=None,
        value=draw(st.none() | st.binary(max_size=6)),
        properties={name: draw(carried[name]) for name in sorted(names)},
        publish_time=millis(draw(minutes)), event_time=draw(st.none() | minutes.map(millis)),
    )  # fmt: skip


def failed_at(letter: DeadLetterRow) -> int | None:
    text = letter.properties.get(FAILED_AT, "")
    if "T" not in text:
        return None
    return int(datetime.fromisoformat(text).timestamp() * 1_000)


STRINGS = (
    Expression("key", lambda letter: letter.key),
    Expression("cause_type", lambda letter: letter.properties.get(CAUSE_TYPE)),
    Expression("consumer", lambda letter: letter.properties.get(CONSUMER)),
    Expression("properties['shop']", lambda letter: letter.properties.get("shop")),
)


NUMBERS = (
    Expression("size", lambda letter: letter.size),
    Expression("replays", lambda letter: envelope.replays(letter.properties)),
    Expression("reconsume_times", lambda letter: envelope.reconsume_times(letter.properties)),
)


MOMENTS = (
    Expression("publish_time", lambda letter: letter.publish_time),
    Expression("event_time", lambda letter: letter.event_time),
    Expression("failed_at", failed_at),
)


def applied(sql: str, function: Callable[..., Any], *parts: Expression) -> Expression:
    """Return an expression that is NULL wherever one of its parts is."""

    def value_of(letter: DeadLetterRow) -> Any:  # noqa: ANN401  of whatever type
        values = [part.value_of(letter) for part in parts]
        return None if None in values else function(*values)

    return Expression(sql.format(*(part.sql for part in parts)), value_of)


def by_bytes(compare: Callable[[bytes, bytes], bool]) -> Callable[[str, str], bool]:
    return lambda one, other: compare(one.encode(), other.encode())


COMPARISONS = {
    "=": operator.eq, "<>": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge,
}  # fmt: skip


strings = st.one_of(
    st.sampled_from(STRINGS),
    st.builds(lambda operand: applied("lower({})", str.lower, operand), st.sampled_from(STRINGS)),
    st.builds(lambda operand: applied("upper({})", str.upper, operand), st.sampled_from(STRINGS)),
    st.builds(
        lambda operand: applied("trim({})", lambda text: text.strip(" "), operand),
        st.sampled_from(STRINGS),
    ),
    st.builds(
        lambda operand, first, length: applied(
            f"substring({{}}, {first}, {length})",
            lambda text: text[first - 1 : first - 1 + length],
            operand,
        ),
        st.sampled_from(STRINGS), st.integers(1, 3), st.integers(0, 3),
    ),
    st.builds(
        lambda operand, text: Expression(
            f"coalesce({operand.sql}, {written(text)})",
            lambda letter: text if operand.value_of(letter) is None else operand.value_of(letter),
        ),
        st.sampled_from(STRINGS), texts,
    ),
)  # fmt: skip


numbers = st.one_of(
    st.sampled_from(NUMBERS),
    st.builds(lambda operand: applied("length({})", len, operand), st.sampled_from(STRINGS)),
    st.builds(
        lambda one, other: applied("({} + 2 * {})", lambda a, b: a + 2 * b, one, other),
        st.sampled_from(NUMBERS), st.sampled_from(NUMBERS),
    ),
)  # fmt: skip


def literal(text: str) -> Expression:
    return Expression(written(text), lambda _: text)


def like(text: str, pattern: str) -> bool:
    wild = {"%": ".*", "_": "."}
    expression = "".join(wild.get(letter) or re.escape(letter) for letter in pattern)
    return re.fullmatch(expression, text, re.DOTALL) is not None


def moment(minute: int) -> Expression:
    return Expression(f"'{at(minute):%Y-%m-%dT%H:%M:%SZ}'", lambda _: millis(minute))


def is_null(operand: Expression) -> Expression:
    return Expression(f"{operand.sql} is null", lambda letter: operand.value_of(letter) is None)


def same(one: Expression, text: str) -> Expression:
    return Expression(f"{one.sql} <=> {written(text)}", lambda letter: one.value_of(letter) == text)


def among(operand: Expression, some: list[str]) -> Expression:
    listed = ", ".join(map(written, some))
    return applied(f"{{}} in ({listed})", some.__contains__, operand)


def both(one: Expression, other: Expression) -> Expression:
    def value_of(letter: DeadLetterRow) -> bool | None:
        values = {one.value_of(letter), other.value_of(letter)}
        return False if False in values else None if None in values else True

    return Expression(f"({one.sql} and {other.sql})", value_of)


def either(one: Expression, other: Expression) -> Expression:
    def value_of(letter: DeadLetterRow) -> bool | None:
        values = {one.value_of(letter), other.value_of(letter)}
        return True if True in values else None if None in values else False

    return Expression(f"({one.sql} or {other.sql})", value_of)


signs = st.sampled_from(sorted(COMPARISONS))


atoms = st.one_of(
    st.builds(
        lambda operand, sign, text: applied(
            f"{{}} {sign} {{}}", by_bytes(COMPARISONS[sign]), operand, literal(text)
        ),
        strings, signs, texts,
    ),
    st.builds(
        lambda operand, sign, number: applied(
            f"{{}} {sign} {number}", lambda value: COMPARISONS[sign](value, number), operand
        ),
        numbers, signs, st.integers(-1, 6),
    ),
    st.builds(
        lambda operand, first, last: applied(
            f"{{}} between {first} and {last}", lambda value: first <= value <= last, operand
        ),
        numbers, st.integers(0, 4), st.integers(0, 4),
    ),
    st.builds(
        lambda operand, sign, minute: applied(
            f"{{}} {sign} {{}}", COMPARISONS[sign], operand, moment(minute)
        ),
        st.sampled_from(MOMENTS), signs, minutes,
    ),
    st.builds(
        lambda operand, pattern: applied("{} like {}", like, operand, literal(pattern)),
        strings, st.text(alphabet="abB %_ß😀\n", max_size=4),
    ),
    st.builds(
        lambda name, operand, text: applied(
            f"{name[0]}({{}}, {{}})", getattr(str, name[1]), operand, literal(text)
        ),
        st.sampled_from(
            [("contains", "__contains__"), ("startswith", "startswith"), ("endswith", "endswith")]
        ),
        strings, texts,
    ),
    st.builds(among, strings, st.lists(texts, min_size=1, max_size=3)),
    st.builds(same, strings, texts),
    st.builds(is_null, st.one_of(strings, st.sampled_from(MOMENTS))),
)  # fmt: skip


conditions = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.builds(both, inner, inner),
        st.builds(either, inner, inner),
        st.builds(lambda operand: applied("(not {})", operator.not_, operand), inner),
    ),
    max_leaves=5,
)


@settings(
    max_examples=ROUNDS,
    deadline=None,
    phases=[Phase.generate],  # each example is a query of many conditions: none is made smaller
    suppress_health_check=list(HealthCheck),
)
@given(
    st.lists(drawn_dead_letters(), min_size=LETTERS, max_size=LETTERS),
    st.lists(conditions, min_size=CONDITIONS, max_size=CONDITIONS, unique_by=lambda c: c.sql),
)
def test_spark_selects_the_same_rows_as_the_oracle(
    spark: SparkSession, some: list[DeadLetterRow], chosen: list[Expression]
) -> None:
    table = pa.Table.from_batches([rows.to_batch(some, rows.COLUMNS)])
    frame = spark.createDataFrame(table, rows.ddl(rows.COLUMNS))
    columns = [functions.expr(selection.to_sql(condition.sql)) for condition in chosen]

    selected = frame.select(columns).collect()

    for letter, row in zip(some, selected, strict=True):
        for condition, verdict in zip(chosen, row, strict=True):
            assert verdict == condition.value_of(letter), (condition.sql, letter)

"""What Spark selects by a `where` is what an oracle in plain Python has of it, nulls included."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pulsar
import pyarrow as pa
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession, functions
from sqlglot import exp

from redrive.policy import envelope
from redrive.policy.envelope import CAUSE_TYPE, CONSUMER, FAILED_AT, RECONSUMETIMES, REPLAYS
from redrive.reading import rows
from redrive.reading.positions import Position
from redrive.reading.rows import DeadLetterRow
from redrive.replay import selection

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
        of: what it is for a message; None for NULL.
    """

    sql: str
    of: Callable[[DeadLetterRow], Any]


def written(text: str) -> str:
    return exp.Literal.string(text).sql("spark")


def at(minute: int) -> datetime:
    return BEGIN + timedelta(minutes=minute)


def millis(minute: int) -> int:
    return int(at(minute).timestamp() * 1_000)


@st.composite
def letters(draw: st.DrawFn) -> DeadLetterRow:
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
    """Return what has NULL wherever a part has."""

    def of(letter: DeadLetterRow) -> Any:  # noqa: ANN401  of whatever type
        values = [part.of(letter) for part in parts]
        return None if None in values else function(*values)

    return Expression(sql.format(*(part.sql for part in parts)), of)


def by_bytes(compare: Callable[[bytes, bytes], bool]) -> Callable[[str, str], bool]:
    return lambda one, other: compare(one.encode(), other.encode())


COMPARISONS = {
    "=": operator.eq, "<>": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge,
}  # fmt: skip
strings = st.one_of(
    st.sampled_from(STRINGS),
    st.builds(lambda of: applied("lower({})", str.lower, of), st.sampled_from(STRINGS)),
    st.builds(lambda of: applied("upper({})", str.upper, of), st.sampled_from(STRINGS)),
    st.builds(
        lambda of: applied("trim({})", lambda text: text.strip(" "), of), st.sampled_from(STRINGS)
    ),
    st.builds(
        lambda of, first, length: applied(
            f"substring({{}}, {first}, {length})",
            lambda text: text[first - 1 : first - 1 + length],
            of,
        ),
        st.sampled_from(STRINGS), st.integers(1, 3), st.integers(0, 3),
    ),
    st.builds(
        lambda of, text: Expression(
            f"coalesce({of.sql}, {written(text)})",
            lambda letter: text if of.of(letter) is None else of.of(letter),
        ),
        st.sampled_from(STRINGS), texts,
    ),
)  # fmt: skip
numbers = st.one_of(
    st.sampled_from(NUMBERS),
    st.builds(lambda of: applied("length({})", len, of), st.sampled_from(STRINGS)),
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


def is_null(of: Expression) -> Expression:
    return Expression(f"{of.sql} is null", lambda letter: of.of(letter) is None)


def same(one: Expression, text: str) -> Expression:
    return Expression(f"{one.sql} <=> {written(text)}", lambda letter: one.of(letter) == text)


def among(of: Expression, some: list[str]) -> Expression:
    listed = ", ".join(map(written, some))
    return applied(f"{{}} in ({listed})", some.__contains__, of)


def both(one: Expression, other: Expression) -> Expression:
    def of(letter: DeadLetterRow) -> bool | None:
        values = {one.of(letter), other.of(letter)}
        return False if False in values else None if None in values else True

    return Expression(f"({one.sql} and {other.sql})", of)


def either(one: Expression, other: Expression) -> Expression:
    def of(letter: DeadLetterRow) -> bool | None:
        values = {one.of(letter), other.of(letter)}
        return True if True in values else None if None in values else False

    return Expression(f"({one.sql} or {other.sql})", of)


signs = st.sampled_from(sorted(COMPARISONS))
atoms = st.one_of(
    st.builds(
        lambda of, sign, text: applied(
            f"{{}} {sign} {{}}", by_bytes(COMPARISONS[sign]), of, literal(text)
        ),
        strings, signs, texts,
    ),
    st.builds(
        lambda of, sign, number: applied(
            f"{{}} {sign} {number}", lambda value: COMPARISONS[sign](value, number), of
        ),
        numbers, signs, st.integers(-1, 6),
    ),
    st.builds(
        lambda of, first, last: applied(
            f"{{}} between {first} and {last}", lambda value: first <= value <= last, of
        ),
        numbers, st.integers(0, 4), st.integers(0, 4),
    ),
    st.builds(
        lambda of, sign, minute: applied(
            f"{{}} {sign} {{}}", COMPARISONS[sign], of, moment(minute)
        ),
        st.sampled_from(MOMENTS), signs, minutes,
    ),
    st.builds(
        lambda of, pattern: applied("{} like {}", like, of, literal(pattern)),
        strings, st.text(alphabet="abB %_ß😀\n", max_size=4),
    ),
    st.builds(
        lambda name, of, text: applied(
            f"{name[0]}({{}}, {{}})", getattr(str, name[1]), of, literal(text)
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
        st.builds(lambda of: applied("(not {})", operator.not_, of), inner),
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
    st.lists(letters(), min_size=LETTERS, max_size=LETTERS),
    st.lists(conditions, min_size=CONDITIONS, max_size=CONDITIONS, unique_by=lambda c: c.sql),
)
def test_spark_selects_what_the_oracle_selects(
    spark: SparkSession, some: list[DeadLetterRow], chosen: list[Expression]
) -> None:
    table = pa.Table.from_batches([rows.to_batch(some, rows.COLUMNS)])
    frame = spark.createDataFrame(table, rows.ddl(rows.COLUMNS))
    columns = [functions.expr(selection.to_sql(condition.sql)) for condition in chosen]

    found = frame.select(columns).collect()

    for letter, row in zip(some, found, strict=True):
        for condition, verdict in zip(chosen, row, strict=True):
            assert verdict == condition.of(letter), (condition.sql, letter)

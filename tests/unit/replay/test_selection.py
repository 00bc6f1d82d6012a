"""What a `where` may say, and that nothing else reaches Spark."""

from __future__ import annotations

import pytest

from redrive.errors import InvalidSpecError
from redrive.replay.selection import COLUMNS, FUNCTIONS, TYPES, columns, to_sql


@pytest.mark.parametrize(
    ("where", "sql"),
    [
        ("cause_type = 'TimeoutError'", "cause_type = 'TimeoutError'"),
        ("Cause_Type = 'a' AND `key` IN ('b', 'c')", "cause_type = 'a' AND key IN ('b', 'c')"),
        ("event_time > '2026-11-20'", "event_time > '2026-11-20'"),
        ("properties['shop'] <=> NULL", "properties['shop'] IS NOT DISTINCT FROM NULL"),
        ("not (key is null or size >= 10)", "NOT (key IS NULL OR size >= 10)"),
        ("replays between 1 and 3", "replays BETWEEN 1 AND 3"),
        (
            "failed_at < timestamp '2026-11-20 10:00:00'",
            (
                "CASE WHEN properties['REDRIVE_FAILED_AT'] LIKE '____-__-__T%' "
                "THEN TRY_CAST(properties['REDRIVE_FAILED_AT'] AS TIMESTAMP) END "
                "< CAST('2026-11-20 10:00:00' AS TIMESTAMP)"
            ),
        ),
        ("startswith(lower(key), 'eu-')", "STARTSWITH(LOWER(key), 'eu-')"),
        (
            "get_json_object(cast(value as string), '$.needs') = 'warehouse'",
            "GET_JSON_OBJECT(CAST(value AS STRING), '$.needs') = 'warehouse'",
        ),
        ("key like 'a!%%' escape '!'", "key LIKE 'a!%%' ESCAPE '!'"),
        ("key rlike '^[0-9]+$'", "key RLIKE '^[0-9]+$'"),
        ("true -- and nothing else", "TRUE"),
        ("size > 1L and replays > .5", "size > CAST(1 AS BIGINT) AND replays > 0.5"),
        ("key is not distinct from 'a'", "key IS NOT DISTINCT FROM 'a'"),
        ("`properties`['a'] in (('a'))", "properties['a'] IN (('a'))"),
    ],
)
def test_a_condition_is_spelled_out_over_the_columns_of_the_source(where: str, sql: str) -> None:
    assert to_sql(where) == sql


@pytest.mark.parametrize(
    ("where", "read"),
    [
        ("cause_type = 'value' and size > 9 and replays < 3", {"cause_type", "size", "replays"}),
        ("Event_Time >= '2026-11-20' or `KEY` = 'properties'", {"event_time", "key"}),
        ("contains(cast(value as string), 'x')", {"value"}),
        ("consumer is null or failed_at > '2026-11-20'", {"properties"}),
        ("true", set()),
    ],
)
def test_no_more_is_read_than_a_condition_speaks_of(where: str, read: set[str]) -> None:
    assert columns(where) == read


@pytest.mark.parametrize("column", COLUMNS)
def test_every_listed_column_can_be_used(column: str) -> None:
    assert to_sql(f"{column} is not null").startswith("NOT ")


@pytest.mark.parametrize("kind", TYPES)
def test_every_listed_type_can_be_cast_to(kind: str) -> None:
    assert to_sql(f"try_cast(key as {kind}) is null") == f"TRY_CAST(key AS {kind.upper()}) IS NULL"


_ARGUMENTS = {
    "contains": "key, 'a'",
    "endswith": "key, 'a'",
    "startswith": "key, 'a'",
    "coalesce": "key, 'a'",
    "get_json_object": "key, '$.a'",
    "substring": "key, 1, 2",
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_listed_function_can_be_called(function: str) -> None:
    call = f"{function}({_ARGUMENTS.get(function, 'key')})"
    assert to_sql(f"{call} is null") == f"{call} IS NULL".replace(function, function.upper())


@pytest.mark.parametrize(
    "hostile",
    [
        "java_method('java.lang.System', 'getenv', 'REDRIVE_PULSAR_ACCESS') = 'x'",
        "reflect('java.lang.System', 'getenv', 'REDRIVE_PULSAR_ACCESS') = 'x'",
        "try_reflect('java.lang.System', 'getenv', 'X') is null",
        "key in (select key from secrets)",
        "exists (select 1)",
        "(select count(*) from range(9)) > 1",
        "event_time < current_timestamp",
        "event_time < current_timestamp()",
        "event_time < now()",
        "event_time < current_date()",
        "rand() < 0.5",
        "uuid() = key",
        "monotonically_increasing_id() = 1",
        "input_file_name() = ''",
        "current_user() = 'root'",
        "version() = ''",
        "spark_partition_id() = 1",
        "raise_error(key) is null",
        "transform(array(key), x -> x) is null",
        "case when key = 'a' then true else false end",
        "key = :parameter",
        "key = ?",
        "try_cast(key as array<int>) is null",
        "cast(key as decimal(10, 2)) > 1",
        "get_json_object(key, '$..a') = 'x'",
        "properties[key] = 'x'",
        "properties[0] = 'x'",
        "properties['a']['b'] = 'x'",
        "properties is null",
        "other.key = 'a'",
        "spark_catalog.default.key = 'a'",
        "count(*) > 1",
        "row_number() over (order by key) = 1",
        "key = X'00'",
        "{fn current_timestamp()} > event_time",
        "identifier('key') = 'a'",
        "key like any ('a', 'b')",
        "event_time > timestamp '2026-01-01' - interval 1 day",
        "string(key) = 'a'",
        "key::int = 1",
        "key.lower = 'a'",
        "`lower`(key) = 'a'",
        "key = r'a'",
        "key = lower",
        "date = '2026-11-20'",
    ],
)
def test_everything_else_is_refused(hostile: str) -> None:
    with pytest.raises(InvalidSpecError):
        to_sql(hostile)


@pytest.mark.parametrize(
    ("where", "character"),
    [
        ("key = 'a' and other = 1", 15),
        ("key = 'a' or java_method('x') = 'b'", 14),
        ("size > 1 and event_time < 'now'", 27),
        ("key = 'a' and\n (cause = 'x')", 17),
        ("key = 'a' or `cause` = 'x'", 14),
        ("size > 1 or string(key) = 'b'", 13),
        ("true and cast(size as array<int>) = 1", 23),
        ("true and key[0] = 'a'", 13),
        ("true and lower('a') = 'a'", 10),
    ],
)
def test_what_is_refused_is_shown_with_its_place(where: str, character: int) -> None:
    with pytest.raises(InvalidSpecError, match=f", at character {character}; got "):
        to_sql(where)


@pytest.mark.parametrize(
    "moving",
    [
        "failed_at < 'now'",
        "event_time < key",
        "publish_time in (properties['until'])",
        "failed_at between event_time and lower(key)",
        "event_time < timestamp 'now'",
        "publish_time > date 'today'",
        "event_time < timestamp ' Yesterday UTC'",
        "event_time in ('2026-11-20', 'tomorrow')",
        "event_time between '2026-11-20' and 'now'",
        "event_time > '10:00'",
        "event_time > timestamp 'T10:00'",
        "cast('now' as timestamp) > event_time",
        "cast(lower('NOW') as timestamp) > event_time",
        "event_time > lower('NOW')",
        "event_time > substring('2026-11-20 10:00:00', 12)",
        "startswith(coalesce(failed_at, 'now'), '2026')",
        "cast(properties['when'] as timestamp) > '2026-11-20'",
        "cast(key as date) is null",
    ],
)
def test_nothing_may_mean_another_moment_tomorrow(moving: str) -> None:
    with pytest.raises(InvalidSpecError):
        to_sql(moving)


@pytest.mark.parametrize(
    "moment",
    ["2026-11-20", "2026-11-20 10:00", "2026-11-20T10:00:00.123Z", "2026-11-20 10:00:00+01:00"],
)
def test_a_moment_is_written_with_its_date(moment: str) -> None:
    assert to_sql(f"event_time >= '{moment}'") == f"event_time >= '{moment}'"
    written = f"event_time >= CAST('{moment}' AS TIMESTAMP)"
    assert to_sql(f"event_time >= timestamp '{moment}'") == written


def test_moments_are_compared_with_one_another() -> None:
    assert to_sql("event_time < publish_time") == "event_time < publish_time"


@pytest.mark.parametrize(
    "where",
    [
        "key like 'a%b_'",
        "key like 'a!%' escape '!'",
        "key rlike '^(timeout|refused): [^ ]+ .*$'",
        "cast(value as string) rlike '[a-z]{3}(x|y)?'",
    ],
)
def test_pattern_of_bounded_recursion_is_left_as_it_is(where: str) -> None:
    assert to_sql(where).lower() == where


@pytest.mark.parametrize(
    "pattern",
    ["'(a|b)*'", "'(ab)+'", "'(ab){2}'", "'.{2,}'", "'(?x)(a) *'", "'\\\\X*'", "consumer"],
)
def test_pattern_that_may_recurse_is_tried_on_short_texts(pattern: str) -> None:
    sql = to_sql(f"not lower(key) rlike {pattern}")
    assert "CASE WHEN (LENGTH(LOWER(key)) + 20) * LENGTH(" in sql
    assert ") > 4000 THEN RAISE_ERROR(" in sql


@pytest.mark.parametrize("pattern", ["consumer", "'" + "_" * 501 + "'"])
def test_long_pattern_of_like_raises_an_error(pattern: str) -> None:
    sql = to_sql(f"key ilike {pattern}")
    assert "> 500 THEN RAISE_ERROR('the text or the pattern is too long') ELSE key END" in sql


def test_pattern_for_a_condition_is_refused() -> None:
    with pytest.raises(InvalidSpecError, match="compared with a text, and is no condition"):
        to_sql("(key rlike 'a') rlike 'b'")


def test_a_pattern_with_flags_is_refused_rather_than_read_without_them() -> None:
    assert to_sql("key rlike '(?i)a'") == "key RLIKE '(?i)a'"
    with pytest.raises(InvalidSpecError, match="can't use this, at character 1; got 'regexp_like'"):
        to_sql("regexp_like(key, 'a', 'i')")


def test_a_moment_may_stand_beside_any_other_text() -> None:
    assert to_sql("event_time > '2026-11-20' and key = 'now'") == (
        "event_time > '2026-11-20' AND key = 'now'"
    )


@pytest.mark.parametrize("nothing", ["", " ", ";", "key = 'a'; key = 'b'", "((("])
def test_what_is_not_one_condition_is_refused(nothing: str) -> None:
    with pytest.raises(InvalidSpecError, match=r"selection is (exactly one condition|not SQL)|con"):
        to_sql(nothing)


@pytest.mark.parametrize("value", ["key", "1", "not key", "key = 'a' or size", "lower(key)"])
def test_what_is_neither_true_nor_false_is_refused(value: str) -> None:
    with pytest.raises(InvalidSpecError, match="true or false for each dead letter"):
        to_sql(value)


def test_a_condition_that_is_nested_without_end_is_refused() -> None:
    with pytest.raises(InvalidSpecError, match="nested too deeply"):
        to_sql("(" * 2_000 + "true" + ")" * 2_000)


def test_a_refusal_says_what_is_wrong_what_was_found_and_what_to_do() -> None:
    with pytest.raises(InvalidSpecError) as refused:
        to_sql("cause = 'TimeoutError'")
    assert str(refused.value) == (
        "a selection names an unknown column, at character 1; got 'cause'; use one of "
        "cause_type, cause_message, failed_at, consumer, dead_reason, reconsume_times, replays, "
        "key, value, size, event_time, publish_time, or properties['name']"
    )

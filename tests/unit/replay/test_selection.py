"""Selections of dead letters: grammar, vocabulary, cost and reference."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlglot.dialects.spark import Spark
from sqlglot.errors import SqlglotError
from sqlglot.parser import Parser
from sqlglot.tokenizer_core import Token

from redrive.errors import InvalidSpecError
from redrive.policy.envelope import CAUSE_TYPE
from redrive.policy.verdict import DeadReason
from redrive.reading.positions import Position
from redrive.replay.selection import (
    COLUMNS,
    FUNCTIONS,
    MAX_DEPTH,
    MOMENTS,
    TYPES,
    columns,
    read_tokens,
    to_sql,
)
from redrive.replay.spec import Choice, Chooser, FailureCause
from tests.support.documented import SELECTION, block


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
        ("event_time < publish_time", "event_time < publish_time"),
        (
            "event_time > '2026-11-20' and key = 'now'",
            "event_time > '2026-11-20' AND key = 'now'",
        ),
    ],
)
def test_condition_is_rewritten_over_source_columns(where: str, sql: str) -> None:
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
def test_condition_reads_only_its_columns(where: str, read: set[str]) -> None:
    assert columns(where) == read


@pytest.mark.parametrize("column", COLUMNS)
def test_listed_column_is_accepted(column: str) -> None:
    assert to_sql(f"{column} is not null").startswith("NOT ")


@pytest.mark.parametrize("kind", TYPES)
def test_listed_type_is_accepted_in_casts(kind: str) -> None:
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
def test_listed_function_is_accepted(function: str) -> None:
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
def test_unlisted_syntax_is_refused(hostile: str) -> None:
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
def test_refusal_has_the_position(where: str, character: int) -> None:
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
def test_relative_moment_is_refused(moving: str) -> None:
    with pytest.raises(InvalidSpecError):
        to_sql(moving)


@pytest.mark.parametrize(
    "moment",
    ["2026-11-20", "2026-11-20 10:00", "2026-11-20T10:00:00.123Z", "2026-11-20 10:00:00+01:00"],
)
def test_absolute_moment_is_accepted(moment: str) -> None:
    assert to_sql(f"event_time >= '{moment}'") == f"event_time >= '{moment}'"
    written = f"event_time >= CAST('{moment}' AS TIMESTAMP)"
    assert to_sql(f"event_time >= timestamp '{moment}'") == written


@pytest.mark.parametrize(
    "where",
    [
        "key like 'a%b_'",
        "key like 'a!%' escape '!'",
        "key rlike '^(timeout|refused): [^ ]+ .*$'",
        "cast(value as string) rlike '[a-z]{3}(x|y)?'",
    ],
)
def test_pattern_of_bounded_recursion_is_unchanged(where: str) -> None:
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


def test_pattern_with_flags_argument_is_refused() -> None:
    assert to_sql("key rlike '(?i)a'") == "key RLIKE '(?i)a'"
    with pytest.raises(InvalidSpecError, match="can't use this, at character 1; got 'regexp_like'"):
        to_sql("regexp_like(key, 'a', 'i')")


@pytest.mark.parametrize("nothing", ["", " ", ";", "key = 'a'; key = 'b'", "((("])
def test_text_with_other_than_one_condition_is_refused(nothing: str) -> None:
    with pytest.raises(InvalidSpecError, match=r"selection is (exactly one condition|not SQL)|con"):
        to_sql(nothing)


@pytest.mark.parametrize("value", ["key", "1", "not key", "key = 'a' or size", "lower(key)"])
def test_value_that_is_no_condition_is_refused(value: str) -> None:
    with pytest.raises(InvalidSpecError, match="true or false for each dead letter"):
        to_sql(value)


@pytest.mark.parametrize(
    ("published", "is_taken"), [(9, False), (10, True), (19, True), (20, False)]
)
def test_choice_begins_at_since_and_ends_before_until(published: int, *, is_taken: bool) -> None:
    chooser = Chooser(Choice(since=10, until=20))
    assert chooser.takes(Position(7, 0, 0), (), published, FailureCause()) == is_taken


@pytest.mark.parametrize(
    ("choice", "failure", "is_taken"),
    [
        (Choice(causes=("TimeoutError", "")), FailureCause("TimeoutError", "0" * 16), True),
        (Choice(causes=("TimeoutError", "")), FailureCause(), True),
        (Choice(causes=("TimeoutError",)), FailureCause("ValueError"), False),
        (Choice(causes=("x" * 256,)), FailureCause.of({CAUSE_TYPE: "x" * 300}), True),
        (Choice(fingerprints=("0" * 16,)), FailureCause("TimeoutError", "0" * 16), True),
        (Choice(fingerprints=("0" * 16,)), FailureCause("TimeoutError"), False),
        (
            Choice(causes=("ValueError",), fingerprints=("0" * 16,)),
            FailureCause("TimeoutError", "0" * 16),
            False,
        ),
    ],
)
def test_choice_takes_causes_and_fingerprints(
    choice: Choice, failure: FailureCause, *, is_taken: bool
) -> None:
    chooser = Chooser(choice)
    assert chooser.takes(Position(7, 0, 0), (), 0, failure) == is_taken
    assert chooser.takes_undelivered(Position(7, 0, 0)) is None


def test_refusal_has_problem_value_and_remedy() -> None:
    with pytest.raises(InvalidSpecError) as refused:
        to_sql("cause = 'TimeoutError'")
    assert str(refused.value) == (
        "a selection names an unknown column, at character 1; got 'cause'; did you mean "
        "cause_type? columns are cause_type, cause_message, failed_at, consumer, dead_reason, "
        "reconsume_times, replays, key, value, size, event_time, publish_time, or "
        "properties['name']"
    )


REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "selection.md"


@pytest.fixture(scope="module")
def text() -> str:
    return REFERENCE.read_text("utf-8")


def quoted(text: str, begin: str, end: str) -> set[str]:
    """Return the names in backquotes between *begin* and the next *end*."""
    return set(re.findall(r"`([^`]+)`", text.partition(begin)[2].partition(end)[0]))


def test_conditions_of_the_page_are_accepted() -> None:
    conditions = block(SELECTION, "Selection in SQL", "sql").splitlines()
    assert len(conditions) == 2
    for condition in conditions:
        assert to_sql(condition)


def test_every_column_is_documented(text: str) -> None:
    names = (row.split(" | ")[0] for row in re.findall(r"^\| (`.*) \|$", text, re.MULTILINE))
    documented = [column for name in names for column in re.findall(r"`([^`]+)`", name)]
    assert sorted(documented) == sorted([*COLUMNS, "properties['name']"])


def test_moment_columns_are_documented(text: str) -> None:
    rows = re.findall(r"^\| (`.*) \| moment \|", text, re.MULTILINE)
    assert set(re.findall(r"`([^`]+)`", " ".join(rows))) == MOMENTS


def test_dead_letter_reasons_are_documented(text: str) -> None:
    assert quoted(text, "| `dead_reason` |", "|\n") == set(DeadReason)


def test_functions_and_types_are_documented(text: str) -> None:
    assert quoted(text, "Functions:", "\n") == set(FUNCTIONS)
    assert quoted(text, "`cast` to ", ".") == set(TYPES)


LONGEST = 4_096
STEPS_PER_TOKEN = 4
CALLS_PER_CHARACTER = 250

WRITTEN = (
    "key", "`key`", "properties", "properties['a']", "'x'", "1", "1L", ".5", "null", "true",
    "date '2026-11-20'", "date", "string", "int", "as string)", "is not", "is distinct from",
    "lower(", "coalesce(", "trim(", "substring(", "get_json_object(", "contains(", "cast(",
    "try_cast(", "in (", "properties[", "(", ")", "]", ",", ";", ".", "[", "/* a */", "-- a\n",
    "=", "<>", "<", ">", "<=>", "+", "-", "*", "/", "%", "!", "and", "or", "not", "in", "between",
    "like", "ilike", "rlike", "escape", "is", "as", "distinct", "from", "timestamp",
)  # fmt: skip
"""All kinds of words and signs that a selection may use, in their places and out of them."""


class Steps(BaseException):
    """More than a text may take, by its length; the parser handles no such exception."""


@contextmanager
def at_most(limit: int) -> Iterator[None]:
    """Let parsers take *limit* steps, forward and back, and no more."""
    advance = Parser._advance  # noqa: SLF001  common to all its ways through a text
    taken = 0

    def count(parser: Parser, times: int = 1) -> None:
        nonlocal taken
        taken += 1
        if taken > limit:
            raise Steps
        advance(parser, times)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parser, "_advance", count)
        yield


def parse_in_steps(tokens: list[Token], text: str) -> None:
    with at_most(STEPS_PER_TOKEN * (len(tokens) + 5)):
        Spark().parser().parse(tokens, text)


def closed(text: str) -> str:
    """Return *text* with all closed that is open."""
    still: list[str] = []
    for character in text:
        if character in "([":
            still.append(")" if character == "(" else "]")
        elif character in ")]" and still:
            still.pop()
    return text + "".join(reversed(still))


blocks = st.lists(st.sampled_from(WRITTEN), min_size=1, max_size=6).map(" ".join)
nested = st.builds(
    lambda block, times, core, tail: " ".join([*[block] * times, core, *[tail] * times]),
    blocks, st.integers(1, 60), st.sampled_from(WRITTEN), st.sampled_from(["", ")", *WRITTEN]),
)  # fmt: skip
texts = st.lists(st.one_of(blocks, nested), min_size=1, max_size=3).map(" ".join)


@given(texts | texts.map(closed))
def test_condition_is_parsed_in_linear_steps(text: str) -> None:
    text = text[:LONGEST]
    with suppress(InvalidSpecError, RecursionError, SqlglotError):
        parse_in_steps(read_tokens(text), text)


def test_unchecked_nested_text_is_parsed_repeatedly() -> None:
    text = "string(" * 6 + "key" + ")" * 6 + " = 'a'"
    with pytest.raises(Steps):
        parse_in_steps(Spark().tokenize(text), text)


@pytest.mark.parametrize(
    ("opened", "closing"),
    [
        *((f"{kind}(", ")") for kind in ("string", "date", "decimal", "array", "struct", "map")),
        *((f"{kind}[", "]") for kind in ("date", "timestamp", "int", "key", "'a'", "a", "array")),
        *((f"cast(key as {kind}<", ">)") for kind in ("array", "struct<a:", "map<int,")),
        *((f"1{kind}(", ")") for kind in ("BD", "L", "D")),
        ("key::decimal(", ")"), ("interval ", ""), ("interval (", ") day"), ("`string`(", ")"),
        ("cast(key as `string(", ")`)"), ("case when ", " then 1 end"), ("if(", ", 1, 2)"),
        ("(select ", ")"), ("(from ", ")"), ("(values ", ")"), ("exists(", ")"), ("any(", ")"),
        ("x -> (", ")"), ("(x, y) -> (", ")"), ("{fn lower(", ")}"), ("{{", "}}"), ("{%", "%}"),
        ("array(", ")"), ("named_struct(", ")"), ("nullif(", ")"), ("substr(", ")"), ("a.b(", ")"),
        ("lower(key) over (", ")"), ("(key.", ")"), ("@", ""), (":a ", ""), ("?", ""), ("~", ""),
        ("key || (", ")"), ("key & (", ")"), ("key ? ", ""), ("$$a$$", ""), ("r'lower'(", ")"),
    ],
)  # fmt: skip
def test_unlisted_text_is_refused_before_parsing(opened: str, closing: str) -> None:
    text = (opened * 30 + "key" + closing * 30 + " = 'a'")[:LONGEST]
    with at_most(0), pytest.raises(InvalidSpecError):
        to_sql(text)


def calls(text: str) -> int:
    """Return how many calls of functions it takes to read *text*, or to refuse it."""
    counted = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal counted
        counted += event in {"call", "c_call"}

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        with suppress(InvalidSpecError):
            to_sql(text)
    finally:
        sys.setprofile(before)
    return counted


@pytest.mark.parametrize(
    ("begin", "again", "end"),
    [
        ("1", "=1", ""), ("true", " and true", ""), ("size=1", " or size<2", ""),
        ("failed_at > '2026-11-20'", " or consumer is null", ""), ("size=1", "+1", ""),
        ("", "not ", "1"), ("size > ", "-1=-", "1"), ("not 1", "=not 1", ""),
        ("key between 1", " and 2 between 1", ""),
        ("key in ('a'", ",'a'", ")"), ("key in (" * 23 + "key", ",consumer", ")" * 23),
        ("coalesce(" * 23 + "key", ",event_time", ")" * 23 + "='2026-11-20'"),
        ("coalesce(" * 23 + "'a'", ",'a'", ",key)" * 23 + "='a'"),
        ("get_json_object(key, '$", ".a", "') = 'a'"), ("get_json_object(key,'$", "[?(", "')='a'"),
        ("key = 'a'", " 'a'", ""), ("true", ";true", ""), ("true", "/**/", ""),
        ("true", " -- a\n", ""), ("'a'", " is null = true", ""), ("key like 'a'", " like 'b'", ""),
        ("key", " is not", " null"), ("(" * 24 + "key='a'", " or key='a'", ")" * 24),
        ("", "(", ""), ("", "1=(", ""), ("1", ")", ""),
    ],
)  # fmt: skip
def test_calls_are_linear_in_length_of_longest_text(begin: str, again: str, end: str) -> None:
    text = begin + again * ((LONGEST - len(begin) - len(end)) // len(again)) + end
    assert calls(text) < CALLS_PER_CHARACTER * len(text)


@pytest.mark.parametrize(
    ("opened", "core", "closing", "whole"),
    [
        ("(", "key = 'a'", ")", ""),
        ("lower(", "key", ")", " = 'a'"),
        ("coalesce('a', ", "key", ")", " = 'a'"),
        ("cast(", "key", " as string)", " = 'a'"),
        ("key in (", "'a'", ")", ""),
        ("not (", "key = 'a'", ")", ""),
        ("not lower(", "key", ")", " = 'a'"),
        ("1 = - (", "size", ")", ""),
    ],
)
def test_nesting_limit_is_independent_of_stack_depth(
    opened: str, core: str, closing: str, whole: str
) -> None:
    def text(levels: int) -> str:
        return opened * levels + core + closing * levels + whole

    def deeper(frames: int) -> str:
        return deeper(frames - 1) if frames else to_sql(text(MAX_DEPTH))

    assert deeper(150)
    with pytest.raises(InvalidSpecError, match=r"nested too deeply, at character \d+; got '\('"):
        to_sql(text(MAX_DEPTH + 1))


@pytest.mark.parametrize("levels", [*range(60, 140, 4), 1_000])
@pytest.mark.parametrize("core", ["true", "cast(key as string) = 'a'"])
def test_chained_operators_are_bounded_at_any_stack_depth(levels: int, core: str) -> None:
    try:
        read = to_sql("not " * levels + core)
    except InvalidSpecError as refused:
        assert "nested too deeply" in str(refused)  # noqa: PT017
    else:
        assert read.count("NOT ") == levels


def test_comment_gives_no_instructions() -> None:
    with pytest.raises(InvalidSpecError, match=r"on literals alone, at character 1; got \"LOWER"):
        to_sql("lower('a') /* sqlglot.meta start=x */ = 'b'")

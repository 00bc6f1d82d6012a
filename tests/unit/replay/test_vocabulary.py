"""However a `where` is nested, it costs as much as it is long; the operator's event loop reads it.

Counted are steps of the parser and calls, never time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlglot.dialects.spark import Spark
from sqlglot.errors import SqlglotError
from sqlglot.parser import Parser
from sqlglot.tokenizer_core import Token

from redrive.errors import InvalidSpecError
from redrive.replay.selection import MAX_DEPTH, read_tokens, to_sql

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
    advance = Parser._advance  # noqa: SLF001  what all its ways through a text have in common
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
def test_each_part_is_parsed_once(text: str) -> None:
    text = text[:LONGEST]
    with suppress(InvalidSpecError, RecursionError, SqlglotError):
        parse_in_steps(read_tokens(text), text)


def test_what_is_refused_would_be_parsed_again_and_again() -> None:
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
def test_what_is_not_listed_is_refused_before_it_is_parsed(opened: str, closing: str) -> None:
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
def test_the_longest_text_takes_as_many_calls_as_it_is_long(
    begin: str, again: str, end: str
) -> None:
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
def test_so_many_levels_are_read_however_deep_the_stack_is_already(
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
def test_too_many_operators_before_a_condition_are_refused_wherever_the_stack_ends(
    levels: int, core: str
) -> None:
    try:
        read = to_sql("not " * levels + core)
    except InvalidSpecError as refused:
        assert "nested too deeply" in str(refused)  # noqa: PT017
    else:
        assert read.count("NOT ") == levels


def test_a_comment_gives_no_instructions() -> None:
    with pytest.raises(InvalidSpecError, match=r"on literals alone, at character 1; got \"LOWER"):
        to_sql("lower('a') /* sqlglot.meta start=x */ = 'b'")

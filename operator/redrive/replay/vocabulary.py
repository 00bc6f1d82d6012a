"""What a `where` may be written with; all else is refused before it is parsed. Pure.

The parser knows all of SQL, and where a text may mean two things it tries both, also of what lies
within: `date[date[key]]`, sixteen deep, keeps it busy for 46 s, and the operator's event loop with
it. So it is given nothing but words and signs that a selection may use, each where it may stand:
names of functions before parentheses, of types behind `as`, brackets behind `properties`. These it
reads once.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sqlglot import exp
from sqlglot.dialects.spark import Spark
from sqlglot.errors import SqlglotError, TokenError
from sqlglot.tokenizer_core import Token, TokenType

from redrive.errors import InvalidSpecError
from redrive.policy import properties

MAX_DEPTH = 24
"""How many parentheses and brackets may be open at a place. The parser has up to 25 frames each on
the stack, of the thousand that Python permits."""


def _property(name: str) -> str:
    return f"properties['{name}']"


def _moment(name: str) -> str:
    # Anybody may have written it, and a time without a date would be taken for today's.
    read = _property(name)
    return f"CASE WHEN {read} LIKE '____-__-__T%' THEN TRY_CAST({read} AS TIMESTAMP) END"


COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        "cause_type": "cause_type",
        "cause_message": _property(properties.CAUSE_MESSAGE),
        "failed_at": _moment(properties.FAILED_AT),
        "consumer": _property(properties.CONSUMER),
        "dead_reason": _property(properties.DEAD_REASON),
        "reconsume_times": "reconsume_times",
        "replays": "replays",
        "key": "key",
        "value": "value",
        "size": "size",
        "event_time": "event_time",
        "publish_time": "publish_time",
    }
)
"""What a condition may speak of, and how it is read from a row of the source. Besides these:
`properties['name']`."""

MOMENTS = frozenset({"failed_at", "event_time", "publish_time"})
"""The columns that are compared with a moment, which is in UTC unless it names an offset."""

FUNCTIONS: Mapping[str, type[exp.Expr]] = MappingProxyType(
    {
        "coalesce": exp.Coalesce,
        "contains": exp.Contains,
        "endswith": exp.EndsWith,
        "get_json_object": exp.JSONExtractScalar,
        "length": exp.Length,
        "lower": exp.Lower,
        "startswith": exp.StartsWith,
        "substring": exp.Substring,
        "trim": exp.Trim,
        "upper": exp.Upper,
    }
)
"""What a condition may call; all of them depend on their arguments alone."""

TYPES: Mapping[str, exp.DType] = MappingProxyType(
    {
        "bigint": exp.DType.BIGINT,
        "boolean": exp.DType.BOOLEAN,
        "double": exp.DType.DOUBLE,
        "int": exp.DType.INT,
        "string": exp.DType.TEXT,
    }
)
"""What a condition may cast to. Moments are only ever written out: `timestamp '2026-11-20'`."""

DIALECT = Spark()
PROPERTIES = "properties"
UNKNOWN_COLUMN = "a selection names an unknown column"
NAME_A_COLUMN = f"use one of {', '.join(COLUMNS)}, or properties['name']"
NOT_LISTED = "a selection can't use this"
USE_LISTED = f"compare columns with literals; functions are {', '.join(FUNCTIONS)}"
NOT_A_TYPE = "a selection can't cast to this"
CAST_TO = f"cast to {', '.join(TYPES)}"
NOT_A_PROPERTY = "only a property can be looked up"
LOOK_UP = "write properties['name']"

_LITERAL = "''"
_NAMES = frozenset({*COLUMNS, PROPERTIES})
_OPERATORS = frozenset(
    "= == <> != ! < <= > >= <=> + - * / % "
    "and or not in between like ilike rlike regexp escape is".split()
)
_CALLS = frozenset({*FUNCTIONS, "cast", "try_cast"})
_ANYWHERE = frozenset(
    {*_OPERATORS, *_NAMES, _LITERAL, "null", "true", "false", "as", "(", ")", "]", ",", ";"}
)
_ONLY_BEFORE = {
    **dict.fromkeys(_CALLS, "("),
    **dict.fromkeys(("date", "timestamp", "."), _LITERAL),
}
_ONLY_AFTER = {"[": {PROPERTIES}, "distinct": {"is", "not"}, "from": {"distinct"}}
_BEFORE_PARENTHESES = frozenset({*_OPERATORS, *_CALLS, "from", "(", "[", ",", ";"})
_CASTS_TO = frozenset({*TYPES, "date", "timestamp"})
_DEPTH = {"(": 1, "[": 1, ")": -1, "]": -1}


def tokens(where: str) -> list[Token]:
    """Return what *where* is written with, without its comments.

    Raises:
        InvalidSpecError: it is no SQL, uses what is not listed, or is nested too deeply.
    """
    try:
        found = DIALECT.tokenize(where)
    except TokenError as error:
        raise unreadable(where, error) from error
    words = [_word(where, token) for token in found]
    depth = 0
    for before, word, after, token in zip(
        ["", *words], words, [*words[1:], ""], found, strict=False
    ):
        token.comments.clear()  # some of them are instructions to sqlglot
        refused = _refused(before, word, after, token)
        depth += _DEPTH.get(word, 0)
        if depth > MAX_DEPTH:
            refused = (
                "the condition of a selection is nested too deeply",
                f"write it more flatly, with at most {MAX_DEPTH} levels of parentheses",
            )
        if refused is not None:
            problem, remedy = refused
            got = where[token.start : token.end + 1][:256]
            raise InvalidSpecError(
                f"{problem}, at character {token.start + 1}", got=got, remedy=remedy
            )
    return found


def unreadable(where: str, error: SqlglotError) -> InvalidSpecError:
    """Return how *where* is refused that can't be read, for which *error* has the cause."""
    return InvalidSpecError(
        f"the condition of a selection is not SQL that can be read: {str(error).splitlines()[0]}",
        got=where[:256],
        remedy="write one condition, like cause_type = 'TimeoutError'",
    )


def _word(where: str, token: Token) -> str:
    """Return *token* as it is listed: by how it is written, not by what it may mean."""
    written = where[token.start : token.end + 1].lower()
    if token.token_type is TokenType.STRING or written[:1].isdecimal():
        return _LITERAL  # the last are three tokens for 1L, as if it were 1::bigint
    if token.token_type is TokenType.IDENTIFIER and token.text.lower() in _NAMES:
        return token.text.lower()
    return written


def _refused(before: str, word: str, after: str, token: Token) -> tuple[str, str] | None:
    """Return what is wrong with *word* between *before* and *after*, and what to do."""
    if after == "(" and word not in _BEFORE_PARENTHESES:
        return NOT_LISTED, USE_LISTED
    if before == "as":
        return None if word in _CASTS_TO else (NOT_A_TYPE, CAST_TO)
    if word in _ANYWHERE or _ONLY_BEFORE.get(word) == after or before in _ONLY_AFTER.get(word, ()):
        return None
    if word == "[":
        return NOT_A_PROPERTY, LOOK_UP
    if token.token_type in {TokenType.VAR, TokenType.IDENTIFIER}:
        return UNKNOWN_COLUMN, NAME_A_COLUMN
    return NOT_LISTED, USE_LISTED

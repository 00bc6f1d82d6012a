"""Vocabulary of the condition of a selection, and its translation to SQL.

The operator refuses an invalid `where` before it launches a job, and the job translates it again.

Tokens are checked before they are parsed. The parser supports all of SQL, and parses ambiguous text
twice at each level: `date[date[key]]` with 16 levels blocks the event loop of the operator for
46 s. So only listed words and signs pass, at permitted places: functions before parentheses, types
after `as`, brackets after `properties`.

Spark SQL can call any Java method and so read the environment of the driver, which has the token.
It can also read the time, so that a restarted run would select other messages: by a function, by
'now' as a timestamp, or by a time of day, which means today. So only listed expressions pass, and
Spark gets SQL that is generated from them, never the original text.

If a condition cannot be computed for a message, Spark catches the exception, see
`spark.evaluated`. It does not catch a stack overflow, with which Java's regular expressions fail on
long texts, and which ends the executor. So patterns that recurse are only applied to short texts,
and raise an exception for others.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from types import MappingProxyType

from sqlglot import exp
from sqlglot.dialects.spark import Spark
from sqlglot.errors import ParseError, SqlglotError, TokenError
from sqlglot.tokenizer_core import Token, TokenType

from redrive.errors import InvalidSpecError
from redrive.policy.envelope import CAUSE_MESSAGE, CONSUMER, DEAD_REASON, FAILED_AT

MAX_DEPTH = 24
"""Maximum number of nested parentheses and brackets. The parser needs up to 25 stack frames for
each, of 1,000 that Python permits."""


def _property(name: str) -> str:
    return f"properties['{name}']"


def _moment(name: str) -> str:
    # Any client may have written it, and Spark adds today's date to a time without one.
    text = _property(name)
    return f"CASE WHEN {text} LIKE '____-__-__T%' THEN TRY_CAST({text} AS TIMESTAMP) END"


COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        "cause_type": "cause_type",
        "cause_message": _property(CAUSE_MESSAGE),
        "failed_at": _moment(FAILED_AT),
        "consumer": _property(CONSUMER),
        "dead_reason": _property(DEAD_REASON),
        "reconsume_times": "reconsume_times",
        "replays": "replays",
        "key": "key",
        "value": "value",
        "size": "size",
        "event_time": "event_time",
        "publish_time": "publish_time",
    }
)
"""Columns of a condition, with their expressions over a row of the source. Conditions may also use
`properties['name']`."""

MOMENTS = frozenset({"failed_at", "event_time", "publish_time"})
"""Columns that are compared with a timestamp, in UTC unless it has an offset."""

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
"""Functions of a condition. Their results depend on their arguments alone."""

TYPES: Mapping[str, exp.DType] = MappingProxyType(
    {
        "bigint": exp.DType.BIGINT,
        "boolean": exp.DType.BOOLEAN,
        "double": exp.DType.DOUBLE,
        "int": exp.DType.INT,
        "string": exp.DType.TEXT,
    }
)
"""Types to which a condition may cast. Timestamps are literals: `timestamp '2026-11-20'`."""

DIALECT = Spark()
PROPERTIES = "properties"
UNKNOWN_COLUMN = "a selection names an unknown column"
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
_CALL_WORDS = frozenset({*FUNCTIONS, "cast", "try_cast"})
_ANYWHERE = frozenset(
    {*_OPERATORS, *_NAMES, _LITERAL, "null", "true", "false", "as", "(", ")", "]", ",", ";"}
)
_ONLY_BEFORE = {
    **dict.fromkeys(_CALL_WORDS, "("),
    **dict.fromkeys(("date", "timestamp", "."), _LITERAL),
}
_ONLY_AFTER = {"[": {PROPERTIES}, "distinct": {"is", "not"}, "from": {"distinct"}}
_BEFORE_PARENTHESES = frozenset({*_OPERATORS, *_CALL_WORDS, "from", "(", "[", ",", ";"})
_CASTS_TO = frozenset({*TYPES, "date", "timestamp"})
_DEPTH = {"(": 1, "[": 1, ")": -1, "]": -1}


def read_tokens(where: str) -> list[Token]:
    """Return the tokens of *where*, without its comments.

    Raises:
        InvalidSpecError: it is not SQL, has unlisted words, or is nested too deeply.
    """
    try:
        tokens = DIALECT.tokenize(where)
    except TokenError as error:
        raise unreadable(where, error) from error
    words = [_word(where, token) for token in tokens]
    depth = 0
    for before, word, after, token in zip(
        ["", *words], words, [*words[1:], ""], tokens, strict=False
    ):
        token.comments.clear()  # sqlglot interprets some comments as instructions
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
    return tokens


def unreadable(where: str, error: SqlglotError) -> InvalidSpecError:
    """Return the error of a *where* that cannot be parsed because of *error*."""
    return InvalidSpecError(
        f"the condition of a selection is not SQL: {str(error).splitlines()[0]}",
        got=where[:256],
        remedy="write one condition, like cause_type = 'TimeoutError'",
    )


def _word(where: str, token: Token) -> str:
    """Return the listed form of *token*, by its text, not by its type."""
    written = where[token.start : token.end + 1].lower()
    if token.token_type is TokenType.STRING or written[:1].isdecimal():
        return _LITERAL  # 1L has three tokens, as 1::bigint
    if token.token_type is TokenType.IDENTIFIER and token.text.lower() in _NAMES:
        return token.text.lower()
    return written


def _refused(before: str, word: str, after: str, token: Token) -> tuple[str, str] | None:
    """Return problem and remedy of *word* between *before* and *after*; None if it may be used."""
    if after == "(" and word not in _BEFORE_PARENTHESES:
        return NOT_LISTED, USE_LISTED
    if before == "as":
        return None if word in _CASTS_TO else (NOT_A_TYPE, CAST_TO)
    if word in _ANYWHERE or _ONLY_BEFORE.get(word) == after or before in _ONLY_AFTER.get(word, ()):
        return None
    if word == "[":
        return NOT_A_PROPERTY, LOOK_UP
    if token.token_type in {TokenType.VAR, TokenType.IDENTIFIER}:
        return UNKNOWN_COLUMN, _name_a_column(word)
    return NOT_LISTED, USE_LISTED


def _name_a_column(name: str) -> str:
    """Return the remedy for an unknown column: the most similar column, and all columns."""
    name = name.lower().strip("`")
    near = [column for column in COLUMNS if column.startswith(f"{name}_")]
    near += difflib.get_close_matches(name, COLUMNS, n=1)
    question = f"did you mean {near[0]}? columns are" if near else "use one of"
    return f"{question} {', '.join(COLUMNS)}, or properties['name']"


_WRITTEN_MOMENT = re.compile(
    r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}([.]\d{1,6})?)?(Z|[+-]\d{2}:\d{2})?)?", re.ASCII
)
_MOMENT_TYPES = frozenset({exp.DType.DATE, exp.DType.TIMESTAMPTZ})

_CALLS = tuple(FUNCTIONS.values())
_TEXT_REMEDY = "join conditions with and, or"
_MOMENT_REMEDY = "write it like '2026-11-20' or '2026-11-20T10:00:00Z'"
_CONNECTIVES = (exp.And, exp.Or, exp.Not, exp.Paren)
_COMPARISONS = (
    exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.NullSafeEQ, exp.NullSafeNEQ, exp.Is,
    exp.In, exp.Between, exp.Like, exp.ILike, exp.RegexpLike, exp.Escape, exp.Boolean,
    exp.Contains, exp.EndsWith, exp.StartsWith,
)  # fmt: skip
_OTHERS = (
    exp.Column, exp.Identifier, exp.Literal, exp.Null, exp.Bracket, exp.Cast, exp.TryCast,
    exp.DataType, exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Mod, exp.Neg,
    exp.JSONPath, exp.JSONPathRoot, exp.JSONPathKey, exp.JSONPathSubscript,
)  # fmt: skip
_PATTERNS = (exp.RegexpLike, exp.Like, exp.ILike)
_RECURSES = re.compile(r"\)[*+{]|\{\d*,|\\[XR]|\(\?\w*x")
"""Parts of a pattern for which Java recurses for each character of a text: repeated groups, and
repetitions of characters of several lengths. With `x`, white space may precede them."""
_MAX_RECURSION = 4_000
"""Maximum product of the lengths of a text and its pattern, which takes half of 1 MiB of stack."""
_MAX_PATTERN = 500
_ALLOWED = frozenset((*_CONNECTIVES, *_COMPARISONS, *_OTHERS, *FUNCTIONS.values()))


def to_sql(where: str) -> str:
    """Return the SQL condition of *where* over the columns of the source.

    Raises:
        InvalidSpecError: it is not a condition, or has unlisted expressions.
    """
    return _written(where)[0]


def columns(where: str) -> frozenset[str]:
    """Return the columns of the source that `to_sql` reads for *where*; errors are the same."""
    return _written(where)[1]


def _written(where: str) -> tuple[str, frozenset[str]]:
    """Return the condition for Spark, and the columns of the source that it reads."""
    try:
        tree = _parse(where)
        for node in tree.walk():
            _check(node)
        _check_condition(tree)
        _check_moments(tree)
        read = set()
        for column in tree.find_all(exp.Column):
            name = column.name.lower()
            written = COLUMNS.get(name, name)
            read.add(name if written == name else PROPERTIES)
            # As text, because replacing a node takes time in proportion to its list.
            column.set("this", exp.var(written))
        for node in tree.find_all(*_PATTERNS):
            _bound(node)
        return tree.sql(dialect=DIALECT, comments=False, copy=False), frozenset(read)
    except (RecursionError, TokenError):
        # Operators nest without limit, as in `not not true`. A TokenError is a RecursionError in
        # the tokenizer, which sqlglot calls for names of types.
        raise InvalidSpecError(
            "the condition of a selection is nested too deeply", remedy="write it more flatly"
        ) from None


def _parse(where: str) -> exp.Expr:
    tokens = read_tokens(where)
    try:
        read = DIALECT.parser().parse(tokens, where)
    except ParseError as error:
        raise unreadable(where, error) from error
    parsed = [tree for tree in read if tree is not None]
    if len(parsed) != 1:
        raise InvalidSpecError(
            "a selection is exactly one condition",
            got=where[:256],
            remedy="write one condition, without semicolons",
        )
    return parsed[0]


def _check(node: exp.Expr) -> None:
    """Refuse *node* unless it is listed. Its children are checked separately."""
    if type(node) not in _ALLOWED:
        raise _refusal(NOT_LISTED, node, USE_LISTED)
    match node:
        case exp.Column():
            _check_column(node)
        case exp.Bracket() if not _reads_property(node):
            raise _refusal(NOT_A_PROPERTY, node, LOOK_UP)
        case exp.Cast() | exp.TryCast():
            _check_cast(node)
        case exp.RegexpLike() | exp.Like() | exp.ILike():
            if any(part.find(*_PATTERNS) for part in (node.this, node.expression)):
                problem = "a pattern is compared with a text, and is no condition"
                raise _refusal(problem, node, _TEXT_REMEDY)
    if isinstance(node, _CALLS) and node.find(exp.Column) is None:
        raise _refusal("a function is called on literals alone", node, "write its value")


def _bound(node: exp.Expr) -> None:
    """Replace a pattern that may recurse too deeply by an expression that raises an exception."""
    pattern, is_regex = node.expression, isinstance(node, exp.RegexpLike)
    recurses = not pattern.is_string or len(pattern.name) > _MAX_PATTERN
    if not recurses and not (is_regex and _RECURSES.search(pattern.name)):
        return
    text, by = (part.sql(dialect=DIALECT, comments=False) for part in (node.this, pattern))
    cost = f"LENGTH({by})"
    limit = _MAX_PATTERN
    if is_regex:
        cost, limit = f"(LENGTH({text}) + 20) * {cost}", _MAX_RECURSION
    error = "RAISE_ERROR('the text or the pattern is too long')"
    node.set("this", exp.var(f"CASE WHEN {cost} > {limit} THEN {error} ELSE {text} END"))


def _check_column(column: exp.Column) -> None:
    is_listed = len(column.parts) == 1 and column.name.lower() in COLUMNS
    if not is_listed and not (isinstance(column.parent, exp.Bracket) and _is_properties(column)):
        raise _refusal(UNKNOWN_COLUMN, column, _name_a_column(column.name))


def _check_cast(cast: exp.Cast | exp.TryCast) -> None:
    if cast.to.this in _MOMENT_TYPES:
        if not (cast.this.is_string and _WRITTEN_MOMENT.fullmatch(cast.this.name)):
            raise _refusal("a selection can't cast this to a timestamp", cast, _MOMENT_REMEDY)
    elif cast.to.this not in TYPES.values() or cast.to.expressions:
        raise _refusal(NOT_A_TYPE, cast.to, CAST_TO)


def _check_moments(tree: exp.Expr) -> None:
    """Check each outermost call or comparison with a timestamp, which contains nested ones."""
    for node in tree.walk(prune=_is_used):
        columns = (column.name.lower() for column in node.find_all(exp.Column))
        if _is_used(node) and not MOMENTS.isdisjoint(columns):
            _check_moment(node)


def _is_used(node: exp.Expr) -> bool:
    return isinstance(node, (*_CALLS, *_COMPARISONS))


def _check_moment(node: exp.Expr) -> None:
    for column in node.find_all(exp.Column):
        # Its text may be 'now', which has another meaning in each run.
        if column.name.lower() not in MOMENTS:
            raise _refusal(
                "a timestamp can only be compared with a literal or another timestamp",
                column,
                _MOMENT_REMEDY,
            )
    for literal in node.find_all(exp.Literal):
        named = isinstance(literal.parent, exp.Bracket)
        if literal.is_string and not named and not _WRITTEN_MOMENT.fullmatch(literal.name):
            raise _refusal("this is used as a timestamp, but is none", literal, _MOMENT_REMEDY)


def _check_condition(tree: exp.Expr) -> None:
    for node in tree.walk(prune=lambda node: not isinstance(node, _CONNECTIVES)):
        if not isinstance(node, (*_CONNECTIVES, *_COMPARISONS)):
            raise _refusal(
                "a selection must be a condition, true or false for each dead letter",
                node,
                "compare it with a value",
            )


def _is_properties(node: object) -> bool:
    return isinstance(node, exp.Column) and len(node.parts) == 1 and node.name.lower() == PROPERTIES


def _reads_property(node: exp.Bracket) -> bool:
    keys = node.expressions
    return _is_properties(node.this) and len(keys) == 1 and keys[0].is_string


def _refusal(problem: str, node: exp.Expr, remedy: str) -> InvalidSpecError:
    # A part of a JSON path has no SQL.
    is_part = isinstance(node, exp.JSONPathPart)
    got = type(node).__name__ if is_part else node.sql(dialect=DIALECT, comments=False)[:256]
    starts = [part.meta["start"] for part in node.walk() if "start" in part.meta]
    at = f", at character {min(starts) + 1}" if starts else ""
    return InvalidSpecError(f"{problem}{at}", got=got, remedy=remedy)

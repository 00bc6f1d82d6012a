"""`where`, written by a person → the SQL condition that Spark evaluates for each dead letter. Pure.

Called by the operator, which refuses a bad one before anything is launched, and by the job.

SQL as Spark runs it can call any Java method and so read the driver's environment, where the
token is; and it can ask for the time, whereupon a restarted run would select differently: by a
function, by 'now' where a moment is expected, and by a time of day, which it takes for today's. So
nothing passes but what is listed here, and Spark is given the text generated from what passed,
never the text that was written.

A message for which a condition can't be computed fails nothing: Spark catches the exception, see
`spark.query`. It does not catch the overflow of a thread's stack, which ends the executor; that is
how Java's regular expressions fail on long texts. So a pattern that recurses is tried on short
texts only, and on others raises an exception.
"""

from __future__ import annotations

import re

from sqlglot import exp
from sqlglot.errors import ParseError, TokenError

from redrive.errors import InvalidSpecError
from redrive.replay import vocabulary
from redrive.replay.vocabulary import COLUMNS, DIALECT, FUNCTIONS, MOMENTS, TYPES

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
"""Signs of what makes Java recurse for each character of a text: repeated groups, and repetitions
of characters of several lengths; with `x` white space may stand before them."""
_MAX_RECURSION = 4_000
"""Length of a text times that of its pattern: half of what takes 1 MiB of stack."""
_MAX_PATTERN = 500
_ALLOWED = frozenset((*_CONNECTIVES, *_COMPARISONS, *_OTHERS, *FUNCTIONS.values()))


def to_sql(where: str) -> str:
    """Return the condition to give to Spark for *where*, over the columns of the source.

    Raises:
        InvalidSpecError: it is no condition, or uses what is not allowed.
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
            read.add(name if written == name else vocabulary.PROPERTIES)
            # As text: to replace a node costs as much as the list that it stands in is long.
            column.set("this", exp.var(written))
        for node in tree.find_all(*_PATTERNS):
            _bound(node)
        return tree.sql(dialect=DIALECT, comments=False, copy=False), frozenset(read)
    except (RecursionError, TokenError):
        # By operators alone, as in `not not true`: how deep parentheses are is bounded. The second
        # is the first, met in the tokenizer, by which sqlglot looks up its own names of types.
        raise InvalidSpecError(
            "the condition of a selection is nested too deeply", remedy="write it more flatly"
        ) from None


def _parse(where: str) -> exp.Expr:
    tokens = vocabulary.tokens(where)
    try:
        read = DIALECT.parser().parse(tokens, where)
    except ParseError as error:
        raise vocabulary.unreadable(where, error) from error
    parsed = [tree for tree in read if tree is not None]
    if len(parsed) != 1:
        raise InvalidSpecError(
            "a selection is exactly one condition",
            got=where[:256],
            remedy="write one condition, without semicolons",
        )
    return parsed[0]


def _check(node: exp.Expr) -> None:
    """Refuse *node* unless it is listed; its children are checked in their own turn."""
    if type(node) not in _ALLOWED:
        raise _refusal(vocabulary.NOT_LISTED, node, vocabulary.USE_LISTED)
    match node:
        case exp.Column():
            _check_column(node)
        case exp.Bracket() if not _reads_property(node):
            raise _refusal(vocabulary.NOT_A_PROPERTY, node, vocabulary.LOOK_UP)
        case exp.Cast() | exp.TryCast():
            _check_cast(node)
        case exp.RegexpLike() | exp.Like() | exp.ILike():
            _check_pattern(node)
    if isinstance(node, _CALLS) and node.find(exp.Column) is None:
        raise _refusal("a function is called on literals alone", node, "write its value")


def _check_pattern(node: exp.Expr) -> None:
    if any(part.find(*_PATTERNS) for part in (node.this, node.expression)):
        raise _refusal("a pattern is compared with a text, and is no condition", node, _TEXT_REMEDY)


def _bound(node: exp.Expr) -> None:
    """Have a pattern that may recurse too deeply raise an exception instead."""
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
    known = len(column.parts) == 1 and column.name.lower() in COLUMNS
    if not known and not (isinstance(column.parent, exp.Bracket) and _is_properties(column)):
        raise _refusal(vocabulary.UNKNOWN_COLUMN, column, vocabulary.NAME_A_COLUMN)


def _check_cast(cast: exp.Cast | exp.TryCast) -> None:
    if cast.to.this in _MOMENT_TYPES:
        if not (cast.this.is_string and _WRITTEN_MOMENT.fullmatch(cast.this.name)):
            raise _refusal("a selection can't make a moment of this", cast, _MOMENT_REMEDY)
    elif cast.to.this not in TYPES.values() or cast.to.expressions:
        raise _refusal(vocabulary.NOT_A_TYPE, cast.to, vocabulary.CAST_TO)


def _check_moments(tree: exp.Expr) -> None:
    """Check the outermost of what is nested, which holds all the others: each part once."""
    for node in tree.walk(prune=_is_used):
        if _is_used(node) and _speaks_of_moments(node):
            _check_moment(node)


def _is_used(node: exp.Expr) -> bool:
    return isinstance(node, (*_CALLS, *_COMPARISONS))


def _speaks_of_moments(node: exp.Expr) -> bool:
    columns = (column.name.lower() for column in node.find_all(exp.Column))
    return not MOMENTS.isdisjoint(columns)


def _check_moment(node: exp.Expr) -> None:
    for column in node.find_all(exp.Column):
        # Its text may be 'now', to which Spark would give another meaning in another run.
        if column.name.lower() not in MOMENTS:
            raise _refusal(
                "a moment is compared with one that is written out, or another moment",
                column,
                _MOMENT_REMEDY,
            )
    for literal in node.find_all(exp.Literal):
        named = isinstance(literal.parent, exp.Bracket)
        if literal.is_string and not named and not _WRITTEN_MOMENT.fullmatch(literal.name):
            raise _refusal("this is used like a moment, and is none", literal, _MOMENT_REMEDY)


def _check_condition(tree: exp.Expr) -> None:
    for node in tree.walk(prune=lambda node: not isinstance(node, _CONNECTIVES)):
        if not isinstance(node, (*_CONNECTIVES, *_COMPARISONS)):
            raise _refusal(
                "a selection is a condition, true or false for each dead letter",
                node,
                "compare it with something",
            )


def _is_properties(node: object) -> bool:
    return (
        isinstance(node, exp.Column)
        and len(node.parts) == 1
        and node.name.lower() == vocabulary.PROPERTIES
    )


def _reads_property(node: exp.Bracket) -> bool:
    keys = node.expressions
    return _is_properties(node.this) and len(keys) == 1 and keys[0].is_string


def _refusal(problem: str, node: exp.Expr, remedy: str) -> InvalidSpecError:
    # A part of a JSON path can't be written on its own.
    part = isinstance(node, exp.JSONPathPart)
    got = type(node).__name__ if part else node.sql(dialect=DIALECT, comments=False)[:256]
    starts = [each.meta["start"] for each in node.walk() if "start" in each.meta]
    at = f", at character {min(starts) + 1}" if starts else ""
    return InvalidSpecError(f"{problem}{at}", got=got, remedy=remedy)

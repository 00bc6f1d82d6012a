"""`where`, written by a person → the SQL condition that Spark evaluates for each dead letter. Pure.

Called by the operator, which refuses a bad one before anything is launched, and by the job.

SQL as Spark runs it can call any Java method and so read the driver's environment, where the
token is; and it can ask for the time, whereupon a restarted run would select differently: by a
function, by 'now' where a moment is expected, and by a time of day, which it takes for today's. So
nothing passes but what is listed here, and Spark is given the text generated from what passed,
never the text that was written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from redrive.errors import InvalidSpecError
from redrive.policy import properties

_DIALECT = "spark"


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

_WRITTEN_MOMENT = re.compile(
    r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}([.]\d{1,6})?)?(Z|[+-]\d{2}:\d{2})?)?", re.ASCII
)
_MOMENT_TYPES = frozenset({exp.DType.DATE, exp.DType.TIMESTAMPTZ})

_CALLS = tuple(FUNCTIONS.values())
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
_ALLOWED = frozenset((*_CONNECTIVES, *_COMPARISONS, *_OTHERS, *FUNCTIONS.values()))


def to_sql(where: str) -> str:
    """Return the condition to give to Spark for *where*, over the columns of the source.

    Raises:
        InvalidSpecError: it is no condition, or uses what is not allowed.
    """
    try:
        tree = _parse(where)
        for node in tree.walk():
            _check(node)
        _check_condition(tree)
        return tree.transform(_spell_out).sql(dialect=_DIALECT, comments=False)
    except RecursionError:
        raise InvalidSpecError(
            "the condition of a selection is nested too deeply", remedy="write it more flatly"
        ) from None


def columns(where: str) -> frozenset[str]:
    """Return the columns of the source that `to_sql` reads for *where*; errors are the same."""
    written = sqlglot.parse_one(to_sql(where), dialect=_DIALECT)
    return frozenset(column.name.lower() for column in written.find_all(exp.Column))


def _parse(where: str) -> exp.Expr:
    try:
        parsed = [tree for tree in sqlglot.parse(where, dialect=_DIALECT) if tree is not None]
    except SqlglotError as error:
        said = str(error).splitlines()[0]
        raise InvalidSpecError(
            f"the condition of a selection is not SQL that can be read: {said}",
            got=where[:256],
            remedy="write one condition, like cause_type = 'TimeoutError'",
        ) from error
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
        raise _refusal(
            "a selection can't use this",
            node,
            f"compare columns with literals; functions are {', '.join(FUNCTIONS)}",
        )
    match node:
        case exp.Column():
            _check_column(node)
        case exp.Bracket() if not _reads_property(node):
            raise _refusal("only a property can be looked up", node, "write properties['name']")
        case exp.Cast() | exp.TryCast():
            _check_cast(node)
        case exp.RegexpLike() if node.args.get("flag") is not None:
            raise _refusal("a pattern takes no flags", node, "write them into it, as in (?i)a")
    if isinstance(node, _CALLS) and node.find(exp.Column) is None:
        raise _refusal("a function is called on literals alone", node, "write its value")
    if isinstance(node, (*_CALLS, *_COMPARISONS)) and _speaks_of_moments(node):
        _check_moments(node)


def _check_column(column: exp.Column) -> None:
    known = len(column.parts) == 1 and column.name.lower() in COLUMNS
    if not known and not (isinstance(column.parent, exp.Bracket) and _is_properties(column)):
        raise _refusal(
            "a selection names an unknown column",
            column,
            f"use one of {', '.join(COLUMNS)}, or properties['name']",
        )


def _check_cast(cast: exp.Cast | exp.TryCast) -> None:
    if cast.to.this in _MOMENT_TYPES:
        if not (cast.this.is_string and _WRITTEN_MOMENT.fullmatch(cast.this.name)):
            raise _refusal("a selection can't make a moment of this", cast, _MOMENT_REMEDY)
    elif cast.to.this not in TYPES.values() or cast.to.expressions:
        raise _refusal("a selection can't cast to this", cast.to, f"cast to {', '.join(TYPES)}")


def _speaks_of_moments(node: exp.Expr) -> bool:
    columns = (column.name.lower() for column in node.find_all(exp.Column))
    return not MOMENTS.isdisjoint(columns)


def _check_moments(node: exp.Expr) -> None:
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


def _check_condition(node: exp.Expr) -> None:
    if isinstance(node, _CONNECTIVES):
        for child in node.iter_expressions():
            _check_condition(child)
    elif not isinstance(node, _COMPARISONS):
        raise _refusal(
            "a selection is a condition, true or false for each dead letter",
            node,
            "compare it with something",
        )


def _is_properties(node: object) -> bool:
    return (
        isinstance(node, exp.Column) and len(node.parts) == 1 and node.name.lower() == "properties"
    )


def _reads_property(node: exp.Bracket) -> bool:
    keys = node.expressions
    return _is_properties(node.this) and len(keys) == 1 and keys[0].is_string


def _spell_out(node: exp.Expr) -> exp.Expr:
    if isinstance(node, exp.Column) and not _is_properties(node):
        return sqlglot.parse_one(COLUMNS[node.name.lower()], dialect=_DIALECT)
    return node


def _refusal(problem: str, node: exp.Expr, remedy: str) -> InvalidSpecError:
    # A part of a JSON path can't be written on its own.
    part = isinstance(node, exp.JSONPathPart)
    got = type(node).__name__ if part else node.sql(dialect=_DIALECT, comments=False)[:256]
    starts = [each.meta["start"] for each in node.walk() if "start" in each.meta]
    at = f", at character {min(starts) + 1}" if starts else ""
    return InvalidSpecError(f"{problem}{at}", got=got, remedy=remedy)

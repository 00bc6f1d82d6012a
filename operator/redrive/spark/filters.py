"""Conditions of a query that say what need not be read. Pure.

They narrow only: Spark evaluates each of them again, so one that is not understood costs time and
no message. `AND` joins all of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from redrive.policy.naming import TopicName
from redrive.replay.topic import messageid

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_NO_LIMIT = 2**63 - 1

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "EqualTo": operator.eq,
    "EqualNullSafe": operator.eq,
    "GreaterThan": operator.gt,
    "GreaterThanOrEqual": operator.ge,
    "LessThan": operator.lt,
    "LessThanOrEqual": operator.le,
    "In": lambda value, among: value in among,
}
_TYPES: dict[str, type] = {
    "__topic": str,
    "__partition": int,
    "__ledger": int,
    "__entry": int,
    "__messageId": bytes,
    "__publishTime": datetime,
    "__eventTime": datetime,
}


class PushedFilter(NamedTuple):
    """A comparison of a column with a value, or for `In` with a tuple of values.

    Attributes:
        kind: the name of a class of filters in PySpark.
    """

    column: str
    kind: str
    value: Any


class Filters:
    """What some conditions leave over.

    Args:
        conditions: those of other kinds, or of other columns, are passed over.
    """

    def __init__(self, conditions: Iterable[PushedFilter] = ()) -> None:
        self._conditions = tuple(filter(_is_understood, conditions))

    def keep_partition(self, topic: TopicName, index: int) -> bool:
        """Whether messages of a partition may be asked for."""
        return self._hold("__topic", str(topic)) and self._hold("__partition", index)

    def entries(self, ledger: int) -> tuple[int, int]:
        """Return the first and the last entry of a ledger that may be asked for."""
        low, high = 0, _NO_LIMIT if self._hold("__ledger", ledger) else -1
        for condition in self._of("__entry"):
            first, last = _span(condition)
            low, high = max(low, first), min(high, last)
        for condition in self._of("__messageId"):
            if condition.kind in {"EqualTo", "EqualNullSafe"}:
                entry, _ = messageid.place_of(condition.value)
                wanted = entry.entry if entry.ledger == ledger else -1
                low, high = max(low, wanted), min(high, wanted)
        return low, high

    def keep_times(self, published: int, event: int | None) -> bool:
        """Whether a message of these times may be asked for, in milliseconds since 1970."""
        return self._at("__publishTime", published) and self._at("__eventTime", event)

    def _at(self, column: str, milliseconds: int | None) -> bool:
        if not any(self._of(column)):
            return True
        # Where there is no time, the column is NULL, which no comparison is true of.
        if milliseconds is None:
            return False
        try:
            return self._hold(column, _EPOCH + milliseconds * _MILLISECOND)
        except OverflowError:  # whoever sends a message sets it
            return True

    def _hold(self, column: str, value: object) -> bool:
        return all(_COMPARE[each.kind](value, each.value) for each in self._of(column))

    def _of(self, column: str) -> Iterator[PushedFilter]:
        return (each for each in self._conditions if each.column == column)


def _is_understood(condition: PushedFilter) -> bool:
    column, kind, value = condition
    if kind not in _COMPARE or column not in _TYPES:
        return False
    values = value if kind == "In" else (value,)
    return all(
        isinstance(each, _TYPES[column])
        and not (isinstance(each, datetime) and each.tzinfo is None)
        and not (column == "__messageId" and not _is_id(each))
        for each in values
    )


def _is_id(value: object) -> bool:
    try:
        messageid.place_of(bytes(value) if isinstance(value, bytes) else b"")
    except ValueError:
        return False
    return True


def _span(condition: PushedFilter) -> tuple[int, int]:
    _, kind, value = condition
    if kind == "In":
        return min(value, default=_NO_LIMIT), max(value, default=-1)
    low = {"GreaterThan": value + 1, "LessThan": 0, "LessThanOrEqual": 0}.get(kind, value)
    high = {"LessThan": value - 1, "GreaterThan": _NO_LIMIT, "GreaterThanOrEqual": _NO_LIMIT}
    return low, high.get(kind, value)

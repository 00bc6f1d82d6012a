"""JSON in answers of servers, within bounds of numbers, values and nesting."""

from __future__ import annotations

import json
import math
import re
from typing import Any

MOST_VALUES = 1_000_000
"""Maximum values of an answer that is parsed: each takes about a hundred bytes."""
MOST_DIGITS = 20
"""A broker's numbers have at most 64 bits."""
MOST_NESTED = 64
"""Maximum depth of values. The parser permits a thousand, and then fails to write them again."""


def parse_answer(answer: bytes) -> Any:  # noqa: ANN401  JSON
    """Return the value of a JSON answer.

    Raises:
        ValueError: it is not JSON, or has more values, longer numbers or deeper nesting than an
            answer of a broker.
    """
    if sum(map(answer.count, (b",", b"[", b"{"))) > MOST_VALUES:  # counts those in texts, too
        raise ValueError(f"JSON of more than {MOST_VALUES} values")
    text = answer.decode(errors="replace")
    try:
        value = json.loads(text, parse_int=_integer, parse_float=_finite, parse_constant=_finite)
        if _SURROGATE.search(answer):
            # Half of a pair is not text: to quote it in a path, or to log it, would fail.
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except ValueError:
        raise ValueError(f"{len(text)} characters that are not JSON") from None
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    if _is_deep(value):
        raise ValueError(f"JSON that is nested more than {MOST_NESTED} deep")
    return value


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""Beginning of an escape for a half of a surrogate pair."""


def _integer(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError("a number of more than 64 bits")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number that is not finite")
    return number


def _is_deep(value: object) -> bool:
    """Return True if containers are nested more than `MOST_NESTED` deep."""
    level: list[Any] = [[value]]
    for _ in range(MOST_NESTED + 1):
        values = (v for held in level for v in (held.values() if type(held) is dict else held))
        level = [inner for inner in values if type(inner) in {dict, list}]
        if not level:
            return False
    return True

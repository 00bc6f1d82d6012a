"""How long a broker's answer may be, how many long ones are read at a time, and what is parsed.

The owner of a PulsarConnection says what answers, and the operator is one process for all of them.
Parsed, an answer takes far more memory than its bytes: `[[],[],…]` twenty times as much. So only
calls whose answers grow with a namespace or a topic may have a long one, few of those are in memory
at a time and one of each connection, and what would be parsed to too many values is not parsed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

SHORT = 64 * 2**10
"""In bytes: what is longer is read in turn. Of an error, the rest is not read."""
USUAL = 2**20
"""In bytes: the longest answer about one thing."""
LONG = 24 * 2**20
"""In bytes: the longest answer of all. Permissions on a hundred thousand topics take 15 MiB."""
LONG_AT_A_TIME = 2
"""Answers of all connections that are longer than `SHORT` and are being read."""
LONG_SECONDS = 10.0
"""How long such an answer may take from there on, so that others get their turn."""
MOST_VALUES = 1_500_000
"""An answer with more values is not parsed: each takes about a hundred bytes."""


class AnswerTooLongError(Exception):
    """An answer is longer than that of a broker to the call."""


class CallTurns:
    """What the calls of one connection wait for.

    Attributes:
        calls: limits how many are made at a time, wherever they are redirected.
        long: limits how many have a long answer at a time.
    """

    def __init__(self, calls: int) -> None:
        self.calls = asyncio.Semaphore(calls)
        self.long = asyncio.Semaphore(1)


async def read(parts: AsyncIterator[bytes], longest: int, *turns: asyncio.Semaphore) -> bytes:
    """Read an answer; one that is longer than `SHORT` waits for all *turns*.

    Raises:
        AnswerTooLongError: it has more than *longest* bytes; the rest is not read.
        TimeoutError: it is long, and took too long from its turn on.
    """
    found = bytearray()
    try:
        async with asyncio.timeout(None) as limit, AsyncExitStack() as held:
            async for part in parts:
                found += part
                if len(found) > longest:
                    raise AnswerTooLongError(f"an answer of more than {_size(longest)}")
                if turns and len(found) > SHORT:
                    for turn in turns:
                        await held.enter_async_context(turn)
                    turns = ()
                    limit.reschedule(asyncio.get_running_loop().time() + LONG_SECONDS)
    except TimeoutError as error:
        if not limit.expired():
            raise
        said = f"no whole answer of more than {_size(SHORT)} within {LONG_SECONDS:g} s"
        raise TimeoutError(said) from error
    return bytes(found)


async def begin(parts: AsyncIterator[bytes]) -> bytes:
    """Read the first `SHORT` bytes of an answer, or a little more."""
    found = bytearray()
    async for part in parts:
        found += part
        if len(found) > SHORT:
            break
    return bytes(found)


def parsed(answer: bytes) -> Any:  # noqa: ANN401  JSON
    """Return the value of an answer that is JSON.

    Raises:
        ValueError: it is none, or of more values, or nested deeper, than any of a broker.
    """
    if sum(map(answer.count, (b",", b"[", b"{"))) > MOST_VALUES:  # those in texts count too
        raise ValueError(f"JSON of more than {MOST_VALUES} values")
    text = answer.decode(errors="replace")
    try:
        return json.loads(text)
    except ValueError:
        raise ValueError(f"{len(text)} characters that are no JSON") from None
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None


def _size(count: int) -> str:
    return f"{count / 2**20:g} MiB" if count >= 2**20 else f"{count / 2**10:g} KiB"

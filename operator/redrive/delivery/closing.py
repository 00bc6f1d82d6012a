"""What consumers and producers share: a `with`, or `async with`, block closes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta
from types import TracebackType
from typing import Self

CLOSE_TIMEOUT = timedelta(seconds=15)
"""How long closing waits for a broker that doesn't answer, and for handlers at work."""


class Closing(ABC):
    """Closes at the end of a `with` block, however that ends."""

    @abstractmethod
    def close(self, timeout: float | timedelta = CLOSE_TIMEOUT) -> None:
        """Let go of what it holds at the broker, within *timeout* (seconds, or a timedelta)."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClosing(ABC):
    """Closes at the end of an `async with` block, however that ends."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of what it holds at the broker."""

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

"""What consumers and producers share: a `with` block closes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """Closes at the end of a `with` block, however that ends."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what it holds at the broker."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

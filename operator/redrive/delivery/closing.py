"""What consumers and producers share: a `with` block closes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future


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


_Opened = TypeVar("_Opened", bound=Closing)


def close_opened(opening: Future[_Opened]) -> None:
    """Close what somebody began to open and does not want any more, once that is there."""
    if opening.exception() is None:
        opening.result().close()

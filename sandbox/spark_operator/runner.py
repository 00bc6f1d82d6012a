"""The interface between a keeper and the place where drivers run: this machine, or pods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from .lifecycle import Observation
from .objects import Application


class Driver(Protocol):
    """The driver of one submission."""

    @property
    def observation(self) -> Observation | None:
        """The state of the driver; None after its pod is deleted."""

    async def stop(self) -> None:
        """Stop the driver and its processes."""


@dataclass(frozen=True)
class Submission:
    """An accepted submission.

    Attributes:
        application_id: Spark's id of the run.
        follow: returns the driver, which calls the argument at each new observation; called once.
    """

    application_id: str
    follow: Callable[[Callable[[], None]], Driver]


class Runner(Protocol):
    """The place where drivers run."""

    async def submit(self, app: Application) -> Submission:
        """Submit *app*, which has no running driver.

        Raises:
            RefusedError: a field is not supported, or a required object does not exist.
        """

"""What a keeper needs of the place where drivers run: this machine, or pods of the cluster."""

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
        """How the driver is; None once its pod is gone."""

    async def stop(self) -> None:
        """End the driver and all it started."""


@dataclass(frozen=True)
class Submission:
    """A submission that was accepted.

    Attributes:
        application_id: what Spark calls the run.
        follow: gives the driver, once; it calls what it is given at each new observation.
    """

    application_id: str
    follow: Callable[[Callable[[], None]], Driver]


class Runner(Protocol):
    """Where drivers run."""

    async def submit(self, app: Application) -> Submission:
        """Submit *app*, whose earlier driver, if any, was stopped or lost.

        Raises:
            RefusedError: it cannot be run, or what it needs to be submitted is not there.
        """

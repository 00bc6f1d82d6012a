"""Who runs the tasks of a replay: this process, or Spark; and what shows how far it has come."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from redrive.policy.naming import TopicName
from redrive.replay.job import plan
from redrive.replay.job.plan import PlannedRange, Scan, Scanned
from redrive.replay.ledger.account import Account
from redrive.replay.moving import mover
from redrive.replay.moving.outcome import RangeResult
from redrive.replay.moving.task import RangeTask
from redrive.replay.topic.position import EntryId


class Engine(Protocol):
    """Runs tasks. What they raise that is no `RedriveError` may pass when they run again."""

    @property
    def slots(self) -> int:
        """Return how many tasks run at a time as it stands; executors come and go."""

    @property
    def capacity(self) -> int:
        """Return how many tasks to have under way: some of them may wait for one to end.

        What waits is what Spark asks for more executors by.
        """

    @property
    def scanned(self) -> Scanned:
        """Return what scans have found by now."""

    def scan(self, scans: Sequence[Scan]) -> Iterable[PlannedRange]:
        """Plan ranges; one that is left out has nothing to be planned."""

    def move(self, task: RangeTask) -> RangeResult:
        """Move one range; called from several threads at a time."""


class Wish(enum.Enum):
    """What whoever made a run wants of it now."""

    RUN = enum.auto()
    SUSPEND = enum.auto()
    END = enum.auto()
    EXPIRE = enum.auto()
    """To end as well, because of the deadline."""


class Rest(NamedTuple):
    """Why a run sends nothing.

    Attributes:
        full_topic: is over its backlog quota: its consumers have to catch up. None if the run is
            suspended, or of the other.
        unsubscribed_topic: has a partition without a durable subscription, which would keep no
            message.
    """

    full_topic: TopicName | None = None
    unsubscribed_topic: TopicName | None = None


SUSPENDED = Rest()


class Reporter(Protocol):
    """Shows how far a run has come."""

    def take_over(self, token: EntryId) -> None:
        """Report from now on as the run that took the ledger over with this fencing token."""

    def report(self, account: Account, *, rests: Rest | None = None) -> Wish:
        """Show the latest account, and return what is wanted.

        Args:
            account: the latest.
            rests: why nothing is sent; None while the run goes on.

        Raises:
            FencedError: a later run reports.
            RedriveError: it can't be shown now.
        """

    def report_scan(self, scanned: Scanned) -> None:
        """Show what scans have found by now, while the run is planned."""


class Local:
    """Runs tasks in this process, for jobs without SQL; good for some thousand messages."""

    def __init__(self, slots: int = 2) -> None:
        self.slots = self.capacity = slots
        self.scanned = Scanned()

    def scan(self, scans: Sequence[Scan]) -> Iterable[PlannedRange]:
        """Plan ranges one after the other."""
        for each in scans:
            planned = plan.scan(each)
            self.scanned += Scanned.of(planned)
            yield planned

    def move(self, task: RangeTask) -> RangeResult:
        """Move one range."""
        return mover.move(task)

"""What a replay job reads from and writes into the status of its Replay.

The operator writes the rest of that status; neither touches the other's fields.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar

from redrive.api.replay import ReplayStatus, Snapshot
from redrive.errors import RedriveError
from redrive.kube import resources
from redrive.kube.client import Kubernetes
from redrive.kube.resources import Key
from redrive.replay.move import Tally
from redrive.replay.spec import ReplayJob


class ReplayGoneError(RedriveError):
    """The Replay that the job was launched for is not there any more."""

    reason: ClassVar[str] = "ReplayGone"


@dataclass(frozen=True)
class Numbers:
    """How far the run has come, in messages.

    Attributes:
        kept: how many are counted in *matched* and, once their turn has come, in *skipped*: they
            are selected and can't be moved, see `Mover.move`.
    """

    matched: int
    replayed: int
    skipped: int
    duplicates: int
    kept: int = 0

    @classmethod
    def at_begin(cls, status: ReplayStatus, *, looked_at: int, selected: int) -> Numbers:
        """Count what an earlier, interrupted run has done, from what it left.

        Args:
            status: as that run left it.
            looked_at: messages that rest now, within the bounds of the run.
            selected: those of them that are selected.
        """
        matched = max(status.matched or 0, selected)
        return cls(matched, matched - selected, looked_at - selected, status.duplicates or 0)

    def after(self, tally: Tally) -> Numbers:
        """Add what became of a slice."""
        return Numbers(
            matched=self.matched,
            replayed=self.replayed + tally.replayed,
            skipped=self.skipped + tally.kept,
            duplicates=self.duplicates + tally.duplicates,
            kept=self.kept + tally.kept,
        )

    def to_status(self) -> dict[str, int]:
        """Write them as fields of the status."""
        return {name: value for name, value in asdict(self).items() if name != "kept"}


class Progress:
    """The status of one Replay.

    Raises:
        ReplayGoneError: from each method, when the Replay was deleted, or created again.
        KubernetesError: likewise, when the API server refuses.
    """

    def __init__(self, job: ReplayJob) -> None:
        self._key = Key(job.namespace, job.name)
        self._uid = job.uid

    def read(self) -> ReplayStatus:
        """Return what is known of the run: more than nothing if it was begun before."""
        return asyncio.run(self._exchange({}))

    def begin(self, bounds: Snapshot, numbers: Numbers) -> None:
        """Write down the bounds of the run; once they stand there, messages may be sent."""
        asyncio.run(self._exchange({"snapshot": bounds.to_manifest(), **numbers.to_status()}))

    def report(self, numbers: Numbers) -> None:
        """Write down how far the run has come."""
        asyncio.run(self._exchange(numbers.to_status()))

    async def _exchange(self, fields: Mapping[str, object]) -> ReplayStatus:
        async with Kubernetes.connect() as kubernetes:
            replay = await kubernetes.get(resources.REPLAYS, self._key)
            if replay["metadata"]["uid"] != self._uid:
                raise ReplayGoneError(
                    f"the Replay {self._key} is another one than this job was launched for",
                    got=replay["metadata"]["uid"],
                    remedy="nothing: the other has a job of its own",
                )
            if fields:
                replay = await kubernetes.patch_status(resources.REPLAYS, self._key, fields)
        return ReplayStatus.model_validate(replay.get("status", {}))

"""What a dry run has found, drawn up from the plans of its ranges. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from redrive.replay.job.plan import SAMPLES, PlannedRange, Scanned
from redrive.replay.ledger.account import Account
from redrive.replay.spec import MESSAGES_PER_SECOND, ReplayJob

SHOWN = 20
BYTES_PER_SECOND = 10 * 2**20
"""The bytes that one task moves in a second at least, likewise."""


@dataclass(frozen=True)
class RunPreview:
    """What would be moved.

    Attributes:
        account: of which nothing is moved: what would be is left.
        causes: cause → how many messages of it would be moved; the most frequent ones.
        refused: cause → how many messages can't be moved for it.
        samples: ids of some that would be moved.
        seconds: how long it would take.
    """

    account: Account
    causes: Mapping[str, int]
    refused: Mapping[str, int]
    samples: tuple[str, ...]
    seconds: int

    @classmethod
    def of(
        cls, account: Account, planned: Sequence[PlannedRange], job: ReplayJob, slots: int
    ) -> Self:
        """Draw it up.

        Args:
            account: of these plans.
            planned: all ranges.
            job: which would move them.
            slots: how many tasks would run at a time.
        """
        causes: Counter[str] = Counter()
        refused: Counter[str] = Counter()
        samples: list[str] = []
        for each in planned:
            causes.update(each.causes)
            refused.update(each.refused)
            partition = each.range.partition
            samples += [f"{s.ledger}:{s.entry}:{partition}:{s.batch_index}" for s in each.samples]
        # Of an ordered policy one range of each partition is moved at a time.
        beside = {each.range.partition if job.policy.ordered else each.range for each in planned}
        busy = max(1, min(slots, len(beside)))
        seconds = max(
            account.left / MESSAGES_PER_SECOND / busy,
            sum(each.size for each in planned) / BYTES_PER_SECOND / busy,
            account.left / (job.rate_limit or math.inf),
        )
        return cls(
            account,
            dict(causes.most_common(SHOWN)),
            dict(refused.most_common(SHOWN)),
            tuple(samples[:SAMPLES]),
            math.ceil(seconds),
        )

    def to_status(self) -> dict[str, Any]:
        """Write it as fields of the Replay's status."""
        return {
            **self.account.to_status(),
            "preview": {
                "causes": counts(self.causes),
                "refused": counts(self.refused),
                "samples": list(self.samples),
                "estimatedSeconds": self.seconds,
            },
        }


def so_far(scanned: Scanned) -> dict[str, Any]:
    """Write what scans have found by now as the field `preview` of the Replay's status."""
    return {
        "causes": counts(dict(scanned.causes.most_common(SHOWN))),
        "refused": counts(dict(scanned.refused.most_common(SHOWN))),
    }


def counts(counted: Mapping[str, int]) -> list[dict[str, Any]]:
    """Write numbers by cause as a field of the Replay's status."""
    return [{"cause": cause, "messages": n} for cause, n in counted.items()]

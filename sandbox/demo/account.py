"""The account that closes the demo: where every order is, from three lists of ids.

producer's log ──┐
handler's log  ──┼─▶ Account ─▶ balanced, or every id that is out of place
dead letters   ──┘
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Account:
    """Where the ids are; the last four hold what must not be.

    Attributes:
        produced: ids the broker confirmed to the producer.
        done: ids handled with success.
        resting: ids in the dead-letter topic, not acknowledged there.
        lost: produced, but neither done nor resting.
        repeated: handled with success more than once.
        revived: done, and yet resting: a replay would handle them again.
        unknown: done or resting, but never produced.
    """

    produced: frozenset[str]
    done: frozenset[str]
    resting: frozenset[str]
    lost: frozenset[str]
    repeated: frozenset[str]
    revived: frozenset[str]
    unknown: frozenset[str]

    @classmethod
    def of(cls, *, produced: Iterable[str], done: Iterable[str], resting: Iterable[str]) -> Account:
        """Compare the ids produced with those handled, one for each success, and those at rest."""
        times = Counter(done)
        sent, ended, dead = frozenset(produced), frozenset(times), frozenset(resting)
        return cls(
            produced=sent,
            done=ended,
            resting=dead,
            lost=sent - ended - dead,
            repeated=frozenset(order for order, count in times.items() if count > 1),
            revived=ended & dead,
            unknown=(ended | dead) - sent,
        )

    @property
    def faults(self) -> dict[str, frozenset[str]]:
        """Return the ids out of place, by what is wrong with them."""
        groups = {
            "lost": self.lost,
            "processed more than once": self.repeated,
            "processed, and still a dead letter": self.revived,
            "never produced": self.unknown,
        }
        return {fault: ids for fault, ids in groups.items() if ids}

    @property
    def balanced(self) -> bool:
        """Whether every id is in exactly one place, and something was produced at all."""
        return bool(self.produced) and not self.faults

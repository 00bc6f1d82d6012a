"""The account at the end of the demo: the place of every order, from three lists of ids.

producer's log ──┐
handler's log  ──┼─▶ Account ─▶ balanced, or the ids in a wrong place
dead letters   ──┘
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Account:
    """The ids by place. The last four sets are faults, and empty in a balanced account.

    Attributes:
        produced: ids that the broker confirmed to the producer.
        done: ids that were handled successfully.
        dead: ids of unacknowledged dead letters.
        lost: produced, but neither done nor dead.
        repeated: handled successfully more than once.
        revived: both done and dead: a replay would handle them again.
        unknown: done or dead, but never produced.
    """

    produced: frozenset[str]
    done: frozenset[str]
    dead: frozenset[str]
    lost: frozenset[str]
    repeated: frozenset[str]
    revived: frozenset[str]
    unknown: frozenset[str]

    @classmethod
    def of(cls, *, produced: Iterable[str], done: Iterable[str], dead: Iterable[str]) -> Account:
        """Compare the produced ids with the handled ones, an id per success, and the dead ones."""
        successes = Counter(done)
        sent, handled, stored = frozenset(produced), frozenset(successes), frozenset(dead)
        return cls(
            produced=sent,
            done=handled,
            dead=stored,
            lost=sent - handled - stored,
            repeated=frozenset(order for order, count in successes.items() if count > 1),
            revived=handled & stored,
            unknown=(handled | stored) - sent,
        )

    @property
    def faults(self) -> dict[str, frozenset[str]]:
        """The ids in a wrong place, by fault."""
        groups = {
            "lost": self.lost,
            "processed more than once": self.repeated,
            "processed, and still a dead letter": self.revived,
            "never produced": self.unknown,
        }
        return {fault: ids for fault, ids in groups.items() if ids}

    @property
    def balanced(self) -> bool:
        """True if an order was produced, and every id is in exactly one place."""
        return bool(self.produced) and not self.faults

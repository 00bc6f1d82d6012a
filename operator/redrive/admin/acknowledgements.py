"""What a broker remembers of acknowledgements when it unloads a topic; pure.

Of a subscription it stores up to where all is acknowledged, and what is acknowledged behind that as
far as its settings go: so many ranges, or whole ledgers until they hold so many messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote_plus

RANGES = "managedLedgerMaxUnackedRangesToPersist"
AS_ARRAYS = "managedLedgerPersistIndividualAckAsLongArray"
_IN_ARRAYS = "managedLedgerUnackedRangesOpenCacheSetEnabled"
"""Without which `AS_ARRAYS` has no effect; brokers after 4.2 always have it."""
_DEFAULT_RANGES = 10_000
_ARRAYS_SINCE = (4, 1)


@dataclass(frozen=True)
class AckPersistence:
    """How far acknowledgements behind a message that is not acknowledged are stored.

    Attributes:
        limit: so many ranges of them; of *whole_ledgers*, those of each ledger until the ledgers
            before it have more acknowledged messages than this.
        whole_ledgers: whether they are stored as a bitmap for each ledger.
        configured: whether the broker's configuration says so; else its release does.
    """

    limit: int = _DEFAULT_RANGES
    whole_ledgers: bool = False
    configured: bool = False

    @classmethod
    def of(cls, settings: Mapping[str, str], release: tuple[int, ...]) -> AckPersistence:
        """Read the configuration of a broker.

        Args:
            settings: by name; none where it may not be read.
            release: of the broker, whose defaults stand for what is not there.

        Raises:
            ValueError: a setting has no value of its kind.
        """
        arrays = settings.get(AS_ARRAYS, str(release >= _ARRAYS_SINCE))
        return cls(
            int(settings.get(RANGES, _DEFAULT_RANGES)),
            arrays.lower() == settings.get(_IN_ARRAYS, "true").lower() == "true",
            configured=RANGES in settings,
        )


BY_DEFAULT = AckPersistence()
"""That of brokers before 4.1."""


def acknowledged_behind(part: Mapping[str, Any], subscription: str) -> int:
    """Count what is acknowledged behind a message that is not, where it lies in several ledgers.

    In a single one it is stored, however much it is.

    Args:
        part: the internal statistics of a topic without partitions, or of one partition.
        subscription: of which; 0 where there is none.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: it is no broker's answer.
    """
    cursor = part["cursors"].get(_cursor(subscription))
    if cursor is None:
        return 0
    through, after = (int(each) for each in cursor["markDeletePosition"].split(":"))
    newest, last = (int(each) for each in part["lastConfirmedEntry"].split(":"))
    entries = {int(each["ledgerId"]): int(each["entries"]) for each in part["ledgers"]}
    if newest in entries:  # of the ledger being written the list does not tell the number
        entries[newest] = last + 1
    behind = {ledger: count for ledger, count in entries.items() if ledger >= through}
    if through in behind:
        behind[through] -= after + 1
    if sum(count > 0 for count in behind.values()) <= 1:
        return 0
    backlog = int(part["entriesAddedCounter"]) - int(cursor["messagesConsumedCounter"])
    return max(0, sum(behind.values()) - backlog)


def _cursor(subscription: str) -> str:
    """Return the name of a subscription's cursor, which a broker encodes as Java does."""
    return quote_plus(subscription, safe="*").replace("~", "%7E")

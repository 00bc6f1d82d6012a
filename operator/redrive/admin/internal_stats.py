"""Ledgers and cursors of a topic, and settings of a broker; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from redrive.admin.model import bounded, name_set
from redrive.admin.policies import Limits, Quotas, default_limits, default_quotas
from redrive.policy.naming import cursor_name

MOST_ENTRIES = 10**10
"""Maximum entries of a topic or a partition in an answer: a run divides them into ranges."""
RANGES = "managedLedgerMaxUnackedRangesToPersist"
AS_ARRAYS = "managedLedgerPersistIndividualAckAsLongArray"
_IN_ARRAYS = "managedLedgerUnackedRangesOpenCacheSetEnabled"
"""Setting without which `AS_ARRAYS` has no effect; always on in brokers after 4.2."""
SUBSCRIPTION_TYPES = "subscriptionTypesEnabled"
REQUIRES_ENCRYPTION = "encryptionRequireOnProducer"
_DEFAULT_RANGES = 10_000
_ARRAYS_SINCE = (4, 1)


@dataclass(frozen=True)
class AckPersistence:
    """Limit up to which the broker persists acknowledgements out of order.

    A broker persists the position up to which a subscription is acknowledged, and acknowledgements
    behind it as configured: a number of ranges, or whole ledgers.

    Attributes:
        limit: number of ranges. With *whole_ledgers*, ledgers are persisted until those before
            have more acknowledged messages than this.
        whole_ledgers: True if they are stored as a bitmap for each ledger.
        configured: True if it comes from the broker's configuration, False from its release.
    """

    limit: int = _DEFAULT_RANGES
    whole_ledgers: bool = False
    configured: bool = False

    @classmethod
    def of(cls, settings: Mapping[str, str], release: tuple[int, ...]) -> AckPersistence:
        """Parse the configuration of a broker.

        Args:
            settings: by name; empty if it may not be read.
            release: release of the broker, for the defaults of missing settings.

        Raises:
            ValueError: a setting has an invalid value.
        """
        arrays = settings.get(AS_ARRAYS, str(release >= _ARRAYS_SINCE))
        return cls(
            bounded(int(settings.get(RANGES, _DEFAULT_RANGES))),
            arrays.lower() == settings.get(_IN_ARRAYS, "true").lower() == "true",
            configured=RANGES in settings,
        )


class BrokerSettings(NamedTuple):
    """Settings of a broker, by its configuration if that may be read.

    Attributes:
        quotas: see `default_quotas`.
        limits: see `default_limits`.
        subscription_types: allowed types, for namespaces that set none; empty if it is not known.
        requires_encryption: True if unencrypted messages are refused in all namespaces.
    """

    persistence: AckPersistence = AckPersistence()
    quotas: Quotas = MappingProxyType({})
    limits: Limits = MappingProxyType({})
    subscription_types: frozenset[str] = frozenset()
    requires_encryption: bool = False

    @classmethod
    def of(cls, settings: Mapping[str, str], release: tuple[int, ...]) -> BrokerSettings:
        """Parse the configuration; see `AckPersistence.of`."""
        types = settings.get(SUBSCRIPTION_TYPES, "").strip("[]").replace(",", " ").split()
        return cls(
            AckPersistence.of(settings, release),
            default_quotas(settings),
            default_limits(settings),
            name_set(types),
            settings.get(REQUIRES_ENCRYPTION) == "true",
        )


BY_DEFAULT = AckPersistence()
"""The limit of brokers before 4.1."""


def acknowledged_behind(part: Mapping[str, Any], subscription: str) -> int:
    """Count messages acknowledged out of order, if they are in several ledgers.

    In a single ledger they are always persisted.

    Args:
        part: internal statistics of a topic without partitions, or of one partition.
        subscription: a subscription; the count is 0 if it does not exist.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: it is not an answer of a broker.
    """
    cursor = part["cursors"].get(cursor_name(subscription))
    if cursor is None:
        return 0
    through, after = _position(cursor["markDeletePosition"])
    newest, last = _position(part["lastConfirmedEntry"])
    entries = _entries(part)
    if newest in entries:  # the list has no count of the open ledger
        entries[newest] = last + 1
    behind = {ledger: count for ledger, count in entries.items() if ledger >= through}
    if through in behind:
        behind[through] -= after + 1
    if sum(count > 0 for count in behind.values()) <= 1:
        return 0
    consumed = bounded(cursor["messagesConsumedCounter"])
    backlog = bounded(part["entriesAddedCounter"]) - consumed
    return max(0, sum(behind.values()) - backlog)


def read_internal_stats(answer: Any) -> dict[str, Any]:  # noqa: ANN401  JSON
    """Return internal statistics of a topic without partitions, or of a partition.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: it is not an answer of a broker.
    """
    entries, (newest, last) = _entries(answer), _position(answer["lastConfirmedEntry"])
    if newest in entries:
        entries[newest] = last + 1
    bounded(sum(entries.values()), MOST_ENTRIES)
    for name in ("totalSize", "numberOfEntries", "entriesAddedCounter", "pendingAddEntriesCount"):
        bounded(answer.get(name, 0))
    for cursor in answer["cursors"].values():
        _position(cursor["markDeletePosition"])
        _position(cursor["readPosition"])
        name_set([cursor["individuallyDeletedMessages"]])
    return dict(answer)


def _entries(part: Mapping[str, Any]) -> dict[int, int]:
    """Return the number of entries of each ledger."""
    return {bounded(held["ledgerId"]): bounded(held["entries"]) for held in part["ledgers"]}


def _position(text: str) -> tuple[int, int]:
    """Parse ledger and entry."""
    ledger, entry = text.split(":")
    return bounded(int(ledger)), bounded(int(entry))

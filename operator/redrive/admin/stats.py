"""A broker's statistics of a topic, as JSON → statistics of its subscriptions; pure.

Partitions are combined here: a broker's own sum of all of them adds up what belongs to each, and
has no oldest message where one partition has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from redrive.admin.model import SubscriptionStats, TopicUsage
from redrive.policy.naming import SYSTEM_PREFIX


def read_stats(answer: Mapping[str, Any]) -> dict[str, SubscriptionStats]:
    """Read the answer for a topic without partitions, or for a partitioned one with each of them.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: it is no broker's answer.
    """
    parts = (answer.get("partitions") or {"": answer}).values()
    return _by_name(map(_subscriptions, parts))


def read_producers(answer: Mapping[str, Any]) -> list[Mapping[str, str]]:
    """Read the metadata of the producers, from an answer as for `read_stats` that has them.

    Raises:
        AttributeError, KeyError, TypeError: it is no broker's answer.
    """
    parts = (answer.get("partitions") or {"": answer}).values()
    return [dict(each.get("metadata") or {}) for part in parts for each in part["publishers"]]


def read_names(part: Mapping[str, Any]) -> frozenset[str]:
    """Read the names of the subscriptions of one partition.

    Raises:
        KeyError, TypeError: it is no broker's answer.
    """
    return frozenset(part["subscriptions"])


def read_receivers(part: Mapping[str, Any]) -> frozenset[str]:
    """Read the names of the durable subscriptions of one partition that are not Pulsar's own.

    Raises:
        AttributeError, KeyError, TypeError: it is no broker's answer.
    """
    return frozenset(
        name
        for name, subscription in part["subscriptions"].items()
        if subscription.get("isDurable", True) and not name.startswith(SYSTEM_PREFIX)
    )


def read_usage(part: Mapping[str, Any], subscription: str) -> TopicUsage:
    """Read who uses one partition, or a topic without any.

    Args:
        part: its statistics, those of producers included.
        subscription: see `TopicUsage`.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: it is no broker's answer.
    """
    found, stored = _subscriptions(part), int(part["storageSize"])
    return TopicUsage(found, len(part["publishers"]), 0 if subscription in found else stored)


def united(parts: Iterable[TopicUsage]) -> TopicUsage:
    """Put the partitions of a topic together; of none of them there is nothing."""
    parts = list(parts)
    return TopicUsage(
        subscriptions=_by_name(part.subscriptions for part in parts),
        producers=max((part.producers for part in parts), default=0),
        uncounted=sum(part.uncounted for part in parts),
    )


def _subscriptions(part: Mapping[str, Any]) -> dict[str, SubscriptionStats]:
    return {name: _read(found) for name, found in part["subscriptions"].items()}


def _by_name(parts: Iterable[Mapping[str, SubscriptionStats]]) -> dict[str, SubscriptionStats]:
    found: dict[str, list[SubscriptionStats]] = {}
    for part in parts:
        for name, stands in part.items():
            found.setdefault(name, []).append(stands)
    return {name: _united(each) for name, each in found.items()}


def _read(found: Mapping[str, Any]) -> SubscriptionStats:
    oldest = int(found.get("earliestMsgPublishTimeInBacklog", 0))
    return SubscriptionStats(
        backlog=int(found["msgBacklog"]),
        delivered=int(found["msgOutCounter"]),
        consumers=len(found["consumers"]),
        durable=bool(found.get("isDurable", True)),
        ack_holes=int(found.get("nonContiguousDeletedMessagesRanges", 0)),
        oldest=datetime.fromtimestamp(oldest / 1_000, UTC) if oldest > 0 else None,
        unacknowledged=int(found.get("unackedMessages", 0)),
        bytes=max(0, int(found.get("backlogSize", 0))),  # -1 where it was not asked for
    )


def _united(parts: Iterable[SubscriptionStats]) -> SubscriptionStats:
    parts = list(parts)
    return SubscriptionStats(
        backlog=sum(part.backlog for part in parts),
        delivered=sum(part.delivered for part in parts),
        consumers=max(part.consumers for part in parts),
        durable=any(part.durable for part in parts),
        ack_holes=max(part.ack_holes for part in parts),
        oldest=min((part.oldest for part in parts if part.oldest is not None), default=None),
        unacknowledged=sum(part.unacknowledged for part in parts),
        bytes=max(part.bytes for part in parts),
    )

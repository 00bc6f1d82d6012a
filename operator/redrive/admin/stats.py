"""A broker's statistics of a topic, as JSON → how its subscriptions stand; pure.

The partitions of a topic are put together here: what a broker itself says of all of them adds up
what belongs to each, and tells no oldest message where one partition has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from redrive.admin.model import SubscriptionStats, TopicUsage


def read_stats(answer: Mapping[str, Any]) -> dict[str, SubscriptionStats]:
    """Read the answer for a topic without partitions, or for a partitioned one with each of them.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: it is no broker's answer.
    """
    subscriptions: dict[str, list[SubscriptionStats]] = {}
    for part in (answer.get("partitions") or {"": answer}).values():
        for name, found in part["subscriptions"].items():
            subscriptions.setdefault(name, []).append(_read(found))
    return {name: _united(parts) for name, parts in subscriptions.items()}


def read_usage(answer: Mapping[str, Any]) -> TopicUsage:
    """Read who uses a topic from the same answer, where it tells of producers too.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: it is no broker's answer.
    """
    parts = list((answer.get("partitions") or {"": answer}).values())
    return TopicUsage(
        subscriptions=read_stats(answer),
        producers=max(len(part["publishers"]) for part in parts),
        stored=sum(int(part["storageSize"]) for part in parts),
    )


def _read(found: Mapping[str, Any]) -> SubscriptionStats:
    oldest = int(found.get("earliestMsgPublishTimeInBacklog", 0))
    return SubscriptionStats(
        backlog=int(found["msgBacklog"]),
        delivered=int(found["msgOutCounter"]),
        consumers=len(found["consumers"]),
        durable=bool(found.get("isDurable", True)),
        ack_holes=int(found.get("nonContiguousDeletedMessagesRanges", 0)),
        oldest=datetime.fromtimestamp(oldest / 1_000, UTC) if oldest > 0 else None,
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
    )

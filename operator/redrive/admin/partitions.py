"""Read statistics and subscriptions of each partition of a topic, as a broker keeps them.

Called by `client`. A broker's answer for a partitioned topic as a whole is only a union: a
subscription that one partition lacks, so that what is published there is lost, looks as if it were
there. So all partitions are read, in one call.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

from redrive.admin import stats
from redrive.admin.acknowledgements import acknowledged_behind
from redrive.admin.answer_limits import LONG
from redrive.admin.errors import AdminNotFoundError
from redrive.admin.model import TopicSubscriptions, TopicUsage
from redrive.admin.paths import topic_path
from redrive.policy.naming import TopicName

T = TypeVar("T")


class Get(Protocol):
    """Reads from a broker: what the call does in words, its path, and what reads the answer."""

    def __call__(
        self, does: str, path: str, read: Callable[[Any], T], longest: int = ..., /
    ) -> Awaitable[T]:
        """Return what was read, if it has at most *longest* bytes.

        Raises:
            AdminError: the broker gave no answer, or refused.
        """


async def subscriptions(get: Get, topic: TopicName, *, partitioned: bool) -> TopicSubscriptions:
    """See `Admin.subscriptions`."""
    does = f"read the subscriptions of {topic}"
    if not partitioned:
        return TopicSubscriptions(
            (await get(does, f"{topic_path(topic)}/subscriptions", frozenset),)
        )
    query = "excludePublishers=true&excludeConsumers=true&subscriptionBacklogSize=false"
    return TopicSubscriptions(await _each(get, does, topic, query, stats.read_names))


async def receivers(get: Get, topic: TopicName, *, partitioned: bool) -> TopicSubscriptions:
    """See `Admin.receivers`."""
    does = f"read the subscriptions of {topic}"
    query = "excludePublishers=true&excludeConsumers=true&subscriptionBacklogSize=false"
    if not partitioned:
        path = f"{topic_path(topic)}/stats?{query}"
        return TopicSubscriptions((await get(does, path, stats.read_receivers, LONG),))
    return TopicSubscriptions(await _each(get, does, topic, query, stats.read_receivers))


async def usage(get: Get, topic: TopicName, *, partitioned: bool, subscription: str) -> TopicUsage:
    """See `Admin.usage`."""
    does = f"read the use of {topic}"
    # A count that is not precise may be 0 where messages are left.
    query = "getPreciseBacklog=true&subscriptionBacklogSize=false"

    def read(part: Mapping[str, Any]) -> TopicUsage:
        return stats.read_usage(part, subscription)

    if not partitioned:
        return await get(does, f"{topic_path(topic)}/stats?{query}", read, LONG)
    parts = await _each(get, does, topic, query, read)
    return stats.united(part for part in parts if part is not None)


async def acknowledged(get: Get, topic: TopicName, *, partitioned: bool, subscription: str) -> int:
    """See `Admin.acknowledged`."""

    def read(answer: Mapping[str, Any]) -> int:
        parts = answer["partitions"].values() if partitioned else [answer]
        return max((acknowledged_behind(part, subscription) for part in parts), default=0)

    kind = "partitioned-internalStats" if partitioned else "internalStats"
    path = f"{topic_path(topic)}/{kind}"
    return await get(f"read what is acknowledged of {topic}", path, read, LONG)


async def _each(
    get: Get, does: str, topic: TopicName, query: str, read: Callable[[Mapping[str, Any]], T]
) -> tuple[T | None, ...]:
    """Read the statistics of each partition, in order; None stands for one that is not there."""

    def read_all(answer: Mapping[str, Any]) -> list[T | None]:
        given, count = answer["partitions"], int(answer["metadata"]["partitions"])
        names = (str(topic.partition(number)) for number in range(count))
        return [read(given[name]) if name in given else None for name in names]

    path = f"{topic_path(topic)}/partitioned-stats?perPartition=true&{query}"
    found = await get(does, path, read_all, LONG)
    for number, part in enumerate(found):
        if part is None:
            found[number] = await _one(get, does, topic.partition(number), query, read)
    return tuple(found)


async def _one(
    get: Get, does: str, part: TopicName, query: str, read: Callable[[Mapping[str, Any]], T]
) -> T | None:
    """Read a partition that was left out: it is missing, or could not be read just then."""
    try:
        return await get(does, f"{topic_path(part)}/stats?{query}", read, LONG)
    except AdminNotFoundError:
        return None

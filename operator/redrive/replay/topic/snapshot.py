"""What rests in a topic at one moment, and what of it is acknowledged already.

Taken of the dead-letter topic when a run is planned: messages that die again while it runs come
after that, so a run never chases its own failures. Taken of the target before a range is leased,
which fixes where a search for what the lease has stored begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from redrive.admin.client import Admin
from redrive.admin.errors import AdminForbiddenError, AdminNotFoundError
from redrive.admin.http import Http
from redrive.policy.naming import TopicName
from redrive.replay.topic import broker, credentials
from redrive.replay.topic.partition import Partition
from redrive.replay.topic.position import EntryId


def look(admin_url: str, topic: TopicName, subscription: str = "") -> tuple[Partition, ...]:
    """Do what `take` does, where no event loop runs."""
    return asyncio.run(take(admin_url, topic, subscription))


def look_at(admin_url: str, topic: TopicName, index: int, subscription: str = "") -> Partition:
    """Look at one partition; *index* is `broker.UNPARTITIONED` for a topic that has none.

    Raises:
        AdminError, SubscriptionMissingError: as for `take`.
    """
    stats = asyncio.run(_internal_stats(admin_url, broker.partition_of(topic, index)))
    return Partition.from_stats(index, stats, subscription)


async def take(admin_url: str, topic: TopicName, subscription: str = "") -> tuple[Partition, ...]:
    """Look at *topic* as it is now, with the replay role's own credentials.

    Raises:
        AdminError: the broker refuses to tell.
        SubscriptionMissingError: the topic has no such *subscription*.
    """
    async with Http.open() as http:
        access = await asyncio.to_thread(credentials.of_this_job().access)
        admin = Admin(http, admin_url, access)
        count = await admin.partitions(topic)
        taken = []
        for index in range(count) if count else [broker.UNPARTITIONED]:
            stats = await admin.internal_stats(broker.partition_of(topic, index))
            taken.append(Partition.from_stats(index, stats, subscription))
        return tuple(taken)


def read_through(admin_url: str, topic: TopicName, reader: str) -> EntryId | None:
    """Return the last entry that the broker has read for a reader; None if it knows no such reader.

    Args:
        topic: one partition, or a topic without.
        reader: what its name begins with.

    Raises:
        AdminError: the broker refuses to tell.
    """
    return served(asyncio.run(_internal_stats(admin_url, topic)), reader)


def served(stats: Mapping[str, Any], reader: str) -> EntryId | None:
    """Return what `read_through` does, of a broker's `internalStats`."""
    for name, cursor in stats["cursors"].items():
        if name.startswith(reader):
            following = EntryId.parse(cursor["readPosition"])
            return EntryId(following.ledger, following.entry - 1)
    return None


def is_subscribed(admin_url: str, topic: TopicName, partitions: int, subscription: str) -> bool:
    """Return True if each partition of *topic* keeps its messages for an application.

    Without a durable subscription the broker drops what is stored. A topic that is gone, and the
    right to look at it with it, keeps nothing either.

    Args:
        admin_url: of the broker.
        topic: the whole topic.
        partitions: how many it has, 0 for none.
        subscription: the one that has to be there; empty for any.

    Raises:
        AdminError: the broker does not answer.
    """
    return asyncio.run(_is_subscribed(admin_url, topic, partitions, subscription))


async def _is_subscribed(
    admin_url: str, topic: TopicName, partitions: int, subscription: str
) -> bool:
    async with Http.open() as http:
        access = await asyncio.to_thread(credentials.of_this_job().access)
        try:
            admin = Admin(http, admin_url, access)
            receivers = await admin.receivers(topic, partitioned=partitions > 0)
        except (AdminNotFoundError, AdminForbiddenError):
            return False
    return receivers.has(subscription) if subscription else all(receivers.parts)


async def _internal_stats(admin_url: str, topic: TopicName) -> Mapping[str, Any]:
    async with Http.open() as http:
        access = await asyncio.to_thread(credentials.of_this_job().access)
        return await Admin(http, admin_url, access).internal_stats(topic)

"""Content of topics, and the subscription that follows a stream.

With `admin.url` the broker returns the ledgers of each partition; otherwise a reader finds its end.

The progress of a stream is in the query's checkpoint; the subscription reads nothing. It retains
unprocessed messages, and shows the progress. Of each partition it also retains the last processed
entry. While it is before that entry, the broker has deleted no later messages; otherwise, for
example after expiry, it may have.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from typing import Any

import pulsar

from redrive.admin.client import Admin
from redrive.admin.errors import AdminForbiddenError, AdminNotFoundError
from redrive.admin.http import Http
from redrive.auth.files import source_credentials
from redrive.errors import InvalidSpecError, RedriveError
from redrive.kube.resources import TOPIC_OWNER
from redrive.policy.naming import PARTITION_SUFFIX, TopicName, cursor_name, is_derived
from redrive.reading import broker
from redrive.reading.broker import UNPARTITIONED
from redrive.reading.positions import LATEST, NOWHERE, EntryId
from redrive.reading.ranges import Partition
from redrive.spark.options import SourceConnection, TopicSelection
from redrive.spark.slices import Extent, Offset


@contextmanager
def failures(doing: str, right: str) -> Iterator[None]:
    """Turn errors of the client into one about *doing*, which needs the permission *right*."""
    try:
        yield
    except pulsar.PulsarException as error:
        raise RedriveError(
            f"the broker refused to {doing}, or did not answer",
            got=str(error) or type(error).__name__,
            remedy=f"check service.url and the credentials: their role must have permission to "
            f"{right} there; the client reports a refused token as a time-out",
            reason="PulsarFailed",
        ) from error


class TopicReader:
    """Reads about topics from the broker of a connection; opens clients for each call.

    Raises:
        RedriveError: from each method: a credential, the broker or the topic is not available.
    """

    def __init__(self, connection: SourceConnection) -> None:
        self._connection = connection
        self._credentials = source_credentials(connection.authentication)

    def extents(self, selection: TopicSelection, subscription: str = "") -> list[Extent]:
        """Return the content of each partition of the topics, once, sorted by name.

        Args:
            selection: the topics.
            subscription: its progress is included, if it exists.
        """
        if self._connection.admin_url is None:
            with self.client() as client:
                extents = list(_by_readers(client, selection))
        else:
            extents = asyncio.run(self._by_admin(selection, subscription))
        unique = {extent.topic: extent for extent in extents}.values()
        return sorted(unique, key=lambda e: (e.topic.without_partition(), e.partition.index))

    def held(self, topic: TopicName) -> frozenset[int]:
        """Return the ledgers of a partition, from the admin API."""
        stats = asyncio.run(self._internal_stats(topic))
        return Partition.from_stats(UNPARTITIONED, stats, "").held

    def read_through(self, _admin_url: str, topic: TopicName, reader: str) -> EntryId | None:
        """Return the position up to which the broker has served *reader*; None if unknown."""
        return broker.served(asyncio.run(self._internal_stats(topic)), reader)

    def client(self) -> AbstractContextManager[broker.ReadingClient]:
        """Open a client; closing it closes all that it opened."""
        return broker.connect(self._connection.service_url, self._credentials)

    async def _internal_stats(self, topic: TopicName) -> dict[str, Any]:
        async with Http.open() as http:
            return await (await self._admin(http)).internal_stats(topic)

    async def _admin(self, http: Http) -> Admin:
        shown = await asyncio.to_thread(self._credentials.access)
        return Admin(http, self._connection.admin_url or "", shown)

    async def _by_admin(self, selection: TopicSelection, subscription: str) -> list[Extent]:
        async with Http.open() as http:
            admin = await self._admin(http)
            names = await _matching(admin, selection)
            whole = await asyncio.gather(*(_partitions(admin, name) for name in names))
            return list(
                await asyncio.gather(
                    *(
                        _extent(admin, topic, subscription)
                        for partitions in whole
                        for topic in partitions
                    )
                )
            )


async def _matching(admin: Admin, selection: TopicSelection) -> list[TopicName]:
    if selection.pattern is None:
        return list(selection.names)
    unpartitioned, partitioned = await admin.topics(selection.namespace)
    single = {name for name in unpartitioned if not PARTITION_SUFFIX.search(name)}
    matching = [
        topic
        for topic in map(TopicName.parse, sorted(single | partitioned))
        if selection.pattern.fullmatch(str(topic)) and not topic.is_system
    ]
    if selection.derived:
        return matching
    named_apart = [topic for topic in matching if not is_derived(topic)]
    owned = await asyncio.gather(
        *(_is_owned(admin, topic, partitioned=str(topic) in partitioned) for topic in named_apart)
    )
    topics = [topic for topic, is_owned in zip(named_apart, owned, strict=True) if not is_owned]
    if matching and not topics:
        raise InvalidSpecError(
            "topicsPattern matches only retry topics, dead-letter topics or those beside them",
            got=[str(topic) for topic in matching[:5]],
            remedy="set includeDerivedTopics to true to read them",
        )
    return topics


async def _is_owned(admin: Admin, topic: TopicName, *, partitioned: bool) -> bool:
    """Return True if a topic has the mark of a RetryPolicy; False if the role may not read it."""
    try:
        metadata = await admin.metadata(topic, partitioned=partitioned)
    except (AdminForbiddenError, AdminNotFoundError):
        return False  # a read of the topic shows the error, if it is selected
    return bool(metadata.properties.get(TOPIC_OWNER))


async def _partitions(admin: Admin, topic: TopicName) -> list[TopicName]:
    if PARTITION_SUFFIX.search(topic.local):
        return [topic]
    count = await admin.partitions(topic)
    return [topic.partition(index) for index in range(count)] or [topic]


async def _extent(admin: Admin, topic: TopicName, subscription: str) -> Extent:
    stats = await admin.internal_stats(topic)
    existing = subscription if cursor_name(subscription) in stats["cursors"] else ""
    return Extent(topic, Partition.from_stats(_index(topic), stats, existing))


def _index(topic: TopicName) -> int:
    match = PARTITION_SUFFIX.search(topic.local)
    return UNPARTITIONED if match is None else int(match[1])


def _by_readers(client: broker.ReadingClient, selection: TopicSelection) -> Iterator[Extent]:
    for name in selection.names:
        with failures(f"look up {name}", "consume"):
            partitions = client.get_topic_partitions(str(name))
        for topic in map(TopicName.parse, partitions):
            ledger, entry = _last_entry(client, topic)
            ledgers = () if ledger < 0 else ((ledger, entry + 1),)
            yield Extent(topic, Partition(_index(topic), ledgers), complete=False)


def _last_entry(client: pulsar.Client, topic: TopicName) -> EntryId:
    with failures(f"open a reader on {topic}", "consume"):
        name = f"redrive-{secrets.token_hex(8)}"
        reader = client.open_entry_reader(topic, UNPARTITIONED, LATEST, name=name, ahead=1)
        with closing(reader):
            last = EntryId(*reader.last_entry())
            return NOWHERE if last.entry < 0 else last


class FollowingSubscription:
    """Acknowledges messages that a stream processed; keeps a consumer open for each partition.

    Args:
        topics: reader of the broker's topics.
        subscription: its name. If it is missing, it is created with all messages of the topic,
            provided that the broker creates subscriptions automatically.
    """

    def __init__(self, topics: TopicReader, subscription: str) -> None:
        self._opened = ExitStack()
        self._client = self._opened.enter_context(topics.client())
        self._subscription = subscription
        self._consumers: dict[TopicName, pulsar.Consumer] = {}

    def open(self, topic: TopicName) -> pulsar.Consumer:
        """Subscribe to a partition, once."""
        if topic not in self._consumers:
            with failures(f"subscribe as {self._subscription} to {topic}", "consume"):
                self._consumers[topic] = self._client.subscribe(
                    str(topic),
                    self._subscription,
                    initial_position=pulsar.InitialPosition.Earliest,
                    receiver_queue_size=0,  # it receives no messages
                )
        return self._consumers[topic]

    def keep(self, topic: TopicName, passed: EntryId, processed: EntryId) -> None:
        """Let the subscription retain *processed* and all later messages.

        Args:
            topic: a partition.
            passed: last acknowledged entry.
            processed: start of the stream.
        """
        consumer = self.open(topic)
        if passed >= processed:
            ledger, entry = processed
            first = pulsar.MessageId(UNPARTITIONED, ledger, entry, -1)
            with failures(f"move {self._subscription} of {topic} to {processed}", "consume"):
                consumer.seek(first if entry >= 0 else pulsar.MessageId.earliest)

    def acknowledge(self, processed: Offset) -> None:
        """Acknowledge all messages before the entries of *processed*."""
        for topic, position in processed.items():
            ledger, entry = position.entry_id
            if entry > 0:
                consumer = self.open(topic)
                with failures(f"acknowledge {position.entry_id} of {topic}", "consume"):
                    consumer.acknowledge_cumulative(
                        pulsar.MessageId(UNPARTITIONED, ledger, entry - 1, -1)
                    )

    def close(self) -> None:
        """Close all consumers, after their acknowledgements are sent."""
        self._opened.close()

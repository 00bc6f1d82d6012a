"""Contents of topics, and the subscription that follows a stream.

What the topics of a read hold now, as the broker tells.

With `admin.url` it tells each ledger; else a reader finds where each partition ends.

The subscription that follows a stream: it keeps what has not been processed, and shows it.

What has been read is in the query's checkpoint; nothing is read by the subscription. Of each
partition it keeps the last entry that was processed, too. As long as it stands before that, the
broker has deleted nothing of what follows; once it does not, as when messages expired, it may have.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from typing import Any

import pulsar

from redrive.admin.client import Admin
from redrive.admin.http import Http
from redrive.auth.files import source_credentials
from redrive.errors import RedriveError
from redrive.policy.naming import PARTITION_SUFFIX, TopicName, cursor_name, is_derived
from redrive.reading import broker
from redrive.reading.broker import UNPARTITIONED
from redrive.reading.positions import LATEST, NOWHERE, EntryId
from redrive.reading.ranges import Partition
from redrive.spark.options import InvalidOptionError, SourceConnection, TopicSelection
from redrive.spark.slices import Extent, Offset


class PulsarFailedError(RedriveError):
    """The broker refused what the data source asks of it, or can't be reached."""

    reason = "PulsarFailed"


@contextmanager
def failures(doing: str, right: str) -> Iterator[None]:
    """Name what failed: *doing*, for which the broker asks for *right*."""
    try:
        yield
    except pulsar.PulsarException as error:
        raise PulsarFailedError(
            f"the broker refused to {doing}, or did not answer",
            got=str(error) or type(error).__name__,
            remedy=f"check service.url and the credentials, whose role may {right} there if it is "
            "granted that; the client says of a refused token that it has timed out",
        ) from error


class TopicReader:
    """Asks the broker of a connection about topics; opens what it needs for each question.

    Raises:
        RedriveError: from each method: a credential, the broker, or the topic is not there.
    """

    def __init__(self, connection: SourceConnection) -> None:
        self._connection = connection
        self._credentials = source_credentials(connection.authentication)

    def extents(self, selection: TopicSelection, subscription: str = "") -> list[Extent]:
        """Return what each partition of the topics holds, each once, in order of their names.

        Args:
            selection: the topics.
            subscription: of which the broker tells how far it has come, if it is there.
        """
        if self._connection.admin_url is None:
            with self.client() as client:
                found = list(_by_readers(client, selection))
        else:
            found = asyncio.run(self._by_admin(selection, subscription))
        once = {each.topic: each for each in found}.values()
        return sorted(once, key=lambda of: (of.topic.without_partition(), of.partition.index))

    def held(self, topic: TopicName) -> frozenset[int]:
        """Return the ledgers of a partition, of which the admin API tells."""
        stats = asyncio.run(self._internal_stats(topic))
        return Partition.from_stats(UNPARTITIONED, stats, "").held

    def read_through(self, _admin_url: str, topic: TopicName, reader: str) -> EntryId | None:
        """Do what `snapshot.read_through` does."""
        return broker.served(asyncio.run(self._internal_stats(topic)), reader)

    def client(self) -> AbstractContextManager[broker.ReadingClient]:
        """Open a client, and close it with all it has opened."""
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
    topics = [topic for topic in matching if selection.derived or not is_derived(topic)]
    if matching and not topics:
        raise InvalidOptionError(
            "topicsPattern matches only retry topics, dead-letter topics or those beside them",
            got=[str(topic) for topic in matching[:5]],
            remedy="set includeDerivedTopics to true to read them",
        )
    return topics


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
    """Acknowledges what a stream has processed; keeps a consumer open for each partition.

    Args:
        of: the broker.
        subscription: its name. Where it is missing, it is created with all that the topic holds,
            if the broker creates subscriptions by itself.
    """

    def __init__(self, of: TopicReader, subscription: str) -> None:
        self._opened = ExitStack()
        self._client = self._opened.enter_context(of.client())
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
                    receiver_queue_size=0,  # it receives nothing
                )
        return self._consumers[topic]

    def keep(self, topic: TopicName, passed: EntryId, processed: EntryId) -> None:
        """Have the subscription keep what follows on *processed*, and that itself.

        Args:
            topic: a partition.
            passed: up to where it has acknowledged.
            processed: where the stream begins.
        """
        consumer = self.open(topic)
        if passed >= processed:
            ledger, entry = processed
            first = pulsar.MessageId(UNPARTITIONED, ledger, entry, -1)
            with failures(f"move {self._subscription} of {topic} to {processed}", "consume"):
                consumer.seek(first if entry >= 0 else pulsar.MessageId.earliest)

    def acknowledge(self, processed: Offset) -> None:
        """Acknowledge all before some entries; see above."""
        for topic, position in processed.items():
            ledger, entry = position.entry_id
            if entry > 0:
                consumer = self.open(topic)
                with failures(f"acknowledge {position.entry_id} of {topic}", "consume"):
                    consumer.acknowledge_cumulative(
                        pulsar.MessageId(UNPARTITIONED, ledger, entry - 1, -1)
                    )

    def close(self) -> None:
        """Close all that is open; acknowledgements go out before."""
        self._opened.close()

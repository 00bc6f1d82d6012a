"""Connections with the credentials of a role, and snapshots of a topic.

Connections to Pulsar with the replay role's credentials, see `credentials`.

Used in the driver and in Spark's Python workers. Those are forked, and a client that is inherited
by a fork hangs: so each task opens its own, and closes it.

What rests in a topic at one moment, and what of it is acknowledged already.

Taken of the dead-letter topic when a run is planned: messages that die again while it runs come
after that, so a run never chases its own failures. Taken of the target before a range is leased,
which fixes where a search for what the lease has stored begins.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from typing import Any, TypeVar

import pulsar

from redrive.admin.client import Admin
from redrive.admin.errors import (
    AdminConflictError,
    AdminError,
    AdminForbiddenError,
    AdminNotFoundError,
    BrokerFailedError,
    BrokerRefusedError,
    BrokerUnreachableError,
    refused_by_setting,
)
from redrive.admin.http import Http
from redrive.auth.files import BrokerCredentials, job_credentials
from redrive.auth.method import ShownCredentials
from redrive.errors import RedriveError
from redrive.messages import NotSentError
from redrive.policy.naming import TopicName
from redrive.reading.entries import EntryReader, OnMalformed
from redrive.reading.positions import EntryId
from redrive.reading.ranges import Partition
from redrive.reading.session import ProtocolError, Session
from redrive.reading.stored import MAX_CONTENT

WAIT_SECONDS = 300.0
"""So long a run waits for a broker that is away, as while it is restarted; or for another process
to lose the name of a producer."""
UNPARTITIONED = -1
"""Stands for the index of a partition where a topic has none."""

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class ReplayRoleRefusedError(RedriveError):
    """The broker does not let the replay role do its work."""

    reason = "ReplayRoleRefused"


class ReadingClient(pulsar.Client):  # type: ignore[misc]  # the client has no types
    """A client that reads topics others write to by the protocol itself.

    Args:
        service_url: of the cluster.
        shown: returns the credentials of one more session.
        options: of `pulsar.Client`.

    Attributes:
        on_malformed: see `EntryReader`.
    """

    def __init__(
        self,
        service_url: str,
        shown: Callable[[], ShownCredentials],
        **options: Any,  # noqa: ANN401  those of the client
    ) -> None:
        super().__init__(service_url, **options)
        self.on_malformed: OnMalformed | None = None
        self._service_url, self._shown = service_url, shown

    def open_entry_reader(  # noqa: PLR0913  as `EntryReader` takes them
        self,
        topic: TopicName,
        index: int,
        after: EntryId,
        *,
        name: str,
        ahead: int,
        compacted: bool = False,
        max_content: int = MAX_CONTENT,
    ) -> EntryReader:
        """Open a reader of one partition; see `EntryReader`.

        Raises:
            pulsar.PulsarException: the broker refuses, or can't be reached.
        """
        return EntryReader(
            lambda: Session(self._service_url, self._shown()),
            str(partition_of(topic, index)),
            index,
            after,
            name=name,
            ahead=ahead,
            on_malformed=self.on_malformed,
            compacted=compacted,
            max_content=max_content,
        )


@contextmanager
def connect(service_url: str, shown: BrokerCredentials | None = None) -> Iterator[ReadingClient]:
    """Open a client, and close it with all it has opened; it shows those of the job by default.

    Closing is no error, whatever the state of its connections.
    """
    quiet = pulsar.ConsoleLogger(pulsar.LoggerLevel.Warn)
    shown = shown or job_credentials()
    client = ReadingClient(service_url, shown.protocol, logger=quiet, **shown.client(service_url))
    try:
        yield client
    finally:
        with suppress(pulsar.PulsarException):  # a producer may wait for its receipts yet
            client.close()


@contextmanager
def refusals(doing: str, right: str) -> Iterator[None]:
    """Name what the broker refused to do: *doing*, for which it asks for *right*.

    Raises:
        AdminError: a setting of the Pulsar namespace is the reason, or a topic that is terminated.
        ReplayRoleRefusedError: any other reason.
    """
    try:
        yield
    except pulsar.Interrupted:
        raise  # the client's word for KeyboardInterrupt
    except pulsar.PulsarException as error:
        if by_setting := refused_by_setting(f"the broker refused to {doing}", str(error)):
            raise by_setting from error
        raise ReplayRoleRefusedError(
            f"the broker refused to {doing}",
            got=str(error),
            remedy=f"check that it can be reached, and that the replay role may {right} there",
        ) from error


OVER_QUOTA = (
    pulsar.ProducerBlockedQuotaExceededError,
    pulsar.ProducerBlockedQuotaExceededException,
)
"""Why a producer is not opened on a topic whose backlog is larger than it may be."""
_FOR_GOOD = (
    *OVER_QUOTA,  # which passes, but not within minutes
    pulsar.AuthenticationError,
    pulsar.AuthorizationError,
    pulsar.ConsumerBusy,  # others read from it as no Replay does
    pulsar.IncompatibleSchema,
    pulsar.InvalidTopicName,
    pulsar.NotAllowedError,
    pulsar.TopicNotFound,
    pulsar.TopicTerminated,
)
# While a topic goes from one broker to another, some refuse what they are asked, or see a conflict.
_PASSING = AdminConflictError, BrokerFailedError, BrokerRefusedError, BrokerUnreachableError


def opened(doing: str, right: str, open_: Callable[[], _T], seconds: float = WAIT_SECONDS) -> _T:
    """Open a producer, consumer or reader, as soon as the broker is there: see `waited`.

    Args:
        doing: see `refusals`.
        right: likewise.
        open_: opens it.
        seconds: see `waited`.
    """

    def attempt() -> _T:
        with refusals(doing, right):
            return open_()

    return waited(attempt, seconds)


def waited(call: Callable[[], _T], seconds: float = WAIT_SECONDS) -> _T:
    """Call again while the broker is away, for so many seconds.

    Raises:
        RedriveError: that of the last *call*, or the first that does not pass.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return call()
        except RedriveError as error:
            if not may_pass(error) or time.monotonic() > deadline:
                raise
            logger.warning("trying again: %s", error)
            time.sleep(1)


def may_pass(error: RedriveError) -> bool:
    """Whether to try again: a broker that is restarted, or a name that is taken yet."""
    if isinstance(error, AdminError):
        return isinstance(error, _PASSING)
    if not isinstance(error, ReplayRoleRefusedError | NotSentError):
        return False  # such as a ledger that another run has
    cause = error.__cause__
    return isinstance(cause, pulsar.PulsarException) and not isinstance(cause, _FOR_GOOD)


def check_producer(service_url: str, topic: TopicName) -> None:
    """Check that no setting keeps producers from *topic*, a partition or a topic without any.

    The client does not show the broker's words, and repeats for minutes what a setting refuses.

    Raises:
        AdminError: see `refused_by_setting`.
    """
    try:
        with closing(Session[None](service_url, job_credentials().protocol())) as session:
            session.open(str(topic), f"redrive-{secrets.token_hex(8)}")
    except ProtocolError as error:
        # All else, such as a broker that is away, is met again by whoever sends.
        if by_setting := refused_by_setting(
            f"the broker refused a producer on {topic}", str(error)
        ):
            raise by_setting from error


def acknowledger(client: pulsar.Client, topic: TopicName, subscription: str) -> pulsar.Consumer:
    """Open a consumer of a topic without partitions, or of one, that only acknowledges.

    Raises:
        ReplayRoleRefusedError: the role may not, or the broker is away.
    """
    return opened(
        f"open the subscription {subscription} of {topic}",
        "consume",
        lambda: client.subscribe(
            str(topic),
            subscription,
            consumer_type=pulsar.ConsumerType.Shared,
            # Without a queue it receives no message.
            receiver_queue_size=0,
            # If it was deleted this may create it again, which has to keep what rests.
            initial_position=pulsar.InitialPosition.Earliest,
        ),
    )


def close(handle: pulsar.Producer | pulsar.Consumer | pulsar.Reader | EntryReader) -> None:
    """Close *handle*, whatever the state of its connection."""
    with suppress(pulsar.PulsarException):
        handle.close()


def partition_of(topic: TopicName, index: int) -> TopicName:
    """Return the name to open: of one partition, or of the topic where it has none."""
    return topic if index == UNPARTITIONED else topic.partition(index)


def read_partitions(
    admin_url: str,
    topic: TopicName,
    subscription: str = "",
    shown: BrokerCredentials | None = None,
) -> tuple[Partition, ...]:
    """Do what `take_snapshot` does, where no event loop runs."""
    return asyncio.run(take_snapshot(admin_url, topic, subscription, shown))


def read_partition(
    admin_url: str, topic: TopicName, index: int, subscription: str = ""
) -> Partition:
    """Look at one partition; *index* is `broker.UNPARTITIONED` for a topic that has none.

    Raises:
        AdminError, SubscriptionMissingError: as for `take`.
    """
    stats = asyncio.run(_internal_stats(admin_url, partition_of(topic, index)))
    return Partition.from_stats(index, stats, subscription)


async def take_snapshot(
    admin_url: str,
    topic: TopicName,
    subscription: str = "",
    shown: BrokerCredentials | None = None,
) -> tuple[Partition, ...]:
    """Look at *topic* as it is now, with some credentials, by default those of the job.

    Raises:
        AdminError: the broker refuses to tell.
        SubscriptionMissingError: the topic has no such *subscription*.
    """
    async with _admin(admin_url, shown) as admin:
        count = await admin.partitions(topic)
        taken = []
        for index in range(count) if count else [UNPARTITIONED]:
            stats = await admin.internal_stats(partition_of(topic, index))
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
    async with _admin(admin_url) as admin:
        try:
            receivers = await admin.receivers(topic, partitioned=partitions > 0)
        except (AdminNotFoundError, AdminForbiddenError):
            return False
    return receivers.has(subscription) if subscription else all(receivers.parts)


def read_properties(admin_url: str, topic: TopicName, partitions: int) -> Mapping[str, str]:
    """Return the properties of a topic, with the replay role's own credentials.

    Args:
        admin_url: of the broker.
        topic: the whole topic.
        partitions: number of its partitions, 0 for none.

    Raises:
        AdminError: the broker does not answer, or refuses.
    """
    return asyncio.run(_properties(admin_url, topic, partitions))


async def _properties(admin_url: str, topic: TopicName, partitions: int) -> Mapping[str, str]:
    async with _admin(admin_url) as admin:
        return (await admin.metadata(topic, partitioned=partitions > 0)).properties


async def _internal_stats(admin_url: str, topic: TopicName) -> Mapping[str, Any]:
    async with _admin(admin_url) as admin:
        return await admin.internal_stats(topic)


@asynccontextmanager
async def _admin(admin_url: str, shown: BrokerCredentials | None = None) -> AsyncIterator[Admin]:
    """Open the admin API with some credentials, by default those of the job."""
    async with Http.open() as http:
        access = await asyncio.to_thread((shown or job_credentials()).access)
        yield Admin(http, admin_url, access)

"""Connections with the credentials of a role, and snapshots of a topic.

Connections are used in the driver and in Spark's Python workers. Workers are forked, and an
inherited client hangs in a forked process, so each task opens and closes its own.

A snapshot contains the messages of a topic at one moment, and their acknowledgements. The snapshot
of the dead-letter topic is taken when a run is planned: messages that are dead-lettered during the
run come after it. The snapshot of the target is taken before a range is leased: a search for
messages that the lease has stored begins there.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import Any, TypeVar

import pulsar

from redrive.admin import errors
from redrive.admin.client import Admin
from redrive.admin.http import Http
from redrive.auth.files import BrokerCredentials, job_credentials
from redrive.auth.method import ShownCredentials
from redrive.errors import RedriveError
from redrive.messages import NotSentError
from redrive.policy.naming import TopicName
from redrive.reading.entries import EntryReader, OnChunk, OnMalformed
from redrive.reading.positions import EntryId
from redrive.reading.ranges import Partition
from redrive.reading.session import ProtocolError, Session
from redrive.reading.stored import MAX_READ_CONTENT
from redrive.reasons import Reason

WAIT_SECONDS = 300.0
"""Time for which a run waits for an unreachable broker, for example during a restart, or until
another process releases the name of a producer."""
UNPARTITIONED = -1
"""Index of the partition of a topic without partitions."""

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class ReplayRoleRefusedError(RedriveError):
    """The broker refuses an operation of the replay role."""

    reason = "ReplayRoleRefused"


class ReadingClient(pulsar.Client):  # type: ignore[misc]  # the client has no types
    """A client that reads topics of other writers by the binary protocol.

    Args:
        service_url: of the cluster.
        shown: returns the credentials of a new session.
        options: of `pulsar.Client`.

    Attributes:
        service_url: of the cluster.
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
        self.service_url, self._shown = service_url, shown

    def open_entry_reader(  # noqa: PLR0913  as `EntryReader` takes them
        self,
        topic: TopicName,
        index: int,
        after: EntryId,
        *,
        name: str,
        ahead: int,
        compacted: bool = False,
        max_content: int = MAX_READ_CONTENT,
        on_chunk: OnChunk | None = None,
    ) -> EntryReader:
        """Open a reader of one partition; see `EntryReader`.

        Raises:
            pulsar.PulsarException: the broker refuses, or is unreachable.
        """
        return EntryReader(
            lambda: Session(self.service_url, self._shown()),
            str(partition_of(topic, index)),
            index,
            after,
            name=name,
            ahead=ahead,
            on_malformed=self.on_malformed,
            compacted=compacted,
            max_content=max_content,
            on_chunk=on_chunk,
        )


@contextmanager
def connect(service_url: str, shown: BrokerCredentials | None = None) -> Iterator[ReadingClient]:
    """Open a client, and close it with its producers and readers.

    The credentials default to those of the job. Closing raises no exception. If no thread can
    start, the client stays open, because it would wait permanently for the one that closes it.
    """
    quiet = pulsar.ConsoleLogger(pulsar.LoggerLevel.Warn)
    shown = shown or job_credentials()
    client = ReadingClient(service_url, shown.protocol, logger=quiet, **shown.client(service_url))
    try:
        yield client
    finally:
        if _starts_threads():
            with suppress(pulsar.PulsarException):  # a producer may still wait for receipts
                client.close()


def _starts_threads() -> bool:
    thread = threading.Thread(target=int)
    try:
        thread.start()
    except (MemoryError, RuntimeError):
        return False
    thread.join()  # before another one needs its memory
    return True


@contextmanager
def refusals(doing: str, right: str) -> Iterator[None]:
    """Convert a refusal of the broker to do *doing*, which needs *right*, to an error.

    Raises:
        AdminError: a setting of the Pulsar namespace, or a terminated topic, is the cause.
        ReplayRoleRefusedError: any other cause.
    """
    try:
        yield
    except pulsar.Interrupted:
        raise  # the client's KeyboardInterrupt
    except pulsar.PulsarException as error:
        if by_setting := errors.refused_by_setting(f"the broker refused to {doing}", str(error)):
            raise by_setting from error
        remedy = f"check that the broker is reachable and that the replay role may {right} there"
        reason = None
        if isinstance(error, OVER_QUOTA):
            remedy, reason = _RAISE_QUOTA, Reason.LIMIT_REACHED
        elif isinstance(error, pulsar.ConsumerBusy):
            remedy = (
                "stop consumers of another subscription type, or raise maxConsumersPerTopic and "
                "maxConsumersPerSubscription of the topic, its namespace and the broker"
            )
        raise ReplayRoleRefusedError(
            f"the broker refused to {doing}", got=str(error), remedy=remedy, reason=reason
        ) from error


OVER_QUOTA = (
    pulsar.ProducerBlockedQuotaExceededError,
    pulsar.ProducerBlockedQuotaExceededException,
)
"""Refusals of a producer on a topic whose backlog exceeds its quota."""
_RAISE_QUOTA = (
    "process or delete messages of the topic, or raise its backlog quota by size or by age, which "
    "the topic, its Pulsar namespace or the broker sets (pulsar-admin namespaces "
    "get-backlog-quotas), and repeat the run"
)
_FOR_GOOD = (
    *OVER_QUOTA,  # passes, but not within minutes
    pulsar.AuthenticationError,
    pulsar.AuthorizationError,
    pulsar.ConsumerBusy,  # other consumers of another type
    pulsar.IncompatibleSchema,
    pulsar.InvalidTopicName,
    pulsar.NotAllowedError,
    pulsar.TopicNotFound,
    pulsar.TopicTerminated,
)
# While a topic moves to another broker, calls may be refused, or conflict.
_PASSING = (
    errors.AdminConflictError,
    errors.BrokerFailedError,
    errors.BrokerRefusedError,
    errors.BrokerUnreachableError,
)


def opened(doing: str, right: str, open_: Callable[[], _T], seconds: float = WAIT_SECONDS) -> _T:
    """Open a producer, consumer or reader when the broker is reachable; see `waited`.

    Args:
        doing: see `refusals`.
        right: see `refusals`.
        open_: opens it.
        seconds: see `waited`.
    """

    def attempt() -> _T:
        with refusals(doing, right):
            return open_()

    return waited(attempt, seconds)


def waited(call: Callable[[], _T], seconds: float = WAIT_SECONDS) -> _T:
    """Repeat *call* while the broker is unreachable, for so many seconds.

    Raises:
        RedriveError: the error of the last *call*, or the first permanent one.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return call()
        except RedriveError as error:
            if not may_pass(error) or time.monotonic() > deadline:
                raise
            logger.warning("retrying: %s", error)
            time.sleep(1)


def may_pass(error: RedriveError) -> bool:
    """Return True for a transient error: a broker restarts, or a name is still in use."""
    if isinstance(error, errors.AdminError):
        return isinstance(error, _PASSING)
    if not isinstance(error, ReplayRoleRefusedError | NotSentError):
        return False  # for example a ledger of another run
    cause = error.__cause__
    return isinstance(cause, pulsar.PulsarException) and not isinstance(cause, _FOR_GOOD)


def check_producer(service_url: str, topic: TopicName) -> None:
    """Check that no setting excludes producers from *topic*, a partition or an unpartitioned topic.

    The client hides the broker's message, and repeats a refused request for minutes.

    Raises:
        AdminError: see `refused_by_setting`.
    """
    try:
        with closing(Session[None](service_url, job_credentials().protocol())) as session:
            session.open(str(topic), f"redrive-{secrets.token_hex(8)}")
    except ProtocolError as error:
        # Other errors, such as an unreachable broker, occur again when messages are sent.
        if by_setting := errors.refused_by_setting(
            f"the broker refused a producer on {topic}", str(error)
        ):
            raise by_setting from error


def acknowledger(client: pulsar.Client, topic: TopicName, subscription: str) -> pulsar.Consumer:
    """Open a consumer of a partition, or of an unpartitioned topic, that only acknowledges.

    Raises:
        ReplayRoleRefusedError: the role has no right, or the broker is unreachable.
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
            # If it was deleted, this may create it again; it must keep pending messages.
            initial_position=pulsar.InitialPosition.Earliest,
        ),
    )


def close(handle: pulsar.Producer | pulsar.Consumer | pulsar.Reader | EntryReader) -> None:
    """Close *handle* without an exception."""
    with suppress(pulsar.PulsarException):
        handle.close()


def partition_of(topic: TopicName, index: int) -> TopicName:
    """Return the name of a partition, or of the topic if it has none."""
    return topic if index == UNPARTITIONED else topic.partition(index)


def read_partitions(
    admin_url: str,
    topic: TopicName,
    subscription: str = "",
    shown: BrokerCredentials | None = None,
) -> tuple[Partition, ...]:
    """Return the partitions of *topic* at this moment; *shown* defaults to the job's credentials.

    Raises:
        AdminError: the broker refuses.
        RedriveError: the topic has no such *subscription*.
    """

    async def read(admin: Admin) -> tuple[Partition, ...]:
        taken = []
        for index in range(await admin.partitions(topic)) or [UNPARTITIONED]:
            partition = partition_of(topic, index)
            stats = await admin.internal_stats(partition)
            taken.append(Partition.from_stats(index, stats, subscription, partition))
        return tuple(taken)

    return _asked(admin_url, read, shown)


def read_partition(
    admin_url: str, topic: TopicName, index: int, subscription: str = ""
) -> Partition:
    """Return one partition; *index* is `broker.UNPARTITIONED` for an unpartitioned topic.

    Raises:
        RedriveError: as for `read_partitions`.
    """
    partition = partition_of(topic, index)
    stats = _asked(admin_url, lambda admin: admin.internal_stats(partition))
    return Partition.from_stats(index, stats, subscription, partition)


def read_through(
    admin_url: str, topic: TopicName, reader: str, shown: BrokerCredentials | None = None
) -> EntryId | None:
    """Return the last entry that the broker has read for a reader; None for an unknown reader.

    Args:
        admin_url: of the broker.
        topic: a partition, or an unpartitioned topic.
        reader: prefix of its name. Of several connections the least advanced counts.
        shown: credentials; those of the job by default.

    Raises:
        AdminError: the broker refuses.
    """
    return served(_asked(admin_url, lambda admin: admin.internal_stats(topic), shown), reader)


def served(stats: Mapping[str, Any], reader: str) -> EntryId | None:
    """Return the result of `read_through` from a broker's `internalStats`."""
    cursors = stats["cursors"].items()
    positions = [cursor["readPosition"] for name, cursor in cursors if name.startswith(reader)]
    following = min(map(EntryId.parse, positions), default=None)
    return None if following is None else EntryId(following.ledger, following.entry - 1)


def is_subscribed(admin_url: str, topic: TopicName, partitions: int, subscription: str) -> bool:
    """Return True if each partition of *topic* keeps its messages for an application.

    Without a durable subscription the broker deletes stored messages. A deleted topic, for which
    the role has no right any more, keeps none either.

    Args:
        admin_url: of the broker.
        topic: the whole topic.
        partitions: number of its partitions, 0 for none.
        subscription: required subscription; empty for any.

    Raises:
        AdminError: the broker does not answer.
    """
    try:
        receivers = _asked(
            admin_url, lambda admin: admin.receivers(topic, partitioned=partitions > 0)
        )
    except (errors.AdminNotFoundError, errors.AdminForbiddenError):
        return False
    return receivers.retain_for(subscription)


def has_open_transaction(admin_url: str, topic: TopicName) -> bool:
    """Return True if a transaction is open in *topic*, a partition or a topic without.

    Raises:
        AdminError: the broker does not answer, or refuses.
    """
    with suppress(errors.AdminNotFoundError):
        return _asked(admin_url, lambda admin: admin.has_open_transaction(topic))
    return False


def read_properties(admin_url: str, topic: TopicName, partitions: int) -> Mapping[str, str]:
    """Return the properties of a topic, with the replay role's own credentials.

    Args:
        admin_url: of the broker.
        topic: the whole topic.
        partitions: number of its partitions, 0 for none.

    Raises:
        AdminError: the broker does not answer, or refuses.
    """
    read = _asked(admin_url, lambda admin: admin.metadata(topic, partitioned=partitions > 0))
    return read.properties


def _asked(
    admin_url: str,
    read: Callable[[Admin], Awaitable[_T]],
    shown: BrokerCredentials | None = None,
) -> _T:
    """Return the result of *read*; the credentials default to those of the job."""
    access = (shown or job_credentials()).access()

    async def ask() -> _T:
        async with Http.open() as http:
            return await read(Admin(http, admin_url, access))

    return asyncio.run(ask())

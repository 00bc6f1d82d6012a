"""Inspection of a consumer's subscriptions, before the client decodes their entries.

The client for Python ends its process at many malformed entries: those whose content differs from
their metadata. It decodes ahead of the handlers, so no in-flight message is to blame, and the entry
comes first after each restart. The crash log counts processes that were killed in a row.
After more than `CrashLog.max_redeliveries` of them the next one inspects the subscriptions of the
source and the retry topic. It consumes each partition with the protocol itself, as the client would
do, so the broker delivers what it would deliver to the client. A malformed entry is dead-lettered
with all its bytes, and acknowledged once the dead letter is stored; a crash in between stores it
twice. All other entries stay unacknowledged, and the broker delivers them to the client again.

An entry that ends the inspection each time, for example by the memory it takes, is malformed too:
the crash log contains the entry that is being checked.

Several processes may inspect at a time: the broker delivers an entry to one of them. A chunk whose
predecessors went to another process, or were acknowledged, is not malformed: the client drops it.
"""

from __future__ import annotations

import functools
import ssl
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import cast

import pulsar

from redrive.auth.method import ShownCredentials
from redrive.delivery.concurrency import CLOSE_TIMEOUT, Deadline, ends_run, identity, log_of
from redrive.delivery.forwarder import Producers
from redrive.delivery.middleware.poison_guard import CrashLogFile
from redrive.delivery.parts import Clock, CrashLog, Subscribing
from redrive.delivery.reporting import Event, Events, Name
from redrive.errors import RedriveError
from redrive.messages import id_text
from redrive.policy import envelope
from redrive.policy.model import Policy, SubscriptionType
from redrive.policy.naming import TopicName
from redrive.policy.values import text_of
from redrive.policy.verdict import DeadReason
from redrive.reading import frames
from redrive.reading.entries import (
    ChunksRead,
    EntryReader,
    MissingChunkError,
    read_place,
)
from redrive.reading.frames import Command
from redrive.reading.metadata import decode_entry
from redrive.reading.positions import NOWHERE
from redrive.reading.session import ProtocolConnection, ProtocolError, Session, refusal
from redrive.reading.stored import (
    MalformedEntryError,
    MessagePlace,
    Place,
    ReadMessage,
    StoredEntry,
)

MALFORMED_ENTRY = "MalformedEntry"
"""The cause of such dead letters."""
MAX_ENTRIES = 10_000
"""So many entries of a partition are inspected: more than the client had received and not settled,
which the broker delivers first."""
MAX_SECONDS = 60.0
IDLE_SECONDS = 3.0
"""A partition is inspected once nothing comes for so long, after its last entry."""
LATE_SECONDS = 10.0
"""Without the last entry the broker has so long: it may be delayed, or with another consumer."""
_NOTHING_FOUND = (
    "; if processes are killed again, the broker withholds an entry from the inspection, such as a "
    "chunk of a killed consumer: list and remove it with python -m redrive.replay.harmful"
)
_PERMITS = 100
_THREADS = 16
_NUMBER = 1
_ERROR = 4
"""A field of an ACK_RESPONSE."""
_LAST, _MARK_DELETE = 1, 3
"""Fields of a LAST_MESSAGE_ID_RESPONSE."""
_KINDS = {
    SubscriptionType.EXCLUSIVE: frames.EXCLUSIVE,
    SubscriptionType.SHARED: frames.SHARED,
    SubscriptionType.FAILOVER: frames.FAILOVER,
    SubscriptionType.KEY_SHARED: frames.KEY_SHARED,
}

logger = log_of(__name__)


@dataclass(frozen=True)
class Inspection:
    """Inspection of the subscriptions of one policy.

    Attributes:
        client: of the consumer that is about to start.
        log_file: that of *crash_log*.
    """

    client: pulsar.Client
    policy: Policy
    subscribing: Subscribing
    crash_log: CrashLog
    log_file: CrashLogFile
    events: Events
    clock: Clock

    def run(self) -> None:
        """Dead-letter the malformed entries that the subscriptions deliver.

        An inspection that fails is logged as an error, and repeated by the next process if this one
        is killed too. If it is complete, the crash log counts deaths from 0.
        """
        logger.warning(
            "%d processes in a row were killed, so the entries of %s and %s are inspected before "
            "the client decodes them",
            self.log_file.deaths, self.policy.topic, self.policy.retry_topic,
        )  # fmt: skip
        name, crypto = self.subscribing.name, self.subscribing.crypto
        producers = Producers(self.client, name=name, crypto=crypto)
        try:
            partitions = self._partitions(producers)
            with ThreadPoolExecutor(min(_THREADS, len(partitions))) as threads:
                malformed = sum(threads.map(PartitionInspection.run, partitions))
            self.log_file.inspected(malformed)
            logger.warning(
                "the inspection is complete: %d malformed entries%s",
                malformed, "" if malformed else _NOTHING_FOUND,
            )  # fmt: skip
        except pulsar.Interrupted:
            raise  # the client's word for KeyboardInterrupt
        except (ProtocolError, RedriveError, pulsar.PulsarException, OSError) as error:
            logger.error(  # noqa: TRY400 - the line has all that helps
                "the entries could not be inspected, and one of them may kill this process; got "
                "%s; check that crash_log= has the token or the certificate of this consumer's "
                "role, and that the broker answers",
                error,
            )
        finally:
            producers.close(Deadline(CLOSE_TIMEOUT))

    def _partitions(self, producers: Producers) -> list[PartitionInspection]:
        connect = functools.partial(Session[None], *access(self.client, self.crash_log))
        kinds = {
            self.policy.topic: _KINDS[self.policy.subscription_type],
            self.policy.retry_topic: frames.SHARED,
        }
        return [
            PartitionInspection(self, producers, connect, partition, index, kind)
            for topic, kind in kinds.items()
            for index, partition in self._names(topic)
        ]

    def _names(self, topic: TopicName) -> Iterable[tuple[int, str]]:
        """Return the names of the partitions by their indexes; -1 for a topic without."""
        names: list[str] = self.client.get_topic_partitions(str(topic))
        return [(-1, str(topic))] if names == [str(topic)] else enumerate(names)


def access(client: pulsar.Client, crash_log: CrashLog) -> tuple[str, ShownCredentials]:
    """Return the address of the cluster, and the credentials to show there.

    Raises:
        OSError: a certificate, or the trusted authorities, can't be read; later, the function of
            the token fails.
    """
    service = client.get_service_info()
    tls, method, token = None, "", crash_log.token
    if service.use_tls:
        tls = ssl.create_default_context(cafile=service.tls_trust_certs_file_path or None)
    if crash_log.certificate is not None:
        method = "tls"
        if tls is not None:
            tls.load_cert_chain(*crash_log.certificate)
    elif token is not None:
        method = "token"
    show = functools.partial(_token_of, token if callable(token) else lambda: token or "")
    return service.service_url, ShownCredentials(method, show, tls)


def _token_of(function: Callable[[], object]) -> str:
    """Return the result of a *function* of the program.

    Raises:
        OSError: it raises an exception, or returns no text.
    """
    try:
        token = function()
    except BaseException as error:
        if ends_run(error):
            raise
        raise OSError(f"the function token= of crash_log= raised {type(error).__name__}") from error
    text = text_of(token)
    if text is None:
        raise OSError(f"the function token= of crash_log= returned {type(token).__name__}")
    return text


def open_record_reader(client: pulsar.Client, crash_log: CrashLog, topic: TopicName) -> EntryReader:
    """Open a reader of compacted records, which skips entries that the client cannot decode.

    Raises:
        pulsar.PulsarException: the broker refuses, or is unreachable.
        OSError: see `access`.
    """
    return EntryReader(
        lambda: Session[None](*access(client, crash_log)),
        str(topic), -1, NOWHERE, name=identity(), ahead=_PERMITS, compacted=True,
    )  # fmt: skip


@dataclass(frozen=True)
class PartitionInspection:
    """Inspection of the subscription of one partition, or of a topic without partitions.

    Attributes:
        connect: opens a session with the cluster.
        partition: its name.
        index: its number; -1 for a topic without partitions.
        kind: the type of the subscription.
    """

    inspection: Inspection
    producers: Producers
    connect: Callable[[], Session[None]]
    partition: str
    index: int
    kind: int
    _chunks: ChunksRead = field(default_factory=ChunksRead)

    def run(self) -> int:
        """Dead-letter the malformed entries that come, and return their number.

        Raises:
            ProtocolError: the broker refuses, or is away.
            NotSentError: a dead letter was not stored; its entry stays.
            OSError: the crash log can't be written.
        """
        entries, malformed, deadline = 0, 0, time.monotonic() + MAX_SECONDS
        subscription = self.inspection.policy.subscription
        with closing(self.connect()) as session:
            connection = session.connection_for(self.partition)
            connection.ask(
                lambda request: frames.consume(
                    self.partition, request, _NUMBER, subscription, self.kind
                ),
                frames.SUCCESS,
            )
            last = _last_pending(connection)
            connection.write(frames.flow(_NUMBER, _PERMITS))
            idle = IDLE_SECONDS if last is None else LATE_SECONDS
            while entries < MAX_ENTRIES and time.monotonic() < deadline:
                if not (commands := connection.read(idle)):
                    break
                for command in commands:
                    if command.kind == frames.CLOSE_CONSUMER:
                        raise ProtocolError("the broker has closed the consumer")
                    if command.kind == frames.MESSAGE:
                        entries += 1
                        if command.place == last:
                            idle = IDLE_SECONDS
                        malformed += self._inspect(connection, command)
        return malformed

    def _inspect(self, connection: ProtocolConnection, command: Command) -> bool:
        """Check an entry, and remove it if it is malformed; return True if it was."""
        place = command.place
        log_file, key = self.inspection.log_file, "entry:{}:{}:{}".format(*place, self.partition)
        messages, cause = 1, ""
        if (crashes := log_file.crashes(key)) > self.inspection.crash_log.max_redeliveries:
            cause = f"{crashes} processes were killed while they inspected it"
        else:
            log_file.begin(key)
            try:
                entry = StoredEntry.read(command.entry)
                messages = entry.messages
                self._check(place, entry)
            except MissingChunkError:
                pass
            except MalformedEntryError as error:
                cause = str(error)
        if cause:
            self._remove(connection, place, command.entry, cause)
        log_file.end(key)
        if messages > 0:  # as the broker counts it, which may be billions
            connection.write(frames.flow(_NUMBER, messages))
        return bool(cause)

    def _check(self, place: Place, entry: StoredEntry) -> None:
        """Decode an entry; of a chunk, the whole message with its last one.

        Raises:
            MalformedEntryError: it can't be decoded.
        """
        chunk = entry.chunk
        if chunk is None:
            entry.of(entry.content, (place,), self.index)
        elif (whole := self._chunks.add(chunk, place, entry.content)) and whole.content is not None:
            entry.of(whole.content, whole.entries, self.index)

    def _remove(
        self, connection: ProtocolConnection, place: Place, stored: bytes, cause: str
    ) -> None:
        """Dead-letter an entry, or discard it as the policy asks, and acknowledge it."""
        policy = self.inspection.policy
        message = _Entry(self.partition, MessagePlace(self.index, (place,)), stored)
        entry_id = id_text(message.message_id())
        receipt = None
        if policy.dead_letters:
            now, name = self.inspection.clock.now(), self.inspection.subscribing.name
            properties = {
                **dead_letter_properties(policy.topic, policy.subscription, entry_id),
                envelope.RETRY_TOPIC: str(policy.retry_topic),
                **envelope.Cause(MALFORMED_ENTRY, cause, now, name, attempt=1).to_properties(),
            }
            receipt = self.producers.send(
                policy.dead_letter_topic, cast("pulsar.Message", message), properties, None
            )
        answer = connection.ask(
            lambda request: frames.acknowledge(_NUMBER, request, place), frames.ACK_RESPONSE
        )
        if _ERROR in answer.numbers:
            raise refusal(answer)
        self._report(entry_id, cause, receipt)

    def _report(self, entry_id: str, cause: str, receipt: pulsar.MessageId | None) -> None:
        policy = self.inspection.policy
        event = Event(
            Name.DEAD_LETTERED if policy.dead_letters else Name.DISCARDED,
            origin=entry_id, message_id=entry_id, attempt=1, generation=policy.generation,
            source=str(policy.topic), subscription=policy.subscription,
            topic=str(policy.dead_letter_topic) if policy.dead_letters else "",
            new_id="" if receipt is None else id_text(receipt),
            reason=MALFORMED_ENTRY, policy=policy.name,
        )  # fmt: skip
        self.inspection.events.report(
            event, "removed the malformed entry %s of %s: %s", entry_id, self.partition, cause
        )


def _last_pending(connection: ProtocolConnection) -> Place | None:
    """Return the last entry of the topic; None if all are acknowledged."""
    answer = connection.ask(
        lambda request: frames.last_message_id(request, _NUMBER), frames.LAST_MESSAGE_ID_RESPONSE
    )
    last = read_place(answer.nested.get(_LAST, b""))
    return None if read_place(answer.nested.get(_MARK_DELETE, b"")) >= last else last


def dead_letter_properties(topic: TopicName, subscription: str, entry_id: str) -> dict[str, str]:
    """Return the properties that mark a dead letter as an entry, and tell its origin."""
    return {
        envelope.DEAD_REASON: DeadReason.NOT_COPYABLE,
        envelope.NOT_COPIED: MALFORMED_ENTRY,
        envelope.REAL_TOPIC: str(topic),
        envelope.REAL_SUBSCRIPTION: subscription,
        envelope.ORIGIN_MESSAGE_ID: entry_id,
        envelope.SOURCE_MESSAGE_ID: entry_id,
    }


class _Entry(ReadMessage):
    """All bytes of an entry, as a message without properties, key and schema."""

    def __init__(self, topic: str, place: MessagePlace, stored: bytes) -> None:
        super().__init__(place, decode_entry(b""), (), stored)
        self._topic = topic

    def topic_name(self) -> str:
        """Return the topic, or partition, it lies in."""
        return self._topic

"""Protocols of the parts of a consumer, and options of consumers and producers.

`connection` assembles the parts at a broker, from `fetcher`, `forwarder` and the consumers of the
client; `testing` does so in memory. Both hand out `Postponed` messages again. `Crypto` is the
option `crypto=`. `CrashLog` is read by `poison_guard`, which a consumer without a crash log never
imports.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import pulsar
import pulsar.schema

from redrive.delivery.concurrency import Deadline, all_within
from redrive.errors import InvalidSpecError
from redrive.messages import BYTES
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.policy.values import check_count, check_instance, text_of

if TYPE_CHECKING:
    from redrive.delivery.run import Run
    from redrive.policy.sequences import Sequences


MAX_IN_FLIGHT_BYTES = 128 * 1024 * 1024


class Clock(Protocol):
    """Source of the time."""

    def now(self) -> datetime:
        """Return the time of day with a time zone, for records."""

    def monotonic(self) -> float:
        """Return seconds since a fixed moment, for waits."""


class SystemClock:
    """The clock of this machine."""

    def now(self) -> datetime:
        """Return the time of day in UTC."""
        return datetime.now(UTC)  # noqa: TID251 - the only clock of consumers

    monotonic = staticmethod(time.monotonic)


class Subscription(Protocol):
    """A subscription of the client, which settles its messages."""

    def acknowledge(self, message: pulsar.Message) -> None:
        """Acknowledge the message."""

    def negative_acknowledge(self, message: pulsar.Message) -> None:
        """Request the redelivery of the message after the delay of the subscription."""


class Incoming(Protocol):
    """All subscriptions as one stream; see `fetcher.Fetcher`."""

    @property
    def received(self) -> int:
        """Return the number of messages received from the client."""

    @property
    def waiting(self) -> deque[pulsar.Message]:
        """Return messages that could be taken after one that was `ready`, without waiting."""

    @property
    def connected(self) -> bool:
        """Return True if each topic has a connection to the broker."""

    @property
    def disconnected_since(self) -> float:
        """Return the moment at which the first topic lost its connection; now if all have one."""

    def watch(self, seconds: float, report: Callable[[str, bool, float], None]) -> None:
        """Report each connection that is lost for so many *seconds*, and its recovery."""

    def recover(
        self,
        may: Callable[[], bool],
        recovered: Callable[[str], None],
        remove: Callable[[pulsar.Message, int], None],
    ) -> None:
        """Request the redelivery of messages that the client has dropped, when it *may*.

        Args:
            remove: settles an entry that can't be decrypted, and states so many messages.
        """

    def watch_clock(self, report: Callable[[str, float], None]) -> None:
        """Report that the clock of this host is ahead of the broker's; see `EarlyRetries`."""

    def take(self, timeout: float | None = None) -> pulsar.Message | None:
        """Return the next message, or None after *timeout* seconds without one."""

    def ready(self) -> pulsar.Message | None:
        """Return the next message if that takes no waiting."""

    def hold_new(self, holder: object, *, held: bool) -> None:
        """Deliver only returned messages, no new ones, while any *holder* has *held* set."""

    def pause(self) -> None:
        """Deliver no messages until `resume`."""

    def resume(self) -> None:
        """Deliver messages again."""

    def again(self, message: pulsar.Message, seconds: float) -> None:
        """Deliver *message* again after so many seconds; it stays unacknowledged."""

    def hasten(self, message: pulsar.Message) -> None:
        """Deliver *message* at once if it waits to be delivered again."""

    def sleep(self, seconds: float) -> None:
        """Wait, at most until `stop`."""

    def stop(self) -> None:
        """Deliver no more messages."""

    def close(self, deadline: Deadline) -> None:
        """Return unsettled messages to the broker."""


_Moment = TypeVar("_Moment", float, datetime)


class Postponed(list[tuple[_Moment, int, pulsar.Message]], Generic[_Moment]):
    """Messages to deliver again, as a heap: by the moment at which each is due, then in order."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count()

    @property
    def due(self) -> _Moment | None:
        """Return the moment at which the first message is due; None if there is none."""
        return self[0][0] if self else None

    def add(self, message: pulsar.Message, due: _Moment) -> None:
        """Add a message."""
        heapq.heappush(self, (due, next(self._numbers), message))

    def hasten(self, message: pulsar.Message, now: _Moment) -> None:
        """Make *message* due now, if it is one of them."""
        self[:] = [(now if one is message else due, n, one) for due, n, one in self]
        heapq.heapify(self)

    def pop_first(self) -> pulsar.Message:
        """Remove the first message, and return it."""
        return heapq.heappop(self)[2]


class Outgoing(Protocol):
    """Producers for the retry and the dead-letter topic; see `forwarder.Producers`."""

    def send(
        self,
        topic: TopicName,
        message: pulsar.Message,
        properties: dict[str, str],
        deliver_after: timedelta | None,
    ) -> pulsar.MessageId | None:
        """Store a copy with *properties*, and return its id; None if it was stored before."""

    def stop(self) -> None:
        """Stop repeating sends to topics to which a send has failed."""

    def close(self, deadline: Deadline) -> None:
        """Close all producers."""


class SequenceLog(Protocol):
    """Records of the sequenced dead letters of a policy, shared by all its consumers.

    Attributes:
        sequences: records at the last call.
    """

    sequences: Sequences

    def read(self) -> None:
        """Read all stored records.

        Raises:
            NotSentError: the broker does not answer.
        """

    def write(self, name: str, content: bytes) -> None:
        """Store a record, and read it; an empty *content* removes the record of that *name*.

        Raises:
            NotSentError: the broker sent no receipt.
        """

    def close(self, deadline: Deadline) -> None:
        """Close all producers."""


class OutageReporter(Protocol):
    """Publishes in the broker's statistics why a consumer is paused, or a key waits."""

    def show(self, name: str, value: str) -> None:
        """Publish *value* in place of the previous one of that name; nothing if it is empty."""

    def close(self) -> None:
        """Publish nothing any more."""


class AnyTimer(Protocol):
    """Timer with changing times; see `concurrency.Timer`."""

    closing: bool

    def reschedule(self) -> None:
        """Read the next time again."""

    def close(self) -> None:
        """Stop the timer."""


MakeTimer = Callable[[Callable[[], float | None], Callable[[], None]], AnyTimer]


@dataclass(frozen=True)
class Parts:
    """All parts of one consumer.

    Attributes:
        timer: makes a timer; see `concurrency.Timer`.
        work: runs the workers of a `Run` until the consumer is stopped.
        linger: seconds in which further messages follow a first one.
        behind: highest number of messages before a waiting copy of a received message; 0 if no
            message waits after a lost connection.
        nack_seconds: delay of redeliveries after a negative acknowledgement.
        max_in_flight_bytes: payload bytes of in-flight messages at which no new ones are taken.
        sequence_log: records of policies with sequenced dead letters.
    """

    clock: Clock
    subscriptions: Mapping[TopicName, Subscription]
    incoming: Incoming
    outgoing: Outgoing
    timer: MakeTimer
    work: Callable[[Run], None]
    linger: float
    outage_reporter: OutageReporter
    nack_seconds: float
    max_in_flight_bytes: int
    sequence_log: SequenceLog | None = None
    behind: int = 0

    def stop(self) -> None:
        """Deliver no more messages, and settle in-flight ones; may be called in a signal handler.

        Messages that cannot be sent on are left to the next consumer.
        """
        self.outgoing.stop()
        self.incoming.stop()

    def close(self, deadline: Deadline) -> None:
        """Close subscriptions and producers in parallel."""
        closes = [self.incoming.close, self.outgoing.close]
        if self.sequence_log is not None:
            closes.append(self.sequence_log.close)
        closing = [functools.partial(close, deadline) for close in closes]
        all_within(deadline, [*closing, self.outage_reporter.close])


@dataclass(frozen=True)
class Subscribing:
    """Options of the subscriptions of a consumer.

    Attributes:
        name: of the consumer, in the broker's statistics.
        nack_delay: delay of redeliveries after a negative acknowledgement.
        prefetch: highest number of messages of a topic that wait in the client.
        schema: decodes the messages; the broker refuses an incompatible one.
        crypto: decrypts them, and encrypts their copies.
        max_in_flight_bytes: see `Parts`.
        crash_log: its credentials read records without the client.
    """

    name: str
    nack_delay: timedelta
    prefetch: int
    schema: pulsar.schema.Schema = BYTES
    crypto: Crypto | None = None
    max_in_flight_bytes: int = MAX_IN_FLIGHT_BYTES
    crash_log: CrashLog | None = None

    def __post_init__(self) -> None:
        """Check the options, for a broker in memory too.

        Raises:
            InvalidSpecError: one is out of bounds, or of another type.
        """
        check_prefetch(self.prefetch)
        check_count(self.max_in_flight_bytes, "max_in_flight_bytes")
        check_names(self.name, self.schema)
        for_consumer(self.crypto)


class BrokerConnection(ABC):
    """Source of the parts of consumers: a `pulsar.Client`, or a broker in memory."""

    clock: Clock

    @abstractmethod
    def open(self, policy: Policy, subscribing: Subscribing) -> Parts:
        """Subscribe to the topics of *policy*.

        Raises:
            SubscribeError: the broker refused one of the two subscriptions.
        """


@dataclass(frozen=True)
class Crypto:
    """End-to-end encryption of payloads.

    Keys, properties and the cause of a failed message are not encrypted: see `Redaction`.

    Attributes:
        key: name of the key in encrypted messages.
        public_key: file with the public key in PEM, for encryption.
        private_key: file with the private key in PEM, for decryption; only needed by consumers.

    Raises:
        InvalidSpecError: the name is empty, a file is not readable, or one of them is of another
            type.
    """

    key: str
    public_key: str | os.PathLike[str]
    private_key: str | os.PathLike[str] = ""

    def __post_init__(self) -> None:
        """Refuse an empty name, and files that cannot be read."""
        check_instance(self.key, str, "key")
        if not self.key:
            raise InvalidSpecError(
                "`key` must not be empty",
                got="an empty name",
                remedy="set key= to the name of the key",
            )
        public = _path(self.public_key, "public_key")
        private = _path(self.private_key, "private_key")
        for file in [public, private] if private else [public]:
            is_folder = os.path.isdir(file)  # noqa: PTH112 - the import of pathlib takes long
            if is_folder or not os.access(file, os.R_OK):
                raise InvalidSpecError(
                    "a key must be a readable file in PEM",
                    got=file,
                    remedy="mount the key there, readable by this process",
                )


def _path(path: object, name: str) -> str:
    """Return *path* as text.

    Raises:
        InvalidSpecError: it is no path. The message contains *name*.
    """
    text: object = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise InvalidSpecError(
            f"{name} must be a path: a string, or an os.PathLike such as pathlib.Path",
            got=path,
            remedy="pass the path of a file or a folder",
        )
    return text


MAX_PREFETCH = 1_000_000
"""The client aborts the process at a few more than 2,000 million."""


def check_prefetch(prefetch: int) -> None:
    """Pass if so many messages may wait in the client.

    Raises:
        InvalidSpecError: they may not.
    """
    check_count(prefetch, "prefetch")
    if prefetch > MAX_PREFETCH:
        raise InvalidSpecError(
            f"prefetch must be at most {MAX_PREFETCH}",
            got=prefetch,
            remedy="leave it out: 1000 messages wait by default",
        )


def check_names(name: object, schema: object) -> None:
    """Pass if these are the name and the schema of a consumer or a producer.

    Raises:
        InvalidSpecError: they are of other types, or the name is no text that can be sent.
    """
    check_instance(name, str, "name", optional=True)
    if name is not None and text_of(name) != name:
        raise InvalidSpecError(
            "name must be text in UTF-8", got=name, remedy="leave out lone surrogates"
        )
    check_instance(schema, pulsar.schema.Schema, "schema")


def for_consumer(crypto: Crypto | None) -> Mapping[str, Any]:
    """Return the options of *crypto* for `Client.subscribe` and `Client.create_reader`.

    Raises:
        InvalidSpecError: it has no private key, or is no Crypto.
    """
    check_instance(crypto, Crypto, "crypto", optional=True)
    if crypto is None:
        return {}
    if not crypto.private_key:
        raise InvalidSpecError(
            "a consumer needs the private key to decrypt messages",
            got="crypto= without a private key",
            remedy="set private_key= to its file",
        )
    return {"crypto_key_reader": _reader(crypto)}


def for_producer(crypto: Crypto | None) -> Mapping[str, Any]:
    """Return the options of *crypto* for `Client.create_producer`.

    Raises:
        InvalidSpecError: it is no Crypto.
    """
    check_instance(crypto, Crypto, "crypto", optional=True)
    if crypto is None:
        return {}
    return {"encryption_key": crypto.key, "crypto_key_reader": _reader(crypto)}


def _reader(crypto: Crypto) -> pulsar.CryptoKeyReader:
    return pulsar.CryptoKeyReader(os.fspath(crypto.public_key), os.fspath(crypto.private_key))


@dataclass(frozen=True)
class CrashLog:
    """Crash log: detects poison messages, which kill their process or end it by `sys.exit`.

    A handler that raises SystemExit counts as a crash of its messages, with any exit code. Another
    exception, or `close`, is no crash.

    A malformed entry kills the process while the client decodes it, before a message is delivered.
    If more than *max_redeliveries* processes in a row were killed, a consumer inspects both
    subscriptions before it starts: it reads the pending entries without the client, dead-letters
    malformed ones with all their bytes (`MalformedEntry`), and acknowledges each after its dead
    letter is stored. The inspection needs the packages of `redrive[crash-log]`, and *token* or
    *certificate*, because the client does not reveal its own. Address and trusted authorities are
    those of the client. If the inspection fails, an error is logged and the consumer starts. The
    records of a policy with `deadLetter.sequenced` are read with the same credentials.

    Attributes:
        directory: folder of the notes; it must outlive the process, like an `emptyDir` of a pod.
            Consumers may share it.
        max_redeliveries: number of crashes with a message in-flight after which it is delivered
            again; after one more it is dead-lettered without being handled. Defaults to 3.
        token: of the consumer's role, or a function that returns a valid one; as for
            `pulsar.AuthenticationToken`.
        certificate: files of the certificate and of its key, in PEM, as for
            `pulsar.AuthenticationTLS`.

    Raises:
        InvalidSpecError: the number is negative, both a token and a certificate are set, or one of
            the values is of another type.
    """

    directory: str | os.PathLike[str]
    max_redeliveries: int = 3
    token: str | Callable[[], str] | None = field(default=None, repr=False)
    certificate: tuple[str | os.PathLike[str], str | os.PathLike[str]] | None = None

    def __post_init__(self) -> None:
        """Refuse contradictory and negative values, and those of other types."""
        _path(self.directory, "directory")
        check_count(self.max_redeliveries, "max_redeliveries", least=0)
        if not (self.token is None or isinstance(self.token, str) or callable(self.token)):
            raise InvalidSpecError(
                "token must be a string, or a function that returns one",
                got=type(self.token).__name__,
                remedy="pass the one of the client, or leave it out",
            )
        if self.certificate is not None:
            pair = self.certificate
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:  # noqa: PLR2004
                raise InvalidSpecError(
                    "certificate must be a pair: the file of the certificate, and that of its key",
                    got=pair,
                    remedy='pass a pair such as ("tls.crt", "tls.key"), or leave it out',
                )
            for file in pair:
                _path(file, "a file of certificate")
        if self.token is not None and self.certificate is not None:
            raise InvalidSpecError(
                "only one of token= and certificate= may be set",
                got="both",
                remedy="set the one that the client uses",
            )

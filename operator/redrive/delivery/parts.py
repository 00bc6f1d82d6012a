"""Protocols of the parts of a consumer, and options that they share.

What a consumer is put together from: at a broker by `connection`, in memory by `testing`.

`fetcher`, `producers` and the client's own consumers are the real ones.

End-to-end encryption of contents; taken by consumers and producers as `crypto=`.

`CrashLog`: the setting by which a consumer finds poison messages; read by `poison_guard`.

The setting stands apart from what it needs, `poison_guard` and `crash_log_file`, which a consumer
without a crash log never imports.
"""

from __future__ import annotations

import functools
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol

import pulsar
import pulsar.schema

from redrive.delivery.concurrency import Deadline, all_within
from redrive.errors import InvalidSpecError
from redrive.messages import BYTES
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName

if TYPE_CHECKING:
    from redrive.delivery.run import Run
    from redrive.policy.sequences import Sequences


MAX_IN_FLIGHT_BYTES = 128 * 1024 * 1024


class Clock(Protocol):
    """Tells the time."""

    def now(self) -> datetime:
        """Return the time of day, with a time zone: to be written down."""

    def monotonic(self) -> float:
        """Return seconds since some moment: to wait by."""


class SystemClock:
    """The clock of this machine."""

    def now(self) -> datetime:
        """Return the time of day in UTC."""
        return datetime.now(UTC)  # noqa: TID251 - the one clock of this journey

    monotonic = staticmethod(time.monotonic)


class Subscription(Protocol):
    """Where messages come from and are settled."""

    def acknowledge(self, message: pulsar.Message) -> None:
        """Settle it for good."""

    def negative_acknowledge(self, message: pulsar.Message) -> None:
        """Have it delivered again, by the broker, after the subscription's own delay."""


class Incoming(Protocol):
    """All subscriptions as one stream; see `fetcher.Fetcher`."""

    @property
    def received(self) -> int:
        """Return the number of messages that the client has handed over."""

    @property
    def connected(self) -> bool:
        """Return True if there is a connection to the broker for each topic."""

    def watch(self, seconds: float, report: Callable[[str, bool, float], None]) -> None:
        """Report each connection that is lost for so many *seconds*, and its return."""

    def recover(self, may: Callable[[], bool], recovered: Callable[[str], None]) -> None:
        """Have the broker deliver again, whenever it *may*, what the client has dropped."""

    def take(self, timeout: float | None = None) -> pulsar.Message | None:
        """Return the next message, or None if none came within *timeout* seconds."""

    def ready(self) -> pulsar.Message | None:
        """Return the next message if that takes no waiting."""

    def hold_new(self, holder: object, *, held: bool) -> None:
        """Hand out only what is handed out again, while it is *held* by any *holder*."""

    def pause(self) -> None:
        """Hand out nothing until `resume`."""

    def resume(self) -> None:
        """Go on."""

    def again(self, message: pulsar.Message, seconds: float) -> None:
        """Hand *message* out once more after so long; it stays unacknowledged."""

    def sleep(self, seconds: float) -> None:
        """Wait, but no longer than until `stop`."""

    def stop(self) -> None:
        """Hand out nothing more."""

    def close(self, deadline: Deadline) -> None:
        """Give back what was not settled."""


class Outgoing(Protocol):
    """The way to the retry and the dead-letter topic; see `producers.Producers`."""

    def send(
        self,
        topic: TopicName,
        message: pulsar.Message,
        properties: dict[str, str],
        deliver_after: timedelta | None,
    ) -> pulsar.MessageId | None:
        """Store a copy with *properties*, and return its id; None if it was stored before."""

    def stop(self) -> None:
        """From now on, send nothing to a topic again that a send has failed for."""

    def close(self, deadline: Deadline) -> None:
        """Close what was opened."""


class SequenceLog(Protocol):
    """The letters of each key that are out, for all consumers of a policy alike.

    Attributes:
        sequences: as of the last call.
    """

    sequences: Sequences

    def read(self) -> None:
        """Follow all that is stored by now.

        Raises:
            NotSentError: the broker does not answer.
        """

    def write(self, name: str, content: bytes) -> None:
        """Store a record, and follow it; nothing for *content* removes the one of that *name*.

        Raises:
            NotSentError: no receipt came for it.
        """

    def close(self, deadline: Deadline) -> None:
        """Close what was opened."""


class Beacon(Protocol):
    """Shows in the broker's statistics what a consumer has paused for; see `OutageBeacon`."""

    def show(self, cause: str) -> None:
        """Show *cause*, and no longer what was shown before; nothing if it is empty."""

    def close(self) -> None:
        """Show nothing more."""


class AnyTimer(Protocol):
    """Calls at moments that change; see `timer.Timer`."""

    def look(self) -> None:
        """Look again when the next moment is."""

    def close(self) -> None:
        """End."""


MakeTimer = Callable[[Callable[[], float | None], Callable[[], None]], AnyTimer]


@dataclass(frozen=True)
class Parts:
    """One of each.

    Attributes:
        timer: makes a timer; see `timer.Timer`.
        work: has the workers of a `Run` work until the consumer is stopped.
        linger: seconds in which further messages follow a first one.
        behind: so many messages at most go before a copy that waits here, of one that was taken;
            0 where nothing waits any more once a connection is lost.
        nack_seconds: when the broker delivers again what is acknowledged negatively.
        max_in_flight_bytes: with payloads of so many bytes taken and not settled, nothing new is
            taken.
        letters: of policies that keep the sequence of dead letters.
    """

    clock: Clock
    subscriptions: Mapping[TopicName, Subscription]
    incoming: Incoming
    outgoing: Outgoing
    timer: MakeTimer
    work: Callable[[Run], None]
    linger: float
    beacon: Beacon
    nack_seconds: float
    max_in_flight_bytes: int
    letters: SequenceLog | None = None
    behind: int = 0

    def stop(self) -> None:
        """Hand out nothing more, and settle what is in hand; may be called from a signal handler.

        What can't be sent on is left to the next consumer.
        """
        self.outgoing.stop()
        self.incoming.stop()

    def close(self, deadline: Deadline) -> None:
        """Leave the subscriptions, and close the producers, side by side."""
        closes = [self.incoming.close, self.outgoing.close]
        if self.letters is not None:
            closes.append(self.letters.close)
        closing = [functools.partial(close, deadline) for close in closes]
        all_within(deadline, [*closing, self.beacon.close])


@dataclass(frozen=True)
class Subscribing:
    """How a consumer subscribes.

    Attributes:
        name: of the consumer, in the broker's statistics.
        nack_delay: when the broker delivers again what is acknowledged negatively.
        prefetch: at most so many messages of a topic wait in the client.
        schema: decodes the messages; the broker refuses one that does not fit that of a topic.
        crypto: decrypts them, and encrypts their copies.
        max_in_flight_bytes: see `Parts`.
    """

    name: str
    nack_delay: timedelta
    prefetch: int
    schema: pulsar.schema.Schema = BYTES
    crypto: Crypto | None = None
    max_in_flight_bytes: int = MAX_IN_FLIGHT_BYTES


class BrokerConnection(ABC):
    """Where consumers get their parts: a `pulsar.Client`, or a broker in memory."""

    clock: Clock

    @abstractmethod
    def open(self, policy: Policy, subscribing: Subscribing) -> Parts:
        """Subscribe to the topics of *policy*.

        Raises:
            SubscribeError: the broker refused one of the two subscriptions.
        """


@dataclass(frozen=True)
class Crypto:
    """Encrypt contents before the broker sees them, and decrypt what comes from it.

    Keys and properties are not encrypted, nor is the cause that travels with a failed message: see
    `Redaction`.

    Attributes:
        key: the name that encrypted messages give for their key.
        public_key: a file, in PEM, of the key that contents are encrypted with.
        private_key: a file of the key that decrypts them; needed by consumers only.

    Raises:
        InvalidSpecError: the name is empty, or there is no such file.
    """

    key: str
    public_key: str | os.PathLike[str]
    private_key: str | os.PathLike[str] = ""

    def __post_init__(self) -> None:
        """Refuse what the client would take for no encryption, or find out at the first message."""
        if not self.key:
            raise InvalidSpecError(
                "encrypted messages name their key", got="an empty name", remedy="give key= a name"
            )
        for file in (os.fspath(self.public_key), os.fspath(self.private_key)):
            if file and not os.access(file, os.R_OK):
                raise InvalidSpecError(
                    "keys are read from files in PEM",
                    got=f"{file}, which can't be read",
                    remedy="mount the key there, and let this process read it",
                )


def for_consumer(crypto: Crypto | None) -> Mapping[str, Any]:
    """Return what `Client.subscribe` and `Client.create_reader` take of *crypto*.

    Raises:
        InvalidSpecError: it has no private key.
    """
    if crypto is None:
        return {}
    if not crypto.private_key:
        raise InvalidSpecError(
            "a consumer decrypts messages",
            got="crypto= without a private key",
            remedy="give private_key= a file",
        )
    return {"crypto_key_reader": _reader(crypto)}


def for_producer(crypto: Crypto | None) -> Mapping[str, Any]:
    """Return what `Client.create_producer` takes of *crypto*."""
    if crypto is None:
        return {}
    return {"encryption_key": crypto.key, "crypto_key_reader": _reader(crypto)}


def _reader(crypto: Crypto) -> pulsar.CryptoKeyReader:
    return pulsar.CryptoKeyReader(os.fspath(crypto.public_key), os.fspath(crypto.private_key))


@dataclass(frozen=True)
class CrashLog:
    """Let a consumer find poison messages: those that kill its process, or end it by `sys.exit`.

    A handler that raises SystemExit counts as a crash of the messages that it was given, whatever
    the exit code. A program that ends otherwise, by another exception or by `close`, has not
    crashed.

    A malformed entry kills the process while the client decodes it, before a message is handed out.
    So a consumer inspects both subscriptions before it starts, if more than *max_redeliveries*
    processes in a row were killed: it reads the pending entries without the client, dead-letters
    the malformed ones with all their bytes (`MalformedEntry`), and acknowledges each once its dead
    letter is stored. The inspection needs the packages of `redrive[crash-log]`, and shows *token*
    or *certificate* to the broker: the client does not reveal its own. Address and trusted
    authorities are those of the client. If it fails, an error is logged and the consumer starts.

    Attributes:
        directory: where it records what it has in hand; it must outlive the process, as an
            `emptyDir` of the pod does. Consumers may share it.
        max_redeliveries: a message that was in hand when processes ended so is delivered again
            so often; then it is dead-lettered, before a handler sees it.
        token: that of the consumer's role, or a function that returns one that is valid now; as
            `pulsar.AuthenticationToken` takes it.
        certificate: the files of the certificate and of its key, in PEM, as
            `pulsar.AuthenticationTLS` takes them.

    Raises:
        InvalidSpecError: the number is negative, or there are a token and a certificate.
    """

    directory: str | os.PathLike[str]
    max_redeliveries: int = 3
    token: str | Callable[[], str] | None = field(default=None, repr=False)
    certificate: tuple[str | os.PathLike[str], str | os.PathLike[str]] | None = None

    def __post_init__(self) -> None:
        """Refuse what means nothing."""
        if self.token is not None and self.certificate is not None:
            raise InvalidSpecError(
                "a role authenticates by a token or by a certificate",
                got="both",
                remedy="give the one that the client has",
            )
        if self.max_redeliveries < 0:
            raise InvalidSpecError(
                "a message is delivered again after a crash at least 0 times",
                got=self.max_redeliveries,
                remedy="give 0 or more; 0 dead-letters it after the first crash",
            )

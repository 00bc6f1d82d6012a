"""One producer name at the broker, and the proof that a message sent under it is stored.

A topic with deduplication keeps the highest sequence id of each producer name that it has stored.
It drops a message whose id is not above that, and answers `-1:-1`: no entry. The answer alone
proves nothing. The client numbers messages from the start again when a producer that has not
published yet is connected again, and the broker then drops a second message of one number. A
message that the broker refuses, such as one above the `maxMessageSize` of its topic, looks like a
duplicate once a later one was stored. So each `PartitionSender` keeps four rules:

1. Its name is its own: no other process, topic partition or schema uses it.
2. Sequence ids are its own. They are above 0, which the client takes for none, and rise by random
   steps. Another client that writes under this name can't tell the id of the message in flight.
3. One message is in flight at a time. The next id is used only after the message before it was
   stored, refused, or given up for good. Senders work side by side, each under its own name.
4. A message that is sent again keeps the name and the sequence id.

No id above that of the message in flight was ever sent. So the message is stored if the broker's
last sequence id, read when a producer is opened under this name after the message was sent, equals
its id, and the broker has dropped it as a duplicate: `-1:-1`. Nothing else without an entry is a
receipt, and the message is sent again:

- Deduplication is on, and the broker remembers the name: a message is stored once. A broker that
  loads the topic may know too low an id for a moment (apache/pulsar#25954), and store a second copy
  of a message that the client sends again then.
- Deduplication is off, was switched off and on, or the broker has forgotten the name (a producer
  that was away for `brokerDeduplicationProducerInactivityTimeoutMinutes`, or more names than
  `brokerDeduplicationMaxNumberOfProducers` when a topic is loaded): the id is above all that the
  broker knows, so the message is stored, a second time if the lost receipt was one of a stored
  message. It is never dropped.
- `-1:-1` contradicts the last sequence id: the message is sent under a new name, and may be stored
  twice.
- Another client holds the name: a message that was not sent yet gets a new name at once. One in
  doubt gets it after `_NAME_SECONDS`, and may be stored twice.
- Chunks: the broker recognises only the last chunk. It may have stored that one alone. And when the
  client connects again, it sends chunks twice, of which consumers with the client 4.2 can't put the
  message together. So the message is sent again whole under a new name if its producer was
  disconnected meanwhile, or if the receipt has no entry, and may be stored twice.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import pulsar

from redrive.delivery.concurrency import OPEN_SECONDS, SendWatchdog, in_background, within
from redrive.messages import NotSentError, TooBigError
from redrive.policy.naming import partition_of_key

_TOO_SMALL = "that the topic has no maxMessageSize of its own, which clients do not know"
REMEDY = f"check that the broker answers, that this role may produce there, and {_TOO_SMALL}"
CHECK_POLICY = (
    "check that the RetryPolicy is Ready and lists this consumer's role, that the broker answers, "
    f"and {_TOO_SMALL}"
)
_OVER_QUOTA = (
    "the topic is over its backlog quota, by size or by age (message_age): replay or delete its "
    "messages, or raise the quota of the topic, its namespace or the broker (pulsar-admin "
    "namespaces get-backlog-quotas), and consumers resume"
)
_REMEDIES: Mapping[type[Exception], str] = {
    pulsar.ProducerBlockedQuotaExceededError: _OVER_QUOTA,
    pulsar.ProducerBlockedQuotaExceededException: _OVER_QUOTA,
    pulsar.ProducerBusy: "set maxProducersPerTopic of the topic, its namespace and the broker to "
    "at least the number of processes that send there, times their workers, which may send at the "
    "same time; idle producers of consumers are closed within two minutes after the last send",
    pulsar.TopicTerminated: "the topic was terminated: process its messages, then delete it; the "
    "operator creates topics of a RetryPolicy again, and consumers resume",
}


def remedy_of(error: Exception, other: str) -> str:
    """Return what to do about *error*, with which a client answered a send; *other* by default."""
    return _REMEDIES.get(type(error), other)


IDLE_SECONDS = 60.0
"""Time after which an idle producer of a consumer is closed: others of a topic with a limit of
producers need its place."""

PARTITIONS_SECONDS = 60.0
"""Age at which the partitions of a topic are read again: they may have grown."""

BYTES_PER_SECOND = 2**20
"""The slowest transfer that a send is given time for, on top of its time-out."""

_GRACE_SECONDS = 1.0
"""Seconds that a broker has to confirm that a producer is closed."""

_PAUSE_SECONDS = 0.2
"""After the first send, where that failed at once; four times as long after each that follows. A
broker that has not yet noticed the end of a connection keeps a producer's name for 6 s."""

_SECOND = timedelta(seconds=1)

MAX_OPEN = 32
"""Producers that one slot keeps at the broker: with more partitions than that they take turns."""

_POLL_SECONDS = 0.02
"""Interval of checks of a producer of chunks; the client waits 0.09 s before it connects again."""

_MAX_NAMES = 3
"""Names tried in one call of `PartitionSender.send`."""

_NAME_SECONDS = 60.0
"""Time for which a message in doubt waits for its name: a broker notices a connection that ended
without a sign after 30 to 60 s."""

_STEP_BYTES = 4
"""Random bytes of a step between two sequence ids: about 4 billion of them are below 2^63."""


def open_producer(
    client: pulsar.Client, topic: str, name: str, options: Mapping[str, Any]
) -> pulsar.Producer:
    """Open an unbatched producer, whose sends wait for as long as the caller does.

    Raises:
        pulsar.exceptions.PulsarException: the broker refused it, or did not answer within
            `OPEN_SECONDS`.
    """
    make = functools.partial(
        client.create_producer,
        topic,
        producer_name=name,
        send_timeout_millis=0,
        batching_enabled=False,  # the broker knows a batch by the id of its first message only
        **options,
    )
    try:
        producer = within(OPEN_SECONDS, make, late=leave)
    except TimeoutError as error:
        raise pulsar.Timeout from error
    if not producer.topic():  # empty, of a client that was shut down: `last_sequence_id` crashes
        raise pulsar.AlreadyClosed
    return producer


class PartitionSender:
    """Sends messages under one producer name, one at a time; see the module for its proofs.

    One thread at a time may send. Any thread may close it.

    Args:
        make: opens a producer under a name, see `open_producer`.
        name: begins the producer name; no other sender has it.
        watchdog: ends sends that take too long: the client reconnects without limit.
        chunked: whether messages may go in chunks.
    """

    def __init__(
        self,
        make: Callable[[str], pulsar.Producer],
        name: str,
        watchdog: SendWatchdog,
        *,
        chunked: bool = False,
    ) -> None:
        self._make = make
        self._base = self._name = name
        self._watchdog = watchdog
        self._chunked = chunked
        self._renamed = itertools.count(2)
        self._sequence_id = 0
        self._producer: pulsar.Producer | None = None
        self._last = -1  # the broker's last sequence id of the name, when the producer was opened
        self._ended = False
        self._taken_since: float | None = None
        self.in_doubt = False
        """True if the message of `begin` was sent, and may be stored."""

    def begin(self) -> None:
        """Number a new message; the one before is not sent again."""
        self._sequence_id += 1 + int.from_bytes(os.urandom(_STEP_BYTES))
        self.in_doubt = False

    def open(self) -> pulsar.Producer:
        """Return the producer, opened under its name unless it is open.

        Raises:
            pulsar.exceptions.PulsarException: it could not be opened.
        """
        producer = self._producer
        if producer is None:
            try:
                producer = self._make(self._name)
            except pulsar.ProducerBusy:  # too many producers, or another client has the name
                self._leave_taken_name()
                raise
            self._taken_since = None
            self._last = producer.last_sequence_id()
            self._producer = producer
            if self._ended:  # meanwhile, by another thread
                self.close()
                raise pulsar.AlreadyClosed
        return producer

    def send(
        self, content: object, fields: Mapping[str, Any], timeout: float
    ) -> pulsar.MessageId | None:
        """Send the message of `begin`, or send it again; on return the broker has stored it.

        Args:
            content: encoded by the producer's schema; None for a null value.
            fields: further arguments of the client's `send`.
            timeout: seconds for each send, besides opening a producer.

        Returns:
            Its id; None if an earlier send has stored it, whose id the broker does not repeat.

        Raises:
            pulsar.MessageTooBig: the client refuses it. It was not sent.
            pulsar.exceptions.PulsarException: no receipt came, or none that proves anything. It may
                be stored; `send` with the same content stores it once, but for the module's limits.
        """
        if self._chunked and self.in_doubt:
            self._rename()
        for _ in range(_MAX_NAMES):
            producer = self.open()
            whole = True
            if self._chunked:
                with _Connected(producer) as connected:
                    receipt = self._once(producer, content, fields, timeout)
                whole = connected.always
            else:
                receipt = self._once(producer, content, fields, timeout)
            if receipt.ledger_id() >= 0 and whole:
                self.in_doubt = False
                return receipt
            if not self._chunked and self._is_stored():
                self.in_doubt = False
                return None
            self._rename()
        raise pulsar.exceptions.PulsarException(f"{_MAX_NAMES} receipts that prove nothing")

    def close(self) -> None:
        """Close the producer; the next send opens it again under its name."""
        producer, self._producer = self._producer, None
        if producer is not None:
            # A broker that answers has to know, before it lets another in under this name.
            with contextlib.suppress(TimeoutError):
                within(_GRACE_SECONDS, functools.partial(leave, producer), late=_ignore)

    def end(self) -> None:
        """Close the producer for good, also one that is being opened now."""
        self._ended = True
        self.close()

    def _once(
        self,
        producer: pulsar.Producer,
        content: object,
        fields: Mapping[str, Any],
        timeout: float,
    ) -> pulsar.MessageId:
        give_up = functools.partial(in_background, functools.partial(leave, producer))
        call = self._watchdog.during(timeout, give_up)
        was_in_doubt, self.in_doubt = self.in_doubt, True
        try:
            with call:
                # Not send_async: each call of it leaks some hundred bytes in the client.
                return producer.send(content, sequence_id=self._sequence_id, **fields)
        except pulsar.MessageTooBig:
            self.in_doubt = was_in_doubt
            raise
        except pulsar.Interrupted:
            raise  # the client's word for KeyboardInterrupt
        except pulsar.exceptions.PulsarException as error:
            self.close()
            if call.given_up:
                raise pulsar.Timeout("no answer") from error
            raise

    def _is_stored(self) -> bool:
        """Return True if the message, which the broker dropped, is the last one of this name."""
        if self._last != self._sequence_id:  # read before the message was sent
            self.close()
            self.open()
        return self._last == self._sequence_id

    def _leave_taken_name(self) -> None:
        now = time.monotonic()
        if self._taken_since is None:
            self._taken_since = now
        if not self.in_doubt or now - self._taken_since >= _NAME_SECONDS:
            self._rename()

    def _rename(self) -> None:
        self.close()
        self._name = f"{self._base}.{next(self._renamed)}"
        self._taken_since = None


class _Connected:
    """Watches the connection of a producer, within a `with` block.

    Attributes:
        always: whether it was connected all the time.
    """

    def __init__(self, producer: pulsar.Producer) -> None:
        self.always = True
        self._producer = producer
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="redrive-chunks", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while self.always:
            self.always = self._producer.is_connected()
            if self._over.wait(_POLL_SECONDS):
                self.always &= self._producer.is_connected()
                return


@dataclass(frozen=True)
class Opening:
    """Options of all producers of a `RetryProducer`, and the number and time-out of their sends.

    Attributes:
        watchdog: ends sends that take too long.
        ending: set once no further send is made: the producer is closed.
    """

    client: pulsar.Client
    options: Mapping[str, Any]
    sends: int
    timeout: timedelta
    watchdog: SendWatchdog
    ending: threading.Event

    def sender(self, topic: str, name: str) -> PartitionSender:
        """Return a sender to *topic*, or to one partition."""

        def make(name: str) -> pulsar.Producer:
            return open_producer(self.client, topic, name, self.options)

        return PartitionSender(make, name, self.watchdog)


class SendSlot:
    """The way of one message at a time."""

    def __init__(self, opening: Opening, name: str) -> None:
        self._opening = opening
        self._name = name
        self._senders: dict[str, PartitionSender] = {}
        self._open: OrderedDict[str, PartitionSender] = OrderedDict()  # used last, last

    def sender(self, topic: str) -> PartitionSender:
        """Return the slot's producer of *topic*, or of one partition.

        The one that was used longest ago leaves the broker, if there are too many. It comes back
        under its name, and continues to count its messages.
        """
        if topic not in self._senders:
            # A name of its own: the producer of a whole topic is one of each partition too.
            self._senders[topic] = self._opening.sender(topic, f"{self._name}-{len(self._senders)}")
        self._open[topic] = self._senders[topic]
        self._open.move_to_end(topic)
        if len(self._open) > MAX_OPEN:
            _, longest_ago = self._open.popitem(last=False)
            longest_ago.close()
        return self._senders[topic]

    def send(
        self, topic: str, content: bytes | None, fields: Mapping[str, Any]
    ) -> pulsar.MessageId | None:
        """Send a message until it is stored; see `RetryProducer.send`."""
        opening, sender = self._opening, self.sender(topic)
        sender.begin()
        timeout = opening.timeout / _SECOND + len(content or b"") / BYTES_PER_SECOND
        failures: list[str] = []
        remedy = REMEDY
        for number in range(1, opening.sends + 1):
            try:
                receipt = sender.send(content, fields, timeout)
                return None if receipt is None else in_partition(receipt, topic)
            except pulsar.Interrupted:
                raise  # the client's word for KeyboardInterrupt
            except pulsar.MessageTooBig as error:
                raise TooBigError(
                    f"a message with its properties is too big for {topic}",
                    remedy="raise maxMessageSize of the broker, or keep messages well below it",
                ) from error
            except pulsar.exceptions.PulsarException as error:
                failures.append(str(error) or type(error).__name__)
                remedy = remedy_of(error, REMEDY)
            if opening.ending.is_set():
                break
            if number < opening.sends:
                opening.ending.wait(self._pause(number))
        sender.close()
        raise NotSentError(
            f"a message was sent to {topic} {len(failures)} times, without a receipt",
            got=", ".join(failures),
            remedy=f"{remedy}; whether it is stored is not known, so sending it again may store "
            "it twice",
        )

    def close(self) -> None:
        """Leave the broker."""
        for sender in list(self._senders.values()):
            sender.close()

    def _pause(self, failures: int) -> float:
        return float(min(_PAUSE_SECONDS * 4 ** (failures - 1), self._opening.timeout / _SECOND))


def leave(producer: pulsar.Producer) -> None:
    """Close *producer*, however long that takes."""
    with contextlib.suppress(pulsar.exceptions.PulsarException):  # nothing left to close
        producer.close()


def partition_for(key: str, names: Sequence[str], turns: Iterator[int]) -> str:
    """Return the partition of a message: that of its key, as for Java's client, or the next one."""
    if len(names) == 1:
        return names[0]
    number = partition_of_key(key, len(names)) if key else next(turns)
    return names[number % len(names)]


def in_partition(receipt: pulsar.MessageId, topic: str) -> pulsar.MessageId:
    """Return the id as consumers read it: the receipt of a partition does not name that."""
    _, separator, index = topic.rpartition("-partition-")
    if not separator:
        return receipt
    ledger, entry, batch = receipt.ledger_id(), receipt.entry_id(), receipt.batch_index()
    return pulsar.MessageId(int(index), ledger, entry, batch)


def _ignore(_: None) -> None:
    """Do nothing: a producer that was closed late is closed."""

"""A message and its sends, each with a time-out; called by `retry_producer`.

What makes a message the same to a topic with deduplication is its producer's name and its sequence
id; both stay through all of its sends.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pulsar

from redrive.copying.errors import NotSentError, TooBigError
from redrive.delivery.bounded import OPEN_SECONDS, in_background, within
from redrive.delivery.retrying.send_watchdog import SendWatchdog

REMEDY = "check that the broker answers, and that this role may produce there"

GRACE_SECONDS = 1.0
"""How much later than its time-out the client may answer before its producer is given up; looked
at once a second."""

_PAUSE_SECONDS = 0.2
"""After the first send, where that failed at once; four times as long after each that follows. A
broker that has not yet noticed the end of a connection keeps a producer's name for 6 s."""

_SECOND = timedelta(seconds=1)

MAX_OPEN = 32
"""Producers that one slot keeps at the broker: with more partitions than that they take turns."""


@dataclass(frozen=True)
class Opening:
    """What all producers of the client's are made with, and how often and long they send.

    Attributes:
        watchdog: ends sends that the client's own time-out does not.
        ending: set once no further send is made: the producer is closed.
    """

    client: pulsar.Client
    options: Mapping[str, Any]
    sends: int
    timeout: timedelta
    watchdog: SendWatchdog
    ending: threading.Event

    def __call__(self, topic: str, name: str) -> pulsar.Producer:
        """Make one.

        Raises:
            pulsar.exceptions.PulsarException: the broker refused it, or didn't answer in time.
        """
        try:
            return within(OPEN_SECONDS, functools.partial(self._make, topic, name), late=leave)
        except TimeoutError as error:
            raise pulsar.Timeout from error

    def _make(self, topic: str, name: str) -> pulsar.Producer:
        return self.client.create_producer(
            topic,
            producer_name=name,
            send_timeout_millis=self.timeout // timedelta(milliseconds=1),
            # A batch is known by the id of its first message only; chunks are not known at all.
            batching_enabled=False,
            chunking_enabled=False,
            **self.options,
        )


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
        under its name, and goes on counting its messages.
        """
        if topic not in self._senders:
            # A name of its own: the producer of a whole topic is one of each partition too.
            self._senders[topic] = PartitionSender(
                self._opening, topic, f"{self._name}-{len(self._senders)}"
            )
        self._open[topic] = self._senders[topic]
        self._open.move_to_end(topic)
        if len(self._open) > MAX_OPEN:
            _, longest_ago = self._open.popitem(last=False)
            longest_ago.close()
        return self._senders[topic]

    def close(self) -> None:
        """Leave the broker."""
        for sender in list(self._senders.values()):
            sender.close()


class PartitionSender:
    """One producer at the broker: a name, and sequence ids that only rise.

    A message is sent only after the one before it has got its receipt or was given up. Else one
    that is sent again would come behind its successor, and the broker would drop it for a duplicate
    though it was never stored.
    """

    def __init__(self, opening: Opening, topic: str, name: str) -> None:
        self._opening = opening
        self._topic = topic
        self._name = name
        self._sequence_id = 0  # ids begin at 1: the client takes 0 for none
        self._producer: pulsar.Producer | None = None

    def open(self) -> pulsar.Producer:
        """Return the producer, made again under its old name where the client has lost it.

        Raises:
            pulsar.exceptions.PulsarException: none could be made.
        """
        if self._producer is None:
            self._producer = self._opening(self._topic, self._name)
        return self._producer

    def send(self, content: object, fields: Mapping[str, Any]) -> pulsar.MessageId | None:
        """Send a message until it is stored; see `RetryProducer.send`."""
        self._sequence_id += 1
        failures: list[str] = []
        for number in range(1, self._opening.sends + 1):
            given_up = threading.Event()
            try:
                return self._once(content, fields, given_up)
            except pulsar.Interrupted:
                raise  # the client's word for KeyboardInterrupt
            except pulsar.MessageTooBig as error:
                raise TooBigError(
                    f"a message with its properties is too big for {self._topic}",
                    remedy="raise maxMessageSize of the broker, or keep messages well below it",
                ) from error
            except pulsar.Timeout as error:
                failures.append(type(error).__name__)
                if self._producer is not None and not given_up.is_set():
                    continue  # the client has forgotten the message, and goes on
            except pulsar.exceptions.PulsarException as error:
                failures.append("no answer" if given_up.is_set() else str(error))
            self.close()
            if self._opening.ending.is_set():
                break
            if number < self._opening.sends:
                self._opening.ending.wait(self._pause(number))
        raise NotSentError(
            f"a message was sent to {self._topic} {len(failures)} times, without a receipt",
            got=", ".join(failures),
            remedy=f"{REMEDY}; whether it is stored is not known, so sending it again may store "
            "it twice",
        )

    def close(self) -> None:
        """Leave the broker; the next send comes back under the same name."""
        producer, self._producer = self._producer, None
        if producer is not None:
            # A broker that answers has to know, before it lets another in under this name.
            with contextlib.suppress(TimeoutError):
                within(GRACE_SECONDS, functools.partial(leave, producer), late=_is_left)

    def _once(
        self, content: object, fields: Mapping[str, Any], given_up: threading.Event
    ) -> pulsar.MessageId | None:
        producer = self.open()

        def give_up() -> None:
            given_up.set()
            in_background(functools.partial(leave, producer))

        with self._opening.watchdog.during(give_up):
            # Each send_async() of the client leaks some hundred bytes.
            message_id = producer.send(content, sequence_id=self._sequence_id, **fields)
        # The client tells a duplicate in no other way. No other process sends under this name, so
        # what the broker has of it came from here.
        return message_id if message_id.ledger_id() >= 0 else None

    def _pause(self, failures: int) -> float:
        return float(min(_PAUSE_SECONDS * 4 ** (failures - 1), self._opening.timeout / _SECOND))


def leave(producer: pulsar.Producer) -> None:
    """Close *producer*, however long that takes."""
    with contextlib.suppress(pulsar.exceptions.PulsarException):  # nothing left to close
        producer.close()


def _is_left(_: None) -> None:
    """Do nothing: a producer that was closed late is closed."""

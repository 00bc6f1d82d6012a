"""A message and its sends, each with a time-out; called by `retry_producer`.

What makes a message the same to a topic with deduplication is its producer's name and its sequence
id; both stay through all of its sends.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pulsar

from redrive.delivery.producers import NotSentError, TooBigError

REMEDY = "check that the broker answers, and that this role may produce there"

_GRACE_SECONDS = 1.0
"""How much later than its time-out the client may answer before its producer is given up."""

_PAUSE_SECONDS = 0.2
"""After the first send, where that failed at once; four times as long after each that follows. A
broker that has not yet noticed the end of a connection keeps a producer's name for 6 s."""

_SECOND = timedelta(seconds=1)


@dataclass(frozen=True)
class Opening:
    """What all producers of the client's are made with, and how often and long they send."""

    client: pulsar.Client
    options: Mapping[str, Any]
    sends: int
    timeout: timedelta

    def __call__(self, topic: str, name: str) -> pulsar.Producer:
        """Make one."""
        return self.client.create_producer(
            topic,
            producer_name=name,
            send_timeout_millis=self.timeout // timedelta(milliseconds=1),
            # A batch is known by the id of its first message only; chunks are not known at all.
            batching_enabled=False,
            chunking_enabled=False,
            **self.options,
        )


class Lane:
    """The way of one message at a time."""

    def __init__(self, opening: Opening, name: str) -> None:
        self._opening = opening
        self._name = name
        self._lines: dict[str, Line] = {}

    def line(self, topic: str) -> Line:
        """Return the lane's producer of *topic*, or of one partition."""
        if topic not in self._lines:
            # A name of its own: the producer of a whole topic is one of each partition too.
            self._lines[topic] = Line(self._opening, topic, f"{self._name}-{len(self._lines)}")
        return self._lines[topic]

    def close(self) -> None:
        """Leave the broker."""
        for line in self._lines.values():
            line.close()


class Line:
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
        """Return the producer, made anew under its old name where the client has lost it.

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
            try:
                return self._once(content, fields)
            except pulsar.Interrupted:
                raise  # the client's word for KeyboardInterrupt
            except pulsar.exceptions.PulsarException as error:
                failures.append(str(error))
            except _NoReceiptError as error:
                failures.append(str(error))
                if error.result == pulsar.Result.Timeout:
                    continue  # the client has forgotten the message, and goes on
            self.close()
            if number < self._opening.sends:
                time.sleep(self._pause(number))
        raise NotSentError(
            f"a message was sent to {self._topic} {len(failures)} times, without a receipt",
            got=", ".join(failures),
            remedy=f"{REMEDY}; whether it is stored is not known, so sending it anew may store it "
            "twice",
        )

    def close(self) -> None:
        """Leave the broker; the next send comes back under the same name."""
        producer, self._producer = self._producer, None
        if producer is not None:
            with contextlib.suppress(pulsar.exceptions.PulsarException):  # nothing left to close
                producer.close()

    def _once(self, content: object, fields: Mapping[str, Any]) -> pulsar.MessageId | None:
        receipt: Future[tuple[pulsar.Result, pulsar.MessageId]] = Future()
        self.open().send_async(
            content,
            lambda *result: receipt.set_result(result),
            sequence_id=self._sequence_id,
            **fields,
        )
        try:
            # The client's own time-out never fires while it reconnects for ever.
            result, message_id = receipt.result(self._opening.timeout / _SECOND + _GRACE_SECONDS)
        except TimeoutError as error:
            raise _NoReceiptError(None) from error
        if result == pulsar.Result.MessageTooBig:
            raise TooBigError(
                f"a message with its properties is too big for {self._topic}",
                remedy="raise maxMessageSize of the broker, or keep messages well below it",
            )
        if result != pulsar.Result.Ok:
            raise _NoReceiptError(result)
        # The client has no other word for a duplicate. Nobody else sends under this name, so what
        # the broker has of it came from here.
        return message_id if message_id.ledger_id() >= 0 else None

    def _pause(self, failures: int) -> float:
        return float(min(_PAUSE_SECONDS * 4 ** (failures - 1), self._opening.timeout / _SECOND))


class _NoReceiptError(Exception):
    """One send failed with *result*, or without any."""

    def __init__(self, result: pulsar.Result | None) -> None:
        super().__init__("no answer" if result is None else result.name)
        self.result = result

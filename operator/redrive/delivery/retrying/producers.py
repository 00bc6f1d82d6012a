"""Sends messages to the retry and the dead-letter topic; called by `forwarder`.

Unbatched, so that the broker's deduplication sees each message, and consumers can acknowledge it,
by itself. Only what is too big so is compressed, and what is too big then goes in chunks.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from datetime import timedelta
from typing import NamedTuple

import pulsar
import pulsar.schema

from redrive.delivery.identity import identity
from redrive.delivery.receiving import reading
from redrive.delivery.retrying.errors import NotSentError, TooBigError
from redrive.delivery.retrying.send_watchdog import SendWatchdog
from redrive.delivery.retrying.writer_schemas import WriterSchemas
from redrive.policy.naming import TopicName

_SEND_TIMEOUT_SECONDS = 10
# The client's own time-out never fires while it reconnects for ever, as it does when the broker
# refuses a delay for being too long.
_GIVE_UP_SECONDS = _SEND_TIMEOUT_SECONDS + 2


_LARGE = pulsar.CompressionType.ZSTD
"""How the client compresses what is too big; clients of all languages read it."""


class _Destination(NamedTuple):
    """What a producer is made for.

    Attributes:
        large: whether for messages that are bigger than the broker takes as they are.
    """

    topic: TopicName
    schema: pulsar.schema.Schema
    large: bool = False


class Producers:
    """The producers for each topic, made when they are first needed, and again after a failure.

    May be used by several threads.
    """

    def __init__(self, client: pulsar.Client, *, name: str) -> None:
        self._client = client
        self._name = name
        self._schemas = WriterSchemas(client)
        self._producers: dict[_Destination, pulsar.Producer] = {}
        self._changing = threading.Lock()
        self._opening: defaultdict[_Destination, threading.Lock] = defaultdict(threading.Lock)
        self._closed = False
        self._watchdog = SendWatchdog(_GIVE_UP_SECONDS)

    def send(
        self,
        topic: TopicName,
        message: pulsar.Message,
        properties: dict[str, str],
        deliver_after: timedelta | None,
    ) -> pulsar.MessageId:
        """Send a copy of *message*, but for its properties, and return the copy's id.

        Schema, key, ordering key, event time and a null payload survive; a key that is no text
        becomes its base64. The broker has stored the copy when this returns.

        Raises:
            TooBigError: the broker takes no message with so many *properties*.
            SchemaNotFoundError, SchemaUnsupportedError: it can't be sent with its schema.
            NotSentError: no producer could be made, or no receipt came within 12 s.
        """
        to = _Destination(topic, self._schemas.of(message))
        # The client judges what is too big: nothing was sent then.
        with contextlib.suppress(pulsar.MessageTooBig):
            return self._send(to, message, properties, deliver_after)
        try:
            return self._send(to._replace(large=True), message, properties, deliver_after)
        except pulsar.MessageTooBig as error:
            raise TooBigError(
                f"the properties of a message are too big for {topic}",
                got=f"{sum(len(k) + len(v) for k, v in properties.items())} characters",
                remedy="keep properties well below maxMessageSize of the broker",
            ) from error

    def close(self) -> None:
        """Close all producers, for good: what is sent later has no receipt."""
        with self._changing:
            self._closed = True
            producers = list(self._producers.items())
        for to, producer in producers:
            self._drop(to, producer)
        self._watchdog.close()

    def _send(
        self,
        to: _Destination,
        message: pulsar.Message,
        properties: dict[str, str],
        deliver_after: timedelta | None,
    ) -> pulsar.MessageId:
        producer = self._producer(to)
        given_up = threading.Event()

        def give_up() -> None:
            given_up.set()
            self._drop(to, producer)

        try:
            with self._watchdog.during(give_up):
                return producer.send(  # each send_async() of the client leaks some hundred bytes
                    None if message.has_null_value() else message.data(),
                    properties=properties,
                    partition_key=reading.partition_key(message),
                    ordering_key=reading.ordering_key(message),
                    event_timestamp=message.event_timestamp(),
                    deliver_after=deliver_after,
                )
        except (pulsar.Interrupted, pulsar.MessageTooBig):
            raise  # Interrupted is the client's word for KeyboardInterrupt; it may have been sent
        except pulsar.exceptions.PulsarException as error:
            self._drop(to, producer)
            got = "no answer" if given_up.is_set() else str(error)
            raise _not_sent(to.topic, got) from error

    def _producer(self, to: _Destination) -> pulsar.Producer:
        with self._changing:
            known = self._known(to)
            opening = self._opening[to]
        if known is not None:
            return known
        with opening:  # which takes up to the client's own time-out: others don't wait for it
            with self._changing:
                known = self._known(to)
            if known is not None:
                return known
            made = self._open(to)
            with self._changing:
                self._producers[to] = made
                closed = self._closed
        if closed:  # meanwhile, without this one
            self._drop(to, made)
            raise _closed(to.topic)
        return made

    def _known(self, to: _Destination) -> pulsar.Producer | None:
        if self._closed:
            raise _closed(to.topic)
        return self._producers.get(to)

    def _open(self, to: _Destination) -> pulsar.Producer:
        try:
            return self._client.create_producer(
                str(to.topic),
                schema=to.schema,
                # Unique: the broker may still know the one before it by its name.
                producer_name=identity(self._name),
                send_timeout_millis=_SEND_TIMEOUT_SECONDS * 1_000,
                batching_enabled=False,
                chunking_enabled=to.large,
                compression_type=_LARGE if to.large else pulsar.CompressionType.NONE,
            )
        except pulsar.Interrupted:
            raise  # the client's word for KeyboardInterrupt
        except pulsar.exceptions.PulsarException as error:
            raise _not_sent(to.topic, str(error)) from error

    def _drop(self, to: _Destination, producer: pulsar.Producer) -> None:
        with self._changing:
            if to not in self._producers or self._producers[to] is not producer:
                return  # another thread has dropped it already; its successor is in use
            del self._producers[to]
        # Without a connection there is nothing left to close.
        with contextlib.suppress(pulsar.exceptions.PulsarException):
            producer.close()


def _closed(topic: TopicName) -> NotSentError:
    return _not_sent(topic, "a consumer that is closed")


def _not_sent(topic: TopicName, got: str) -> NotSentError:
    return NotSentError(
        f"no receipt came for a message sent to {topic}",
        got=got,
        remedy="check that the RetryPolicy is Ready and lists this consumer's role, "
        "and that the broker answers",
    )

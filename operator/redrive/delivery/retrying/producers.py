"""Sends messages to the retry and the dead-letter topic; called by `forwarder`.

Unbatched, so that the broker's deduplication sees each message, and consumers can acknowledge it,
by itself. Only what is too big so is compressed, and what is too big then goes in chunks.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from datetime import timedelta
from typing import NamedTuple

import pulsar
import pulsar.schema

from redrive.copying import reading
from redrive.copying.errors import NotSentError, TooBigError
from redrive.copying.writer_schemas import BYTES, WriterSchemas
from redrive.delivery.bounded import (
    OPEN_SECONDS,
    Deadline,
    Promise,
    all_within,
    in_background,
    within,
)
from redrive.delivery.crypto import Crypto, for_producer
from redrive.delivery.identity import identity
from redrive.delivery.receiving.origin import topic_of
from redrive.delivery.retrying.send_watchdog import SendWatchdog
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

    def __init__(self, client: pulsar.Client, *, name: str, crypto: Crypto | None = None) -> None:
        self._client = client
        self._name = name
        self._crypto = for_producer(crypto)
        self._schemas = WriterSchemas(
            client, functools.partial(within, OPEN_SECONDS, late=lambda _: None)
        )
        self._producers: dict[_Destination, pulsar.Producer] = {}
        self._changing = threading.Lock()
        self._opening: dict[_Destination, Promise[pulsar.Producer]] = {}
        self._stopping = False
        self._failed: set[TopicName] = set()  # since `stop`
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
            NotSentError: no producer could be made within 12 s, or no receipt came within 12 s.
        """
        if topic in self._failed:
            raise _not_sent(topic, "no answer to the send before it, and a consumer that stops")
        try:
            return self._copy(topic, message, properties, deliver_after)
        except NotSentError as error:
            if self._stopping and type(error) is NotSentError:  # none that is about the message
                self._failed.add(topic)
            raise

    def stop(self) -> None:
        """Send nothing to a topic again for which a send has failed since; callable from a signal.

        Else who stops would wait for each message in hand.
        """
        self._stopping = True

    def _copy(
        self,
        topic: TopicName,
        message: pulsar.Message,
        properties: dict[str, str],
        deliver_after: timedelta | None,
    ) -> pulsar.MessageId:
        version = reading.schema_version(message)
        schema = BYTES if version is None else self._schemas.get(topic_of(message), version)
        to = _Destination(topic, schema)
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

    def close(self, deadline: Deadline) -> None:
        """Close all producers, for good: what is sent later has no receipt."""
        with self._changing:
            self._closed = True
            producers, self._producers = list(self._producers.values()), {}
        leaving = [functools.partial(_leave, producer) for producer in producers]
        all_within(deadline, [*leaving, self._watchdog.close])

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
            if known is not None:
                return known
            first = to not in self._opening
            opening = self._opening.setdefault(to, Promise())
        if first:  # those who come meanwhile share what comes of it, also a failure
            self._open(to, opening)
        return opening.wait()

    def _known(self, to: _Destination) -> pulsar.Producer | None:
        if self._closed:
            raise _closed(to.topic)
        return self._producers.get(to)

    def _open(self, to: _Destination, opening: Promise[pulsar.Producer]) -> None:
        made, error = None, _not_sent(to.topic, "no answer")
        try:
            made = within(OPEN_SECONDS, lambda: self._make(to), late=_leave)
        except TimeoutError:
            pass
        except pulsar.exceptions.PulsarException as refused:
            error = _not_sent(to.topic, str(refused))
            error.__cause__ = refused
        finally:
            with self._changing:
                del self._opening[to]
                if made is not None and self._closed:  # meanwhile, without this one
                    in_background(functools.partial(_leave, made))
                    made, error = None, _closed(to.topic)
                elif made is not None:
                    self._producers[to] = made
            if made is None:
                opening.fail(error)
            else:
                opening.keep(made)

    def _make(self, to: _Destination) -> pulsar.Producer:
        return self._client.create_producer(
            str(to.topic),
            schema=to.schema,
            # Unique: the broker may still know the one before it by its name.
            producer_name=identity(self._name),
            send_timeout_millis=_SEND_TIMEOUT_SECONDS * 1_000,
            batching_enabled=False,
            chunking_enabled=to.large,
            compression_type=_LARGE if to.large else pulsar.CompressionType.NONE,
            **self._crypto,
        )

    def _drop(self, to: _Destination, producer: pulsar.Producer) -> None:
        with self._changing:
            if to not in self._producers or self._producers[to] is not producer:
                return  # another thread has dropped it already; its successor is in use
            del self._producers[to]
        # Ends a send at once, but waits for the broker: as long as it takes, if that is frozen.
        in_background(functools.partial(_leave, producer))


def _leave(producer: pulsar.Producer) -> None:
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

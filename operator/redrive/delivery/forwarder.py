"""Forwarding of failed messages to the retry and dead-letter topics, and retries of failed sends.

Messages are sent unbatched, so that the broker's deduplication sees each of them, and consumers can
acknowledge each alone. Only a message that is too big otherwise is compressed, and then chunked.

Each send has a `PartitionSender` of its own, see `sender`: a partition, a producer name and
ascending sequence ids. Sends in other threads have other senders, so a refused message never makes
another message look stored. A sender whose message got no receipt is kept for that
message alone: when the message is sent again to the same topic, it goes to the same partition under
the same name and sequence id. If the topic deduplicates, it is stored once, however often it is
sent, while this consumer lives; see `sender` for the limits. A message that the policy sends to
another topic meanwhile may be stored in both.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Container, Mapping
from datetime import timedelta
from typing import Any, NamedTuple, cast

import pulsar
import pulsar.schema

from redrive.delivery.concurrency import (
    OPEN_SECONDS,
    Deadline,
    Promise,
    SendWatchdog,
    Timer,
    all_within,
    identity,
    in_background,
    within,
)
from redrive.delivery.in_flight import topic_of
from redrive.delivery.middleware.chain import Failure, Hop
from redrive.delivery.parts import Crypto, Outgoing, for_producer
from redrive.delivery.sender import (
    BYTES_PER_SECOND,
    CHECK_POLICY,
    IDLE_SECONDS,
    PARTITIONS_SECONDS,
    PartitionSender,
    in_partition,
    open_producer,
    partition_for,
    remedy_of,
)
from redrive.messages import (
    BYTES,
    UNDECRYPTABLE,
    NotCopyableError,
    NotSentError,
    TooBigError,
    WriterSchemas,
    encode,
    encryption_of,
    message_id_text,
    ordering_key,
    partition_key,
    raw_properties,
    read_properties,
    schema_version,
)
from redrive.policy import envelope
from redrive.policy.envelope import ENCODED, NOT_COPIED, PAYLOAD_PREFIX, SOURCE_MESSAGE_ID
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.policy.verdict import Dead, Retry

_KEY, _ORDERING_KEY = "key", "orderingKey"
_MAX_KEY = 1_024
"""Longer keys of a message that is too big are encoded."""


def hop_of(message: pulsar.Message, verdict: Retry | Dead, failure: Failure) -> Hop:
    """Return the copy of *message* that carries out *verdict*; encoded where it can't be one.

    Raises:
        NotCopyableError: the message has properties that can't be copied.
    """
    marks: dict[str, str] = {}
    if failure.not_copied:
        marks = {
            NOT_COPIED: ",".join(sorted(failure.not_copied)),
            SOURCE_MESSAGE_ID: message_id_text(message),
        }
        message, texts = _encoded(message, failure.not_copied)
        marks |= {name: texts[name] for name in (ENCODED, PAYLOAD_PREFIX) if name in texts}
    else:
        texts = _properties(message)
    properties = envelope.for_hop(
        texts, failure.attempt,
        policy=failure.policy, verdict=verdict, cause=failure.cause,
    )  # fmt: skip
    delay = verdict.delay if isinstance(verdict, Retry) else None
    return Hop(message, destination(verdict, failure.policy), properties | marks, delay)


def destination(verdict: object, policy: Policy) -> TopicName:
    """Say where a failed message goes: the policy does, and never a property of the message."""
    return policy.retry_topic if isinstance(verdict, Retry) else policy.dead_letter_topic


def forward(outgoing: Outgoing, hop: Hop) -> pulsar.MessageId | None:
    """Send a copy, and return its id; None if the broker proves that it was stored before.

    Raises:
        NotSentError: no receipt came for it; it may have been stored anyway. The same message keeps
            its identity when it is sent again.
    """
    return outgoing.send(hop.topic, hop.message, dict(hop.properties), hop.deliver_after)


def _properties(message: pulsar.Message) -> dict[str, str]:
    properties = read_properties(message)
    if properties is None:
        raise NotCopyableError(
            "a message can't be copied to its next topic",
            got="a property that is not UTF-8",
            remedy="have its producer write text; this one becomes an encoded dead letter",
            reason="Unreadable",
        )
    return properties


class _EncodedMessage:
    """The content of an encoded dead letter, with the interface of its original.

    It has no schema: the bytes are those of the original, whatever can be decoded of them.
    """

    def __init__(self, message: pulsar.Message, prefix: bytes, keys: Mapping[str, str]) -> None:
        self._original = message
        self._prefix = prefix
        self._encoded_keys = keys

    def data(self) -> bytes:
        content: bytes = self._original.data()
        return self._prefix + content

    def has_null_value(self) -> bool:
        return not self._prefix and bool(self._original.has_null_value())

    def schema_version(self) -> str:
        return ""

    def partition_key(self) -> str:
        return "" if _KEY in self._encoded_keys else partition_key(self._original)

    def ordering_key(self) -> str:
        return "" if _ORDERING_KEY in self._encoded_keys else ordering_key(self._original)

    def __getattr__(self, name: str) -> object:
        return getattr(self._original, name)


def _encoded(
    message: pulsar.Message, reasons: Container[str]
) -> tuple[pulsar.Message, dict[str, str]]:
    """Return the content of the dead letter of *message*, and its properties."""
    too_big = TooBigError.reason in reasons
    encryption = encryption_of(message) if UNDECRYPTABLE in reasons else {}
    keys = {_KEY: partition_key(message), _ORDERING_KEY: ordering_key(message)}
    large = {name: key for name, key in keys.items() if too_big and len(key) > _MAX_KEY}
    encoded = encode(
        raw_properties(message), large, everything=too_big, null=message.has_null_value(),
        encryption=encryption,
    )  # fmt: skip
    content = _EncodedMessage(message, encoded.prefix, large)
    return cast("pulsar.Message", content), encoded.properties


_SEND_SECONDS = 10.0
"""Time for a receipt; a large message has more, see `BYTES_PER_SECOND`."""
_MAX_IDLE = 128
"""Idle senders whose producers stay open."""
_MAX_IN_DOUBT = 4_096
"""Messages without a receipt whose senders are kept: more than ever wait in a consumer."""

_LARGE = pulsar.CompressionType.ZSTD
"""Compression of messages that are too big; clients of all languages read it."""


class _Destination(NamedTuple):
    """The destination of a sender.

    Attributes:
        partition: the topic without partitions, or one partition.
        large: whether for messages that are bigger than the broker takes as they are.
    """

    topic: TopicName
    partition: str
    schema: pulsar.schema.Schema
    large: bool = False


class _Route(NamedTuple):
    """A destination and one of its senders, for one message at a time."""

    to: _Destination
    sender: PartitionSender


class _Partitions(NamedTuple):
    names: tuple[str, ...]
    read_at: float


_Copied = tuple[TopicName, str, str]
"""The topic of a copy, and the source topic and message id of its original."""


class Producers:
    """Senders for each partition, schema and size, made when they are first needed.

    May be used by several threads.
    """

    def __init__(self, client: pulsar.Client, *, name: str, crypto: Crypto | None = None) -> None:
        self._client = client
        self._name = identity(name)
        self._numbers = itertools.count(1)
        self._turns = itertools.count()
        self._crypto = for_producer(crypto)
        self._schemas = WriterSchemas(
            client, functools.partial(within, OPEN_SECONDS, late=lambda _: None)
        )
        self._partitions: dict[TopicName, _Partitions] = {}
        self._reading: dict[TopicName, Promise[tuple[str, ...]]] = {}
        self._senders: set[PartitionSender] = set()
        # With the moment since when; used last, last.
        self._idle: OrderedDict[PartitionSender, tuple[_Destination, float]] = OrderedDict()
        self._timer: Timer | None = None  # closes idle senders
        self._idle_at: dict[_Destination, list[PartitionSender]] = {}
        self._in_doubt: OrderedDict[_Copied, _Route] = OrderedDict()  # oldest first
        self._changing = threading.Lock()
        self._stopping = False
        self._failed: set[TopicName] = set()  # since `stop`
        self._closed = False
        self._watchdog = SendWatchdog()

    def send(
        self,
        topic: TopicName,
        message: pulsar.Message,
        properties: dict[str, str],
        deliver_after: timedelta | None,
    ) -> pulsar.MessageId | None:
        """Send a copy of *message*, but for its properties, and return the copy's id.

        Schema, key, ordering key, event time and a null payload survive; a key that is no text
        becomes its base64. The broker has stored the copy when this returns. Messages with one key
        go to the partition that Java's producers choose for it, others to the partitions in turn.

        Returns:
            The copy's id; None if the broker proves that an earlier send has stored it, whose id it
            does not repeat.

        Raises:
            TooBigError: the broker takes no message with so many *properties*.
            SchemaError: it can't be sent with its schema.
            NotSentError: no producer could be made within 12 s, or no receipt came within 10 s and
                1 s more for each MiB. The same message keeps its identity when it is sent again.
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

        Otherwise a stop would wait for each in-flight message.
        """
        self._stopping = True

    def close(self, deadline: Deadline) -> None:
        """Close all producers: later sends have no receipt."""
        with self._changing:
            self._closed = True
            senders = list(self._senders)
        timers = [self._watchdog.close, *([self._timer.close] if self._timer else [])]
        all_within(deadline, [*(sender.end for sender in senders), *timers])

    def _copy(
        self,
        topic: TopicName,
        message: pulsar.Message,
        properties: dict[str, str],
        deliver_after: timedelta | None,
    ) -> pulsar.MessageId | None:
        copied = topic, message.topic_name(), message_id_text(message)
        content = None if message.has_null_value() else message.data()
        key, order = partition_key(message), ordering_key(message)
        fields = {
            "properties": properties,
            "partition_key": key,
            "ordering_key": order,
            "event_timestamp": message.event_timestamp(),
            "deliver_after": deliver_after,
        }
        route = self._kept(copied)
        if route is None:
            version = schema_version(message)
            schema = BYTES if version is None else self._schemas.get(topic_of(message), version)
            partition = self._partition(topic, order or key)
            route = self._new(_Destination(topic, partition, schema))
        try:
            return self._send(route, copied, content, fields)
        except pulsar.MessageTooBig:  # by the client: nothing was sent
            large = self._new(route.to._replace(large=True))
        try:
            return self._send(large, copied, content, fields)
        except pulsar.MessageTooBig as error:
            raise TooBigError(
                f"the properties of a message are too big for {topic}",
                got=f"{sum(len(k) + len(v) for k, v in properties.items())} characters",
                remedy="keep properties well below maxMessageSize of the broker",
            ) from error

    def _send(
        self, route: _Route, copied: _Copied, content: bytes | None, fields: Mapping[str, Any]
    ) -> pulsar.MessageId | None:
        to, sender = route
        timeout = _SEND_SECONDS + len(content or b"") / BYTES_PER_SECOND
        try:
            receipt = sender.send(content, fields, timeout)
            return None if receipt is None else in_partition(receipt, to.partition)
        except (pulsar.Interrupted, pulsar.MessageTooBig):
            raise  # Interrupted is the client's word for KeyboardInterrupt; it may have been sent
        except pulsar.exceptions.PulsarException as error:
            self._partitions.pop(to.topic, None)  # they may be others by now
            if self._closed:
                raise closed_error(to.topic) from error
            remedy = remedy_of(error, CHECK_POLICY)
            raise _not_sent(to.topic, str(error) or type(error).__name__, remedy) from error
        finally:
            self._put_back(route, copied)

    def _new(self, to: _Destination) -> _Route:
        """Return a sender for the next message to a destination: an idle one if there is any."""
        with self._changing:
            if self._closed:
                raise closed_error(to.topic)
            idle = self._idle_at.get(to)
            if idle:
                sender = idle.pop()
                del self._idle[sender]
            else:
                sender = self._made(to)
        sender.begin()
        return _Route(to, sender)

    def _made(self, to: _Destination) -> PartitionSender:
        options = {
            "schema": to.schema,
            "chunking_enabled": to.large,
            "compression_type": _LARGE if to.large else pulsar.CompressionType.NONE,
            **self._crypto,
        }

        def make(name: str) -> pulsar.Producer:
            return open_producer(self._client, to.partition, name, options)

        name = f"{self._name}-{next(self._numbers)}"
        sender = PartitionSender(make, name, self._watchdog, chunked=to.large)
        self._senders.add(sender)
        return sender

    def _kept(self, copied: _Copied) -> _Route | None:
        """Return the sender of an earlier send of the same copy, which got no receipt."""
        if copied not in self._in_doubt:
            return None
        names = self._names(copied[0])
        with self._changing:
            route = self._in_doubt.pop(copied, None)
        if route is not None and route.to.partition not in names:
            self._discard(route.sender)  # the topic was deleted, with its messages
            return None
        return route

    def _put_back(self, route: _Route, copied: _Copied) -> None:
        """Keep a sender for its message if that is in doubt, else for any other."""
        to, sender = route
        with self._changing:
            if self._closed:
                in_background(sender.end)
                return
            if sender.in_doubt:
                self._in_doubt[copied] = route
                too_many = len(self._in_doubt) > _MAX_IN_DOUBT
                surplus = self._in_doubt.popitem(last=False)[1].sender if too_many else None
            else:
                self._idle[sender] = to, time.monotonic()
                if self._timer is None:
                    with contextlib.suppress(RuntimeError):  # the interpreter is going away
                        self._timer = Timer(self._next_idle_end, self._close_idle)
                self._idle_at.setdefault(to, []).append(sender)
                surplus = None
                if len(self._idle) > _MAX_IDLE:
                    surplus = self._longest_idle()
        if surplus is not None:
            self._discard(surplus)

    def _longest_idle(self) -> PartitionSender:
        """Take out the sender that is idle for longest; called with the lock."""
        sender, (to, _) = self._idle.popitem(last=False)
        self._idle_at[to].remove(sender)
        return sender

    def _next_idle_end(self) -> float:
        """Return when to look for idle senders next: one that begins to be idle wakes no thread."""
        with self._changing:
            _, since = next(iter(self._idle.values()), (None, time.monotonic()))
        return since + IDLE_SECONDS

    def _close_idle(self) -> None:
        while True:
            with self._changing:
                _, since = next(iter(self._idle.values()), (None, time.monotonic()))
                if since + IDLE_SECONDS > time.monotonic():
                    return
                sender = self._longest_idle()
            self._discard(sender)

    def _discard(self, sender: PartitionSender) -> None:
        with self._changing:
            self._senders.discard(sender)
        in_background(sender.end)

    def _partition(self, topic: TopicName, key: str) -> str:
        return partition_for(key, self._names(topic), self._turns)

    def _names(self, topic: TopicName) -> tuple[str, ...]:
        """Return the partitions of *topic*, or the topic itself if it has none."""
        partitions = self._partitions.get(topic)
        if partitions is None:
            return self._read(topic)
        if time.monotonic() - partitions.read_at > PARTITIONS_SECONDS:
            # At once, so that one thread asks.
            self._partitions[topic] = partitions._replace(read_at=time.monotonic())
            in_background(functools.partial(self._read_again, topic))
        return partitions.names

    def _read_again(self, topic: TopicName) -> None:
        with contextlib.suppress(NotSentError):  # a send finds out
            self._read(topic)

    def _read(self, topic: TopicName) -> tuple[str, ...]:
        with self._changing:
            if self._closed:
                raise closed_error(topic)
            first = topic not in self._reading
            answer = self._reading.setdefault(topic, Promise())
        if first:  # those who come meanwhile share the answer, also a failure
            self._ask(topic, answer)
        return answer.wait()

    def _ask(self, topic: TopicName, answer: Promise[tuple[str, ...]]) -> None:
        names: tuple[str, ...] = ()
        error = _not_sent(topic, "no answer")
        try:
            ask = functools.partial(self._client.get_topic_partitions, str(topic))
            names = tuple(within(OPEN_SECONDS, ask, late=lambda _: None))
        except TimeoutError:
            pass
        except pulsar.exceptions.PulsarException as refused:
            error = _not_sent(topic, str(refused))
            error.__cause__ = refused
        finally:
            with self._changing:
                del self._reading[topic]
            if names:
                self._partitions[topic] = _Partitions(names, time.monotonic())
                answer.keep(names)
            else:
                answer.fail(error)


def closed_error(topic: TopicName) -> NotSentError:
    """Return the error of a send to *topic* by a consumer that is closed."""
    return _not_sent(topic, "a consumer that is closed")


def _not_sent(topic: TopicName, got: str, remedy: str = CHECK_POLICY) -> NotSentError:
    return NotSentError(f"no receipt came for a message sent to {topic}", got=got, remedy=remedy)

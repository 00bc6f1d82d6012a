"""Connections of consumers and producers to a broker in memory.

One takes the place of a `ClientConnection`; the other one is a client for producers and for
consumers that broadcast.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from queue import Empty, Queue
from typing import NoReturn, cast

import pulsar
import pulsar.schema

from redrive.delivery.concurrency import Deadline
from redrive.delivery.fetcher import ConsumerStoppedError
from redrive.delivery.forwarder import closed_error
from redrive.delivery.parts import BrokerConnection, Parts, Postponed, Subscribing
from redrive.delivery.run import Run
from redrive.errors import InvalidSpecError
from redrive.messages import BYTES, NotSentError
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.policy.sequences import Sequences
from redrive.policy.values import check_instance
from redrive.testing.broker import InMemoryBroker, InMemoryMessage, VirtualTimer

_LONGEST_WAIT = timedelta(days=1)
"""For timers alone, where no message waits: a send that is refused is repeated without end."""


class NothingLeftError(ConsumerStoppedError):
    """A caller would wait permanently for a message; `run` returns instead."""

    reason = "NothingLeft"


class InMemoryConnection(BrokerConnection):
    """A connection to *broker*, in whose virtual time its consumers work."""

    def __init__(self, broker: InMemoryBroker) -> None:
        self.clock = _ConsumerClock(broker)
        self._broker = broker

    def open(self, policy: Policy, subscribing: Subscribing) -> Parts:
        """Consume source and retry topic of *policy*."""
        subscription = _Subscription(self._broker, subscribing.nack_delay)
        return Parts(
            self.clock,
            dict.fromkeys((policy.topic, policy.retry_topic), subscription),
            _Incoming(self._broker, subscribing.schema),
            _Outgoing(self._broker),
            functools.partial(VirtualTimer, self._broker.clock),
            self._work,
            linger=0,
            outage_reporter=_NoReporter(),
            nack_seconds=subscribing.nack_delay.total_seconds(),
            max_in_flight_bytes=subscribing.max_in_flight_bytes,
            sequence_log=_SequenceLog(self._broker, policy) if policy.sequenced else None,
        )

    def _work(self, run: Run) -> None:
        while True:
            try:
                messages = run.take()
            except ConsumerStoppedError:
                return
            began = self._broker.clock.now()
            outcomes = run.outcomes(messages)
            if self._broker.clock.now() - began > run.timeout:
                run.give_up(messages)
                run.ignore(messages, outcomes)
            else:
                run.settle_all(messages, outcomes)


_MAX_MESSAGE_BYTES = 5 * 1024 * 1024
"""The default limit of a broker."""


class InMemoryClient:
    """A client for `RetryProducer`, `BroadcastConsumer` and their asynchronous forms.

    It has the topics of the policy of *broker*, and checks messages by the code of `pulsar.Client`.
    Producers and consumers use real time.
    """

    def __init__(self, broker: InMemoryBroker) -> None:
        check_instance(broker, InMemoryBroker, "broker")
        self._broker = broker

    def get_topic_partitions(self, topic: str) -> list[str]:
        """Return the whole name of *topic*, which has no partitions."""
        return [str(_topic(topic))]

    def subscribe(self, topic: str, *_arguments: object, **_options: object) -> NoReturn:
        """Refuse a consumer with a policy.

        Raises:
            InvalidSpecError: in any case.
        """
        raise InvalidSpecError(
            "a client in memory subscribes for no consumer",
            got=topic,
            remedy="use InMemoryConsumer or InMemorySimpleConsumer, with broker= to share its "
            "topics, or their asynchronous forms",
        )

    def create_producer(
        self, topic: str, *, schema: pulsar.schema.Schema = BYTES, **_options: object
    ) -> InMemoryClientProducer:
        """Return a producer of *topic*."""
        return InMemoryClientProducer(self._broker, _topic(topic), schema)

    def create_reader(
        self,
        topic: str,
        _start: pulsar.MessageId,
        *,
        schema: pulsar.schema.Schema,
        **_options: object,
    ) -> InMemoryReader:
        """Return a reader of the messages that are stored in *topic* from now on."""
        return InMemoryReader(self._broker, _topic(topic), schema)


def _topic(name: str) -> TopicName:
    """Return the topic of a *name*, which may be short as for `pulsar.Client`."""
    if "://" not in name:
        name = f"persistent://{name}" if "/" in name else f"persistent://public/default/{name}"
    return TopicName.parse(name)


class InMemoryClientProducer(pulsar.Producer):  # type: ignore[misc]  # the client has no types
    """A producer of the client, but for the connection."""

    def __init__(
        self, broker: InMemoryBroker, topic: TopicName, schema: pulsar.schema.Schema
    ) -> None:
        broker.check(topic)
        self._broker, self._topic, self._schema = broker, topic, schema

    def send(  # noqa: PLR0913, PLR0917 - as the client has it
        self,
        content: object,
        properties: Mapping[str, str] | None = None,
        partition_key: str | None = None,
        ordering_key: str | None = None,
        sequence_id: int | None = None,
        event_timestamp: int | None = None,
        deliver_after: timedelta | None = None,
    ) -> pulsar.MessageId:
        """Store a message."""
        self._build_msg(
            content, properties, partition_key, ordering_key, sequence_id, None, False,  # noqa: FBT003
            event_timestamp, None, deliver_after,
        )  # fmt: skip
        data = None if content is None else self._schema.encode(content)
        if len(data or b"") > _MAX_MESSAGE_BYTES:
            raise pulsar.MessageTooBig
        message = InMemoryMessage(
            self._topic, pulsar.MessageId.earliest, data, self._broker.clock.now(),
            dict(properties or {}), partition_key or "", ordering_key or "", event_timestamp or 0,
        )  # fmt: skip
        return self._broker.store(self._topic, message, deliver_after)

    def topic(self) -> str:
        """Return the name of its topic."""
        return str(self._topic)

    def last_sequence_id(self) -> int:
        """Return that of a name that has sent nothing."""
        return -1

    def is_connected(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Release nothing."""


class InMemoryReader:
    """A reader of the messages that are stored in *topic* from now on."""

    def __init__(
        self, broker: InMemoryBroker, topic: TopicName, schema: pulsar.schema.Schema
    ) -> None:
        broker.check(topic)
        self._topic, self._schema = topic, schema
        self._messages: Queue[InMemoryMessage | None] = Queue()
        broker.readers.setdefault(topic, []).append(self._messages.put)

    def topic(self) -> str:
        """Return the name of its topic."""
        return str(self._topic)

    def read_next(self, milliseconds: int) -> pulsar.Message:
        """Return the next message.

        Raises:
            pulsar.Timeout: none came within so many *milliseconds*.
            pulsar.AlreadyClosed: the reader was closed.
        """
        try:
            message = self._messages.get(timeout=milliseconds / 1_000)
        except Empty:
            raise pulsar.Timeout from None
        if message is None:
            self._messages.put(None)
            raise pulsar.AlreadyClosed
        return _decoded_by(self._schema, cast("pulsar.Message", message))

    def is_connected(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """End a call that waits."""
        self._messages.put(None)


class _ConsumerClock:
    def __init__(self, broker: InMemoryBroker) -> None:
        self._broker = broker

    def now(self) -> datetime:
        return self._broker.clock.now() + self._broker.clock_error

    def monotonic(self) -> float:
        return self._broker.clock.monotonic()


class _Subscription:
    def __init__(self, broker: InMemoryBroker, nack_delay: timedelta) -> None:
        self._broker = broker
        self._nack_delay = nack_delay

    def acknowledge(self, message: pulsar.Message) -> None:
        self._broker.acknowledge(message)

    def negative_acknowledge(self, message: pulsar.Message) -> None:
        self._broker.negative_acknowledge(message, self._nack_delay)


class _NoReporter:
    """Publishes nothing to an operator."""

    def show(self, name: str, value: str) -> None:
        pass

    def close(self) -> None:
        pass


class _SequenceLog:
    def __init__(self, broker: InMemoryBroker, policy: Policy) -> None:
        self.sequences = Sequences()
        self._topic = policy.sequences_topic
        self._broker = broker
        self._followed = 0

    def read(self) -> None:
        for name, content in self._broker.sequences[self._followed :]:
            self.sequences.apply(name, content)
        self._followed = len(self._broker.sequences)

    def write(self, name: str, content: bytes) -> None:
        if self._topic in self._broker.refused:
            raise NotSentError(f"{self._topic} is refused", remedy="take it out of `refused`")
        self._broker.sequences.append((name, content))
        self.read()

    def close(self, _: Deadline) -> None:
        """Nothing was opened."""


class _Outgoing:
    def __init__(self, broker: InMemoryBroker) -> None:
        self._broker = broker
        self._closed = False

    def send(
        self,
        topic: TopicName,
        message: pulsar.Message,
        properties: dict[str, str],
        deliver_after: timedelta | None,
    ) -> pulsar.MessageId:
        if self._closed:
            raise closed_error(topic)
        original = cast("InMemoryMessage", message)
        copy = InMemoryMessage(
            topic, original.id, None if original.has_null_value() else original.data(),
            original.published,
            properties, original.key, original.order, original.event_time,
        )  # fmt: skip
        if deliver_after is not None:  # the client adds it to its own time of day
            deliver_after = max(deliver_after + self._broker.clock_error, timedelta())
        return self._broker.store(topic, copy, deliver_after)

    def stop(self) -> None:
        """Every send ends at once."""

    def close(self, _: Deadline) -> None:
        self._closed = True


class _Incoming:
    def __init__(self, broker: InMemoryBroker, schema: pulsar.schema.Schema) -> None:
        self.received = 0  # nothing waits in a consumer
        self._broker = broker
        self._schema = schema
        self._paused = False
        self._stopped = False
        self._holders: set[object] = set()
        self._again = Postponed[datetime]()

    @property
    def connected(self) -> bool:
        return not self._stopped

    @property
    def disconnected_since(self) -> float:
        return self._broker.clock.monotonic()  # no connection is ever lost

    def watch(self, seconds: float, report: Callable[[str, bool, float], None]) -> None:
        """No connection is ever lost."""

    def recover(
        self,
        may: Callable[[], bool],
        recovered: Callable[[str], None],
        remove: Callable[[pulsar.Message, int], None],
    ) -> None:
        """Nothing is ever dropped."""

    def watch_clock(self, report: Callable[[str, float], None]) -> None:
        """No clock is measured."""

    def take(self, timeout: float | None = None) -> pulsar.Message | None:
        if self._stopped:
            raise ConsumerStoppedError(
                "this consumer was stopped", remedy="make a new one to continue"
            )
        clock = self._broker.clock
        end = None if timeout is None else clock.now() + timedelta(seconds=timeout)
        message = None if self._paused else self._next(end)
        if message is not None:
            return message
        if end is None:
            raise NothingLeftError(
                "no message will ever come",
                got="paused" if self._paused else "empty topics",
                remedy="send one before, or wait with a time-out",
            )
        clock.advance(end - clock.now())
        return None

    def ready(self) -> pulsar.Message | None:
        return None  # all are taken in virtual time

    @property
    def waiting(self) -> deque[pulsar.Message]:
        return deque()

    def _next(self, end: datetime | None) -> pulsar.Message | None:
        clock = self._broker.clock
        last = clock.now() + _LONGEST_WAIT if end is None else end
        while clock.fire_next(min([due for due in (last, self._next_due()) if due])):
            pass  # a timer may send a message that comes earlier
        theirs = self._theirs_due()
        # A message that is due again precedes all that wait at the broker, as in a `Fetcher`.
        mine = self._again.due
        if mine is not None and (theirs is None or mine <= max(theirs, clock.now())):
            return self._hand_out_again(mine, end)
        if theirs is None:
            return None
        message = self._broker.hand_out(self, None if end is None else end - clock.now())
        return None if message is None else _decoded_by(self._schema, message)

    def _hand_out_again(self, due: datetime, end: datetime | None) -> pulsar.Message | None:
        if end is not None and due > end:
            return None
        message = self._again.pop_first()
        self._broker.clock.advance(due - self._broker.clock.now())
        return message

    def _theirs_due(self) -> datetime | None:
        return None if self._holders else self._broker.next_due()

    def _next_due(self) -> datetime | None:
        dues = (self._theirs_due(), self._again.due)
        return min([due for due in dues if due], default=None)

    def again(self, message: pulsar.Message, seconds: float) -> None:
        self._again.add(message, self._broker.clock.now() + timedelta(seconds=seconds))

    def hasten(self, message: pulsar.Message) -> None:
        self._again.hasten(message, self._broker.clock.now())

    def hold_new(self, holder: object, *, held: bool) -> None:
        (self._holders.add if held else self._holders.discard)(holder)

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def sleep(self, seconds: float) -> None:
        self._broker.clock.advance(timedelta(seconds=seconds))

    def stop(self) -> None:
        self._stopped = True

    def close(self, _: Deadline) -> None:
        self.stop()
        self._broker.take_back(self)


def _decoded_by(schema: pulsar.schema.Schema, message: pulsar.Message) -> pulsar.Message:
    decoded = dataclasses.replace(cast("InMemoryMessage", message), schema=schema)
    return cast("pulsar.Message", decoded)

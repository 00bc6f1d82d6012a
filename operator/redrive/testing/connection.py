"""The parts of a consumer on a broker in memory, in place of a `ClientConnection`."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import cast

import pulsar
import pulsar.schema

from redrive.delivery.concurrency import Deadline
from redrive.delivery.fetcher import ConsumerStoppedError
from redrive.delivery.parts import BrokerConnection, Parts, Subscribing
from redrive.delivery.run import Run
from redrive.messages import NotSentError
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.policy.sequences import Sequences
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
            beacon=_NoReporter(),
            nack_seconds=subscribing.nack_delay.total_seconds(),
            max_in_flight_bytes=subscribing.max_in_flight_bytes,
            letters=_SequenceLog(self._broker, policy) if policy.sequenced else None,
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
    """Reports outages to no operator."""

    def show(self, cause: str) -> None:
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

    def send(
        self,
        topic: TopicName,
        message: pulsar.Message,
        properties: dict[str, str],
        deliver_after: timedelta | None,
    ) -> pulsar.MessageId:
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
        """Nothing was opened."""


class _Incoming:
    def __init__(self, broker: InMemoryBroker, schema: pulsar.schema.Schema) -> None:
        self.received = 0  # nothing waits in a consumer
        self._broker = broker
        self._schema = schema
        self._paused = False
        self._stopped = False
        self._holders: set[object] = set()
        self._again: list[tuple[datetime, int, pulsar.Message]] = []
        self._numbers = itertools.count()

    @property
    def connected(self) -> bool:
        return not self._stopped

    def watch(self, seconds: float, report: Callable[[str, bool, float], None]) -> None:
        """No connection is ever lost."""

    def recover(self, may: Callable[[], bool], recovered: Callable[[str], None]) -> None:
        """Nothing is ever dropped."""

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

    def _next(self, end: datetime | None) -> pulsar.Message | None:
        clock = self._broker.clock
        last = clock.now() + _LONGEST_WAIT if end is None else end
        while clock.fire_next(min([due for due in (last, self._next_due()) if due])):
            pass  # a timer may send a message that comes earlier
        theirs = self._theirs_due()
        # A message that is due again precedes all that wait at the broker, as in a `Fetcher`.
        if self._again and (theirs is None or self._again[0][0] <= max(theirs, clock.now())):
            return self._hand_out_again(end)
        if theirs is None:
            return None
        message = self._broker.hand_out(self, None if end is None else end - clock.now())
        return None if message is None else _decoded_by(self._schema, message)

    def _hand_out_again(self, end: datetime | None) -> pulsar.Message | None:
        due, _, message = self._again[0]
        if end is not None and due > end:
            return None
        heapq.heappop(self._again)
        self._broker.clock.advance(due - self._broker.clock.now())
        return message

    def _theirs_due(self) -> datetime | None:
        return None if self._holders else self._broker.next_due()

    def _next_due(self) -> datetime | None:
        theirs = self._theirs_due()
        mine = self._again[0][0] if self._again else None
        return min([due for due in (theirs, mine) if due], default=None)

    def again(self, message: pulsar.Message, seconds: float) -> None:
        due = self._broker.clock.now() + timedelta(seconds=seconds)
        heapq.heappush(self._again, (due, next(self._numbers), message))

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

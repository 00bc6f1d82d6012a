"""The topics of one policy in memory; called by `testing.consumers`."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any

import pulsar
import pulsar.schema

from redrive.errors import InvalidSpecError
from redrive.messages import BYTES, NotSentError
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.policy.values import check_instance

_MILLISECOND = timedelta(milliseconds=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class VirtualTimer:
    """Calls *fire* when *clock* has come to the moment that *next_due* tells; as `Timer` does."""

    def __init__(
        self, clock: VirtualClock, next_due: Callable[[], float | None], fire: Callable[[], None]
    ) -> None:
        self.next_due = next_due
        self.fire = fire
        self.closing = False
        self._clock = clock
        clock.timers.append(self)

    def reschedule(self) -> None:
        """Do nothing: the clock reads the next time at each move."""

    def close(self) -> None:
        """Stop the timer."""
        self.closing = True
        if self in self._clock.timers:
            self._clock.timers.remove(self)


class VirtualClock:
    """Stands still unless it is put forward.

    Attributes:
        timers: fired as the clock advances.
    """

    def __init__(self, start: datetime) -> None:
        self.timers: list[VirtualTimer] = []
        self._start = start
        self._passed = timedelta()

    def now(self) -> datetime:
        """Return the time of day."""
        return self._start + self._passed

    def monotonic(self) -> float:
        """Return the seconds since the beginning."""
        return self._passed.total_seconds()

    def advance(self, by: timedelta) -> None:
        """Put the clock forward; it never goes back."""
        end = self.now() + max(by, timedelta())
        while self.fire_next(end):
            pass
        self._passed = end - self._start

    def fire_next(self, end: datetime | None) -> bool:
        """Advance to the next timer and fire it, if one is due until *end*, at any time if None."""
        dues = [(due, timer) for timer in self.timers if (due := timer.next_due()) is not None]
        if not dues:
            return False
        due, timer = min(dues, key=lambda entry: entry[0])
        # Rounded up: a timer that fires too early would never stop firing.
        at = self._start + timedelta(microseconds=math.ceil(due * 1_000_000))
        if end is not None and at > end:
            return False
        self._passed = max(self._passed, at - self._start)
        timer.fire()
        return True


@dataclass(frozen=True, eq=False)
class InMemoryMessage:
    """A message as `pulsar.Message` shows it, with the same methods; equal to itself only."""

    topic: TopicName
    id: pulsar.MessageId
    content: bytes | None
    published: datetime
    headers: Mapping[str, str] = field(default_factory=dict)
    key: str = ""
    order: str = ""
    event_time: int = 0
    redeliveries: int = 0
    schema: pulsar.schema.Schema = BYTES

    def data(self) -> bytes:
        """Return the payload; empty for a null value."""
        return self.content or b""

    @property
    def _message(self) -> InMemoryMessage:
        return self

    def length(self) -> int:
        """Return the size of the payload."""
        return len(self.data())

    def value(self) -> Any:  # noqa: ANN401 - any type that the schema decodes
        """Return the payload as the schema of its consumer decodes it."""
        return self.schema.decode(self.data())

    def has_null_value(self) -> bool:
        """Tell a null value from an empty one."""
        return self.content is None

    def properties(self) -> dict[str, str]:
        """Return a copy of its properties."""
        return dict(self.headers)

    def partition_key(self) -> str:
        """Return its key; empty if it has none."""
        return self.key

    def ordering_key(self) -> str:
        """Return its ordering key; empty if it has none."""
        return self.order

    def event_timestamp(self) -> int:
        """Return its event time in milliseconds since 1970; 0 if it has none."""
        return self.event_time

    def publish_timestamp(self) -> int:
        """Return when it was stored, in milliseconds since 1970."""
        return (self.published - _EPOCH) // _MILLISECOND

    def message_id(self) -> pulsar.MessageId:
        """Return its id in its topic."""
        return self.id

    def topic_name(self) -> str:
        """Return the topic it lies in."""
        return str(self.topic)

    def redelivery_count(self) -> int:
        """Return how often it was acknowledged negatively: a broker counts no crash."""
        return self.redeliveries

    def producer_name(self) -> str:
        """Return a name: whoever sent it had none."""
        return "in-memory"

    def encryption_context(self) -> None:
        """Return the context of a message that is not encrypted."""

    def schema_version(self) -> str:
        """Return the version of a message without a schema."""
        return ""


class InMemoryBroker:
    """Source, retry and dead-letter topic of *policy*, and a clock of its own.

    Messages that were delivered and not settled are in-flight at their consumer; closing that
    consumer, as a crash would, returns them. Not for several threads.

    Attributes:
        sequences: the records of a policy that keeps the sequence of dead letters.
        clock: that of the broker and all its consumers.
        dead_letters: the messages of the dead-letter topic, oldest first.
        refused: sends to these topics fail, as after a permission was revoked.
        readers: get each message of their topic when it is stored.
        clock_error: how far the clock of its consumers is ahead of its own; a retry comes later by
            as much. Messages that wait in a consumer do not depend on it.

    Raises:
        InvalidSpecError: *policy* is no Policy, or *start* is no datetime with a time zone.
    """

    def __init__(
        self, policy: Policy, *, start: datetime = datetime(2026, 1, 1, tzinfo=UTC)
    ) -> None:
        check_instance(policy, Policy, "policy")
        if not isinstance(start, datetime) or start.tzinfo is None:
            raise InvalidSpecError(
                "start must be a datetime with a time zone",
                got=start,
                remedy="pass a value such as datetime(2026, 1, 1, tzinfo=UTC)",
            )
        self.clock = VirtualClock(start)
        self.dead_letters: list[InMemoryMessage] = []
        self.refused: set[TopicName] = set()
        self.readers: dict[TopicName, list[Callable[[InMemoryMessage], object]]] = {}
        self.clock_error = timedelta()
        self.sequences: list[tuple[str, bytes]] = []
        self._ledgers = MappingProxyType(
            {policy.topic: 1, policy.retry_topic: 2, policy.dead_letter_topic: 3}
        )
        self._dead_letter_topic = policy.dead_letter_topic
        self._numbers = itertools.count()
        self._waiting: list[tuple[datetime, int, InMemoryMessage]] = []
        self._in_flight: dict[str, tuple[object, InMemoryMessage]] = {}

    def store(
        self, topic: TopicName, message: InMemoryMessage, deliver_after: timedelta | None = None
    ) -> pulsar.MessageId:
        """Store a copy of *message* in *topic*.

        Raises:
            NotSentError: *topic* is refused, or none of the policy's.
        """
        self.check(topic)
        number = next(self._numbers)
        now = self.clock.now()
        stored = dataclasses.replace(
            message,
            topic=topic,
            id=pulsar.MessageId(-1, self._ledgers[topic], number),
            published=now,
            redeliveries=0,
        )
        if topic == self._dead_letter_topic:
            self.dead_letters.append(stored)
        else:
            due = now + (deliver_after or timedelta())
            heapq.heappush(self._waiting, (due, number, stored))
        for deliver in self.readers.get(topic, ()):
            deliver(stored)
        return stored.id

    def check(self, topic: TopicName) -> None:
        """Pass if *topic* takes messages.

        Raises:
            NotSentError: it is refused, or none of the policy's.
        """
        if topic in self.refused or topic not in self._ledgers:
            raise NotSentError(
                f"no receipt came for a message sent to {topic}",
                got="a topic that takes nothing",
                remedy="take it out of `refused`, or use a topic of the policy",
            )

    def next_due(self) -> datetime | None:
        """Return when the next message can be handed out; None if there is none."""
        return self._waiting[0][0] if self._waiting else None

    def hand_out(self, consumer: object, within: timedelta | None) -> InMemoryMessage | None:
        """Give *consumer* the next message that is due *within* that time, at any if None."""
        if not self._waiting:
            return None
        due, _, message = self._waiting[0]
        if within is not None and due > self.clock.now() + within:
            return None
        heapq.heappop(self._waiting)
        self.clock.advance(due - self.clock.now())
        self._in_flight[str(message.id)] = (consumer, message)
        return message

    def unload(self) -> None:
        """Deliver in-flight messages again, as a broker does whose topics have moved to another.

        Any consumer may get them, and those that have them are not notified.
        """
        in_flight, self._in_flight = self._in_flight, {}
        for _, message in in_flight.values():
            again = dataclasses.replace(message, redeliveries=0)
            self._give_back(again, self.clock.now())

    def acknowledge(self, message: InMemoryMessage) -> None:
        """Forget *message*; again changes nothing."""
        if self._in_flight.pop(str(message.id), None) is None:
            others = [entry for entry in self._waiting if entry[2].id != message.id]
            if len(others) < len(self._waiting):  # it was to be delivered again
                self._waiting = others
                heapq.heapify(others)

    def negative_acknowledge(self, message: InMemoryMessage, delay: timedelta) -> None:
        """Hand *message* out again after *delay*, to any consumer."""
        if self._in_flight.pop(str(message.id), None) is not None:
            again = dataclasses.replace(message, redeliveries=message.redeliveries + 1)
            self._give_back(again, self.clock.now() + delay)

    def take_back(self, consumer: object) -> None:
        """Take back the in-flight messages of *consumer*, as if it had crashed."""
        for held_by, message in list(self._in_flight.values()):
            if held_by is consumer:
                del self._in_flight[str(message.id)]
                self._give_back(message, self.clock.now())

    def unsettled(self) -> list[InMemoryMessage]:
        """Return waiting and in-flight messages of source and retry topic, by their ids."""
        held = [message for _, message in self._in_flight.values()]
        return sorted(
            [*held, *(message for _, _, message in self._waiting)],
            key=lambda message: message.id.entry_id(),
        )

    def _give_back(self, message: InMemoryMessage, due: datetime) -> None:
        heapq.heappush(self._waiting, (due, message.id.entry_id(), message))

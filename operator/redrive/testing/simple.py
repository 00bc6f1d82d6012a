"""`SimpleConsumer` on a broker in memory."""

from __future__ import annotations

from datetime import timedelta

from redrive.delivery.consumers.simple import SimpleConsumer
from redrive.delivery.policy_file import PolicyFile, load_policy
from redrive.delivery.telemetry.events import Hook
from redrive.delivery.telemetry.tracing import UNTRACED, MessageTracing
from redrive.policy.cause import Redaction
from redrive.policy.invisible import check_unordered
from redrive.policy.model import Policy
from redrive.testing.broker import InMemoryBroker, VirtualTimer
from redrive.testing.parts import InMemoryTopics, parts_of


class InMemorySimpleConsumer(InMemoryTopics, SimpleConsumer):
    """A `SimpleConsumer` whose messages, time and dead letters are in the hands of a test.

    Invisible durations end while the clock is put forward, by `advance` or by whoever waits for a
    message, of this consumer or of another one of its broker.

    Args:
        policy: what failures lead to; a `PolicyFile` is looked at again in virtual time.
        broker: one to share with other consumers of the policy; by default one of its own.
    """

    def __init__(  # noqa: PLR0913 - each is a choice of its own, with a default
        self,
        policy: Policy | PolicyFile,
        *,
        broker: InMemoryBroker | None = None,
        name: str = "in-memory",
        redaction: Redaction = Redaction(),
        on_event: Hook | None = None,
        tracing: MessageTracing = UNTRACED,
    ) -> None:
        first = check_unordered(policy if isinstance(policy, Policy) else load_policy(policy.path))
        self.broker = broker or InMemoryBroker(first)
        self._topic = first.topic
        parts = parts_of(self.broker, first, timedelta())
        self._assemble(parts, policy, name, redaction, on_event, tracing, linger=timedelta())
        self._timer = VirtualTimer(self.broker.clock, self._next_end, self._expire)

"""`RetryConsumer` on a broker in memory; the way in for users' tests."""

from __future__ import annotations

import functools
from datetime import timedelta

from redrive.delivery.consumers.consumer import NACK_DELAY, RetryConsumer
from redrive.delivery.handling.run import Run
from redrive.delivery.policy_file import PolicyFile, load_policy
from redrive.delivery.receiving.fetcher import ConsumerStoppedError
from redrive.delivery.telemetry.events import Hook
from redrive.delivery.telemetry.tracing import UNTRACED, MessageTracing
from redrive.policy.cause import Redaction
from redrive.policy.model import Policy
from redrive.testing.broker import InMemoryBroker, VirtualTimer
from redrive.testing.parts import InMemoryTopics, parts_of


class InMemoryConsumer(InMemoryTopics, RetryConsumer):
    """A `RetryConsumer` whose messages, time and dead letters are in the hands of a test.

    `run` and `run_batches` return when nothing is left to be handled, and can be called again. They
    handle one message, or one batch, after another, however many workers they are given. A handler
    that puts the clock forward by more than its time-out has timed out.

    Args:
        policy: what failures lead to; a `PolicyFile` is looked at again in virtual time.
        broker: one to share with other consumers of the policy; by default one of its own.
    """

    def __init__(  # noqa: PLR0913 - as of RetryConsumer
        self,
        policy: Policy | PolicyFile,
        *,
        broker: InMemoryBroker | None = None,
        name: str = "in-memory",
        redaction: Redaction = Redaction(),
        nack_delay: timedelta = NACK_DELAY,
        ack_timeout: timedelta | None = None,
        on_event: Hook | None = None,
        tracing: MessageTracing = UNTRACED,
    ) -> None:
        first = policy if isinstance(policy, Policy) else load_policy(policy.path)
        self.broker = broker or InMemoryBroker(first)
        self._topic = first.topic
        parts = parts_of(self.broker, first, nack_delay)
        self._assemble(parts, policy, name, redaction, on_event, tracing)
        self._guard(None, ack_timeout, functools.partial(VirtualTimer, self.broker.clock))

    def _execute(self, run: Run) -> None:
        clock = self.broker.clock
        while True:
            try:
                messages = run.take()
            except ConsumerStoppedError:
                return
            began = clock.now()
            outcomes = run.outcomes(messages)
            if clock.now() - began > run.timeout:
                run.give_up(messages)
                run.ignore(messages, outcomes)
            else:
                run.settle_all(messages, outcomes)

"""`RetryConsumer` on a broker in memory; the way in for users' tests."""

from __future__ import annotations

from typing import Unpack

from redrive.delivery.assembly import RetryOptions
from redrive.delivery.consumers.consumer import RetryConsumer
from redrive.delivery.policy_file import PolicyFile
from redrive.policy.model import Policy
from redrive.testing.broker import InMemoryBroker
from redrive.testing.topics import InMemoryTopics


class InMemoryConsumer(InMemoryTopics, RetryConsumer):
    """A `RetryConsumer` whose messages, time and dead letters are in the hands of a test.

    `run` and `run_batches` return when nothing is left to be handled, and can be called again. They
    handle one message, or one batch, after another, however many workers they are given. A handler
    that puts the clock forward by more than its time-out has timed out.

    Args:
        policy: what failures lead to; a `PolicyFile` is looked at again in virtual time.
        broker: one to share with other consumers of the policy; by default one of its own.
    """

    def __init__(
        self,
        policy: Policy | PolicyFile,
        *,
        broker: InMemoryBroker | None = None,
        **options: Unpack[RetryOptions],
    ) -> None:
        options.setdefault("name", "in-memory")
        super().__init__(self._connect(policy, broker), policy, **options)

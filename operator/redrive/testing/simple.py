"""`SimpleConsumer` on a broker in memory."""

from __future__ import annotations

from typing import Unpack

from redrive.delivery.assembly import Options
from redrive.delivery.consumers.simple import SimpleConsumer
from redrive.delivery.policy_file import PolicyFile
from redrive.policy.model import Policy
from redrive.testing.broker import InMemoryBroker
from redrive.testing.topics import InMemoryTopics


class InMemorySimpleConsumer(InMemoryTopics, SimpleConsumer):
    """A `SimpleConsumer` whose messages, time and dead letters are in the hands of a test.

    Invisible durations end while the clock is put forward, by `advance` or by whoever waits for a
    message, of this consumer or of another one of its broker.

    Args:
        policy: what failures lead to; a `PolicyFile` is looked at again in virtual time.
        broker: one to share with other consumers of the policy; by default one of its own.
    """

    def __init__(
        self,
        policy: Policy | PolicyFile,
        *,
        broker: InMemoryBroker | None = None,
        **options: Unpack[Options],
    ) -> None:
        options.setdefault("name", "in-memory")
        super().__init__(self._connect(policy, broker), policy, **options)

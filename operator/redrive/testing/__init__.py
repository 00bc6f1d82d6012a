"""For users' own unit tests: a consumer without a broker, in virtual time.

`InMemoryConsumer` is a `RetryConsumer` in all but where its messages come from: verdicts, hops and
everything that travels with a message are the real ones. Waiting takes no time: whoever waits for a
message gets the next one that is due, and the clock is put forward.

    consumer = InMemoryConsumer(policy)
    consumer.send(b"{}")
    consumer.run(handle)  # until nothing is left to be handled
    assert [message.data() for message in consumer.dead_letters] == [b"{}"]

`AsyncInMemoryConsumer` is the same for an `AsyncRetryConsumer`, `InMemorySimpleConsumer` for a
`SimpleConsumer`, and `AsyncInMemorySimpleConsumer` for an `AsyncSimpleConsumer`. `InMemoryClient`
takes the place of a client for `RetryProducer` and `BroadcastConsumer`.
"""

from __future__ import annotations

from redrive.testing.broker import InMemoryBroker, InMemoryMessage
from redrive.testing.connection import InMemoryClient, NothingLeftError
from redrive.testing.consumers import (
    AsyncInMemoryConsumer,
    AsyncInMemorySimpleConsumer,
    InMemoryConsumer,
    InMemorySimpleConsumer,
)

__all__ = [
    "AsyncInMemoryConsumer",
    "AsyncInMemorySimpleConsumer",
    "InMemoryBroker",
    "InMemoryClient",
    "InMemoryConsumer",
    "InMemoryMessage",
    "InMemorySimpleConsumer",
    "NothingLeftError",
]

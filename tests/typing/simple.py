"""Never run: mypy, strict, checks that the public API can be used, and can't be misused."""

from __future__ import annotations

from datetime import timedelta
from typing import assert_type

import pulsar

from redrive import PolicyFile, SimpleConsumer
from redrive.testing.consumers import InMemorySimpleConsumer

client = pulsar.Client("pulsar://localhost:6650")
MINUTE = timedelta(minutes=1)

with SimpleConsumer(client, PolicyFile(), name="till-1") as consumer:
    assert_type(consumer, SimpleConsumer)
    for message in consumer.receive(32, MINUTE, timeout=MINUTE):
        consumer.change_invisible_duration(message, 2 * MINUTE)
        consumer.acknowledge(message)
        assert_type(consumer.attempt_of(message).number, int)
    consumer.receive(32)  # type: ignore[call-arg]
    consumer.receive(32, 60)
    consumer.receive(32, "60s")  # type: ignore[arg-type]
    consumer.reconsume_later(message)  # type: ignore[attr-defined]

SimpleConsumer(client, "policy.json")  # type: ignore[arg-type]
InMemorySimpleConsumer(PolicyFile()).send(b"x")

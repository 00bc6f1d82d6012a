"""Never run: mypy, strict, checks that the public API can be used, and can't be misused."""

from __future__ import annotations

from datetime import timedelta

import pulsar

from redrive import AsyncBroadcastConsumer, BroadcastConsumer, Redaction

client = pulsar.Client("pulsar://localhost:6650")


def handle(message: pulsar.Message) -> None:
    """Handle it."""


with BroadcastConsumer(client, "prices", redaction=Redaction([r"\d{16}"])) as consumer:
    consumer.receive().data()
    consumer.receive(timedelta(seconds=1)).data()  # type: ignore[union-attr]
    consumer.run(handle, workers=4, timeout=timedelta(seconds=5), max_rate=0.5, explicit=True)
    consumer.acknowledge(consumer.receive())  # type: ignore[attr-defined]
    consumer.pause()
    consumer.resume()
    consumer.stop()
AsyncBroadcastConsumer(client, "prices", prefetch=10, crypto=None)
BroadcastConsumer(client, "prices", middleware=[])  # type: ignore[call-arg]

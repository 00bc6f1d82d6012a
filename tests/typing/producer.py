"""Never run: mypy, strict, checks that the public API can be used, and can't be misused."""

from __future__ import annotations

from datetime import timedelta
from typing import assert_type

import pulsar
import pulsar.schema

from redrive import AsyncRetryProducer, RetryProducer

client = pulsar.Client("pulsar://localhost:6650")
SECOND = timedelta(seconds=1)

with RetryProducer(client, "orders", send_retries=0, timeout=SECOND, in_flight=4) as producer:
    assert_type(producer, RetryProducer)
    producer.send(b"x", partition_key="k", properties={"a": "b"}, deliver_after=SECOND)
    producer.send(None)
    producer.send(b"x", "k")  # type: ignore[call-arg, arg-type]
    producer.send(b"x", deliver_after=5)
    producer.send(b"x", deliver_after="5s")  # type: ignore[arg-type]
RetryProducer(client, "orders", timeout=3)
RetryProducer(client, "orders", timeout="3s")  # type: ignore[arg-type]
RetryProducer(client, "orders", schema=pulsar.schema.StringSchema()).close()
RetryProducer(client, "orders", compression=pulsar.CompressionType.LZ4).close()


async def send() -> None:
    """Send asynchronously."""
    async with AsyncRetryProducer(client, "orders", in_flight=100) as producer:
        assert_type(producer, AsyncRetryProducer)
        await producer.send(b"x", event_timestamp=1)
        producer.send(b"x").upper()  # type: ignore[attr-defined]

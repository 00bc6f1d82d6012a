"""`AsyncRetryProducer`: `RetryProducer` for asyncio.

Its sends run in threads of their own, one for each message on its way: they decide nothing here,
and the loop never waits.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Self

import pulsar
import pulsar.schema

from redrive.delivery.closing import CLOSE_TIMEOUT, AsyncClosing
from redrive.delivery.crypto import Crypto
from redrive.delivery.forking import OwnerProcess
from redrive.delivery.opening import opened
from redrive.delivery.producing.retry_producer import SEND_RETRIES, SEND_TIMEOUT, RetryProducer
from redrive.errors import InvalidSpecError


class AsyncRetryProducer(AsyncClosing):
    """Produces to a topic, and sends a message again when no receipt came for it in time.

    Use it as an asynchronous context manager: entering it opens what a `RetryProducer` opens at
    once, and raises the same errors. Arguments and guarantees are those of `RetryProducer`.
    """

    def __init__(  # noqa: PLR0913 - as of RetryProducer
        self,
        client: pulsar.Client,
        topic: str,
        *,
        name: str | None = None,
        schema: pulsar.schema.Schema | None = None,
        compression: pulsar.CompressionType = pulsar.CompressionType.NONE,
        crypto: Crypto | None = None,
        send_retries: int = SEND_RETRIES,
        timeout: float | timedelta = SEND_TIMEOUT,
        in_flight: int = 1,
    ) -> None:
        self._open = functools.partial(
            RetryProducer,
            client, topic, name=name, schema=schema, compression=compression, crypto=crypto,
            send_retries=send_retries, timeout=timeout, in_flight=in_flight,
        )  # fmt: skip
        self._threads = ThreadPoolExecutor(max(1, in_flight), "redrive-producer")
        self._producer: RetryProducer | None = None
        self._owner = OwnerProcess("producer")

    async def send(  # noqa: PLR0913 - what a message can have
        self,
        content: object,
        *,
        properties: Mapping[str, str] | None = None,
        partition_key: str = "",
        ordering_key: str = "",
        event_timestamp: int = 0,
        deliver_after: float | timedelta | None = None,
    ) -> pulsar.MessageId | None:
        """Send a message; see `RetryProducer.send`.

        One that has not begun when the producer is left is not sent: ProducerClosedError says so.
        Cancelling this keeps a message from being sent that has not begun to be; one that has goes
        its way, and may or may not be stored.
        """
        self._owner.check()
        if self._producer is None:
            raise InvalidSpecError(
                "a producer is open between entering and leaving it",
                remedy="send within `async with AsyncRetryProducer(…) as producer:`",
            )
        send = functools.partial(
            self._producer.send,
            content,
            properties=properties,
            partition_key=partition_key,
            ordering_key=ordering_key,
            event_timestamp=event_timestamp,
            deliver_after=deliver_after,
        )
        return await asyncio.wrap_future(self._threads.submit(send))

    async def __aenter__(self) -> Self:
        self._owner.check()
        self._producer = await opened(self._open, self._threads)
        return self

    async def close(self, timeout: float | timedelta = CLOSE_TIMEOUT) -> None:
        """Leave the broker, once every send has ended; see `RetryProducer.close`."""
        producer, self._producer = self._producer, None
        if self._owner.is_parent:
            return
        closing = ThreadPoolExecutor(1, "redrive-closing")  # the others may all be sending
        try:
            if producer is not None:
                await asyncio.shield(asyncio.wrap_future(closing.submit(producer.close, timeout)))
        finally:
            closing.shutdown(wait=False)
            self._threads.shutdown(wait=False)

"""Adapter from asyncio consumers to the blocking ones, so that one suite tests both."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

from redrive import AsyncBroadcastConsumer, AsyncRetryConsumer, AsyncSimpleConsumer

_T = TypeVar("_T")


class SynchronousAdapter:
    """Awaits each call on an event loop in another thread; handlers run on that loop."""

    def __init__(
        self, consumer: AsyncRetryConsumer | AsyncSimpleConsumer | AsyncBroadcastConsumer
    ) -> None:
        self._consumer: Any = consumer
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._wait(consumer.__aenter__())

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute of the consumer
        attribute = getattr(self._consumer, name)
        if not inspect.iscoroutinefunction(attribute):
            return attribute
        return lambda *args, **named: self._wait(attribute(*args, **named))

    def run(self, handler: Callable[..., Any], **choices: Any) -> None:  # noqa: ANN401
        self._wait(self._consumer.run(_asynchronous(handler), **choices))

    def run_batches(self, handler: Callable[..., Any], **choices: Any) -> None:  # noqa: ANN401
        self._wait(self._consumer.run_batches(_asynchronous(handler), **choices))

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._wait(self._consumer.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, call: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()


def _asynchronous(handler: Callable[..., _T]) -> Callable[..., Coroutine[Any, Any, _T]]:
    @functools.wraps(handler)
    async def handle(argument: Any) -> _T:  # noqa: ANN401 - a message, or several
        await asyncio.sleep(0)
        return handler(argument)

    return handle

"""Calls that block, in threads, while an event loop awaits them; called by `async_consumer`."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, ParamSpec, TypeVar

import pulsar

from redrive.delivery.bounded import Deadline
from redrive.delivery.handling.bridge import Bridge
from redrive.delivery.handling.interruption import RunCancelled
from redrive.delivery.handling.sigterm import stopping_at_sigterm
from redrive.delivery.receiving.fetcher import ConsumerStoppedError
from redrive.errors import PROCESS_ERRORS

_THREADS = 16
"""At most so many calls of one kind wait for the broker at a time; more wait for their turn."""

_Given = ParamSpec("_Given")
_T = TypeVar("_T")


class CallThreads:
    """Threads of one consumer, in which nothing that was begun is lost by a cancellation.

    Args:
        hand_back: gets each message that no caller awaits any more.

    Attributes:
        closed: whether they have ended, and take no more calls.
    """

    def __init__(self, hand_back: Callable[[pulsar.Message], None]) -> None:
        self._hand_back = hand_back
        self.closed = False
        self._begun: set[Future[Any]] = set()
        self._taking = ThreadPoolExecutor(_THREADS, "redrive-taking")
        self.settling = ThreadPoolExecutor(_THREADS, "redrive-settling")

    async def take(
        self,
        take: Callable[_Given, list[pulsar.Message]],
        *given: _Given.args,
        **named: _Given.kwargs,
    ) -> list[pulsar.Message]:
        """Return what *take* brings; what comes after a cancellation is handed back.

        Raises:
            ConsumerStoppedError: the consumer was closed.
        """
        self._check_open()
        taking = self._taking.submit(take, *given, **named)
        try:
            return await asyncio.wrap_future(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(self._taken_in_vain)
            raise

    async def settle(
        self, settle: Callable[_Given, _T], *given: _Given.args, **named: _Given.kwargs
    ) -> _T:
        """Return what *settle* does, which goes on after a cancellation; see `wait_settled`.

        Raises:
            ConsumerStoppedError: the consumer was closed.
        """
        self._check_open()
        settling = self.settling.submit(settle, *given, **named)
        self._begun.add(settling)
        settling.add_done_callback(self._begun.discard)
        return await asyncio.shield(asyncio.wrap_future(settling))

    def wait_settled(self, deadline: Deadline) -> None:
        """Wait until every settlement that was begun has ended, but no longer than *deadline*."""
        while self._begun and deadline.left():
            wait(list(self._begun), deadline.left())  # a copy, made in one step

    async def close(self, close: Callable[[], None]) -> None:
        """Await *close*, and end the threads, once they have nothing to do."""
        closing = ThreadPoolExecutor(1, "redrive-closing")  # the others may all wait for the broker
        here = contextvars.copy_context()  # tells whether it is a handler that closes
        try:
            await asyncio.shield(asyncio.wrap_future(closing.submit(here.run, close)))
        finally:
            self.closed = True
            for threads in (closing, self._taking, self.settling):
                threads.shutdown(wait=False)

    def _check_open(self) -> None:
        if self.closed:
            raise ConsumerStoppedError(
                "this consumer was closed", remedy="make a new one to go on consuming"
            )

    def _taken_in_vain(self, taking: Future[list[pulsar.Message]]) -> None:
        if not taking.cancelled() and taking.exception() is None:
            for message in taking.result():
                self._hand_back(message)


async def run_in_thread(run: Callable[[], None], bridge: Bridge, stop: Callable[[], None]) -> None:
    """Await *run*, whose handlers *bridge* brings to the loop.

    SIGTERM calls *stop* meanwhile; so does a cancellation, which cancels the handlers too.
    """
    running: Future[None] = Future()

    def until_ended() -> None:
        try:
            run()
        except BaseException as error:  # noqa: BLE001 - raised by whoever awaits
            bridge.tell(running.set_exception, error)
        else:
            bridge.tell(running.set_result, None)

    ended = asyncio.wrap_future(running)
    # Not by an executor: the interpreter waits for its threads, also where the loop has ended with
    # handlers on it.
    threading.Thread(target=until_ended, name="redrive-run", daemon=True).start()
    with stopping_at_sigterm(stop):
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            stop()
            bridge.cancel()
            while not ended.done():
                # However often it is cancelled: the handlers end as they are, and nothing else
                # tells when. With what ends the process the loop has ended before.
                with contextlib.suppress(asyncio.CancelledError, RunCancelled, *PROCESS_ERRORS):
                    await asyncio.shield(ended)
            raise

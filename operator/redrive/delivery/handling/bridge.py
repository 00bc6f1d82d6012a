"""Coroutines as the handlers of threads; called by `async_consumer`.

`run` works in threads, and each of its workers waits here while its handler runs on the loop. So
time-outs, outcomes and order of effects are decided in one place, for both kinds of handlers.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

from redrive.delivery import durations
from redrive.delivery.handling.interruption import RunCancelled, ends_run
from redrive.delivery.handling.run import out_of_time
from redrive.errors import RedriveError
from redrive.policy.durations import given

_LOOK_EVERY_SECONDS = 1.0
"""How often is looked whether there is still a loop that a handler could end on."""

_Given = ParamSpec("_Given")
_Answer = TypeVar("_Answer")


class HandlerCancelledError(RedriveError):
    """A handler was cancelled, but neither by its time-out nor by `run`."""

    reason = "HandlerCancelled"


class Bridge:
    """Runs the handlers of one call of `run` on *loop*, in the context of the thread that waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._tasks: set[asyncio.Task[Any]] = set()
        self._cancelled = False

    def cancel(self) -> None:
        """Cancel all handlers, and those to come; called in the loop."""
        self._cancelled = True
        for task in self._tasks:
            task.cancel()

    def tell(self, settle: Callable[[Any], object], value: object) -> None:
        """Have *settle* set what the loop awaits, if there is still a loop."""
        if not self._loop.is_closed():
            settle(value)

    def handler(
        self, handler: Callable[_Given, Awaitable[_Answer]], timeout: float | timedelta
    ) -> Callable[_Given, _Answer]:
        """Return what calls *handler* on the loop and waits for it; cancelled after *timeout*.

        It has the signature of *handler*.
        """
        limit = given(timeout, "a handler's time-out")

        @functools.wraps(handler, updated=())
        def call(*arguments: _Given.args, **named: _Given.kwargs) -> _Answer:
            return self._call(lambda: handler(*arguments, **named), limit)

        return call

    def _call(self, handler: Callable[[], Awaitable[_Answer]], timeout: timedelta) -> _Answer:
        started: Future[asyncio.Task[_Answer]] = Future()
        ended: Future[_Answer] = Future()
        here = contextvars.copy_context()

        async def handle() -> _Answer:
            try:
                answer: Awaitable[_Answer] | _Answer = handler()
                # One that awaits nothing has done its work by now.
                return await answer if isinstance(answer, Awaitable) else answer
            except BaseException as error:
                if ends_run(error):  # a SystemExit ends the loop, which may never call `_end`
                    ended.set_exception(error)
                raise

        def start() -> None:
            task = self._loop.create_task(handle(), context=here)
            self._tasks.add(task)
            task.add_done_callback(lambda task: self._end(task, ended))
            started.set_result(task)
            if self._cancelled:
                task.cancel()

        try:
            self._loop.call_soon_threadsafe(start)
        except RuntimeError as error:  # the loop was closed
            raise RunCancelled from error
        late = not self._wait(ended, durations.seconds(timeout))
        if late:
            self._loop.call_soon_threadsafe(lambda: started.result().cancel())
            self._wait(ended, None)
        return self._answer(ended, timeout if late else None)

    def _wait(self, ended: Future[_Answer], seconds: float | None) -> bool:
        """Wait for the end of a handler; tell whether it came within so many *seconds*.

        Raises:
            RunCancelled: the loop was closed with the handler on it.
        """
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            left = _LOOK_EVERY_SECONDS if end is None else max(0.0, end - time.monotonic())
            if wait([ended], min(left, _LOOK_EVERY_SECONDS)).done:
                return True
            if self._loop.is_closed():
                raise RunCancelled
            if end is not None and left <= _LOOK_EVERY_SECONDS:
                return False

    def _end(self, task: asyncio.Task[_Answer], ended: Future[_Answer]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            ended.set_exception(asyncio.CancelledError())
        elif error := task.exception():
            if not ended.done():
                ended.set_exception(error)
        else:
            ended.set_result(task.result())

    def _answer(self, ended: Future[_Answer], exceeded: timedelta | None) -> _Answer:
        """Wait for the end, however late: a handler may do something when it is cancelled."""
        error = ended.exception()
        if error is None:
            return ended.result()
        if ends_run(error):
            raise error
        if self._cancelled:  # whatever the handler made of that
            raise RunCancelled from error
        if not isinstance(error, asyncio.CancelledError):
            raise error  # by name, so that its trace tells nothing of futures
        if exceeded is not None:
            raise out_of_time(exceeded)
        raise HandlerCancelledError(
            "something has cancelled the handler, but neither its time-out nor `run`",
            remedy="have the handler deal with what it awaits being cancelled",
        )

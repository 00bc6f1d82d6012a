"""Blocking calls in threads, and coroutines as handlers.

Coroutines as the handlers of threads; called by `async_consumer`.

`run` works in threads, and each of its workers waits here while its handler runs on the loop. So
time-outs, outcomes and order of effects are decided in one place, for both kinds of handlers.

Calls that block, in threads, while an event loop awaits them; called by `async_consumer`.

What is opened in a thread while an asyncio loop waits: nothing stays open unused.

Called by `async_consumer` and `async_retry_producer` when a program enters them.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import pulsar

from redrive.delivery.concurrency import Deadline, RunCancelled, ends_run, to_seconds
from redrive.delivery.fetcher import check_open
from redrive.delivery.run import PassThrough, out_of_time, stopping_at_sigterm
from redrive.errors import PROCESS_ERRORS, RedriveError
from redrive.policy.values import to_limit

_LOOK_EVERY_SECONDS = 1.0
"""How often is looked whether there is still a loop that a handler could end on."""

_Given = ParamSpec("_Given")
_Answer = TypeVar("_Answer")


class HandlerCancelledError(RedriveError):
    """A handler was cancelled, but neither by its time-out nor by `run`."""

    reason = "HandlerCancelled"


class _End(Generic[_Answer]):
    """The end of a handler on the loop, for one thread that waits.

    A lock alone: a future costs more than all else that a short handler does.

    Attributes:
        error: what the handler has raised.
    """

    def __init__(self) -> None:
        self._waiting = threading.Lock()
        self._waiting.acquire()
        self._answers: list[_Answer] = []
        self.error: BaseException | None = None
        self.over = False

    def answer(self, answer: _Answer) -> None:
        """End with what the handler returned."""
        self._answers.append(answer)
        self._end()

    def fail(self, error: BaseException) -> None:
        """End with what it raised, unless it has ended."""
        if not self.over:
            self.error = error
            self._end()

    def wait(self, seconds: float) -> bool:
        """Return True if it ended within so many *seconds*."""
        return self.over or self._waiting.acquire(timeout=seconds)

    def result(self) -> _Answer:
        """Return what the handler returned."""
        return self._answers[0]

    def _end(self) -> None:
        self.over = True
        self._waiting.release()


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
        self, handler: Callable[_Given, Awaitable[_Answer]], timeout: float | timedelta | None
    ) -> Callable[_Given, _Answer]:
        """Return what calls *handler* on the loop and waits for it; cancelled after *timeout*."""
        limit = to_limit(timeout, "a handler's time-out")

        def call(*arguments: _Given.args, **named: _Given.kwargs) -> _Answer:
            return self._call(lambda: handler(*arguments, **named), limit)

        return PassThrough(call, handler)

    def _call(self, handler: Callable[[], Awaitable[_Answer]], timeout: timedelta) -> _Answer:
        ended = _End[_Answer]()
        here = contextvars.copy_context()

        async def handle() -> None:
            try:
                answer: Awaitable[_Answer] | _Answer = handler()
                # One that awaits nothing has done its work by now.
                result = await answer if isinstance(answer, Awaitable) else answer
            except BaseException as error:
                if ends_run(error):  # a SystemExit ends the loop, which may never call `_end`
                    ended.fail(error)
                raise
            ended.answer(result)

        tasks: list[asyncio.Task[None]] = []

        def start() -> None:
            task = self._loop.create_task(handle(), context=here)
            tasks.append(task)
            self._tasks.add(task)
            task.add_done_callback(lambda task: self._end(task, ended))
            if self._cancelled:
                task.cancel()

        def cancel() -> None:
            tasks[0].cancel()

        try:
            self._loop.call_soon_threadsafe(start)
        except RuntimeError as error:  # the loop was closed
            raise RunCancelled from error
        late = not self._wait(ended, to_seconds(timeout))
        if late:
            self._loop.call_soon_threadsafe(cancel)
            self._wait(ended, None)
        return self._answer(ended, timeout if late else None)

    def _wait(self, ended: _End[_Answer], seconds: float | None) -> bool:
        """Wait for the end of a handler; tell whether it came within so many *seconds*.

        Raises:
            RunCancelled: the loop was closed with the handler on it.
        """
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            left = _LOOK_EVERY_SECONDS if end is None else max(0.0, end - time.monotonic())
            if ended.wait(min(left, _LOOK_EVERY_SECONDS)):
                return True
            if self._loop.is_closed():
                raise RunCancelled
            if end is not None and left <= _LOOK_EVERY_SECONDS:
                return False

    def _end(self, task: asyncio.Task[None], ended: _End[_Answer]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            ended.fail(asyncio.CancelledError())
        elif error := task.exception():
            ended.fail(error)

    def _answer(self, ended: _End[_Answer], exceeded: timedelta | None) -> _Answer:
        """Wait for the end, however late: a handler may do something when it is cancelled."""
        error = ended.error
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


_THREADS = 16
"""At most so many calls of one kind wait for the broker at a time; more wait for their turn."""

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
        check_open(closed=self.closed)

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


class _Closes(Protocol):
    def close(self) -> None: ...


Opened = TypeVar("Opened", bound=_Closes)


async def opened(make: Callable[[], Opened], threads: Executor) -> Opened:
    """Return what *make* opens in one of *threads*.

    When this is cancelled the opening goes on; what it opened is closed then. Left open,
    subscriptions would hold messages that no thread takes, and a producer keep its name at the
    broker.

    Raises:
        RedriveError: as *make* does.
    """
    opening = threads.submit(make)
    try:
        return await asyncio.shield(asyncio.wrap_future(opening))
    except asyncio.CancelledError:
        threads.submit(_close, opening)
        raise


def _close(opening: Future[Opened]) -> None:
    if opening.exception() is None:
        opening.result().close()

"""Blocking calls in threads, and coroutines as handlers.

Where middleware wraps handlers, `run` works in threads, and each of its workers waits here while
its handler runs on the loop. Otherwise one thread takes messages, and the loop does the rest.
Time-outs, outcomes and settlement are those of `Run`, for all kinds of handlers.

An object that is opened in a thread while its task is cancelled is closed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast

import pulsar

from redrive.delivery.concurrency import Deadline, RunCancelled, ends_run, to_seconds
from redrive.delivery.fetcher import ConsumerStoppedError, check_open
from redrive.delivery.forking import stopping_at_sigterm
from redrive.delivery.middleware.chain import Outcome
from redrive.delivery.run import HandlerForm, PassThrough, Run, out_of_time
from redrive.errors import PROCESS_ERRORS
from redrive.policy.values import to_limit
from redrive.policy.verdict import HandlerCancelledError, is_a

_LOOK_EVERY_SECONDS = 1.0
"""Interval of checks for a closed loop, on which no handler can end, and for tasks that have ended
before they began."""

_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")


class _End(Generic[_Answer]):
    """The end of a handler on the loop, for one thread that waits.

    A lock alone: a future costs more than all else that a short handler does.

    Attributes:
        error: raised by the handler.
    """

    def __init__(self) -> None:
        self._waiting = threading.Lock()
        self._waiting.acquire()
        self._answers: list[_Answer] = []
        self.error: BaseException | None = None
        self.over = False

    def answer(self, answer: _Answer) -> None:
        """End with the result of the handler."""
        self._answers.append(answer)
        self._end()

    def fail(self, error: BaseException) -> None:
        """End with its error, unless it has ended."""
        if not self.over:
            self.error = error
            self._end()

    def wait(self, seconds: float) -> bool:
        """Return True if it ended within so many *seconds*."""
        return self.over or self._waiting.acquire(timeout=seconds)

    def result(self) -> _Answer:
        """Return the result of the handler."""
        return self._answers[0]

    def _end(self) -> None:
        self.over = True
        self._waiting.release()


class Bridge:
    """Runs the handlers of one call of `run` on *loop*, in the context of the thread that waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.tasks: dict[object, asyncio.Task[Any]] = {}
        self._cancelled = False
        self._caller = asyncio.current_task(loop)
        self._cancellations = 0 if self._caller is None else self._caller.cancelling()

    @property
    def cancelled(self) -> bool:
        """Return True if `run` was cancelled, even if it does not know that yet."""
        caller = self._caller
        later = caller is not None and caller.cancelling() > self._cancellations
        return self._cancelled or later

    def cancel(self) -> None:
        """Cancel all handlers, and those to come; called in the loop."""
        self._cancelled = True
        for task in self.tasks.values():
            task.cancel()

    def failure(self, error: BaseException, exceeded: timedelta | None) -> BaseException:
        """Return the exception for an *error* of a handler, which may have *exceeded* its time."""
        if ends_run(error):
            return error
        if self.cancelled:  # whatever the handler made of that
            return RunCancelled()
        if not is_a(error, CancelledError):
            return error
        if exceeded is not None:
            return out_of_time(exceeded)
        return HandlerCancelledError(
            "something has cancelled the handler, but neither its time-out nor `run`",
            remedy="have the handler catch the cancellation of the calls that it awaits",
        )

    def tell(self, settle: Callable[[Any], object], value: object) -> None:
        """Have *settle* set the future that the loop awaits, if there is still a loop."""
        if not self.loop.is_closed():
            settle(value)

    def handler(
        self, handler: Callable[_Arguments, Awaitable[_Answer]], timeout: float | timedelta | None
    ) -> Callable[_Arguments, _Answer]:
        """Return a function that has the loop run *handler*, for at most *timeout*."""
        limit = to_limit(timeout, "a handler's time-out")

        def call(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Answer:
            return self._call(lambda: handler(*arguments, **named), limit)

        return PassThrough(call, handler, functools.partial(LoopRun, bridge=self))

    def _call(self, handler: Callable[[], Awaitable[_Answer]], timeout: timedelta) -> _Answer:
        ended = _End[_Answer]()
        here = copy_context()

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

        def start() -> None:
            task = self.tasks[ended] = self.loop.create_task(handle(), context=here)
            task.add_done_callback(functools.partial(self._end, ended))
            if self._cancelled:
                task.cancel()

        try:
            self.loop.call_soon_threadsafe(start)
        except RuntimeError as error:  # the loop was closed
            raise RunCancelled from error
        late = not self._wait(ended, to_seconds(timeout))
        if late:
            self.loop.call_soon_threadsafe(self._cancel, ended)
            self._wait(ended, None)  # however late: it may do something when it is cancelled
        if ended.error is not None:
            raise self.failure(ended.error, timeout if late else None)
        return ended.result()

    def _cancel(self, ended: _End[Any]) -> None:
        if ended in self.tasks:
            self.tasks[ended].cancel()

    def _end(self, ended: _End[_Answer], task: asyncio.Task[None]) -> None:
        del self.tasks[ended]
        if task.cancelled():
            ended.fail(CancelledError())
        elif (error := task.exception()) is not None:
            ended.fail(error)

    def _wait(self, ended: _End[_Answer], seconds: float | None) -> bool:
        """Wait for the end of a handler; tell whether it came within so many *seconds*.

        Raises:
            RunCancelled: the loop was closed with the handler on it.
        """
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            rest = _LOOK_EVERY_SECONDS if end is None else max(0.0, end - time.monotonic())
            if ended.wait(min(rest, _LOOK_EVERY_SECONDS)):
                return True
            if self.loop.is_closed():
                raise RunCancelled
            if end is not None and rest <= _LOOK_EVERY_SECONDS:
                return False


_TURN_SECONDS = 0.001
"""After so long handlers that await nothing let the loop do something else."""


@dataclass(kw_only=True)
class LoopRun(Run):
    """One call of `run` whose handlers are awaited on an event loop.

    The thread of `run` takes messages, and passes them to the loop. There a handler that has ended
    is followed by one for a message that is ready, in the same task: so messages that the client
    hands over together change the thread together. Slow settlements run in threads.

    Attributes:
        form: that of the handler; no middleware wraps it.
        may_wait: returns True if to acknowledge a message may take long.
    """

    bridge: Bridge
    form: HandlerForm
    may_wait: Callable[[], bool]

    def __post_init__(self) -> None:
        """Refuse values that can't be obeyed."""
        super().__post_init__()
        self._context = copy_context()
        self._slots = threading.Semaphore(self.workers)
        self._begun = threading.Semaphore(0)
        self._settling = ThreadPoolExecutor(self.workers, "redrive-worker")
        self._out_of_time: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None

    def until_stopped(self) -> None:
        """Take messages until the consumer is stopped, and wait for their handlers."""
        self._context = copy_context()
        watcher = threading.Thread(target=self._watch, name="redrive-watcher", daemon=True)
        watcher.start()
        try:
            self._in_loop(self._look_for_late)
            self._take_all()
            for _ in range(self.workers):
                self._await(self._slots)
        except BaseException as error:  # noqa: BLE001 - raised below
            self._break(error)
        finally:
            self._over.set()
            with contextlib.suppress(RunCancelled):
                self._in_loop(self._look_for_late)
            watcher.join()
            self._settling.shutdown(wait=False)
        if self._broken:
            raise self._broken[0]

    def _take_all(self) -> None:
        while True:
            self._await(self._slots)
            try:
                messages = self.take()
            except ConsumerStoppedError:
                self._slots.release()
                return
            self._in_loop(self._begin, messages)
            self._await(self._begun)  # the loop takes ready messages, without changing the thread

    def _await(self, semaphore: threading.Semaphore) -> None:
        while not semaphore.acquire(timeout=_LOOK_EVERY_SECONDS):
            if self.bridge.loop.is_closed():
                raise RunCancelled

    def _in_loop(self, call: Callable[..., None], *arguments: object) -> None:
        try:
            self.bridge.loop.call_soon_threadsafe(call, *arguments, context=self._context)
        except RuntimeError as error:  # the loop was closed
            raise RunCancelled from error

    def _begin(self, messages: Sequence[pulsar.Message]) -> None:
        """Call the handler, which has a slot; and for other messages, while there are slots."""
        self._start(messages)
        while self.ready is not None and self._slots.acquire(blocking=False):
            if not self._start_next():
                break
        self._begun.release()

    def _start_next(self) -> bool:
        """Use a slot for a message that is ready; return it if there is none."""
        try:
            message = self._next()
        except BaseException as broken:  # noqa: BLE001 - raised again by until_stopped
            self._break(broken)
            message = None
        if message is None:
            self._slots.release()
            return False
        self._start([message])
        return True

    def _next(self) -> pulsar.Message | None:
        if self.ready is None or self._broken or self.bridge.cancelled:
            return None
        return self.ready()

    def _start(self, messages: Sequence[pulsar.Message]) -> None:
        if self.bridge.cancelled:  # the messages stay unacknowledged
            self._slots.release()
            return
        number = self.at_work.begin((self, 0, time.monotonic(), messages))
        self.bridge.tasks[number] = self.bridge.loop.create_task(
            self._use_slot(number, messages), context=self._context.copy()
        )

    async def _use_slot(self, number: int, messages: Sequence[pulsar.Message]) -> None:
        passed_on = False
        try:
            passed_on = await self._handle_ready(number, messages)
        except CancelledError:  # between two handlers
            raise
        except BaseException as broken:
            self._break(broken)
            if isinstance(broken, (SystemExit, KeyboardInterrupt)):
                raise
        finally:
            if not passed_on:
                self._slots.release()

    async def _handle_ready(self, number: int, messages: Sequence[pulsar.Message]) -> bool:
        """Handle messages, and those that are ready then; return True if the slot is passed on."""
        tasks, task, context = self.bridge.tasks, self.bridge.tasks[number], copy_context()
        resumed = time.monotonic()
        while True:
            try:
                outcomes = await self.form.awaited(messages)
            except BaseException as error:  # noqa: BLE001 - raised again, or an outcome
                outcomes = self._failed(number, messages, error)
            finally:
                del tasks[number]
            # Not by their truth: an exception may be false, or raise when it is asked.
            has_failed = any(outcome is not None for outcome in outcomes)
            if has_failed or number not in self.at_work.calls or self.may_wait():
                self._settle_in_thread(number, messages, outcomes)
                return True
            self.finish(number, messages, outcomes)
            if task.cancelling() or copy_context() != context:  # the next begins without that
                self._start_next()
                return True
            now = time.monotonic()
            if now - resumed > _TURN_SECONDS:
                await asyncio.sleep(0)
                resumed = now = time.monotonic()
            message = self._next()
            if message is None:
                return False
            messages = [message]
            number = self.at_work.begin((self, 0, now, messages))
            tasks[number] = task

    def _failed(
        self, number: int, messages: Sequence[pulsar.Message], error: BaseException
    ) -> Sequence[Outcome]:
        """Return the outcomes of a handler that raised *error*; raise errors that end the run."""
        is_late = number in self._out_of_time
        self._out_of_time.discard(number)
        failure = self.bridge.failure(error, self.timeout if is_late else None)
        return super()._failed(number, messages, failure)

    def _settle_in_thread(
        self, number: int, messages: Sequence[pulsar.Message], outcomes: Sequence[Outcome]
    ) -> None:
        """Settle messages, and release their slot then."""

        def settle() -> None:
            try:
                self.finish(number, messages, outcomes)
            except BaseException as broken:  # noqa: BLE001 - raised again by until_stopped
                self._break(broken)
            finally:
                self._slots.release()

        self._settling.submit(self._context.copy().run, settle)

    def _end_unbegun(self, number: int) -> None:
        """Fail the messages of a task that was cancelled before it began."""
        del self.bridge.tasks[number]
        call = self.at_work.calls.get(number)
        messages = () if call is None else call[3]
        try:
            outcomes = self._failed(number, messages, CancelledError())
        except BaseException as broken:  # noqa: BLE001 - raised again by until_stopped
            self._break(broken)
            self._slots.release()
        else:
            self._settle_in_thread(number, messages, outcomes)

    def _look_for_late(self) -> None:
        """Cancel handlers that are out of time; again when the next may be."""
        if self._timer is not None:
            self._timer.cancel()
        if self._over.is_set():
            return
        limit = self.timeout.total_seconds()
        now, seconds = time.monotonic(), limit
        for key, task in list(self.bridge.tasks.items()):  # in the order in which they began
            number = cast("int", key)
            if task.done():
                self._end_unbegun(number)
            elif number not in self._out_of_time:
                call = self.at_work.calls.get(number)
                seconds = 0.0 if call is None else call[2] + limit - now
                if seconds > 0:
                    break
                self._out_of_time.add(number)
                task.cancel()
                seconds = limit
        self._timer = self.bridge.loop.call_later(
            min(seconds, _LOOK_EVERY_SECONDS), self._look_for_late, context=self._context
        )


_THREADS = 16
"""At most so many calls of one kind wait for the broker at a time; more wait for a thread."""

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
        take: Callable[_Arguments, list[pulsar.Message]],
        *arguments: _Arguments.args,
        **named: _Arguments.kwargs,
    ) -> list[pulsar.Message]:
        """Return the messages of *take*; those after a cancellation are handed back.

        Raises:
            ConsumerStoppedError: the consumer was closed.
        """
        self._check_open()
        taking = self._taking.submit(take, *arguments, **named)
        try:
            return await asyncio.wrap_future(taking)
        except CancelledError:
            taking.add_done_callback(self._taken_in_vain)
            raise

    async def settle(
        self,
        settle: Callable[_Arguments, _T],
        *arguments: _Arguments.args,
        **named: _Arguments.kwargs,
    ) -> _T:
        """Return the result of *settle*, which continues after a cancellation; see `wait_settled`.

        Raises:
            ConsumerStoppedError: the consumer was closed.
        """
        self._check_open()
        settling = self.settling.submit(settle, *arguments, **named)
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
        here = copy_context()  # tells whether it is a handler that closes
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
        except CancelledError:
            stop()
            bridge.cancel()
            while not ended.done():
                # However often it is cancelled: the handlers end as they are, and nothing else
                # tells when. An exception that ends the process has ended the loop before.
                with contextlib.suppress(CancelledError, RunCancelled, *PROCESS_ERRORS):
                    await asyncio.shield(ended)
            raise


class _Closes(Protocol):
    def close(self) -> None: ...


Opened = TypeVar("Opened", bound=_Closes)


async def opened(make: Callable[[], Opened], threads: Executor) -> Opened:
    """Return the object that *make* opens in one of *threads*.

    When this is cancelled, the opening continues, and its result is closed then. Left open,
    subscriptions would hold messages that no thread takes, and a producer keep its name at the
    broker.

    Raises:
        RedriveError: as *make* does.
    """
    opening = threads.submit(make)
    try:
        return await asyncio.shield(asyncio.wrap_future(opening))
    except CancelledError:
        threads.submit(_close, opening)
        raise


def _close(opening: Future[Opened]) -> None:
    if opening.exception() is None:
        opening.result().close()

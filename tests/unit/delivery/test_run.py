"""`Run` with messages from a list, the answers of handlers, and SIGTERM."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import itertools
import os
import signal
import threading
import time
import types
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, cast
from unittest.mock import Mock

import pulsar
import pytest
from prometheus_client import REGISTRY

from redrive import Attempt, BroadcastConsumer, Done, Event, Policy, prometheus
from redrive.delivery.concurrency import SignalSafeEvent, Turnstile
from redrive.delivery.fetcher import ConsumerStoppedError
from redrive.delivery.forking import stopping_at_sigterm
from redrive.delivery.middleware.chain import Handle, Outcome
from redrive.delivery.reporting import Name
from redrive.delivery.run import (
    NotRunError,
    Run,
    batch_handler,
    single_handler,
)
from redrive.errors import InvalidSpecError
from redrive.policy.naming import TopicName
from redrive.policy.verdict import HandlerTimeoutError, NotDoneError
from redrive.testing.consumers import AsyncInMemoryConsumer
from tests.support.fake_client import FakeClient

SHORT = timedelta(milliseconds=200)
LONG = timedelta(seconds=30)


def _attempt_of(message: object) -> Attempt:
    return Attempt(0, f"{message}")


class Desk:
    """Hands out numbers as messages until they are used up, and notes how each was settled."""

    def __init__(self, count: int) -> None:
        self.settled: list[tuple[int, Outcome]] = []
        self.late = 0
        self.stopped = threading.Event()
        self._news = threading.Semaphore(0)
        self._numbers: SimpleQueue[int] = SimpleQueue()
        for number in range(count):
            self._numbers.put(number)

    def run(
        self, handler: Callable[[Any], object], *, workers: int = 1, timeout: timedelta = LONG
    ) -> None:
        """Run *handler* on all of them."""
        Run(
            self.take, single_handler(handler, _attempt_of, explicit=False), self.settle,
            self.settle, self.count_late,
            self.stopped.set, workers, timeout,
        ).until_stopped()  # fmt: skip

    def take(self) -> Sequence[Any]:
        """Hand out the next."""
        try:
            if not self.stopped.is_set():
                return [self._numbers.get_nowait()]
        except Empty:
            pass
        raise ConsumerStoppedError("over", remedy="nothing")

    def settle(self, message: Any, outcome: Outcome = None) -> None:  # noqa: ANN401 - a number
        """Record its outcome."""
        self.settled.append((message, outcome))
        self._news.release()

    def wait_for_settled(self, count: int) -> None:
        """Return once so many more were settled."""
        for _ in range(count):
            assert self._news.acquire(timeout=30)

    def count_late(self, _message: object) -> None:
        """Note a late success."""
        self.late += 1


def test_failed_message_is_released_before_the_next() -> None:
    class Message:
        """Content that may be large."""

    seen: list[weakref.ref[Message]] = []

    def take() -> Sequence[Any]:
        if len(seen) == 3:
            raise ConsumerStoppedError("over", remedy="nothing")
        message = Message()
        assert [alive for alive in seen if alive() is not None] == []
        seen.append(weakref.ref(message))
        return [message]

    def fail(_message: object) -> None:
        raise ValueError

    def ignore(*_: object) -> None:
        """Settle nothing."""

    gc.disable()
    try:
        handle = single_handler(fail, _attempt_of, explicit=False)
        Run(take, handle, ignore, ignore, ignore, ignore, 1, LONG).until_stopped()
    finally:
        gc.enable()
    assert len(seen) == 3


def test_too_few_outcomes_of_a_middleware_end_the_run() -> None:
    form, acknowledged = single_handler(lambda _: None, _attempt_of, explicit=False), list[Any]()
    taken = iter([["a", "b"]])

    def handle(messages: Sequence[Any]) -> Sequence[Outcome]:
        return [form([message]) for message in messages][-1]

    def ignore(*_: object) -> None:
        """Do nothing."""

    run = Run(
        lambda: cast("Sequence[Any]", next(taken)), handle, acknowledged.append, ignore, ignore,
        ignore, 1, LONG, acknowledge_all=acknowledged.extend,
    )  # fmt: skip
    with pytest.raises(ValueError, match="zip"):
        run.until_stopped()
    assert acknowledged == ["a"]


def test_single_worker_uses_the_calling_thread() -> None:
    desk = Desk(3)
    threads = set()
    desk.run(lambda _: threads.add(threading.current_thread()))
    assert threads == {threading.current_thread()}
    assert desk.settled == [(0, None), (1, None), (2, None)]


def test_concurrent_handlers_are_limited_by_workers() -> None:
    desk, running, most = Desk(40), [], []
    first_four = threading.Barrier(4)

    def handle(message: object) -> None:
        running.append(message)
        most.append(len(running))
        if isinstance(message, int) and message < 4:
            first_four.wait(30)
        running.remove(message)

    desk.run(handle, workers=4)
    assert max(most) == 4
    assert sorted(message for message, _ in desk.settled) == list(range(40))


def narrowed(watched: Turnstile) -> Turnstile:
    """Have worker 0 work alone."""
    for _ in range(100):
        watched.leave(0, 0.0)
    return watched


def waits(turnstile: Turnstile, worker: int, seconds: float) -> bool:
    """Return True if *worker* does not get through within so many *seconds*."""
    thread = threading.Thread(target=turnstile.enter, args=(worker,), daemon=True)
    thread.start()
    thread.join(seconds)
    return thread.is_alive()


def test_fast_worker_works_alone() -> None:
    turnstile = narrowed(Turnstile())
    assert waits(turnstile, 1, 0.1)
    assert not waits(turnstile, 0, 30)


def test_workers_with_slow_handlers_all_work() -> None:
    turnstile = Turnstile()
    for _ in range(100):
        turnstile.leave(0, 0.001)
    assert not waits(turnstile, 1, 30)


@pytest.mark.parametrize(
    "change",
    [
        lambda turnstile: [turnstile.leave(0, 0.001) for _ in range(6)],
        lambda turnstile: turnstile.leave(0, 0.006),
        lambda turnstile: turnstile.quit(0),
        lambda turnstile: turnstile.close(),
    ],
    ids=["some slow calls", "one slow call", "the end of the worker", "the end of the run"],
)
def test_lone_worker_lets_the_others_work_after(change: Callable[[Turnstile], object]) -> None:
    turnstile = narrowed(Turnstile())
    change(turnstile)
    assert not waits(turnstile, 1, 30)


def test_lone_worker_recovers_from_single_slow_calls() -> None:
    turnstile = narrowed(Turnstile())
    for _ in range(10):
        turnstile.leave(0, 0.004)
        for _ in range(100):
            turnstile.leave(0, 0.0)
    assert waits(turnstile, 1, 0.1)


def test_lone_worker_that_ends_no_call_is_noticed() -> None:
    turnstile = narrowed(Turnstile())
    watcher = threading.Thread(target=turnstile.watch)
    watcher.start()
    assert not waits(turnstile, 1, 30)
    turnstile.close()
    watcher.join(30)
    assert not watcher.is_alive()


def test_slow_handler_behind_fast_ones_runs_beside_others() -> None:
    desk, slow = Desk(1_000), threading.Barrier(4)

    def handle(message: int) -> None:
        if message >= 996:
            slow.wait(30)

    desk.run(handle, workers=4)
    assert [outcome for _, outcome in desk.settled] == [None] * 1_000


def test_late_success_is_only_counted() -> None:
    desk = Desk(2)
    # Long enough for the other message, however busy the machine.
    desk.run(lambda m: desk.wait_for_settled(1) if m == 0 else None, timeout=timedelta(seconds=1))

    (slow, failure), fast = desk.settled
    assert (slow, fast) == (0, (1, None))
    assert isinstance(failure, HandlerTimeoutError)
    assert isinstance(failure, TimeoutError)
    assert "got 'more than 1 s'" in str(failure)
    assert desk.late == 1


def test_late_failure_is_no_late_success() -> None:
    desk = Desk(1)

    def handle(_: object) -> None:
        desk.wait_for_settled(1)
        raise ValueError

    desk.run(handle, timeout=SHORT)
    assert [type(failure) for _, failure in desk.settled] == [HandlerTimeoutError]
    assert desk.late == 0


def test_broadcast_message_that_fails_is_dropped_and_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client, events, handled = FakeClient(), list[Event](), list[bytes]()
    topic = TopicName("shop", "prod", "prices")

    def handle(message: pulsar.Message) -> None:
        handled.append(message.data())
        if message.data() == b"bad":
            raise ValueError("no such price")
        if message.data() == b"last":
            consumer.stop()

    with BroadcastConsumer(client.as_pulsar(), str(topic), on_event=events.append) as consumer:
        client.deliver(topic, b"bad", b"good", b"last")
        consumer.run(handle)
    with pytest.raises(ConsumerStoppedError, match="was closed"):
        consumer.run(handle)
    assert handled == [b"bad", b"good", b"last"]
    (event,) = events
    assert (event.event, event.reason, event.attempt) == (Name.DROPPED, "ValueError", 1)
    assert event.source == str(topic)
    (record,) = caplog.records
    assert record.getMessage().startswith("dropped ")
    assert "ValueError: no such price" in record.getMessage()
    prometheus.count(event)
    labels = {"policy": "", "policy_namespace": "", "subscription": ""}
    labels |= {"source_topic": event.source, "reason": event.reason}
    assert REGISTRY.get_sample_value("redrive_consumer_dropped_messages_total", labels) == 1


def test_run_ends_without_a_timed_out_handler() -> None:
    desk, hang = Desk(20), threading.Event()
    both = threading.Barrier(2)

    def handle(message: object) -> None:
        if message in {0, 1}:
            both.wait(30)  # else the other worker might do it all
        if threading.current_thread().name == "redrive-worker-1":
            hang.wait(60)

    began = time.monotonic()
    desk.run(handle, workers=2, timeout=timedelta(seconds=1))
    assert time.monotonic() - began < 30
    assert len(desk.settled) == 20
    assert [type(f) for _, f in desk.settled if f is not None] == [HandlerTimeoutError]
    hang.set()


@pytest.mark.parametrize("workers", [1, 3])
def test_system_exit_ends_the_run_and_settles_nothing(workers: int) -> None:
    desk = Desk(10)

    def handle(message: object) -> None:
        if message == 4:
            raise SystemExit(3)
        time.sleep(0.01)

    with pytest.raises(SystemExit):
        desk.run(handle, workers=workers)
    assert desk.stopped.is_set()
    assert 4 not in [message for message, _ in desk.settled]


@pytest.mark.parametrize("workers", [1, 3])
def test_handler_base_exception_fails_its_message(workers: int) -> None:
    desk, error = Desk(10), asyncio.CancelledError()

    def handle(message: object) -> None:
        if message == 4:
            raise error

    desk.run(handle, workers=workers)
    assert sorted(desk.settled) == [(n, error if n == 4 else None) for n in range(10)]


def test_error_while_settling_ends_the_run() -> None:
    class Broken(Desk):
        def settle(self, message: Any, outcome: Outcome = None) -> None:  # noqa: ANN401, ARG002
            raise ConnectionError

    desk = Broken(10)
    with pytest.raises(ConnectionError):
        desk.run(lambda _: None, workers=2)
    assert desk.stopped.is_set()


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"workers": 0}, "workers must be a whole number, at least 1; got 0"),
        ({"timeout": timedelta()}, "positive time"),
    ],
)
def test_invalid_run_option_is_refused(choice: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSpecError, match=message):
        Desk(0).run(print, **choice)


def always(value: object) -> Callable[[object], Any]:
    return lambda _: value


def attempt_of(message: object) -> Attempt:
    return Attempt(2, f"of {message}")


def one(handler: Callable[..., Any], *, explicit: bool) -> Handle:
    return single_handler(handler, attempt_of, explicit=explicit)


async def coroutine(_given: object) -> None:
    """Do nothing when it is called."""


def generator(_given: object) -> Iterator[None]:
    yield


async def asynchronous_generator(_given: object) -> AsyncIterator[None]:
    yield


class Takes:
    """Handlers with and without the attempt; each returns its arguments."""

    def method(self, message: str, attempt: Attempt) -> object:
        return message, attempt

    def __call__(self, message: str, number: Attempt) -> object:
        return message, number

    @staticmethod
    def defaulted(message: str, attempt: Attempt | None = None) -> object:
        return message, attempt

    @staticmethod
    def own_default(message: str, times: int = 3) -> object:
        return message, times

    @staticmethod
    def any_number(*arguments: object, **_named: object) -> object:
        return arguments

    @staticmethod
    def keyword(message: str, *, attempt: str = "none") -> object:
        return message, attempt


def test_handler_with_second_argument_gets_the_attempt() -> None:
    results: list[object] = []

    def noting(handler: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(handler)
        def handle(*arguments: object) -> None:
            results.append(handler(*arguments))

        return handle

    attempt = Attempt(2, "of m")
    takes = Takes()
    expected: dict[Callable[..., object], object] = {
        takes.method: ("m", attempt),
        takes: ("m", attempt),
        takes.defaulted: ("m", attempt),
        functools.partial(takes.method): ("m", attempt),
        takes.own_default: ("m", 3),
        takes.any_number: ("m",),
        takes.keyword: ("m", "none"),
        functools.partial(takes.method, attempt=attempt): ("m", attempt),
    }
    for handler in expected:
        assert [*one(noting(handler), explicit=False)(["m"])] == [None]
    assert results == list(expected.values())


def injecting(handler: Callable[..., object]) -> Callable[..., object]:
    """Add an argument, and take the message only."""

    @functools.wraps(handler)
    def handle(message: object) -> object:
        return handler("database", message)

    return handle


def passing(handler: Callable[..., object]) -> Callable[..., object]:
    """Pass on all arguments."""

    @functools.wraps(handler)
    def handle(*arguments: object, **named: object) -> object:
        return handler(*arguments, **named)

    return handle


class Injecting:
    """The same as an object, and as a method."""

    def __init__(self, handler: Callable[..., object]) -> None:
        functools.update_wrapper(self, handler)
        self.handler = handler

    def __call__(self, message: object) -> object:
        return self.handler("database", message)

    @staticmethod
    def _add(method: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(method)
        def handle(self: object, message: object) -> object:
            return method(self, "database", message)

        return handle

    @_add
    def method(self, database: object, message: object) -> object:
        return database, message


def pair(database: object, message: object) -> tuple[object, object]:
    return database, message


def signed(handler: Callable[..., object]) -> Callable[..., object]:
    vars(handler)["__signature__"] = inspect.signature(handler)
    return handler


def described(handler: Callable[..., object]) -> Callable[..., object]:
    """Say that a function which adds an argument takes all of its handler."""
    handle = injecting(handler)
    vars(handler)["__signature__"] = inspect.signature(handler)
    vars(handle)["__signature__"] = inspect.signature(handler)
    return handle


class Proxy:
    """A decorated handler with the class of its handler, as wrapt makes them."""

    def __init__(self, handler: Callable[..., object]) -> None:
        self.__wrapped__ = handler

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # noqa: ANN401
        return self.__wrapped__.__class__

    def __getattr__(self, name: str) -> object:
        return getattr(self.__wrapped__, name)

    def __call__(self, *arguments: object, **named: object) -> object:
        return self.__wrapped__(*arguments, "database", **named)


INJECTED: dict[str, Callable[..., object]] = {
    "function": injecting(pair),
    "twice": injecting(passing(pair)),
    "signed": injecting(signed(lambda database, message: (database, message))),
    "signed object": Injecting(signed(lambda database, message: (database, message))),
    "described": described(lambda database, message: (database, message)),
    "proxy": Proxy(lambda message, *more: (*more, message)),
    "object": Injecting(pair),
    "method": Injecting(pair).method,
    "partial": functools.partial(injecting(pair)),
    "bound": functools.partial(passing(pair), "database"),
    "keyword": functools.wraps(pair)(lambda message, database="database": (database, message)),
}


@pytest.mark.parametrize("form", [one, batch_handler])
@pytest.mark.parametrize("handler", INJECTED.values(), ids=INJECTED)
def test_decorator_that_injects_an_argument_is_called(form: Any, handler: Any) -> None:  # noqa: ANN401
    results: list[object] = []

    @functools.wraps(handler)
    def handle(message: object) -> None:
        results.append(handler(message))

    assert [*form(handle, explicit=False)(["m"])] == [None]
    if form is one:
        assert [*one(handler, explicit=False)(["m"])] == [None]
        assert results == [("database", "m")]


def test_decorated_function_gets_the_attempt_by_its_type() -> None:
    results: list[object] = []

    @passing
    def handle(message: object, number: Attempt) -> None:
        results.append((message, number))

    assert [*one(handle, explicit=False)(["m"])] == [None]
    assert results == [("m", Attempt(2, "of m"))]


@pytest.mark.parametrize(
    "handler",
    [
        lambda database, message: (database, message),
        lambda message, database: (database, message),
        lambda database, message, attempt: (database, message, attempt),
        lambda message, attempt, database: (database, message, attempt),
        types.MethodType(lambda _self, message, database: (database, message), "self"),
    ],
)
def test_decorator_that_hides_arguments_is_refused(handler: Callable[..., object]) -> None:
    forms: list[Any] = [passing(handler), functools.partial(passing(handler)), Proxy(handler)]
    for form in forms:
        with pytest.raises(InvalidSpecError, match=r"decorator hides|a handler takes"):
            one(form, explicit=False)
        with pytest.raises(InvalidSpecError, match="a handler takes a list"):
            batch_handler(form, explicit=False)


def unmarked(handler: Callable[..., object]) -> Callable[..., object]:
    """Pass on all arguments, without `functools.wraps`."""

    def handle(*arguments: object, **named: object) -> object:
        return handler(*arguments, **named)

    return handle


def unmarked_rest(handler: Callable[..., object]) -> Callable[..., object]:
    """The same, but for the first argument."""

    def handle(message: object, *more: object) -> object:
        return handler(message, *more)

    return handle


class Unmarked:
    """The same as an object."""

    def __init__(self, handler: Callable[..., object]) -> None:
        self.handler = handler

    def __call__(self, *arguments: object) -> object:
        return self.handler(*arguments)


def mocking(handler: Callable[..., object]) -> Callable[..., object]:
    """The same as a mock."""
    return Mock(side_effect=handler)


@pytest.mark.parametrize(
    ("form", "decorate"),
    [
        *itertools.product([one, batch_handler], [unmarked, Unmarked, mocking]),
        (one, unmarked_rest),
    ],
)
def test_unmarked_decorator_that_hides_the_attempt_is_refused(form: Any, decorate: Any) -> None:  # noqa: ANN401
    for decorated in (decorate(pair), functools.partial(decorate(pair)), decorate(Takes().method)):
        with pytest.raises(InvalidSpecError, match="a decorator hides"):
            form(decorated, explicit=False)
    assert [*form(decorate(always(None)), explicit=False)(["m"])] == [None]


class Static:
    """An object that is called without itself."""

    @staticmethod
    def __call__(message: object, attempt: Attempt) -> object:
        return message, attempt


class OfClass:
    """An object that is called with its class."""

    @classmethod
    def __call__(cls, message: object, attempt: Attempt) -> object:
        return message, attempt


class Dispatching:
    """Methods that are chosen by the class of the message."""

    @functools.singledispatchmethod
    def method(self, message: object, attempt: Attempt) -> object:
        return message, attempt


@pytest.mark.parametrize("handler", [Static(), OfClass(), Dispatching().method])
def test_call_without_the_object_gets_the_attempt(handler: Callable[..., Any]) -> None:
    results: list[object] = []
    handle = one(lambda message, attempt: results.append(handler(message, attempt)), explicit=False)
    assert handle(["m"]) == [None]
    assert [*one(handler, explicit=False)(["m"])] == [None]
    assert results == [("m", Attempt(2, "of m"))]
    with pytest.raises(InvalidSpecError, match="a handler takes a list"):
        batch_handler(handler, explicit=False)


@pytest.mark.parametrize("spec", [pair, always(None), Takes().method])
def test_mock_of_a_function_is_called_with_the_message(spec: Callable[..., object]) -> None:
    mock = Mock(spec=spec)
    assert [*one(mock, explicit=False)(["m"])] == [None]
    assert mock.call_args.args == ("m",)


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (None, "a handler must be a function; got None"),
        (b"m", "a handler must be a function; got b'm'"),
        (generator, "must be a coroutine function, .*; got 'generator'; use no yield"),
        (asynchronous_generator, "must be a coroutine function, .*; use no yield"),
    ],
)
async def test_async_handler_that_would_not_run_is_refused(handler: Any, message: str) -> None:  # noqa: ANN401
    consumer = AsyncInMemoryConsumer(POLICY)
    consumer.send(b"m")
    for run in (consumer.run, consumer.run_batches):
        with pytest.raises(InvalidSpecError, match=message):
            await run(handler)
    assert len(consumer.broker.unsettled()) == 1


async def test_async_decorator_that_injects_an_argument_is_called() -> None:
    results: list[object] = []

    async def handle(database: str, message: pulsar.Message) -> None:
        results.append((database, message.data()))

    @functools.wraps(handle)
    async def inject(message: pulsar.Message) -> None:
        await handle("database", message)

    @functools.wraps(handle)
    async def hide(*arguments: pulsar.Message) -> None:
        await handle("database", *arguments)

    consumer = AsyncInMemoryConsumer(POLICY)
    consumer.send(b"m")
    with pytest.raises(InvalidSpecError, match="a decorator hides"):
        await consumer.run(hide)
    await consumer.run(inject)
    assert results == [("database", b"m")]


def test_handler_without_a_signature_is_refused() -> None:
    with pytest.raises(InvalidSpecError, match=r"can't be determined; got 'dict\.update'"):
        one({}.update, explicit=False)


@pytest.mark.parametrize("value", [None, 0, False, Done(), "failed", ValueError()])
def test_handler_that_returns_has_succeeded(value: object) -> None:
    assert [*one(always(value), explicit=False)(["m"])] == [None]


@pytest.mark.parametrize("value", [None, 0, True, Done, "done"])
def test_explicit_handler_succeeds_only_with_done(value: object) -> None:
    handle = one(always(value), explicit=True)
    (outcome,) = handle(["m"])
    assert isinstance(outcome, NotDoneError)
    assert f"got {type(value).__name__!r}; return Done()" in str(outcome)
    assert [*one(always(Done()), explicit=True)(["m"])] == [None]


FAILURE = KeyError("b")


@pytest.mark.parametrize(
    ("answer", "explicit", "outcomes"),
    [
        ([None, FAILURE, Done()], False, [None, FAILURE, None]),
        (None, False, [None] * 3),
        (None, True, [NotDoneError] * 3),
        ([None] * 3, True, [NotDoneError] * 3),
        ([False, True, ValueError], False, [NotDoneError] * 3),
    ],
)
def test_batch_answer_decides_for_each_message(
    answer: object, *, explicit: bool, outcomes: list[object]
) -> None:
    results = batch_handler(always(answer), explicit=explicit)(["a", "b", "c"])
    assert [type(r) if isinstance(r, NotDoneError) else r for r in results] == outcomes


@pytest.mark.parametrize("value", [[], [None], [None] * 3])
def test_batch_answer_of_wrong_length_fails_the_batch(value: list[None]) -> None:
    with pytest.raises(NotDoneError, match=f"a handler of 2 messages .* got '{len(value)} "):
        batch_handler(always(value), explicit=False)(["a", "b"])


def test_batch_handler_may_change_its_list() -> None:
    def clear(batch: Any) -> None:  # noqa: ANN401 - numbers
        batch.clear()

    messages: list[Any] = ["a", "b"]
    assert batch_handler(clear, explicit=False)(messages) == [None, None]
    assert messages == ["a", "b"]


def submitted(_given: object) -> Future[None]:
    return Future()


LAZY = [coroutine, generator, asynchronous_generator]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("lazy", [*LAZY, submitted])
@pytest.mark.parametrize("form", [one, batch_handler])
def test_answer_that_only_promises_work_is_an_error(form: Any, lazy: Any) -> None:  # noqa: ANN401
    handle = form(lambda messages: lazy(messages), explicit=False)  # noqa: PLW0108 - hides its kind
    with pytest.raises(NotRunError, match="returned a promise of its work"):
        handle(["m"])


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        *((lazy, f"got '{lazy.__name__}'; .*AsyncRetryConsumer") for lazy in LAZY),
        (lambda: None, "a handler takes a"),
        (lambda _message, _more, _yet_more: None, "a handler takes a"),
        (lambda *, message: message, "a handler takes a"),
    ],
)
@pytest.mark.parametrize("form", [one, batch_handler])
def test_lazy_handler_or_wrong_signature_is_refused(form: Any, handler: Any, message: str) -> None:  # noqa: ANN401
    with pytest.raises(InvalidSpecError, match=message):
        form(handler, explicit=False)


@pytest.mark.parametrize(
    "fitting", [print, lambda *_messages: None, lambda _message, _retries=3: None, {}.get]
)
@pytest.mark.parametrize("form", [one, batch_handler])
def test_handler_may_have_more_arguments_with_defaults(form: Any, fitting: Any) -> None:  # noqa: ANN401
    form(fitting, explicit=False)


POLICY = Policy(TopicName("shop", "prod", "orders"), "billing")


def terminate() -> None:
    """Send SIGTERM to this process, whose handlers have run on return: it is the main thread."""
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def heedless() -> Iterator[None]:
    """Restore the default at SIGTERM, as in a program that does nothing of its own."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("heedless")
async def test_sigterm_lets_consumers_finish_in_flight_messages() -> None:
    consumers = [AsyncInMemoryConsumer(POLICY, name=name) for name in ("a", "b", "c")]
    in_hand = threading.Barrier(len(consumers) + 1)
    go_on = asyncio.Event()
    handled = []

    async def handle(message: pulsar.Message) -> None:
        await asyncio.to_thread(in_hand.wait, 10)
        await go_on.wait()
        handled.append(message.data())

    for consumer in consumers:
        consumer.send(b"first")
        consumer.send(b"second")
    runs = asyncio.gather(*[consumer.run(handle) for consumer in consumers])
    await asyncio.to_thread(in_hand.wait, 10)
    terminate()
    go_on.set()
    await runs
    assert handled == [b"first"] * len(consumers)
    assert [len(consumer.broker.unsettled()) for consumer in consumers] == [1, 1, 1]


@pytest.mark.usefixtures("heedless")
def test_ended_run_keeps_sigterm_for_the_others() -> None:
    stopped = []
    first = stopping_at_sigterm(lambda: stopped.append("first"))
    second = stopping_at_sigterm(lambda: stopped.append("second"))
    first.__enter__()
    with second:
        first.__exit__(None, None, None)
        terminate()
    assert stopped == ["second"]


@pytest.mark.usefixtures("heedless")
def test_sigterm_handler_of_the_program_is_kept() -> None:
    signals = []
    signal.signal(signal.SIGTERM, lambda *_: signals.append("program"))
    with stopping_at_sigterm(lambda: signals.append("redrive")):
        terminate()
    terminate()
    assert signals == ["program"] * 2
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.mark.usefixtures("heedless")
def test_sigterm_handler_set_during_a_run_is_kept() -> None:
    signals = []
    with stopping_at_sigterm(lambda: signals.append("redrive")):
        signal.signal(signal.SIGTERM, lambda *_: signals.append("program"))
    terminate()
    assert signals == ["program"]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.mark.usefixtures("heedless")
def test_sigterm_during_installation_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    heed, stopped = signal.signal, []

    def heed_and_hear(number: int, handler: Any) -> object:  # noqa: ANN401 - as signal.signal
        before = heed(number, handler)
        terminate()
        return before

    with monkeypatch.context() as patch:
        patch.setattr(signal, "signal", heed_and_hear)
        context = stopping_at_sigterm(lambda: stopped.append("begin"))
        context.__enter__()
    assert stopped == ["begin"]
    context.__exit__(None, None, None)


@pytest.mark.usefixtures("heedless")
def test_sigterm_during_removal_stops_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heed, stopped = signal.signal, []

    def hear_and_heed(number: int, handler: Any) -> object:  # noqa: ANN401 - as signal.signal
        terminate()
        return heed(number, handler)

    with stopping_at_sigterm(lambda: stopped.append("end")):
        monkeypatch.setattr(signal, "signal", hear_and_heed)
    assert stopped == ["end"]
    monkeypatch.undo()


def test_event_that_is_not_set_times_out() -> None:
    assert not SignalSafeEvent().wait(0.01)


def test_set_event_releases_every_waiter() -> None:
    event = SignalSafeEvent()
    through = []
    waiting = [threading.Thread(target=lambda: through.append(event.wait(60))) for _ in range(3)]
    for thread in waiting:
        thread.start()
    event.set()
    for thread in waiting:
        thread.join(60)
    assert through == [True] * 3
    assert event.wait(0)


def test_signal_handler_sets_event_for_interrupted_thread() -> None:
    event = SignalSafeEvent()
    before = signal.signal(signal.SIGALRM, lambda *_: event.set())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        began = time.monotonic()
        assert event.wait(60)
        assert time.monotonic() - began < 30
    finally:
        signal.signal(signal.SIGALRM, before)

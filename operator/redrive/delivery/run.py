"""The loop of `run`: workers, time-outs, results of handlers.

Each worker takes, handles and settles; the first worker is the thread that called. A watcher fails
the messages of a handler that takes too long. The worker or the watcher, whichever is first, claims
the messages and settles them, so that they are settled once.

Handlers of one message and of a batch have one form here: messages in, one outcome per message out.
Several calls of `run` can share the main thread, as coroutines of one loop do.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import re
import sys
import threading
import time
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Generic, ParamSpec, TypeVar, cast

import pulsar

from redrive.delivery.concurrency import Turnstile, ends_run
from redrive.delivery.fetcher import ConsumerStoppedError
from redrive.delivery.forking import stopping_at_sigterm
from redrive.delivery.in_flight import AtWork, Call
from redrive.delivery.middleware.chain import Acknowledge, Handle, Outcome, Ready
from redrive.errors import InvalidSpecError, RedriveError
from redrive.policy.envelope import Attempt
from redrive.policy.values import check_count, check_instance
from redrive.policy.verdict import Done, HandlerTimeoutError, NotDoneError, is_a


def out_of_time(timeout: timedelta) -> HandlerTimeoutError:
    """Say that a handler took longer than *timeout*."""
    return HandlerTimeoutError(
        "the handler took too long",
        got=f"more than {timeout.total_seconds():g} s",
        remedy="make it faster, or give it more time with timeout=",
    )


_CALLS_A_TURN = 16
"""A worker handles so many messages, if they are ready, before its time is measured."""

_HANDLED: Sequence[Outcome] = (None,)  # of a handler of one message


@dataclass
class Run:
    """One call of `run`.

    Attributes:
        take: returns the next messages, or raises ConsumerStoppedError.
        acknowledge: settles a message that was handled.
        fail: settles a message with the exception it failed with.
        late: called with each success that came after its time.
        stop: stops the consumer, so that `take` ends every worker.
        at_work: the calls of all runs of a consumer.
        ready: returns a message that can be taken without waiting; None if none ever can.
        acknowledge_all: settles a batch that was handled; None to settle each message alone.
    """

    take: Callable[[], Sequence[pulsar.Message]]
    handle: Handle
    acknowledge: Acknowledge
    fail: Callable[[pulsar.Message, BaseException], None]
    late: Callable[[pulsar.Message], None]
    stop: Callable[[], None]
    workers: int
    timeout: timedelta
    at_work: AtWork = field(default_factory=AtWork)
    ready: Ready | None = None
    acknowledge_all: Callable[[Sequence[pulsar.Message]], None] | None = None
    # By worker: the number of its last call that was out of time.
    _late: dict[int, int] = field(default_factory=dict)
    _broken: list[BaseException] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _turnstile: Turnstile | None = None

    def __post_init__(self) -> None:
        """Refuse values that no thread could obey."""
        check_count(self.workers, "workers")
        if self.timeout <= timedelta():
            raise InvalidSpecError(
                "a handler's time-out is a positive time",
                got=str(self.timeout),
                remedy="give the longest time that handling may take",
            )

    def until_stopped(self) -> None:
        """Work until the consumer is stopped; raise the error that ended a worker."""
        helpers = [
            threading.Thread(
                target=contextvars.copy_context().run, args=(self._work, n),
                name=f"redrive-worker-{n}", daemon=True,
            )
            for n in range(1, self.workers)
        ]  # fmt: skip
        watchers = [threading.Thread(target=self._watch, name="redrive-watcher", daemon=True)]
        if helpers:
            self._turnstile = Turnstile()
            watch = self._turnstile.watch
            watchers.append(threading.Thread(target=watch, name="redrive-turnstile", daemon=True))
        with stopping_at_sigterm(self.stop):
            try:
                for thread in (*watchers, *helpers):
                    thread.start()
                self._work(0)
            except BaseException:
                self.stop()  # for the others, when this thread was interrupted
                raise
            finally:
                for worker, helper in enumerate(helpers, start=1):
                    self._join_worker(worker, helper)
                self._over.set()
                if self._turnstile is not None:
                    self._turnstile.close()
                for watcher in watchers:
                    watcher.join()
        if self._broken:
            raise self._broken[0]

    def _work(self, worker: int) -> None:
        turnstile = self._turnstile
        try:
            while True:
                if turnstile is None:
                    self._handle_all(worker, self.take(), sys.maxsize)
                    continue
                turnstile.enter(worker)
                messages = self.take()
                began = time.monotonic()
                calls = self._handle_all(worker, messages, _CALLS_A_TURN)
                turnstile.leave(worker, time.monotonic() - began, calls)
        except ConsumerStoppedError:
            return
        except BaseException as error:  # noqa: BLE001 - raised again by until_stopped
            self._break(error)
        finally:
            if turnstile is not None:
                turnstile.quit(worker)

    def outcomes(self, messages: Sequence[pulsar.Message]) -> Sequence[Outcome]:
        """Have *messages* handled; raise errors that are no failure of a message."""
        try:
            return self.handle(messages)
        except BaseException as error:  # noqa: BLE001 - whatever it is travels with the message
            return self._failed(-1, messages, error)  # no call has this number

    def settle_all(self, messages: Sequence[pulsar.Message], outcomes: Sequence[Outcome]) -> None:
        """Settle each message by its outcome."""
        are_handled = len(outcomes) == len(messages) and all(o is None for o in outcomes)
        if are_handled and self.acknowledge_all is not None:
            self.acknowledge_all(messages)
            return
        for message, outcome in zip(messages, outcomes, strict=True):
            if outcome is None:
                self.acknowledge(message)
            else:
                self.fail(message, outcome)

    def give_up(self, messages: Sequence[pulsar.Message]) -> None:
        """Fail all messages of a handler that is out of time."""
        self.settle_all(messages, [out_of_time(self.timeout)] * len(messages))

    def ignore(self, messages: Sequence[pulsar.Message], outcomes: Sequence[Outcome]) -> None:
        """Count the successes among outcomes that came too late."""
        for message, outcome in zip(messages, outcomes, strict=True):
            if outcome is None:
                self.late(message)

    def _handle_all(self, worker: int, messages: Sequence[pulsar.Message], most: int) -> int:
        """Handle *messages*, and those that are ready then; return the number of calls."""
        begin, end, monotonic = self.at_work.begin, self.at_work.end, time.monotonic
        handle, acknowledge, ready, calls = self.handle, self.acknowledge, self.ready, 0
        while True:
            calls += 1
            number = begin((self, worker, monotonic(), messages))
            try:
                outcomes = handle(messages)
            except BaseException as error:  # noqa: BLE001 - raised again, or an outcome
                outcomes = self._failed(number, messages, error)
            if outcomes is _HANDLED and len(messages) == 1 and end(number):  # most: fewer calls
                acknowledge(messages[0])
            else:
                self.finish(number, messages, outcomes)
            del outcomes  # an error refers to this frame, and would keep its message in memory
            message = None if ready is None or calls >= most else ready()
            if message is None:
                return calls
            messages = [message]

    def _failed(
        self, number: int, messages: Sequence[pulsar.Message], error: BaseException
    ) -> Sequence[Outcome]:
        """Return the outcomes of a handler that raised *error*; raise errors that end the run."""
        if fails_message(error):
            return [error] * len(messages)
        self.at_work.end(number)  # the messages stay unacknowledged
        raise error

    def finish(
        self, number: int, messages: Sequence[pulsar.Message], outcomes: Sequence[Outcome]
    ) -> None:
        """Settle the messages of a call that has ended, unless that was done before."""
        if self.at_work.end(number):
            self.settle_all(messages, outcomes)
        else:
            self.ignore(messages, outcomes)

    def _watch(self) -> None:
        look = min(1.0, self.timeout.total_seconds() / 10)
        while not self._over.wait(look):
            # A copy, made in one step: the workers continue meanwhile.
            for number in list(self.at_work.calls):
                call = self.at_work.calls.get(number)
                if call is None or call[0] is not self:
                    continue
                is_over = time.monotonic() - call[2] > self.timeout.total_seconds()
                if is_over and self.at_work.claim(number):
                    self._time_out(number, call)

    def _time_out(self, number: int, call: Call) -> None:
        try:
            self.give_up(call[3])
        except BaseException as broken:  # noqa: BLE001 - raised again by until_stopped
            self._break(broken)
        self._late[call[1]] = number

    def _join_worker(self, worker: int, helper: threading.Thread) -> None:
        """Wait until a worker has ended, or is busy with nothing but a handler out of time."""
        while helper.is_alive():
            if self._late.get(worker) in self.at_work.settled:
                return
            helper.join(0.1)

    def _break(self, error: BaseException) -> None:
        self._broken.append(error)
        self.stop()


Handler = Callable[[pulsar.Message], object] | Callable[[pulsar.Message, Attempt], object]
AttemptOf = Callable[[pulsar.Message], Attempt]
BatchHandler = Callable[[list[pulsar.Message]], Sequence[Done | BaseException | None] | None]
_Answer = TypeVar("_Answer")
_Arguments = ParamSpec("_Arguments")


class NotRunError(RedriveError):
    """A handler returned a promise of its work: a coroutine, a generator or a Future.

    A mistake of the program and no failure of a message: it ends `run`.
    """

    reason = "NotRun"


def fails_message(error: BaseException) -> bool:
    """Return True if an *error* of a handler is a failure of its messages, and ends no `run`."""
    return not is_a(error, NotRunError) and not ends_run(error)


_UNRUN = (Awaitable, Generator, AsyncGenerator)
_REMEDY = (
    "handle coroutines by AsyncRetryConsumer; use no yield; wait for the result of a Future, "
    "and use several workers instead of threads of your own"
)


@dataclass(frozen=True, slots=True)
class HandlerForm:
    """A handler in the form of all loops: messages in, and one outcome for each of them out.

    Attributes:
        handler: of the program, or a `PassThrough`.
        arguments: those of the handler, for the messages of a call; None for a single message.
        outcomes: returns those of so many messages, for an answer of the handler.
        explicit: None is no success.
    """

    handler: Callable[..., Any]
    arguments: Callable[[Sequence[pulsar.Message]], Sequence[object]] | None
    outcomes: Callable[[int, object], Sequence[Outcome]]
    explicit: bool

    def __call__(self, messages: Sequence[pulsar.Message]) -> Sequence[Outcome]:
        """Call the handler, and wait for it."""
        if self.arguments is None:
            (message,) = messages
            answer = self.handler(message)
        else:
            answer = self.handler(*self.arguments(messages))
        if answer is None and not self.explicit:
            return _HANDLED if self.arguments is None else [None] * len(messages)
        return self.outcomes(len(messages), _run(answer))

    async def awaited(self, messages: Sequence[pulsar.Message]) -> Sequence[Outcome]:
        """Await the handler behind a `PassThrough`."""
        handler = self.handler.handler if isinstance(self.handler, PassThrough) else self.handler
        answer = handler(*(messages if self.arguments is None else self.arguments(messages)))
        if isinstance(answer, Awaitable):  # one that awaits nothing has done its work by now
            answer = await answer
        if answer is None and not self.explicit:
            return _HANDLED if self.arguments is None else [None] * len(messages)
        return self.outcomes(len(messages), _run(answer))


def single_handler(handler: Handler, attempt_of: AttemptOf, *, explicit: bool) -> HandlerForm:
    """Give a batch of one to a *handler* of single messages.

    Args:
        attempt_of: tells which attempt at a message this is, for a handler that takes it too.

    Raises:
        InvalidSpecError: a call of *handler* would do nothing, or fail each time.
    """
    check_instance(explicit, bool, "explicit")
    _check_runs(handler)
    takes_attempt = _takes_attempt(handler)
    _check_takes(handler, 1 + takes_attempt, "a message, and the attempt if it wants to")

    def with_attempt(messages: Sequence[pulsar.Message]) -> Sequence[object]:
        (message,) = messages
        return message, attempt_of(message)

    def outcomes(_count: int, answer: object) -> Sequence[Outcome]:
        return [_not_done(answer)] if explicit and not isinstance(answer, Done) else _HANDLED

    return HandlerForm(handler, with_attempt if takes_attempt else None, outcomes, explicit)


def batch_handler(handler: BatchHandler, *, explicit: bool) -> HandlerForm:
    """Give a whole batch to *handler*, and read its answer message by message.

    Raises:
        InvalidSpecError: a call of *handler* would do nothing, or fail each time.
    """
    check_instance(explicit, bool, "explicit")
    _check_runs(handler)
    _check_takes(handler, 1, "a list of messages")

    def outcomes(count: int, answers: Any) -> Sequence[Outcome]:  # noqa: ANN401 - the program's
        if answers is None:
            answers = [None] * count
        if len(answers) != count:
            raise NotDoneError(
                f"a handler of {count} messages answers for each of them, or with None",
                got=f"{len(answers)} answers",
                remedy="return a list with one of Done(), None and an exception per message",
            )
        return [_outcome(answer, explicit=explicit) for answer in answers]

    # A list that the handler may change.
    return HandlerForm(handler, lambda messages: ([*messages],), outcomes, explicit)


def _check_runs(handler: Callable[..., object]) -> None:
    kinds: list[Callable[..., object]] = [inspect.isgeneratorfunction, inspect.isasyncgenfunction]
    form, remedy = "a coroutine function, not a generator function", "use no yield"
    if isinstance(handler, PassThrough):
        handler = handler.handler
    else:
        kinds.append(inspect.iscoroutinefunction)
        form, remedy = "a plain function, not a coroutine or generator function", _REMEDY
    if not callable(handler):
        raise InvalidSpecError(
            "a handler must be a function", got=handler, remedy="give one that takes the message"
        )
    with contextlib.suppress(TypeError):  # of a mock, which may show another mock as its code
        if any(is_of(handler) for is_of in kinds):
            raise InvalidSpecError(f"a handler must be {form}", got=_shown(handler), remedy=remedy)


class PassThrough(Generic[_Arguments, _Answer]):
    """Another form of *handler*: *call* passes all arguments on to it, unchanged.

    Args:
        run: makes a `Run` that calls the handler itself, if no middleware wraps it.
    """

    def __init__(
        self,
        call: Callable[_Arguments, _Answer],
        handler: Callable[_Arguments, object],
        run: Callable[..., Run],
    ) -> None:
        self._call = call
        self.handler = handler
        self.run = run
        self.__qualname__ = getattr(handler, "__qualname__", repr(handler))

    def __call__(self, *arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Answer:
        """Call the handler."""
        return self._call(*arguments, **named)


_MAX_WRAPPERS = 100
_ATTEMPT = re.compile(r"\bAttempt\b")


def _takes_attempt(handler: Callable[..., object]) -> bool:
    """Return True for a second argument without a default, or with the name `attempt`.

    Any other with a default is the program's own. Behind a decorator that takes any arguments the
    second one must be an attempt by its name or type: it may be one that the decorator adds.

    Raises:
        InvalidSpecError: the signature does not show it.
    """
    signatures = _signatures(handler, 2)
    positional = _positional(signatures[-1])
    if len(positional) < 2:  # noqa: PLR2004 - a message and an attempt
        return False
    second = positional[1]
    if second.name == "attempt":
        return True
    if second.default is not second.empty:
        return False
    if len(signatures) > 1 and not _ATTEMPT.search(str(second.annotation)):
        raise _hidden(handler, signatures[-1])
    return True


def _hidden(handler: Callable[..., object], signature: inspect.Signature) -> InvalidSpecError:
    return InvalidSpecError(
        "a decorator hides which arguments its handler is called with",
        got=f"{_shown(handler)}{signature}",
        remedy="have the function in the decorator take the message, or message and attempt",
    )


def _check_takes(handler: Callable[..., object], arguments: int, parameters: str) -> None:
    for signature in _signatures(handler, arguments):
        if not _binds(signature, arguments):
            raise InvalidSpecError(
                f"a handler takes {parameters}, and nothing else without a default",
                got=f"{_shown(handler)}{signature}",
                remedy="change its arguments, or bind them with functools.partial",
            )


def _binds(signature: inspect.Signature, arguments: int) -> bool:
    try:
        signature.bind(*[None] * arguments)
    except TypeError:
        return False
    return True


def _shown(handler: Callable[..., object]) -> str:
    return str(getattr(handler, "__qualname__", repr(handler)))


def _positional(signature: inspect.Signature) -> list[inspect.Parameter]:
    return [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind in {parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD}
    ]


def _signatures(handler: Callable[..., object], arguments: int) -> list[inspect.Signature]:
    """Return the signature of *handler* as it is called, not the one that it copies.

    While one takes any number of arguments and names fewer than *arguments*, that of the function
    which it wraps follows: the arguments are passed on to it.

    Raises:
        InvalidSpecError: one of them has no signature, or does not show that it wraps a function,
            and has one that needs two arguments.
    """
    signatures: list[inspect.Signature] = []
    function: Callable[..., object] | None = handler
    while function is not None and len(signatures) < _MAX_WRAPPERS:
        try:
            signature = _signature(function)
        except (TypeError, ValueError) as error:  # some that are written in C have none
            raise InvalidSpecError(
                "the arguments of a handler can't be determined",
                got=_shown(handler),
                remedy="call it in a function that takes the message",
            ) from error
        signatures.append(signature)
        variadic = any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
        if not variadic or len(_positional(signature)) >= arguments:
            break
        wrapped = _wrapped(function)
        if wrapped is None and _hides_attempt(function):
            raise _hidden(handler, signature)
        function = wrapped
    return signatures


_BINDINGS = {PassThrough: "handler", functools.partial: "func", types.MethodType: "__func__"}


def _hides_attempt(function: Callable[..., object]) -> bool:
    """Return True if its closure, or one of its attributes, has a function of two arguments."""
    for kind, inner in _BINDINGS.items():
        if type(function) is kind:
            return _hides_attempt(getattr(function, inner))
    values: Mapping[str, Any] = getattr(function, "__dict__", {})
    if type(function) is types.FunctionType:
        values = inspect.getclosurevars(function).nonlocals
    functions = [v for v in values.values() if type(v) in {types.FunctionType, types.MethodType}]
    signatures = [inspect.signature(inner, follow_wrapped=False) for inner in functions]
    return any(_binds(signature, 2) and not _binds(signature, 1) for signature in signatures)


def _signature(function: Callable[..., object]) -> inspect.Signature:
    if isinstance(function, PassThrough):
        return _signature(function.handler)
    if type(function) is types.MethodType:
        function = types.MethodType(_own(function.__func__), function.__self__)
    call = inspect.getattr_static(type(function), "__call__", None)
    if isinstance(call, (staticmethod, classmethod)):
        return _signature(type(function).__call__)  # which is not called with the object
    return inspect.signature(_own(function), follow_wrapped=False)


def _own(function: Callable[..., object]) -> Callable[..., object]:
    """Return *function* without the signature that a decorator has copied to it.

    One that takes any arguments, and wraps nothing, is called as its `__signature__` says.
    """
    if type(function) is types.FunctionType:
        plain = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__,
            function.__closure__,
        )  # fmt: skip
        plain.__kwdefaults__ = function.__kwdefaults__
        with contextlib.suppress(NameError):  # from Python 3.14 on, of types that are not imported
            plain.__annotations__ = function.__annotations__
        is_variadic = bool(function.__code__.co_flags & inspect.CO_VARARGS)
        return function if is_variadic and not hasattr(function, "__wrapped__") else plain
    # A proxy, such as those of wrapt, has the class and the signature of what it wraps.
    is_proxy = type(function) is not function.__class__
    signature = getattr(function, "__signature__", None)
    inner = getattr(function, "__wrapped__", None)
    is_copied = signature is not None and getattr(inner, "__signature__", None) is signature
    return (
        types.MethodType(type(function).__call__, function) if is_proxy or is_copied else function
    )


def _wrapped(function: Callable[..., object]) -> Callable[..., object] | None:
    """Return the callable that *function* wraps, with the same arguments bound; None if none."""
    if isinstance(function, PassThrough):
        return _wrapped(function.handler)
    dispatcher = getattr(getattr(function, "register", None), "__self__", None)
    if isinstance(dispatcher, functools.singledispatchmethod):
        return cast("Callable[..., object]", dispatcher.func.__get__(dispatcher))  # bound to any
    if isinstance(function, functools.partial):
        inner = _wrapped(function.func)
        return inner and functools.partial(inner, *function.args, **function.keywords)
    if type(function) is types.MethodType:
        inner = _wrapped(function.__func__)
        return inner and types.MethodType(inner, function.__self__)
    inner = getattr(function, "__wrapped__", None)
    if inner is None and not isinstance(function, types.FunctionType):
        method = getattr(function, "__call__", None)  # noqa: B004 - of an object, maybe decorated
        return _wrapped(method) if isinstance(method, types.MethodType) else None
    return inner


def _run(answer: _Answer) -> _Answer:
    """Return *answer*, unless it only promises the work: to acknowledge that would lose it."""
    # By its method: to import concurrent.futures is slow.
    if not hasattr(type(answer), "add_done_callback") and not isinstance(answer, _UNRUN):
        return answer
    if inspect.iscoroutine(answer):
        answer.close()  # else Python warns of the error below
    raise NotRunError(
        "the handler has returned a promise of its work, which nothing waits for",
        got=type(answer).__name__,
        remedy=_REMEDY,
    )


def _outcome(answer: object, *, explicit: bool) -> Outcome:
    if isinstance(answer, BaseException):  # first: its class may raise at any other question
        return answer
    if isinstance(answer, Done):
        return None
    return _not_done(answer) if explicit or answer is not None else None


def _not_done(answer: object) -> NotDoneError:
    return NotDoneError(
        "the handler did not say that the message is done",
        got=type(answer).__name__,
        remedy="return Done() once a message is handled",
    )

"""What a handler answered → what became of each message; called by `run`.

A handler for one message and one for a batch are brought into one form here: messages in, one
outcome per message out.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from typing import TypeVar

import pulsar

from redrive.delivery.middleware.chain import Handle, Outcome
from redrive.errors import InvalidSpecError, RedriveError
from redrive.policy.envelope import Attempt
from redrive.policy.verdict import Done

Handler = Callable[[pulsar.Message], object] | Callable[[pulsar.Message, Attempt], object]
AttemptOf = Callable[[pulsar.Message], Attempt]
BatchHandler = Callable[[Sequence[pulsar.Message]], Sequence[Done | BaseException | None] | None]
_Answer = TypeVar("_Answer")


class NotDoneError(RedriveError):
    """A handler whose only success is `Done` returned something else."""

    reason = "NotDone"


class BatchAnswerError(RedriveError):
    """A batch handler's answer can't be matched with its messages, so none counts as handled."""

    reason = "BatchAnswer"


class NotRunError(RedriveError):
    """A handler returned a coroutine or a generator, which does nothing unless it is run.

    A mistake of the program and no failure of a message: it ends `run`.
    """

    reason = "NotRun"


_UNRUN = (Awaitable, Generator, AsyncGenerator)
_REMEDY = "handle coroutines by AsyncRetryConsumer; a handler is no generator: use no yield"


def one(handler: Handler, attempt_of: AttemptOf, *, explicit: bool) -> Handle:
    """Give a batch of one to a *handler* of single messages.

    Args:
        attempt_of: tells which attempt at a message this is, for a handler that takes it too.

    Raises:
        InvalidSpecError: a call of *handler* would do nothing, or fail each time.
    """
    _check_runs(handler)
    call: Callable[..., object] = handler
    takes_attempt = _takes_attempt(handler)
    _check_takes(handler, 1 + takes_attempt, "a message, and the attempt if it wants to")

    def handle(messages: Sequence[pulsar.Message]) -> Sequence[Outcome]:
        (message,) = messages
        answer = _run(call(message, attempt_of(message)) if takes_attempt else call(message))
        return [_not_done(answer) if explicit and not isinstance(answer, Done) else None]

    return handle


def many(handler: BatchHandler, *, explicit: bool) -> Handle:
    """Give a whole batch to *handler*, and read its answer message by message.

    Raises:
        InvalidSpecError: a call of *handler* would do nothing, or fail each time.
    """
    _check_runs(handler)
    _check_takes(handler, 1, "a list of messages")

    def handle(messages: Sequence[pulsar.Message]) -> Sequence[Outcome]:
        answers = _run(handler(messages))
        if answers is None:
            answers = [None] * len(messages)
        if len(answers) != len(messages):
            raise BatchAnswerError(
                f"a handler of {len(messages)} messages answers for each of them, or with None",
                got=f"{len(answers)} answers",
                remedy="return a list with one of Done(), None and an exception per message",
            )
        return [_outcome(answer, explicit=explicit) for answer in answers]

    return handle


def _check_runs(handler: Callable[..., object]) -> None:
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(is_of(handler) for is_of in kinds):
        raise InvalidSpecError(
            "a handler does its work when it is called",
            got=getattr(handler, "__qualname__", repr(handler)),
            remedy=_REMEDY,
        )


def _takes_attempt(handler: Callable[..., object]) -> bool:
    """Whether *handler* has a second argument that it needs, or that is named `attempt`.

    Any other with a default is the program's own.
    """
    try:
        parameters = inspect.signature(handler).parameters.values()
    except (TypeError, ValueError):  # some that are written in C tell nothing
        return False
    positional = [
        each
        for each in parameters
        if each.kind in {each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD}
    ]
    return any(each.default is each.empty or each.name == "attempt" for each in positional[1:2])


def _check_takes(handler: Callable[..., object], arguments: int, what: str) -> None:
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):  # some that are written in C tell nothing
        return
    try:
        signature.bind(*[None] * arguments)
    except TypeError as error:
        raise InvalidSpecError(
            f"a handler takes {what}, and nothing else without a default",
            got=f"{getattr(handler, '__qualname__', repr(handler))}{signature}",
            remedy="change its arguments, or bind them with functools.partial",
        ) from error


def _run(answer: _Answer) -> _Answer:
    """Return *answer*, unless it only promises the work: to acknowledge that would lose it."""
    if not isinstance(answer, _UNRUN):
        return answer
    if inspect.iscoroutine(answer):
        answer.close()  # else Python warns of what is raised here
    raise NotRunError(
        "the handler has returned what is never run", got=type(answer).__name__, remedy=_REMEDY
    )


def _outcome(answer: object, *, explicit: bool) -> Outcome:
    if isinstance(answer, Done):
        return None
    if isinstance(answer, BaseException):
        return answer
    return _not_done(answer) if explicit or answer is not None else None


def _not_done(answer: object) -> NotDoneError:
    return NotDoneError(
        "the handler did not say that the message is done",
        got=type(answer).__name__,
        remedy="return Done() once a message is handled",
    )

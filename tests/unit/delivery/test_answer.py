from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from redrive import Attempt, Done
from redrive.delivery.middleware.chain import Handle
from redrive.delivery.run import (
    BatchAnswerError,
    NotDoneError,
    NotRunError,
    batch_handler,
    single_handler,
)
from redrive.errors import InvalidSpecError


def always(value: object) -> Callable[[object], Any]:
    return lambda _: value


def attempt_of(message: object) -> Attempt:
    return Attempt(2, f"of {message}")


def one(handler: Callable[..., Any], *, explicit: bool) -> Handle:
    return single_handler(handler, attempt_of, explicit=explicit)


class Takes:
    """Handlers that take the attempt, or do not; each returns what it was given."""

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
    def any_number(*given: object, **_named: object) -> object:
        return given

    @staticmethod
    def keyword(message: str, *, attempt: str = "none") -> object:
        return message, attempt


def test_a_handler_that_takes_a_second_argument_gets_the_attempt() -> None:
    given: list[object] = []

    def noting(handler: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(handler)
        def handle(*arguments: object) -> None:
            given.append(handler(*arguments))

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
        assert one(noting(handler), explicit=False)(["m"]) == [None]
    assert given == list(expected.values())


@pytest.mark.parametrize("value", [None, 0, False, Done(), "failed", ValueError()])
def test_a_handler_that_returns_has_handled_the_message(value: object) -> None:
    assert one(always(value), explicit=False)(["m"]) == [None]


@pytest.mark.parametrize("value", [None, 0, True, Done, "done"])
def test_if_asked_explicitly_only_done_is_success(value: object) -> None:
    handle = one(always(value), explicit=True)
    (outcome,) = handle(["m"])
    assert isinstance(outcome, NotDoneError)
    assert f"got {type(value).__name__!r}; return Done()" in str(outcome)
    assert one(always(Done()), explicit=True)(["m"]) == [None]


def test_a_batch_handler_answers_for_each_message() -> None:
    failure = KeyError("b")
    handle = batch_handler(always([None, failure, Done()]), explicit=False)
    assert handle(["a", "b", "c"]) == [None, failure, None]


def test_a_batch_handler_that_returns_none_has_handled_all() -> None:
    assert batch_handler(always(None), explicit=False)(["a", "b"]) == [None, None]


def test_if_asked_explicitly_none_fails_every_message_of_a_batch() -> None:
    for value in (None, [None, None]):
        outcomes = batch_handler(always(value), explicit=True)(["a", "b"])
        assert [type(outcome) for outcome in outcomes] == [NotDoneError] * 2


def test_what_is_neither_done_nor_none_nor_an_exception_is_no_success_in_a_batch() -> None:
    outcomes = batch_handler(always([False, True, ValueError]), explicit=False)(["a", "b", "c"])
    assert [type(outcome) for outcome in outcomes] == [NotDoneError] * 3


@pytest.mark.parametrize("value", [[], [None], [None] * 3])
def test_an_answer_that_matches_no_message_fails_the_batch(value: list[None]) -> None:
    with pytest.raises(BatchAnswerError, match=f"a handler of 2 messages .* got '{len(value)} "):
        batch_handler(always(value), explicit=False)(["a", "b"])


async def coroutine(_given: object) -> None:
    """Do nothing when it is called."""


def generator(_given: object) -> Iterator[None]:
    yield


async def asynchronous_generator(_given: object) -> AsyncIterator[None]:
    yield


LAZY = [coroutine, generator, asynchronous_generator]


@pytest.mark.parametrize("lazy", LAZY)
@pytest.mark.parametrize("form", [one, batch_handler])
def test_a_handler_of_which_a_call_does_nothing_is_refused(form: Any, lazy: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidSpecError, match=f"got '{lazy.__name__}'; .*AsyncRetryConsumer"):
        form(lazy, explicit=False)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("lazy", LAZY)
@pytest.mark.parametrize("form", [one, batch_handler])
def test_what_is_never_run_is_no_success_however_it_is_returned(form: Any, lazy: Any) -> None:  # noqa: ANN401
    handle = form(lambda given: lazy(given), explicit=False)  # noqa: PLW0108 - hides what it is
    with pytest.raises(NotRunError, match="returned what is never run"):
        handle(["m"])


@pytest.mark.parametrize(
    "wrong", [lambda: None, lambda _message, _more, _yet_more: None, lambda *, message: message]
)
@pytest.mark.parametrize("form", [one, batch_handler])
def test_a_handler_that_does_not_take_what_it_is_given_is_refused(form: Any, wrong: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidSpecError, match="a handler takes a"):
        form(wrong, explicit=False)


@pytest.mark.parametrize(
    "fitting", [print, lambda *_messages: None, lambda _message, _retries=3: None, {}.get]
)
@pytest.mark.parametrize("form", [one, batch_handler])
def test_a_handler_may_have_more_arguments_with_defaults(form: Any, fitting: Any) -> None:  # noqa: ANN401
    form(fitting, explicit=False)

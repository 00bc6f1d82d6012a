"""`Run` with messages from a list: who settles what, and how it ends. The rest needs a broker."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from redrive import Attempt
from redrive.delivery.fetcher import ConsumerStoppedError
from redrive.delivery.middleware.chain import Outcome
from redrive.delivery.run import HandlerTimeoutError, Run, single_handler
from redrive.errors import InvalidSpecError

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
        self._left: SimpleQueue[int] = SimpleQueue()
        for number in range(count):
            self._left.put(number)

    def run(
        self, handler: Callable[[Any], object], *, workers: int = 1, timeout: timedelta = LONG
    ) -> None:
        """Run *handler* on all of them."""
        Run(
            self.take, single_handler(handler, _attempt_of, explicit=False), self.settle,
            self.count_late,
            self.stopped.set, workers, timeout,
        ).until_stopped()  # fmt: skip

    def take(self) -> Sequence[Any]:
        """Hand out the next."""
        try:
            if not self.stopped.is_set():
                return [self._left.get_nowait()]
        except Empty:
            pass
        raise ConsumerStoppedError("over", remedy="nothing")

    def settle(self, message: Any, outcome: Outcome) -> None:  # noqa: ANN401 - a number
        """Note what became of it."""
        self.settled.append((message, outcome))
        self._news.release()

    def wait_for_settled(self, count: int) -> None:
        """Return once so many more were settled."""
        for _ in range(count):
            assert self._news.acquire(timeout=30)

    def count_late(self, _message: object) -> None:
        """Note a late success."""
        self.late += 1


def test_one_worker_works_in_the_thread_that_called() -> None:
    desk = Desk(3)
    threads = set()
    desk.run(lambda _: threads.add(threading.current_thread()))
    assert threads == {threading.current_thread()}
    assert desk.settled == [(0, None), (1, None), (2, None)]


def test_never_more_handlers_run_at_a_time_than_there_are_workers() -> None:
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


def test_a_handler_that_takes_too_long_has_failed_and_its_late_success_is_only_counted() -> None:
    desk = Desk(2)
    # Long enough for the other message, however busy the machine.
    desk.run(lambda m: desk.wait_for_settled(1) if m == 0 else None, timeout=timedelta(seconds=1))

    (slow, failure), fast = desk.settled
    assert (slow, fast) == (0, (1, None))
    assert isinstance(failure, HandlerTimeoutError)
    assert isinstance(failure, TimeoutError)
    assert "got 'more than 1 s'" in str(failure)
    assert desk.late == 1


def test_a_late_failure_is_no_late_success() -> None:
    desk = Desk(1)

    def handle(_: object) -> None:
        desk.wait_for_settled(1)
        raise ValueError

    desk.run(handle, timeout=SHORT)
    assert [type(failure) for _, failure in desk.settled] == [HandlerTimeoutError]
    assert desk.late == 0


def test_the_end_does_not_wait_for_a_handler_that_is_out_of_time() -> None:
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
def test_what_is_no_failure_of_a_message_ends_the_run_and_settles_nothing(workers: int) -> None:
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
def test_run_failure_that_is_no_exception_fails_its_message(workers: int) -> None:
    desk, error = Desk(10), asyncio.CancelledError()

    def handle(message: object) -> None:
        if message == 4:
            raise error

    desk.run(handle, workers=workers)
    assert sorted(desk.settled) == [(n, error if n == 4 else None) for n in range(10)]


def test_what_breaks_while_settling_ends_the_run() -> None:
    class Broken(Desk):
        def settle(self, message: Any, outcome: Outcome) -> None:  # noqa: ANN401, ARG002
            raise ConnectionError

    desk = Broken(10)
    with pytest.raises(ConnectionError):
        desk.run(lambda _: None, workers=2)
    assert desk.stopped.is_set()


@pytest.mark.parametrize(
    ("choice", "says"),
    [({"workers": 0}, "at least one worker; got 0"), ({"timeout": timedelta()}, "positive time")],
)
def test_a_choice_that_no_thread_could_obey_is_refused(choice: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidSpecError, match=says):
        Desk(0).run(print, **choice)

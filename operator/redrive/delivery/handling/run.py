"""Handles messages in several threads and within a time; called by `RetryConsumer.run`.

Each worker takes, handles and settles; the first of them is the thread that called. A watcher fails
the messages of a handler that takes too long. Whoever is first, the worker or the watcher, claims
the messages and settles them, so that they are settled once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import pulsar

from redrive.delivery.handling.answer import NotRunError
from redrive.delivery.handling.interruption import ends_run
from redrive.delivery.handling.sigterm import stopping_at_sigterm
from redrive.delivery.middleware.chain import Handle, Outcome
from redrive.delivery.receiving.fetcher import ConsumerStoppedError
from redrive.errors import InvalidSpecError, RedriveError


class HandlerTimeoutError(RedriveError, TimeoutError):
    """A handler took longer than it may."""

    reason = "HandlerTimeout"


def out_of_time(timeout: timedelta) -> HandlerTimeoutError:
    """Say that a handler took longer than *timeout*."""
    return HandlerTimeoutError(
        "the handler took too long",
        got=f"more than {timeout.total_seconds():g} s",
        remedy="make it faster, or give it more time with timeout=",
    )


class _Hand:
    """Messages that a handler works on."""

    def __init__(self, messages: Sequence[pulsar.Message]) -> None:
        self.messages = messages
        self.since = time.monotonic()
        self.timed_out = False
        self._claim = threading.Lock()

    def claim(self) -> bool:
        """Return whether the caller is the first, which settles the messages."""
        return self._claim.acquire(blocking=False)


@dataclass
class Run:
    """One call of `run`.

    Attributes:
        take: returns the next messages, or raises ConsumerStoppedError.
        settle: acknowledges a message, or moves it on with the exception it failed with.
        late: called with each success that came after its time.
        stop: stops the consumer, so that `take` ends every worker.
    """

    take: Callable[[], Sequence[pulsar.Message]]
    handle: Handle
    settle: Callable[[pulsar.Message, Outcome], None]
    late: Callable[[pulsar.Message], None]
    stop: Callable[[], None]
    workers: int
    timeout: timedelta
    _hands: dict[int, _Hand] = field(default_factory=dict)
    _broken: list[BaseException] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        """Refuse what no thread could obey."""
        if self.workers < 1:
            raise InvalidSpecError(
                "messages are handled by at least one worker",
                got=self.workers,
                remedy="give a number of threads",
            )
        if self.timeout <= timedelta():
            raise InvalidSpecError(
                "a handler's time-out is a positive time",
                got=str(self.timeout),
                remedy="give the longest time that handling may take",
            )

    def until_stopped(self) -> None:
        """Work until the consumer is stopped; raise what broke a worker, if anything did."""
        helpers = [
            threading.Thread(target=self._work, args=(n,), name=f"redrive-worker-{n}", daemon=True)
            for n in range(1, self.workers)
        ]
        watcher = threading.Thread(target=self._watch, name="redrive-watcher", daemon=True)
        with stopping_at_sigterm(self.stop):
            try:
                for thread in (watcher, *helpers):
                    thread.start()
                self._work(0)
            except BaseException:
                self.stop()  # for the others, when this thread was interrupted
                raise
            finally:
                for number, helper in enumerate(helpers, start=1):
                    self._see_out(number, helper)
                self._over.set()
                watcher.join()
        if self._broken:
            raise self._broken[0]

    def _work(self, number: int) -> None:
        try:
            while True:
                hand = self._hands[number] = _Hand(self.take())
                self._handle(hand)
                del self._hands[number]
        except ConsumerStoppedError:
            return
        except BaseException as error:  # noqa: BLE001 - raised again by until_stopped
            self._break(error)

    def outcomes(self, messages: Sequence[pulsar.Message]) -> Sequence[Outcome]:
        """Have *messages* handled; what is no failure of a message is raised."""
        try:
            return self.handle(messages)
        except NotRunError:
            raise  # a mistake in the program
        except BaseException as error:  # whatever it is travels with the message
            if ends_run(error):
                raise
            return [error] * len(messages)

    def settle_all(self, messages: Sequence[pulsar.Message], outcomes: Sequence[Outcome]) -> None:
        """Settle each message by its outcome."""
        for message, outcome in zip(messages, outcomes, strict=True):
            self.settle(message, outcome)

    def give_up(self, messages: Sequence[pulsar.Message]) -> None:
        """Fail all messages of a handler that is out of time."""
        self.settle_all(messages, [out_of_time(self.timeout)] * len(messages))

    def ignore(self, messages: Sequence[pulsar.Message], outcomes: Sequence[Outcome]) -> None:
        """Count the successes among outcomes that came too late."""
        for message, outcome in zip(messages, outcomes, strict=True):
            if outcome is None:
                self.late(message)

    def _handle(self, hand: _Hand) -> None:
        try:
            outcomes = self.outcomes(hand.messages)
        except BaseException:
            hand.claim()  # the messages stay unacknowledged
            raise
        if hand.claim():
            self.settle_all(hand.messages, outcomes)
        else:
            self.ignore(hand.messages, outcomes)

    def _watch(self) -> None:
        look = min(1.0, self.timeout.total_seconds() / 10)
        while not self._over.wait(look):
            # A copy, made in one step: the workers go on meanwhile.
            for hand in list(self._hands.values()):
                if time.monotonic() - hand.since > self.timeout.total_seconds() and hand.claim():
                    self._time_out(hand)

    def _time_out(self, hand: _Hand) -> None:
        try:
            self.give_up(hand.messages)
        except BaseException as broken:  # noqa: BLE001 - raised again by until_stopped
            self._break(broken)
        hand.timed_out = True

    def _see_out(self, number: int, helper: threading.Thread) -> None:
        """Wait until a worker has ended, or is busy with nothing but a handler out of time."""
        while helper.is_alive():
            hand = self._hands.get(number)
            if hand is not None and hand.timed_out:
                return
            helper.join(0.1)

    def _break(self, error: BaseException) -> None:
        self._broken.append(error)
        self.stop()

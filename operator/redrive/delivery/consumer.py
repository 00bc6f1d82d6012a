"""`RetryConsumer`: what an application consumes with; the spine of the second journey.

receive → verdict → settle: a message comes from the source or the retry topic, the application
handles it, and if that fails, `failures` finds what becomes of it and `settle` obeys.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Self, overload

import pulsar

from redrive.delivery import answer
from redrive.delivery.answer import BatchHandler, Handler
from redrive.delivery.events import Events, Hook
from redrive.delivery.failures import Failures, topic_of
from redrive.delivery.inbox import Inbox
from redrive.delivery.pace import Pace
from redrive.delivery.parts import Parts, Subscription, SystemClock
from redrive.delivery.policy_file import PolicyFile, in_force
from redrive.delivery.producers import Producers
from redrive.delivery.run import Run
from redrive.delivery.settle import Settler
from redrive.delivery.subscribe import subscribe
from redrive.delivery.tracing import UNTRACED, Tracing
from redrive.errors import InvalidSpecError
from redrive.policy.cause import Redaction
from redrive.policy.envelope import Attempt
from redrive.policy.failure import FailureRules
from redrive.policy.model import Policy

HANDLER_TIMEOUT = timedelta(seconds=60)
NACK_DELAY = timedelta(minutes=1)


class RetryConsumer:
    """Consumes a topic, retries later what failed, and lays aside what keeps failing.

    Every message is handled at least once, and is acknowledged only after it was handled or after
    the broker has stored it in the retry or dead-letter topic. So a crash, a lost connection or a
    send without receipt makes a message come again; none of them loses it.

    Use it as a context manager, within the life of *client*. All methods may be called from
    several threads; those that share a consumer share its messages.

    Args:
        client: connects as a role that the policy lists among its consumer roles.
        policy: a `PolicyFile`, which is followed when it changes, or one that stays; see
            `load_policy`.
        name: names this consumer in the broker's statistics and in the cause of dead letters;
            by default the host's name and something random.
        redaction: what must not be told in the cause that travels with a failed message.
        nack_delay: when `negative_acknowledge` has a message delivered again.
        on_event: told of everything that becomes of a failed message, for metrics; see `Event`
            and `delivery.prometheus`.
        tracing: follows messages through their attempts; see `delivery.opentelemetry`.

    Raises:
        SubscribeError: the broker refused one of the two subscriptions.
    """

    def __init__(  # noqa: PLR0913 - each is a choice of its own, with a default
        self,
        client: pulsar.Client,
        policy: Policy | PolicyFile,
        *,
        name: str | None = None,
        redaction: Redaction = Redaction(),
        nack_delay: timedelta = NACK_DELAY,
        on_event: Hook | None = None,
        tracing: Tracing = UNTRACED,
    ) -> None:
        name = name or f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        clock = SystemClock()
        subscriptions = subscribe(
            client, in_force(policy, clock)(), name=name, nack_delay=nack_delay
        )
        inbox = Inbox(list(subscriptions.values()))
        parts = Parts(clock, subscriptions, inbox, Producers(client, name=name))
        self._assemble(parts, policy, name, redaction, on_event, tracing)

    def _assemble(  # noqa: PLR0913, PLR0917 - all that a consumer is made of
        self,
        parts: Parts,
        policy: Policy | PolicyFile,
        name: str,
        redaction: Redaction,
        on_event: Hook | None,
        tracing: Tracing,
    ) -> None:
        self.name = name
        self._parts = parts
        self._failures = Failures(
            in_force(policy, parts.clock),
            Settler(parts.outgoing, parts.incoming, Events(on_event), tracing),
            parts.clock,
            name,
            redaction,
        )
        self._tracing = tracing
        self._runs: dict[threading.Thread, threading.Event] = {}
        self._late_successes = 0
        self._counting = threading.Lock()

    @overload
    def receive(self) -> pulsar.Message: ...
    @overload
    def receive(self, timeout: timedelta | None) -> pulsar.Message | None: ...
    def receive(self, timeout: timedelta | None = None) -> pulsar.Message | None:
        """Return the next message of the source or the retry topic, or None after *timeout*.

        The two topics take turns while both have messages.

        Raises:
            ConsumerStoppedError: `stop` or `close` was called.
            SubscriptionLostError: the client was closed.
        """
        return self._parts.incoming.take(None if timeout is None else timeout.total_seconds())

    def receive_batch(self, size: int, wait: timedelta) -> list[pulsar.Message]:
        """Return up to *size* messages: as soon as there are so many, or what came within *wait*.

        Raises:
            ConsumerStoppedError: `stop` or `close` was called.
            SubscriptionLostError: the client was closed.
        """
        end = self._parts.clock.monotonic() + wait.total_seconds()
        messages: list[pulsar.Message] = []
        while len(messages) < size:
            message = self._parts.incoming.take(max(0.0, end - self._parts.clock.monotonic()))
            if message is None:
                break
            messages.append(message)
        return messages

    def attempt_of(self, message: pulsar.Message) -> Attempt:
        """Return which attempt at *message* this is, where it came from, and why it failed before.

        A message of the source topic is at its first attempt, whatever its properties claim.
        """
        return self._failures.attempt_of(message)

    def acknowledge(self, message: pulsar.Message) -> None:
        """Settle *message* as handled. It may come again if the broker doesn't hear of this.

        Raises:
            InvalidSpecError: it is not a message of this consumer.
        """
        self._subscription(message).acknowledge(message)
        self._failures.forget(message)

    def negative_acknowledge(
        self, message: pulsar.Message, *, cause: BaseException | None = None
    ) -> None:
        """Leave *message* unacknowledged at the broker, which delivers it again after `nack_delay`.

        For failures that concern this consumer rather than the message, and for applications that
        want no retry topic: order and redelivery are the broker's. A message that comes again for
        the `max_retries`-th time and is given here once more is dead-lettered. The count is the
        broker's, which keeps it in memory: it begins anew when the last consumer of the
        subscription has gone.

        Args:
            cause: travels with the message if it is dead-lettered.

        Raises:
            InvalidSpecError: it is not a message of this consumer.
        """
        self._failures.refused(message, self._subscription(message), cause)

    def reconsume_later(
        self,
        message: pulsar.Message,
        *,
        delay: timedelta | None = None,
        level: int | None = None,
        cause: BaseException | None = None,
    ) -> None:
        """Settle *message* as failed: it is retried later, or dead-lettered with retries used up.

        A policy with dead-lettering switched off discards it instead of dead-lettering it.

        With neither *delay* nor *level* the policy's ladder says how long to wait. On return the
        message is in the hands of the broker: either stored on its next hop and acknowledged, or,
        if that could not be had within some seconds, logged as an error and handed out again by
        `receive` after 5 s, as the next attempt. In both cases the caller is done with it.

        Args:
            delay: wait this long, 1 s … 864 000 s.
            level: k waits as long as delay level k says, or the highest if k is above it;
                0 leaves it to the ladder; below 0 the message is dead-lettered now.
            cause: why it failed; its class and text travel with the message.

        Raises:
            InvalidSpecError: both were given, the delay is out of bounds, or the message is not
                one of this consumer. Nothing has been settled then.
        """
        self._failures.asked(
            message, self._subscription(message), delay=delay, level=level, error=cause
        )

    def run(  # noqa: PLR0913 - each is a choice of its own, with a default
        self,
        handler: Handler,
        *,
        explicit: bool = False,
        rules: FailureRules = FailureRules(),
        workers: int = 1,
        timeout: timedelta = HANDLER_TIMEOUT,
        max_rate: float | None = None,
    ) -> None:
        """Handle messages until `stop` or `close` is called, or SIGTERM comes.

        A *handler* that returns, whatever it returns, has handled the message; one that raises an
        Exception has failed, and the message is retried later with the exception as its cause, or
        dead-lettered, as *rules* and the policy say. Anything else that ends it (KeyboardInterrupt,
        SystemExit) stops the consumer and ends this method too, with the message unacknowledged.
        A handler neither acknowledges nor retries by itself.

        SIGTERM calls `stop` for the duration of this method, if it runs in the main thread and the
        program does nothing of its own at SIGTERM.

        Args:
            explicit: only a handler that returns `Done()` has handled the message.
            workers: at most so many handlers run at a time, each in a thread of its own; the
                first of them is the calling thread.
            timeout: a handler that takes longer has failed, with `HandlerTimeoutError` as the
                cause. It can't be interrupted and keeps its worker busy until it ends; if it ends
                well after all, that is ignored, logged and counted.
            max_rate: at most so many messages begin to be handled per second.

        Raises:
            InvalidSpecError: an argument is out of bounds.
            SubscriptionLostError: the client was closed.
        """
        pace = Pace(max_rate)
        self._work(
            lambda: self._paced([self.receive()], pace),
            answer.one(handler, explicit=explicit), rules, workers, timeout,
        )  # fmt: skip

    def run_batches(  # noqa: PLR0913 - as for run
        self,
        handler: BatchHandler,
        *,
        size: int = 100,
        wait: timedelta = timedelta(seconds=1),
        explicit: bool = False,
        rules: FailureRules = FailureRules(),
        workers: int = 1,
        timeout: timedelta = HANDLER_TIMEOUT,
        max_rate: float | None = None,
    ) -> None:
        """Handle messages in batches of up to *size*; in all else like `run`.

        A *handler* gets a list of messages, and answers with a sequence of one result for each:
        None or `Done()` if it was handled, the exception if it failed; only the failed ones are
        retried. None instead of the sequence means that all were handled; an exception raised
        means that all have failed, and so does exceeding *timeout*.

        Args:
            wait: a batch that is not full is handled so long after its first message came.
            explicit: only `Done()` means handled, for each message.
        """
        pace = Pace(max_rate)

        def take() -> list[pulsar.Message]:
            first = self.receive()
            return self._paced([first, *self.receive_batch(size - 1, wait)], pace)

        self._work(take, answer.many(handler, explicit=explicit), rules, workers, timeout)

    @property
    def policy(self) -> Policy:
        """Return the policy in force; its `generation` tells which."""
        return self._failures.policy()

    @property
    def late_successes(self) -> int:
        """Return how many messages were handled well, but after `run` had given them up."""
        return self._late_successes

    def pause(self) -> None:
        """Hand out no message until `resume`; those in hand are finished.

        Messages that have come to this consumer stay with it, unacknowledged; other consumers of
        the subscription get the rest.
        """
        self._parts.incoming.pause()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._parts.incoming.resume()

    def stop(self) -> None:
        """Make every `run` return once its messages in hand are settled; callable from a signal."""
        self._parts.incoming.stop()

    def close(self) -> None:
        """Stop, wait until every `run` in another thread has ended, and leave the subscriptions.

        Messages received and not yet settled stay unacknowledged: the broker delivers them again.
        Not for signal handlers, nor for the handler of `run`: both call `stop`.
        """
        self.stop()
        for thread, ended in list(self._runs.items()):
            if thread is not threading.current_thread():
                ended.wait()
        with contextlib.ExitStack() as closing:
            closing.callback(self._parts.outgoing.close)
            closing.callback(self._parts.incoming.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _registered(self) -> Iterator[None]:
        ended = self._runs[threading.current_thread()] = threading.Event()
        try:
            yield
        finally:
            del self._runs[threading.current_thread()]
            ended.set()

    def _work(
        self,
        take: Callable[[], list[pulsar.Message]],
        handle: answer.Handle,
        rules: FailureRules,
        workers: int,
        timeout: timedelta,
    ) -> None:
        def settle(message: pulsar.Message, failure: answer.Outcome) -> None:
            if failure is None:
                self.acknowledge(message)
            else:
                self._failures.raised(message, self._subscription(message), failure, rules)

        run = Run(
            take,
            self._tracing.handling(handle, self),
            self._tracing.settling(settle),
            self._count_late,
            self.stop,
            workers,
            timeout,
        )
        with self._registered():
            self._execute(run)

    def _execute(self, run: Run) -> None:
        run.until_stopped()

    def _paced(self, messages: list[pulsar.Message], pace: Pace) -> list[pulsar.Message]:
        seconds = pace.wait(len(messages), self._parts.clock.monotonic())
        if seconds > 0:
            self._parts.incoming.sleep(seconds)
        return messages

    def _count_late(self, message: pulsar.Message) -> None:
        with self._counting:
            self._late_successes += 1
        self._failures.late(message)

    def _subscription(self, message: pulsar.Message) -> Subscription:
        topic = topic_of(message)
        if topic not in self._parts.subscriptions:
            raise InvalidSpecError(
                "a message is settled by the consumer it came from",
                got=str(topic),
                remedy=f"this one consumes {' and '.join(map(str, self._parts.subscriptions))}",
            )
        return self._parts.subscriptions[topic]

"""`RetryConsumer`: what an application consumes with.

By hand with the methods of its base, `receiver`; or by handlers: take → handle → settle.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Unpack

import pulsar

from redrive.delivery.assembly import RetryOptions
from redrive.delivery.bounded import Deadline
from redrive.delivery.closing import CLOSE_TIMEOUT
from redrive.delivery.consumers.receiver import Receiver
from redrive.delivery.handling import answer
from redrive.delivery.handling.answer import BatchHandler, Handler
from redrive.delivery.handling.run import Run
from redrive.delivery.middleware.chain import Handle, Outcome, Take, compose
from redrive.delivery.middleware.rate_limiter import RateLimiter
from redrive.delivery.parts import BrokerConnection
from redrive.delivery.policy_file import PolicyFile
from redrive.errors import InvalidSpecError
from redrive.policy.durations import given
from redrive.policy.failure import FailureRules
from redrive.policy.model import Policy

HANDLER_TIMEOUT = timedelta(seconds=60)


class RetryConsumer(Receiver):
    """Consumes a topic, retries later what failed, and lays aside what keeps failing.

    Every message is handled at least once, and is acknowledged only after it was handled or after
    the broker has stored it in the retry or dead-letter topic. So a crash, a lost connection or a
    send without receipt makes a message come again; none of them loses it.

    Use it as a context manager, within the life of *client*. All methods may be called from
    several threads; those that share a consumer share its messages. Durations, here and in its
    methods, are seconds or timedeltas.

    Args:
        client: connects as a role that the policy lists among its consumer roles.
        policy: a `PolicyFile`, which is followed when it changes, or one that stays; see
            `load_policy`.
        name: names this consumer in the broker's statistics and in the cause of dead letters;
            by default the host's name and something random.
        schema: decodes messages for `message.value()`, which raises on those that it can't decode;
            by default they are bytes. The broker refuses one that does not fit the topics'.
        crypto: decrypts messages, and encrypts their copies in the retry and dead-letter topic.
        redaction: what must not appear in the cause that travels with a failed message.
        nack_delay: when `negative_acknowledge` has a message delivered again.
        on_event: called with everything that becomes of a failed message, for metrics; see `Event`
            and `redrive.prometheus`.
        disconnect_timeout: after so long without a connection for one of its topics the consumer
            reports the event `redrive.disconnected`; see `connected`.
        max_in_flight_bytes: with payloads of so many bytes in messages that were taken and are not
            settled (handled now, held in an outage, waiting for their key, or to be sent on)
            nothing new is taken until a tenth of them is settled. By default 128 MiB. The messages
            that wait ahead, see *prefetch*, come on top.
        ack_timeout: a message that is not settled so long after it was received has failed: it is
            retried later or dead-lettered as if it had raised `AckTimeoutError`, and whatever is
            asked for it afterwards is ignored. None waits for ever.
        crash_log: records which messages are in hand, so that a poison message, one which keeps
            ending its process, is dead-lettered in the end; by default there is none. See
            `CrashLog`.
        handle_again_when_unsent: have a message that could not be sent to its next topic handled
            again after 5 s, as its next attempt. By default only the send is tried again.
        prefetch: at most so many messages of each topic wait in this consumer, and no other gets
            them until it closes. Where handlers take long give twice the number of workers. Its
            partitions share it, with at least four messages for each.
        tracing: follows messages through their attempts; see `redrive.opentelemetry`.
        middleware: what the program does around each message; see `redrive.middleware`.

    Raises:
        SubscribeError: the broker refused one of the two subscriptions.
        InvalidSpecError: the ack time-out is no positive time, *prefetch* is below 1, or the crash
            log can't be written.
    """

    def __init__(
        self,
        client: pulsar.Client | BrokerConnection,
        policy: Policy | PolicyFile,
        **options: Unpack[RetryOptions],
    ) -> None:
        super().__init__(client, policy, **options)
        self._close_at_end: float | timedelta | None = None  # asked for by a handler
        self._runs: dict[threading.Thread, threading.Event] = {}
        self._ending = threading.Lock()

    def run(  # noqa: PLR0913 - each is a choice of its own, with a default
        self,
        handler: Handler,
        *,
        explicit: bool = False,
        rules: FailureRules = FailureRules(),
        workers: int = 1,
        timeout: float | timedelta = HANDLER_TIMEOUT,
        max_rate: float | None = None,
    ) -> None:
        """Handle messages until `stop` or `close` is called, or SIGTERM comes.

        A *handler* that returns, whatever it returns, has handled the message; one that raises has
        failed, and the message is retried later with the exception as its cause, or dead-lettered,
        as *rules* and the policy say. So it is with exceptions that are no `Exception`, such as
        `asyncio.CancelledError`, a panic in Rust or a `gevent.Timeout`. Only KeyboardInterrupt,
        GeneratorExit, SystemExit and the client's `Interrupted`, alone or as parts of a group, stop
        the consumer and end this method too, with the message unacknowledged. It comes again after
        a restart; a `CrashLog` bounds how often a message may end its process by SystemExit.
        A handler neither acknowledges nor retries by itself. One with a second argument gets the
        `Attempt` too: `handle(message, attempt)`. An argument with a default has to be named
        `attempt` for that.

        SIGTERM calls `stop` for the duration of this method, if it runs in the main thread and the
        program does nothing of its own at SIGTERM.

        Args:
            explicit: only a handler that returns `Done()` has handled the message.
            workers: at most so many handlers run at a time, each in a thread of its own; the
                first of them is the calling thread.
            timeout: a handler that takes longer has failed, with `HandlerTimeoutError` as the
                cause. It can't be interrupted and keeps its worker busy until it ends; if it ends
                well after all, that is ignored, and reported as the event `redrive.late_success`.
            max_rate: at most so many messages begin to be handled per second.

        Raises:
            InvalidSpecError: an argument is out of bounds, or *handler* is a coroutine function or
                a generator, of which a call does nothing, or does not take a message.
            NotRunError: it returned a coroutine all the same. Its message stays unacknowledged.
            SubscriptionLostError: the client was closed.
        """
        handle = answer.one(handler, self.attempt_of, explicit=explicit)
        self._work(lambda: [self.receive()], handle, rules, workers, timeout, max_rate)

    def run_batches(  # noqa: PLR0913 - as for run
        self,
        handler: BatchHandler,
        *,
        size: int = 100,
        wait: float | timedelta = timedelta(seconds=1),
        explicit: bool = False,
        rules: FailureRules = FailureRules(),
        workers: int = 1,
        timeout: float | timedelta = HANDLER_TIMEOUT,
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

        Raises:
            InvalidSpecError: an argument is out of bounds.
            SubscriptionLostError: the client was closed.
        """
        if size < 1:
            raise InvalidSpecError(
                "a batch is of at least one message", got=size, remedy="give size= 1 or more"
            )

        def take() -> list[pulsar.Message]:
            return [self.receive(), *self.receive_batch(size - 1, wait)]

        handle = answer.many(handler, explicit=explicit)
        self._work(take, handle, rules, workers, timeout, max_rate)

    def close(self, timeout: float | timedelta = CLOSE_TIMEOUT) -> None:
        """Stop, wait until each `run` and settlement has ended, and leave the subscriptions.

        Those of other threads, that is.
        Messages received and not yet settled stay unacknowledged: the broker delivers them again.
        The event `redrive.left_unsettled` tells how many, if there are any.
        The handler of `run` may call it too: then `run` closes the consumer at its end. Not for
        signal handlers, which call `stop`.

        Args:
            timeout: for all of that together. What is under way then, such as a handler or the
                send of a message, goes on and settles nothing any more.
        """
        if self._assembled.owner.is_parent:
            return
        deadline = Deadline(timeout)
        self.stop()
        with self._ending:
            # What a handler has started, such as a task, may outlive every `run`.
            if self._runs and self._processor.one_attempt.in_handler():
                self._close_at_end = timeout
                return
        for thread, ended in list(self._runs.items()):
            if thread is not threading.current_thread():
                ended.wait(deadline.left())
        self._processor.close(deadline)

    @contextlib.contextmanager
    def _registered(self) -> Iterator[None]:
        ended = self._runs[threading.current_thread()] = threading.Event()
        try:
            yield
        finally:
            with self._ending:
                del self._runs[threading.current_thread()]
                closes = None if self._runs else self._close_at_end
            if closes is not None:
                self._assembled.close(Deadline(closes))
            ended.set()

    def _work(  # noqa: PLR0913, PLR0917 - what `run` and `run_batches` have in common
        self,
        take: Take,
        handle: Handle,
        rules: FailureRules,
        workers: int,
        timeout: float | timedelta,
        max_rate: float | None,
    ) -> None:
        processor = self._processor
        parts = processor.parts
        limiter = RateLimiter(max_rate, parts.clock, parts.incoming.sleep)
        middleware = [limiter, processor.one_attempt, *processor.middleware]

        def settle(message: pulsar.Message, error: Outcome) -> None:
            processor.process(message, error, rules)

        run = Run(
            compose([m.take for m in middleware], take),
            compose([m.handle for m in middleware], handle),
            settle, processor.late, self.stop, workers, given(timeout, "a handler's time-out"),
        )  # fmt: skip
        with self._registered():
            parts.work(run)

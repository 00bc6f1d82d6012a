"""`RetryConsumer`, and the base of all consumers with a policy.

Messages are received and settled by hand with the methods of the base, `Receiver`, each of which
makes one `Settlement` for `processor`; or by handlers: take → handle → settle.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Unpack, overload

import pulsar

from redrive.delivery.assembly import RetryOptions, assemble, check_options
from redrive.delivery.concurrency import CLOSE_TIMEOUT, Closing, Deadline, to_seconds
from redrive.delivery.fetcher import check_open
from redrive.delivery.in_flight import check_message
from redrive.delivery.middleware.chain import (
    HAND_BACK,
    Handle,
    Ready,
    Settlement,
    Take,
    compose,
)
from redrive.delivery.middleware.scheduling import RateLimiter
from redrive.delivery.parts import BrokerConnection
from redrive.delivery.policy_file import PolicyFile
from redrive.delivery.processor import Processor
from redrive.delivery.run import (
    BatchHandler,
    Handler,
    HandlerForm,
    PassThrough,
    Run,
    batch_handler,
    single_handler,
)
from redrive.policy.envelope import Attempt
from redrive.policy.model import Policy
from redrive.policy.values import check_count, check_instance, to_limit, to_timedelta
from redrive.policy.verdict import FailureRules, check_request

if TYPE_CHECKING:
    from redrive.delivery.middleware.outage_circuit import Outage


class PolicyState(ABC):
    """State of a consumer of a policy, with and without `Async` in its name."""

    @property
    @abstractmethod
    def _processor(self) -> Processor:
        """Return the processor of its messages."""

    def attempt_of(self, message: pulsar.Message) -> Attempt:
        """Return which attempt at *message* this is, where it came from, and why it failed before.

        A message of the source topic is at its first attempt, whatever its properties claim.
        """
        check_message(message)
        return self._processor.decisions.attempts.of(message)

    @property
    def name(self) -> str:
        """Return the name of this consumer."""
        return self._processor.decisions.consumer

    @property
    def policy(self) -> Policy:
        """Return the policy in force; its `generation` tells which."""
        return self._processor.decisions.policy()

    @property
    def connected(self) -> bool:
        """Return True if the client has a connection for the source and the retry topic.

        For partitioned topics: for each partition. False for the seconds in which the client
        connects again, permanently while the broker refuses this consumer, as with an expired
        token, and after `close`. Cheap, and waits for nothing: made for probes.
        """
        return self._processor.connected

    @property
    def in_flight(self) -> int:
        """Return how many messages were taken and are not settled: handled now, or kept here."""
        return self._processor.in_flight

    @property
    def outages(self) -> tuple[Outage, ...]:
        """Return the outages for which this consumer has paused; see `OutageBreaker`."""
        return self._processor.outages

    @property
    def dead_keys(self) -> int:
        """Return how many keys' messages follow a dead letter, for all consumers of the policy.

        As this one read last, before it was given a message; 0 if the policy is not `sequenced`.
        """
        return self._processor.dead_keys

    def ignore_outages(self) -> None:
        """Continue in spite of all outages, each until a message that needs the same succeeds.

        Failures use up retries again meanwhile.
        """
        self._processor.ignore_outages()


class PolicyConsumer(PolicyState, Closing):
    """Consumes the source and the retry topic of a policy.

    In a process that was forked since it was made, `stop` and `close` do nothing, and all else
    raises InheritedError.
    """

    _assembled: Processor

    @property
    def _processor(self) -> Processor:
        """Return the processor.

        Raises:
            InheritedError: this process was forked from the consumer's.
        """
        self._assembled.owner.check()
        return self._assembled

    @abstractmethod
    def acknowledge(self, message: pulsar.Message) -> None:
        """Settle *message* as handled."""

    @abstractmethod
    def hand_back(self, message: pulsar.Message) -> None:
        """Undo the reception of *message*."""

    @abstractmethod
    def stop(self) -> None:
        """Hand out nothing more."""


class Receiver(PolicyConsumer):
    """Receives from source and retry topic, and settles; see `RetryConsumer`."""

    def __init__(
        self,
        client: pulsar.Client | BrokerConnection,
        policy: Policy | PolicyFile,
        **options: Unpack[RetryOptions],
    ) -> None:
        check_options(options, RetryOptions)
        self._assembled = assemble(self, client, policy, **options)

    @overload
    def receive(self) -> pulsar.Message: ...
    @overload
    def receive(self, timeout: float | timedelta | None) -> pulsar.Message | None: ...
    def receive(self, timeout: float | timedelta | None = None) -> pulsar.Message | None:
        """Return the next message of the source or the retry topic, or None after *timeout*.

        The two topics take turns while both have messages. Durations are seconds, or timedeltas.

        Raises:
            ConsumerStoppedError: `stop` or `close` was called.
            SubscriptionLostError: the client was closed.
        """
        processor = self._assembled
        processor.owner.check()
        if timeout is None and processor.ready is not None:
            message = processor.ready()
            if message is not None:
                return message
        return processor.receive(None if timeout is None else to_seconds(timeout))

    def receive_batch(self, size: int, wait: float | timedelta) -> list[pulsar.Message]:
        """Return up to *size* messages, once there are so many, or those that came within *wait*.

        Raises:
            InvalidSpecError: an argument is out of bounds.
            ConsumerStoppedError: `stop` or `close` was called.
            SubscriptionLostError: the client was closed.
        """
        check_count(size, "size", least=0)
        processor = self._processor
        ready, monotonic = processor.ready, processor.parts.clock.monotonic
        end = monotonic() + to_seconds(wait)
        messages: list[pulsar.Message] = []
        try:
            while len(messages) < size:
                message = None if ready is None else ready()
                if message is not None:
                    messages.append(message)
                    processor.add_ready(messages, size)
                    continue
                message = processor.receive(max(0.0, end - monotonic()))
                if message is None:
                    break
                messages.append(message)
        except BaseException:
            for message in messages:  # which were not handed out
                self.hand_back(message)
            raise
        return messages

    def acknowledge(self, message: pulsar.Message) -> None:
        """Settle *message* as handled. It may come again if this does not reach the broker.

        One that is out of its ack time-out has failed already and is not acknowledged: it is
        reported as the event `redrive.late_success`.

        Raises:
            InvalidSpecError: it is not a message of this consumer.
        """
        try:
            self._assembled.acknowledge(message)
        except (AttributeError, TypeError):  # a message id raises TypeError
            check_message(message)
            raise

    def negative_acknowledge(
        self, message: pulsar.Message, *, cause: BaseException | None = None
    ) -> None:
        """Leave *message* unacknowledged at the broker, which delivers it again after `nack_delay`.

        For failures that concern this consumer rather than the message, and for applications that
        want no retry topic: order and redelivery are the broker's. A message that comes again for
        the `max_retries`-th time and is given here once more is dead-lettered. The count is the
        broker's, which keeps it in memory: it begins again when the last consumer of the
        subscription has gone. On an Exclusive or Failover subscription no broker counts, and of a
        batch it counts all messages as one: there the count is this consumer's own, so that each
        consumer gives a message back as often as this. The broker delivers again all else that is
        not acknowledged, of the subscription or of the batch.

        Args:
            cause: travels with the message if it is dead-lettered.

        Raises:
            InvalidSpecError: *cause* is no exception, or it is not a message of this consumer.
        """
        self._processor.check_own(message)
        self._processor.settle(self._processor.decisions.refused(message, cause))

    def reconsume_later(
        self,
        message: pulsar.Message,
        *,
        delay: float | timedelta | None = None,
        level: int | None = None,
        cause: BaseException | None = None,
    ) -> None:
        """Settle *message* as failed: it is retried later, or dead-lettered with retries used up.

        A policy with dead-lettering switched off discards it instead of dead-lettering it.

        With neither *delay* nor *level* the policy's ladder says how long to wait. On return the
        message is either stored on its next hop and acknowledged, or, if that could not be had
        within some seconds, kept by this consumer, unacknowledged, and sent later: after 5 s, then
        with back-off up to a minute; each failed attempt is the event `redrive.unsent`. With 1 000
        of them nothing new is received: the event `redrive.taking_stopped`. In both cases the
        caller is done with it.

        Args:
            delay: wait this long, 1 s … 864 000 s.
            level: k waits as long as delay level k says, or the highest if k is above it;
                0 leaves it to the ladder; below 0 the message is dead-lettered now.
            cause: why it failed; its class and text travel with the message.

        Raises:
            InvalidSpecError: both were given, an argument is out of bounds or of another type, or
                the message is not one of this consumer. Nothing has been settled then.
        """
        self._processor.check_own(message)
        delay = None if delay is None else to_timedelta(delay, "the delay of a retry")
        check_request(delay, level)
        self._processor.settle(
            self._processor.decisions.asked(message, cause, delay=delay, level=level)
        )

    def hand_back(self, message: pulsar.Message) -> None:
        """Undo its reception: `receive` hands *message* out again, as the same attempt.

        For a message that this consumer can't take now. It stays unacknowledged, with this process.

        Raises:
            InvalidSpecError: it is not a message of this consumer.
        """
        self._processor.check_own(message)
        self._processor.settle(Settlement(message, HAND_BACK))

    def pause(self) -> None:
        """Hand out no message until `resume`; in-flight ones are finished.

        Messages that have come to this consumer stay with it, unacknowledged; other consumers of
        the subscription get the rest.
        """
        self._processor.parts.incoming.pause()

    def resume(self) -> None:
        """Continue after `pause`."""
        self._processor.parts.incoming.resume()

    def stop(self) -> None:
        """Make every `run` return once in-flight messages are settled; callable from a signal."""
        if not self._assembled.owner.is_parent:
            self._processor.parts.stop()


HANDLER_TIMEOUT = timedelta(seconds=60)


class RetryConsumer(Receiver):
    """Consumes a topic, retries failed messages later, and dead-letters those that keep failing.

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
        redaction: text to hide in the cause that travels with a failed message.
        nack_delay: when `negative_acknowledge` has a message delivered again.
        on_event: called with everything that becomes of a failed message, for metrics; see `Event`
            and `redrive.prometheus`.
        disconnect_timeout: after so long without a connection for one of its topics the consumer
            reports the event `redrive.disconnected`; see `connected`.
        max_in_flight_bytes: with so many bytes of payloads, properties and keys in messages that
            were taken and are not settled (handled now, held in an outage, waiting for their key,
            or to be sent on) nothing new is taken until a tenth of them is settled. By default
            128 MiB. The messages that wait ahead, see *prefetch*, come on top.
        ack_timeout: a message that is not settled so long after it was received has failed: it is
            retried later or dead-lettered as if it had raised `AckTimeoutError`, and whatever is
            asked for it afterwards is ignored. None sets no limit.
        crash_log: records which messages are in-flight, so that a poison message, one which keeps
            ending its process, is dead-lettered in the end; by default there is none. See
            `CrashLog`.
        handle_again_when_unsent: have a message that could not be sent to its next topic handled
            again after 5 s, as its next attempt. By default only the send is tried again.
        prefetch: at most so many messages of each topic, up to a million, wait in this consumer,
            and no other gets them until it closes. Where handlers take long give twice the number
            of workers. Its partitions share it, with at least four messages for each.
        tracing: follows messages through their attempts; see `redrive.opentelemetry`.
        middleware: of the program, around each message; see `redrive.middleware`.

    Raises:
        SubscribeError: the broker refused one of the two subscriptions.
        InvalidSpecError: an option is out of bounds or of another type, the crash log can't be
            written, or there is no such option.
    """

    def __init__(
        self,
        client: pulsar.Client | BrokerConnection,
        policy: Policy | PolicyFile,
        **options: Unpack[RetryOptions],
    ) -> None:
        super().__init__(client, policy, **options)
        self._close_at_end: timedelta | None = None  # asked for by a handler
        self._runs: dict[threading.Thread, threading.Event] = {}
        self._ending = threading.Lock()

    def run(  # noqa: PLR0913 - each is a choice of its own, with a default
        self,
        handler: Handler,
        *,
        explicit: bool = False,
        rules: FailureRules = FailureRules(),
        workers: int = 1,
        timeout: float | timedelta | None = HANDLER_TIMEOUT,
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
        A handler must not acknowledge or retry. One with a second argument gets the
        `Attempt` too: `handle(message, attempt)`. An argument with a default has to be named
        `attempt` for that. For a decorated handler the function inside the decorator counts; one
        that takes any arguments gets the message only, unless `functools.wraps` shows more.

        SIGTERM calls `stop` for the duration of this method, if it runs in the main thread and the
        program does nothing of its own at SIGTERM.

        Args:
            explicit: only a handler that returns `Done()` has handled the message.
            workers: at most so many handlers run at a time, each in a thread of its own; the
                first of them is the calling thread.
            timeout: a handler that takes longer has failed, with `HandlerTimeoutError` as the
                cause. It can't be interrupted and keeps its worker busy until it ends; if it ends
                well after all, that is ignored, and reported as the event `redrive.late_success`.
                None sets no limit, as for each time-out of a consumer or a producer.
            max_rate: at most so many messages begin to be handled per second.

        Raises:
            InvalidSpecError: an argument is out of bounds, or *handler* is a coroutine function or
                a generator, of which a call does nothing, or does not take a message, or a
                decorator hides which arguments it takes.
            ConsumerStoppedError: `close` was called before.
            NotRunError: it returned a coroutine, a generator or a Future. Its message stays
                unacknowledged.
            SubscriptionLostError: the client was closed.
        """
        handle = single_handler(handler, self.attempt_of, explicit=explicit)
        receive = self._processor.receive

        def take() -> list[pulsar.Message]:
            message = receive(None)
            return [] if message is None else [message]

        self._work(take, handle, rules, workers, timeout, max_rate, self._processor.ready)

    def run_batches(  # noqa: PLR0913 - as for run
        self,
        handler: BatchHandler,
        *,
        size: int = 100,
        wait: float | timedelta = timedelta(seconds=1),
        explicit: bool = False,
        rules: FailureRules = FailureRules(),
        workers: int = 1,
        timeout: float | timedelta | None = HANDLER_TIMEOUT,
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
            ConsumerStoppedError: `close` was called before.
            SubscriptionLostError: the client was closed.
        """
        check_count(size, "size")
        seconds = to_seconds(wait)

        def take() -> list[pulsar.Message]:
            return [self.receive(), *self.receive_batch(size - 1, seconds)]

        handle = batch_handler(handler, explicit=explicit)
        self._work(take, handle, rules, workers, timeout, max_rate)

    def close(self, timeout: float | timedelta | None = CLOSE_TIMEOUT) -> None:
        """Stop, wait until each `run` and settlement has ended, and leave the subscriptions.

        Those of other threads, that is.
        Messages received and not yet settled stay unacknowledged: the broker delivers them again.
        The event `redrive.left_unsettled` tells how many, if there are any.
        The handler of `run` may call it too: then `run` closes the consumer at its end. Not for
        signal handlers, which call `stop`.

        Args:
            timeout: for all of that together. Handlers and sends that are under way then
                continue, and settle nothing any more.
        """
        if self._assembled.owner.is_parent:
            return
        deadline = Deadline(timeout)
        self.stop()
        with self._ending:
            # A task that a handler has started may outlive every `run`.
            if self._runs and self._processor.one_attempt.runs_here():
                self._close_at_end = to_limit(timeout, "a time to wait")
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

    def _work(  # noqa: PLR0913, PLR0917 - options of `run` and `run_batches`
        self,
        take: Take,
        handle: HandlerForm,
        rules: FailureRules,
        workers: int,
        timeout: float | timedelta | None,
        max_rate: float | None,
        ready: Ready | None = None,
    ) -> None:
        check_instance(rules, FailureRules, "rules")
        processor = self._processor
        check_open(closed=processor.closed)
        parts = processor.parts
        limiter = RateLimiter(max_rate, parts.clock, parts.incoming.sleep)
        middleware = [limiter, processor.one_attempt, *processor.middleware]

        def fail(message: pulsar.Message, error: BaseException) -> None:
            processor.settle(processor.decisions.raised(message, error, rules))

        called: Handle = handle.__call__  # the method takes less time than its object
        arguments = (
            compose([m.take for m in middleware], take),
            compose([m.handle for m in middleware], called),
            processor.acknowledge, fail, processor.late, self.stop, workers,
            to_limit(timeout, "a handler's time-out"), processor.one_attempt.at_work,
            ready if max_rate is None else None, processor.acknowledge_all,
        )  # fmt: skip
        handler = handle.handler
        if isinstance(handler, PassThrough) and arguments[1] == called:
            run = handler.run(*arguments, form=handle, may_wait=lambda: processor.may_wait)
        else:
            run = Run(*arguments)
        with self._registered(), processor.one_attempt.running():
            parts.work(run)

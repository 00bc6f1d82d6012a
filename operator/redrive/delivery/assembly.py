"""Puts a consumer together: its parts, its verdicts and the chain of its middleware."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypedDict

import pulsar
import pulsar.schema

from redrive.delivery.concurrency import (
    CLOSE_TIMEOUT,
    Deadline,
    all_within,
    identity,
    log_of,
    to_seconds,
)
from redrive.delivery.connection import MAX_PENDING_CHUNKED, PREFETCH, ClientConnection
from redrive.delivery.decisions import Attempts, Decisions
from redrive.delivery.middleware.chain import BoundConsumer, Middleware
from redrive.delivery.middleware.scheduling import KeyOrdering
from redrive.delivery.parts import (
    MAX_IN_FLIGHT_BYTES,
    BrokerConnection,
    CrashLog,
    Crypto,
    Parts,
    Subscribing,
)
from redrive.delivery.policy_file import PolicyFile, in_force
from redrive.delivery.processor import Processor
from redrive.delivery.reporting import DISCONNECT_TIMEOUT, Events, Hook, Reporting, check_hooks
from redrive.errors import InvalidSpecError
from redrive.messages import BYTES
from redrive.policy.envelope import Redaction
from redrive.policy.model import Policy
from redrive.policy.values import check_instance, check_listed, to_timedelta
from redrive.policy.verdict import FailureRules

if TYPE_CHECKING:
    from redrive.delivery.middleware.outage_breaker import OutageGuard
    from redrive.delivery.middleware.poison_guard import CrashLogFile

_log = log_of(__name__)

NACK_DELAY = timedelta(minutes=1)
MAX_NACK_DELAY = timedelta(days=10)


class Options(TypedDict, total=False):
    """Options of all kinds of consumers; see `RetryConsumer`."""

    name: str | None
    schema: pulsar.schema.Schema
    crypto: Crypto | None
    redaction: Redaction
    on_event: Hook | None
    disconnect_timeout: float | timedelta | None
    max_in_flight_bytes: int
    crash_log: CrashLog | None
    tracing: Middleware | None
    middleware: Sequence[Middleware]


class RetryOptions(Options, total=False):
    """Further options of a `RetryConsumer`, with asyncio and in memory too."""

    nack_delay: float | timedelta
    ack_timeout: float | timedelta | None
    handle_again_when_unsent: bool
    prefetch: int


_POLICY_SETS = "it is part of the policy: change the RetryPolicy, or the Policy"
_ONE_TOPIC = "a policy is for one topic: create a policy and a consumer for each topic"
_NO_QUEUE = "at most two messages of each partition wait in a SimpleConsumer"
_INVISIBLE = "a message of a SimpleConsumer is invisible for the duration that is given to receive"
_DELAYS = "a SimpleConsumer retries a message after the delay of the ladder, or of fail"
_OF_RUN = "it is an option of run of a RetryConsumer or BroadcastConsumer"
CLIENT_OPTIONS = {
    "consumer_name": "name",
    "receiver_queue_size": "prefetch",
    "max_total_receiver_queue_size_across_partitions": "prefetch",
    "negative_ack_redelivery_delay_ms": "nack_delay",
    "unacked_messages_timeout_ms": "ack_timeout",
    "crypto_key_reader": "crypto",
}
"""Options of `pulsar.Client.subscribe` that a consumer has under another name."""

REFUSED_OPTIONS = {
    "consumer_type": _POLICY_SETS,
    "subscription_name": _POLICY_SETS,
    "dead_letter_policy": _POLICY_SETS,
    "topic": _ONE_TOPIC,
    "topics": _ONE_TOPIC,
    "pattern": _ONE_TOPIC,
    "topics_pattern": _ONE_TOPIC,
    "pattern_auto_discovery_period": _ONE_TOPIC,
    "regex_subscription_mode": _ONE_TOPIC,
    "initial_position": "create the subscription at that position before the first consumer, with "
    "pulsar-admin topics create-subscription --messageId",
    "start_message_id_inclusive": "it is for a seek, which a consumer of a policy never makes",
    "priority_level": "the Python client has no priority of consumers",
    "key_shared_policy": "the broker divides the keys: keys outside all fixed ranges would be "
    "handled by no consumer",
    "replicate_subscription_state_enabled": "another cluster has no copy of the retry topic, so "
    "that pending retries would be lost there",
    "is_read_compacted": "messages that compaction removes would never be handled",
    "message_listener": "give the function to run",
    "batch_receive_policy": "use run_batches or receive_batch",
    "batch_index_ack_enabled": "the consumer recognises messages of a batch that it has settled",
    "max_pending_chunked_message": f"it is {MAX_PENDING_CHUNKED} for each partition",
    "auto_ack_oldest_chunked_message_on_queue_full": "incomplete messages would be acknowledged, "
    "and lost",
    "crypto_failure_action": "a message that can't be decrypted waits for a consumer with its key",
    "broker_consumer_stats_cache_time_ms": "the consumer reads no statistics: use on_event, or "
    "redrive.prometheus",
    "properties": "the consumer sets them to the name and generation of its policy",
    # For a `SimpleConsumer`; a `RetryConsumer` has them, or others in their place.
    "receiver_queue_size": _NO_QUEUE,
    "max_total_receiver_queue_size_across_partitions": _NO_QUEUE,
    "prefetch": _NO_QUEUE,
    "unacked_messages_timeout_ms": _INVISIBLE,
    "ack_timeout": _INVISIBLE,
    "negative_ack_redelivery_delay_ms": _DELAYS,
    "nack_delay": _DELAYS,
}
"""Options, most of `pulsar.Client.subscribe`, that no consumer of a policy takes; with reasons."""

_OF_METHODS = {
    "explicit": _OF_RUN,
    "workers": _OF_RUN,
    "max_rate": _OF_RUN,
    "timeout": f"{_OF_RUN}, and of receive of a SimpleConsumer",
    "rules": "it is an option of run of a RetryConsumer",
}


def check_options(options: Mapping[str, object], kind: type, *more: str) -> None:
    """Pass if each of *options* is one of *kind*, a class of options, or of *more*.

    Raises:
        InvalidSpecError: one is not. The message has the name that an option of the client has
            here, or the reason why an option is refused; else the nearest name.
    """
    names = {*kind.__annotations__, *more}
    remedies = {option: f"use {name}" for option, name in CLIENT_OPTIONS.items() if name in names}
    if "crash_log" in names:  # options of a policy's consumer
        of_policy = dict.fromkeys(Policy.__dataclass_fields__, _POLICY_SETS)
        remedies = of_policy | REFUSED_OPTIONS | remedies
    check_listed(options, names, "a consumer", _OF_METHODS | remedies)


def assemble(  # noqa: PLR0913 - the options of all consumers, with their defaults
    consumer: BoundConsumer,
    client: pulsar.Client | BrokerConnection,
    policy: Policy | PolicyFile,
    *,
    name: str | None = None,
    schema: pulsar.schema.Schema = BYTES,
    crypto: Crypto | None = None,
    redaction: Redaction = Redaction(),
    nack_delay: float | timedelta = NACK_DELAY,
    ack_timeout: float | timedelta | None = None,
    crash_log: CrashLog | None = None,
    handle_again_when_unsent: bool = False,
    on_event: Hook | None = None,
    disconnect_timeout: float | timedelta | None = DISCONNECT_TIMEOUT,
    max_in_flight_bytes: int = MAX_IN_FLIGHT_BYTES,
    tracing: Middleware | None = None,
    middleware: Sequence[Middleware] = (),
    prefetch: int = PREFETCH,
) -> Processor:
    """Return the parts of *consumer*; everything is closed again if that fails.

    Raises:
        SubscribeError: the broker refused one of the two subscriptions.
        InvalidSpecError: an option is out of bounds or of another type, or the crash log can't be
            written.
    """
    check_hooks(redaction, on_event)
    check_instance(crash_log, CrashLog, "crash_log", optional=True)
    check_instance(handle_again_when_unsent, bool, "handle_again_when_unsent")
    _check_middleware(tracing, middleware)
    connection = client if isinstance(client, BrokerConnection) else ClientConnection(client)
    in_force_now = in_force(policy, connection.clock)
    name, watched_after = name or identity(), to_seconds(disconnect_timeout)
    subscribing = Subscribing(
        name, _nack_delay(nack_delay), prefetch, schema, crypto, max_in_flight_bytes, crash_log
    )
    attempts = Attempts(in_force_now, connection.clock)
    decisions = Decisions(in_force_now, attempts, connection.clock, name, redaction)
    events = Events(on_event)
    reporting = Reporting(events, in_force_now, attempts)

    def fail(message: pulsar.Message, error: Exception) -> None:
        processor.settle(decisions.raised(message, error, FailureRules()))

    def dead_letter(message: pulsar.Message, error: Exception) -> None:
        processor.settle(decisions.crashed(message, error))

    def follow(message: pulsar.Message) -> None:
        processor.settle(decisions.follows(message))

    chain: list[Middleware] = [] if tracing is None else [tracing.bind(consumer)]
    with contextlib.ExitStack() as undo:
        deadline = Deadline(CLOSE_TIMEOUT)
        log_file = None
        if crash_log is not None:
            log_file = _open(crash_log, connection, in_force_now(), subscribing, events)
            undo.callback(log_file.close)
        parts = connection.open(in_force_now(), subscribing)
        # Else subscriptions would hold messages that are never taken.
        undo.callback(parts.close, deadline)
        parts.incoming.watch(watched_after, reporting.connection)
        undo.callback(lambda: all_within(deadline, [link.close for link in chain]))
        if ack_timeout is not None:
            from redrive.delivery.middleware.ack_timeouts import AckDeadline  # noqa: PLC0415

            limit = to_timedelta(ack_timeout, "an ack time-out")
            chain.append(AckDeadline(limit, parts, fail, reporting.late))
        if crash_log is not None and log_file is not None:
            from redrive.delivery.middleware.poison_guard import PoisonGuard  # noqa: PLC0415

            chain.append(PoisonGuard(parts, log_file, crash_log.max_redeliveries, dead_letter))
        chain += [theirs.bind(consumer) for theirs in middleware]
        may_change = isinstance(policy, PolicyFile)
        guard = _outage_guard(middleware, parts, in_force_now, reporting, may_change=may_change)
        if guard is not None:
            chain.append(guard)
        sequence_log = parts.sequence_log
        if sequence_log is not None:
            # Its imports take long, and few policies ask for it.
            from redrive.delivery.middleware.sequencing import Sequencing  # noqa: PLC0415

            chain.append(Sequencing(parts, sequence_log, attempts, in_force_now, follow))
        if in_force_now().ordered:
            chain.append(KeyOrdering(parts, in_force_now, by_topic=sequence_log is not None))
        processor = Processor(
            parts, decisions, chain, reporting, guard, handle_again=handle_again_when_unsent
        )
        undo.pop_all()
    return processor


def _check_middleware(tracing: object, middleware: object) -> None:
    check_instance(tracing, Middleware, "tracing", optional=True)
    if isinstance(middleware, Sequence) and all(isinstance(m, Middleware) for m in middleware):
        return
    raise InvalidSpecError(
        "middleware must be a list of objects of Middleware",
        got=middleware,
        remedy="pass a list such as [OutageBreaker()], or leave it out",
    )


def _outage_guard(
    middleware: Sequence[Middleware],
    parts: Parts,
    policy: Callable[[], Policy],
    reporting: Reporting,
    *,
    may_change: bool,
) -> OutageGuard | None:
    """Return the guard of outages; None if neither the policy nor the program has a breaker.

    Args:
        middleware: of the program, which may include an `OutageBreaker`.
        policy: returns the policy in force.
        may_change: True if the policy may get a breaker later.
    """
    needed = may_change or policy().outage_breaker is not None
    if not needed and not middleware:
        return None
    from redrive.delivery.middleware.outage_breaker import (  # noqa: PLC0415 - as for `_open`
        OutageBreaker,
        OutageGuard,
    )

    breaker = next((link for link in middleware if isinstance(link, OutageBreaker)), None)
    return OutageGuard(breaker, parts, policy, reporting) if needed or breaker else None


def _open(
    crash_log: CrashLog,
    connection: BrokerConnection,
    policy: Policy,
    subscribing: Subscribing,
    events: Events,
) -> CrashLogFile:
    """Open the crash log; inspect the subscriptions if too many processes in a row were killed."""
    # Its imports take long, and most consumers have none.
    from redrive.delivery.middleware.poison_guard import CrashLogFile  # noqa: PLC0415

    log_file = CrashLogFile(crash_log.directory, policy)
    if log_file.deaths <= crash_log.max_redeliveries:
        return log_file
    if not isinstance(connection, ClientConnection):
        return log_file
    try:
        from redrive.delivery.inspection import Inspection  # noqa: PLC0415 - needs an extra
    except ImportError as error:
        _log.error(
            "%d processes in a row were killed, and the entries that the client decodes can't be "
            "inspected; got %s; pip install 'redrive[crash-log]'",
            log_file.deaths, error,
        )  # fmt: skip
        return log_file
    client, clock = connection.client, connection.clock
    Inspection(client, policy, subscribing, crash_log, log_file, events, clock).run()
    return log_file


def _nack_delay(delay: float | timedelta) -> timedelta:
    nack_delay = to_timedelta(delay, "nack_delay")
    if not timedelta() <= nack_delay <= MAX_NACK_DELAY:
        raise InvalidSpecError(
            "nack_delay is from 0 to 10 days",
            got=str(nack_delay),
            remedy="give the time after which the broker delivers a message again",
        )
    return nack_delay

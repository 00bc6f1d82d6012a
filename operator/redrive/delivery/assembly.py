"""Puts a consumer together: its parts, its verdicts and the chain of its middleware."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import TypedDict

import pulsar
import pulsar.schema

from redrive.delivery.concurrency import CLOSE_TIMEOUT, Deadline, all_within, identity, to_seconds
from redrive.delivery.connection import PREFETCH, ClientConnection, check_prefetch
from redrive.delivery.decisions import Attempts, Decisions
from redrive.delivery.middleware.ack_timeouts import AckDeadline
from redrive.delivery.middleware.chain import BoundConsumer, Middleware
from redrive.delivery.middleware.outage_breaker import OutageBreaker, OutageGuard
from redrive.delivery.middleware.scheduling import KeyOrdering
from redrive.delivery.parts import (
    MAX_IN_FLIGHT_BYTES,
    BrokerConnection,
    CrashLog,
    Crypto,
    Subscribing,
)
from redrive.delivery.policy_file import PolicyFile, in_force
from redrive.delivery.processor import Processor
from redrive.delivery.reporting import DISCONNECT_TIMEOUT, Events, Hook, Reporting
from redrive.errors import InvalidSpecError
from redrive.messages import BYTES
from redrive.policy.envelope import Redaction
from redrive.policy.model import Policy
from redrive.policy.values import to_timedelta
from redrive.policy.verdict import FailureRules

NACK_DELAY = timedelta(minutes=1)
MAX_NACK_DELAY = timedelta(days=10)


class Options(TypedDict, total=False):
    """What each kind of consumer can be given; see `RetryConsumer`."""

    name: str | None
    schema: pulsar.schema.Schema
    crypto: Crypto | None
    redaction: Redaction
    on_event: Hook | None
    disconnect_timeout: float | timedelta
    max_in_flight_bytes: int
    tracing: Middleware | None
    middleware: Sequence[Middleware]


class RetryOptions(Options, total=False):
    """What a `RetryConsumer` can be given besides, with asyncio and in memory too."""

    nack_delay: float | timedelta
    ack_timeout: float | timedelta | None
    crash_log: CrashLog | None
    handle_again_when_unsent: bool
    prefetch: int


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
    disconnect_timeout: float | timedelta = DISCONNECT_TIMEOUT,
    max_in_flight_bytes: int = MAX_IN_FLIGHT_BYTES,
    tracing: Middleware | None = None,
    middleware: Sequence[Middleware] = (),
    prefetch: int = PREFETCH,
) -> Processor:
    """Return what *consumer* works with; everything is closed again if that fails.

    Raises:
        SubscribeError: the broker refused one of the two subscriptions.
        InvalidSpecError: a duration is out of bounds, *prefetch* is below 1, or the crash log can't
            be written.
    """
    check_prefetch(prefetch)
    connection = client if isinstance(client, BrokerConnection) else ClientConnection(client)
    in_force_now = in_force(policy, connection.clock)
    name = name or identity()
    watched_after = to_seconds(disconnect_timeout)
    subscribing = Subscribing(
        name, _nack_delay(nack_delay), prefetch, schema, crypto, max_in_flight_bytes
    )
    parts = connection.open(in_force_now(), subscribing)
    attempts = Attempts(in_force_now, parts.clock)
    decisions = Decisions(in_force_now, attempts, parts.clock, name, redaction)
    reporting = Reporting(Events(on_event), in_force_now, attempts)
    parts.incoming.watch(watched_after, reporting.connection)

    def fail(message: pulsar.Message, error: Exception) -> None:
        processor.settle(decisions.raised(message, error, FailureRules()))

    def dead_letter(message: pulsar.Message, error: Exception) -> None:
        processor.settle(decisions.crashed(message, error))

    def follow(message: pulsar.Message) -> None:
        processor.settle(decisions.follows(message))

    chain: list[Middleware] = [] if tracing is None else [tracing.bind(consumer)]
    with contextlib.ExitStack() as undo:
        deadline = Deadline(CLOSE_TIMEOUT)
        undo.callback(parts.close, deadline)  # else subscriptions would hold what is never taken
        undo.callback(lambda: all_within(deadline, [each.close for each in chain]))
        if ack_timeout is not None:
            limit = to_timedelta(ack_timeout, "an ack time-out")
            chain.append(AckDeadline(limit, parts, fail, reporting.late))
        if crash_log is not None:
            # What writes the crash log takes long to import, and most consumers have none.
            from redrive.delivery.middleware.poison_guard import PoisonGuard  # noqa: PLC0415

            chain.append(PoisonGuard(parts, crash_log, in_force_now(), dead_letter))
        chain += [theirs.bind(consumer) for theirs in middleware]
        breaker = next((each for each in middleware if isinstance(each, OutageBreaker)), None)
        if breaker or isinstance(policy, PolicyFile) or in_force_now().outage_breaker:
            chain.append(OutageGuard(breaker, parts, in_force_now, reporting))
        letters = parts.letters
        if letters is not None:
            # As the crash log: few policies ask for it.
            from redrive.delivery.middleware.sequencing import Sequencing  # noqa: PLC0415

            chain.append(Sequencing(parts, letters, attempts, in_force_now, follow))
        if in_force_now().ordered:
            chain.append(KeyOrdering(parts.incoming, parts.clock, by_topic=letters is not None))
        processor = Processor(
            parts, decisions, chain, reporting, handle_again=handle_again_when_unsent
        )
        undo.pop_all()
    return processor


def _nack_delay(delay: float | timedelta) -> timedelta:
    found = to_timedelta(delay, "nack_delay")
    if not timedelta() <= found <= MAX_NACK_DELAY:
        raise InvalidSpecError(
            "nack_delay is from 0 to 10 days",
            got=str(found),
            remedy="give the time after which the broker delivers a message again",
        )
    return found

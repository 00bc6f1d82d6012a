"""One trace for all attempts of a message; redrive imports this module nowhere else.

    from redrive import opentelemetry

    with RetryConsumer(client, PolicyFile(), tracing=opentelemetry.Tracing()) as consumer:
        opentelemetry.follow(consumer)
        consumer.run(handle)

Needs the extra `opentelemetry`; the program's OpenTelemetry SDK exports spans and metrics. They are
documented in docs/reference/consumer-metrics.md, with the path of one trace through retries.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import pulsar
from opentelemetry import context as contexts
from opentelemetry import metrics, propagate, trace
from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer

from redrive.delivery.concurrency import ends_run
from redrive.delivery.forking import InheritedError
from redrive.delivery.middleware.chain import (
    BoundConsumer,
    Forward,
    Handle,
    Hop,
    Middleware,
    Outcome,
    Settle,
    Settlement,
)
from redrive.errors import InvalidSpecError
from redrive.messages import id_text, read_properties


class Tracing(Middleware):
    """Creates a span for each attempt, and one for each send to the retry or dead-letter topic.

    Consumers may share it. Spans have the class of an exception, and never its text, which may
    contain data that `Redaction` removes from causes.

    Args:
        tracer: creates the spans; by default one of the program's tracer provider.
    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer or trace.get_tracer("redrive")

    @contextlib.contextmanager
    def attempt(self, consumer: BoundConsumer, *messages: pulsar.Message) -> Iterator[Span]:
        """Create a span for the block; for programs that call `receive` themselves.

        One message continues its own trace; several messages begin a new trace, linked to theirs.
        Settle the messages in the block, so that their retries belong to this attempt.
        """
        carried = [propagate.extract(read_properties(message) or {}) for message in messages]
        alone = len(messages) == 1
        with self._span(
            f"process {messages[0].topic_name()}",
            SpanKind.CONSUMER,
            _attributes(consumer, messages),
            carried[0] if alone else None,
            [] if alone else _links(carried),
        ) as span:
            yield span

    @contextlib.contextmanager
    def sending(self, hop: Hop) -> Iterator[Span]:
        """Create a span for the block, which sends *hop*.

        Outside of any span, for example after an invisible duration ended, it continues the trace
        of the message.
        """
        name = str(hop.topic)
        attributes = {**_COMMON, **_operation("send"), "messaging.destination.name": name}
        inside = trace.get_current_span().get_span_context().is_valid
        parent = None if inside else propagate.extract(hop.properties)
        with self._span(f"send {name}", SpanKind.PRODUCER, attributes, parent) as span:
            yield span

    def bind(self, consumer: BoundConsumer) -> Middleware:
        """Return the middleware that traces *consumer*."""
        return _ConsumerTracing(self, consumer)

    @contextlib.contextmanager
    def _span(
        self,
        name: str,
        kind: SpanKind,
        attributes: Mapping[str, str | int],
        parent: Context | None = None,
        links: Sequence[Link] = (),
    ) -> Iterator[Span]:
        with self._tracer.start_as_current_span(
            name,
            parent,
            kind,
            attributes,
            links,
            record_exception=False,  # it would include the text
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except BaseException as error:
                _fail(span, error)
                raise


class _ConsumerTracing(Middleware):
    """Spans of one consumer."""

    def __init__(self, tracing: Tracing, consumer: BoundConsumer) -> None:
        self._tracing = tracing
        self._consumer = consumer
        # Contexts of unsettled attempts, by the identity of the message object.
        self._attempts: dict[int, Context] = {}

    def handle(self, handle: Handle) -> Handle:
        """Create a span for each call of the handler."""

        def handle_traced(messages: Sequence[pulsar.Message]) -> Sequence[Outcome]:
            with self._tracing.attempt(self._consumer, *messages) as span:
                here = contexts.get_current()
                self._attempts |= {id(message): here for message in messages}
                try:
                    outcomes = handle(messages)
                except BaseException as error:
                    if ends_run(error):  # otherwise it is a failure, and will be settled
                        self._forget(messages)
                    raise
                for failure in filter(None, outcomes):
                    _fail(span, failure)
            return outcomes

        return handle_traced

    def settle(self, settle: Settle) -> Settle:
        """Settle within the attempt's context, even in another thread after a time-out."""

        def settle_traced(settlement: Settlement) -> pulsar.MessageId | None:
            attempt = self._attempts.pop(id(settlement.message), None)
            if attempt is None:
                return settle(settlement)
            before = contexts.attach(attempt)
            try:
                return settle(settlement)
            finally:
                contexts.detach(before)

        return settle_traced

    def forward(self, forward: Forward) -> Forward:
        """Create a span for each send; the copy continues it."""

        def forward_traced(hop: Hop) -> pulsar.MessageId | None:
            with self._tracing.sending(hop):
                return forward(hop._replace(properties=_carrying(hop.properties)))

        return forward_traced

    def _forget(self, messages: Sequence[pulsar.Message]) -> None:
        for message in messages:
            self._attempts.pop(id(message), None)


class ObservedConsumer(Protocol):
    """State of a consumer for gauges; each kind of consumer has it."""

    @property
    def name(self) -> str:
        """Return its name."""

    @property
    def connected(self) -> bool:
        """Return True if it has a connection to the broker."""


class _Observed:
    """Gauges of one meter, for consumers while they exist."""

    def __init__(self, meter: Meter) -> None:
        self.consumers: weakref.WeakSet[ObservedConsumer] = weakref.WeakSet()
        meter.create_observable_gauge(
            "redrive.consumer.connected",
            [self._connected],
            description="1 if the consumer has a connection to the broker for each of its topics.",
        )

    def _connected(self, _: CallbackOptions) -> Iterable[Observation]:
        for consumer in list(self.consumers):
            try:
                name, connected = consumer.name, consumer.connected
            except (InvalidSpecError, InheritedError):
                # An asynchronous consumer that is not entered yet, or one of the parent process.
                continue
            yield Observation(int(connected), {**_COMMON, "messaging.client.id": name})


_observed: dict[Meter | None, _Observed] = {}


def follow(consumer: ObservedConsumer, meter: Meter | None = None) -> None:
    """Observe the gauge `redrive.consumer.connected` of *consumer*, while it exists.

    Args:
        meter: creates the gauge; by default one of the program's meter provider.
    """
    if meter not in _observed:
        _observed[meter] = _Observed(meter or metrics.get_meter("redrive"))
    _observed[meter].consumers.add(consumer)


_COMMON = {"messaging.system": "pulsar"}


def _operation(name: str) -> dict[str, str | int]:
    return {"messaging.operation.name": name, "messaging.operation.type": name}


def _attributes(
    consumer: BoundConsumer, messages: Sequence[pulsar.Message]
) -> dict[str, str | int]:
    common = {
        **_COMMON,
        **_operation("process"),
        "messaging.destination.name": messages[0].topic_name(),
        "messaging.destination.subscription.name": consumer.policy.subscription,
    }
    if len(messages) > 1:
        return {**common, "messaging.batch.message_count": len(messages)}
    attempt = consumer.attempt_of(messages[0])
    return {
        **common,
        "messaging.message.id": id_text(messages[0].message_id()),
        "redrive.origin": attempt.origin,
        "redrive.attempt": attempt.number,
    }


def _links(carried: Sequence[Context]) -> list[Link]:
    spans = [trace.get_current_span(context).get_span_context() for context in carried]
    return [Link(context) for context in spans if context.is_valid]


def _carrying(properties: Mapping[str, str]) -> Mapping[str, str]:
    """Return *properties* with the current span in place of the received one."""
    carried: dict[str, str] = {}
    propagate.inject(carried)
    if not carried:  # nothing is traced here: the next attempt continues the received trace
        return properties
    stale = propagate.get_global_textmap().fields
    return {name: value for name, value in properties.items() if name not in stale} | carried


def _fail(span: Span, error: BaseException) -> None:
    span.set_status(Status(StatusCode.ERROR))
    span.set_attribute("error.type", type(error).__name__)

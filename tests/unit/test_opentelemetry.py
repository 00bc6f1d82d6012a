from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from redrive import Policy
from redrive.messages import id_text
from redrive.opentelemetry import Tracing, follow
from redrive.policy.ladder import Ladder
from redrive.policy.naming import TopicName
from redrive.testing.consumers import InMemoryConsumer, InMemorySimpleConsumer

POLICY = Policy(
    TopicName("shop", "prod", "orders"), "fulfilment", max_retries=1, ladder=Ladder.from_fixed("1s")
)
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
FROM_PRODUCER = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=opaque"}
PROCESS, SEND = "process persistent://shop/prod/orders", "send persistent://shop/prod/orders"


class Spans:
    """Spans that a program's own OpenTelemetry SDK would export."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(provider.get_tracer("test"))

    def all(self) -> list[ReadableSpan]:
        return sorted(self._exporter.get_finished_spans(), key=lambda span: span.start_time or 0)


@pytest.fixture
def spans() -> Spans:
    return Spans()


def fail(_message: object) -> None:
    text = "no account for ann@example.com"
    raise LookupError(text)


def ids(span: ReadableSpan) -> tuple[str, str]:
    context = span.get_span_context()
    assert context is not None
    return f"{context.trace_id:032x}", f"{context.span_id:016x}"


def carried(message: Any) -> tuple[str, str]:  # noqa: ANN401 - the client publishes no types
    _, trace, span, _ = message.properties()["traceparent"].split("-")
    return trace, span


def parent(span: ReadableSpan) -> str | None:
    return None if span.parent is None else f"{span.parent.span_id:016x}"


def test_trace_spans_producer_retries_and_dead_letter(
    spans: Spans,
) -> None:
    consumer = InMemoryConsumer(POLICY, tracing=spans.tracing)
    consumer.send(b"x", properties={**FROM_PRODUCER, "tenant": "a"})

    consumer.run(fail)

    recorded = spans.all()
    assert [(span.name, span.kind) for span in recorded] == [
        (PROCESS, SpanKind.CONSUMER),
        (f"{SEND}-fulfilment-RETRY", SpanKind.PRODUCER),
        (f"{PROCESS}-fulfilment-RETRY", SpanKind.CONSUMER),
        (f"{SEND}-fulfilment-DLQ", SpanKind.PRODUCER),
    ]
    before = PARENT
    for span in recorded:
        trace, before_next = ids(span)
        assert (trace, parent(span)) == (TRACE, before)
        before = before_next
    (dead,) = consumer.dead_letters
    assert carried(dead) == (TRACE, before)
    assert dead.properties()["tracestate"] == "vendor=opaque"
    assert dead.properties()["tenant"] == "a"


def test_message_without_trace_starts_one(spans: Spans) -> None:
    consumer = InMemoryConsumer(POLICY, tracing=spans.tracing)
    consumer.send(b"x", properties={"tracestate": "left=over"})
    consumer.run(fail)

    recorded = spans.all()
    assert parent(recorded[0]) is None
    assert len({ids(span)[0] for span in recorded}) == 1
    (dead,) = consumer.dead_letters
    assert carried(dead) == ids(recorded[-1])
    assert "tracestate" not in dead.properties()


def test_span_has_the_attempt_and_only_the_error_class(
    spans: Spans,
) -> None:
    consumer = InMemoryConsumer(POLICY, tracing=spans.tracing)
    origin = id_text(consumer.send(b"x"))
    consumer.run(fail)
    consumer.send(b"y")
    consumer.run(lambda _: None)

    *_, second, _, good = spans.all()
    assert second.attributes is not None
    assert second.attributes["redrive.origin"] == origin
    assert second.attributes["redrive.attempt"] == 2
    assert second.attributes["messaging.destination.subscription.name"] == "fulfilment"
    assert second.attributes["error.type"] == "LookupError"
    assert second.status.status_code is StatusCode.ERROR
    assert good.status.status_code is StatusCode.UNSET
    assert "ann@example.com" not in "".join(span.to_json() for span in spans.all())


def test_batch_span_links_messages_and_continues_failed_ones(
    spans: Spans,
) -> None:
    consumer = InMemoryConsumer(POLICY, tracing=spans.tracing)
    consumer.send(b"good", properties=FROM_PRODUCER)
    consumer.send(b"bad")

    def handle(messages: Sequence[Any]) -> list[Exception | None]:
        return [LookupError() if message.data() == b"bad" else None for message in messages]

    consumer.run_batches(handle, size=2)

    batch, sent, again, *_ = spans.all()
    assert batch.name == PROCESS
    assert (parent(batch), [f"{link.context.trace_id:032x}" for link in batch.links]) == (
        None,
        [TRACE],
    )
    assert batch.attributes is not None
    assert batch.attributes["messaging.batch.message_count"] == 2
    assert batch.status.status_code is StatusCode.ERROR
    assert (ids(sent)[0], parent(sent)) == ids(batch)
    assert (ids(again)[0], parent(again)) == ids(sent)


def test_manual_settlement_belongs_to_its_attempt_span(spans: Spans) -> None:
    consumer = InMemoryConsumer(POLICY, tracing=spans.tracing)
    consumer.send(b"x", properties=FROM_PRODUCER)
    message = consumer.receive()
    with spans.tracing.attempt(consumer, message):
        consumer.reconsume_later(message)

    attempt, sent = spans.all()
    assert (ids(attempt)[0], parent(attempt)) == (TRACE, PARENT)
    assert parent(sent) == ids(attempt)[1]
    assert carried(consumer.receive()) == ids(sent)


def test_settlement_outside_an_attempt_continues_the_trace(
    spans: Spans,
) -> None:
    consumer = InMemoryConsumer(POLICY, tracing=spans.tracing)
    consumer.send(b"x", properties=FROM_PRODUCER)
    consumer.reconsume_later(consumer.receive())

    (sent,) = spans.all()
    assert (ids(sent)[0], parent(sent)) == (TRACE, PARENT)
    assert carried(consumer.receive()) == ids(sent)


def test_expired_message_continues_its_trace(spans: Spans) -> None:
    consumer = InMemorySimpleConsumer(POLICY, tracing=spans.tracing)
    consumer.send(b"x", properties=FROM_PRODUCER)
    invisible = timedelta(seconds=10)
    (message,) = consumer.receive(1, invisible)
    with spans.tracing.attempt(consumer, message):
        pass  # and nothing is settled
    consumer.advance(invisible)

    attempt, sent = spans.all()
    assert (ids(attempt)[0], parent(attempt)) == (TRACE, PARENT)
    assert (ids(sent)[0], parent(sent)) == (TRACE, PARENT)
    assert carried(consumer.receive(1, invisible)[0]) == ids(sent)


def test_refused_send_is_recorded_as_an_error(spans: Spans) -> None:
    consumer = InMemoryConsumer(POLICY, tracing=spans.tracing)
    consumer.send(b"x")
    consumer.broker.refused.add(POLICY.retry_topic)
    consumer.reconsume_later(consumer.receive())

    (sent,) = spans.all()
    assert sent.attributes is not None
    assert sent.attributes["error.type"] == "NotSentError"
    assert sent.status.status_code is StatusCode.ERROR


def test_trace_context_without_sdk_is_passed_on() -> None:
    consumer = InMemoryConsumer(POLICY, tracing=Tracing())
    consumer.send(b"x", properties=FROM_PRODUCER)
    consumer.run(fail)
    consumer.send(b"untraced")
    consumer.run(fail)

    traced, untraced = consumer.dead_letters
    assert FROM_PRODUCER.items() <= traced.properties().items()
    assert "traceparent" not in untraced.properties()


def test_interrupted_handler_ends_its_span(spans: Spans) -> None:
    consumer = InMemoryConsumer(POLICY, tracing=spans.tracing)
    consumer.send(b"x")

    def interrupted(_message: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consumer.run(interrupted)
    (attempt,) = spans.all()
    assert attempt.attributes is not None
    assert attempt.attributes["error.type"] == "KeyboardInterrupt"


def test_trace_of_cause_omits_frames_of_tracing(
    spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = InMemoryConsumer(POLICY, tracing=spans.tracing)
    consumer.send(b"x")
    consumer.run(fail)
    assert "test_opentelemetry.fail" in caplog.text
    assert "redrive.opentelemetry" not in caplog.text


def test_connected_gauge_follows_the_connection() -> None:
    reader = InMemoryMetricReader()
    meter = MeterProvider([reader]).get_meter("test")

    def gauge() -> list[tuple[Any, Any]]:
        data = reader.get_metrics_data()
        assert data is not None
        return [
            (point.value, dict(point.attributes or {})["messaging.client.id"])  # type: ignore[union-attr]
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == "redrive.consumer.connected"
            for point in metric.data.data_points
        ]

    with InMemoryConsumer(POLICY, name="one") as consumer:
        follow(consumer, meter)
        assert gauge() == [(1, "one")]
    assert gauge() == [(0, "one")]

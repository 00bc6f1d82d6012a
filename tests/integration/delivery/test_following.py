"""Logs, traces and statistics of the broker suffice to follow messages and consumers."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from redrive import Event, RetryConsumer
from redrive.messages import id_text
from redrive.opentelemetry import Tracing
from tests.support.topics import path

ProvisionPolicy = Callable[..., Any]


def fail(_message: object) -> None:
    raise LookupError


def test_log_alone_follows_messages_to_their_dead_letters(
    provision_policy: ProvisionPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    provisioned = provision_policy(delays=["1s"], max_retries=3)
    origins = [id_text(sent) for sent in provisioned.send(b"0", b"1", b"2")]
    ended: list[Event] = []

    def stop_at_the_end(event: Event) -> None:
        if event.event == "redrive.dead_lettered":
            ended.append(event)
        if len(ended) == len(origins):
            consumer.stop()

    policy = replace(provisioned.policy, generation=4)
    with (
        caplog.at_level(logging.INFO, "redrive.delivery.events"),
        RetryConsumer(
            provisioned.client(provisioned.role), policy, on_event=stop_at_the_end
        ) as consumer,
    ):
        consumer.run(fail)

    dead = {id_text(message.message_id()): message for message in provisioned.dead_letters(3)}
    records: list[Any] = [r for r in caplog.records if r.name == "redrive.delivery.events"]
    for content, origin in zip((b"0", b"1", b"2"), origins, strict=True):
        story = [record for record in records if record.origin == origin]
        assert [record.attempt for record in story] == [n for n in range(1, 5) for _ in range(2)]
        assert [record.event for record in story] == [
            *["redrive.attempt_failed", "redrive.retried"] * 3,
            *["redrive.attempt_failed", "redrive.dead_lettered"],
        ]
        at = origin
        for failed, moved in zip(story[::2], story[1::2], strict=True):
            assert failed.message_id == moved.message_id == at
            at = moved.new_id
        assert dead[at].data() == content
        assert {record.generation for record in story} == {4}
        assert {record.topic for record in story[1:-1:2]} == {str(policy.retry_topic)}
        assert (story[-1].topic, story[-1].reason) == (
            str(policy.dead_letter_topic),
            "RetriesExhausted",
        )


def test_trace_continues_after_a_handler_timeout(provision_policy: ProvisionPolicy) -> None:
    provisioned = provision_policy(max_retries=0)
    trace = "0af7651916cd43dd8448eb211c80319c"
    provisioned.send(b"slow", properties={"traceparent": f"00-{trace}-b7ad6b7169203331-01"})
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider.get_tracer("test"))
    buried = threading.Event()

    def record(event: Event) -> None:
        if event.event == "redrive.dead_lettered":
            buried.set()

    with RetryConsumer(
        provisioned.client(provisioned.role), provisioned.policy, tracing=tracing, on_event=record
    ) as consumer:

        def handle(_message: object) -> None:
            consumer.stop()
            assert buried.wait(180)

        consumer.run(handle, timeout=timedelta(milliseconds=300))

    sent, attempt = exporter.get_finished_spans()  # in the order in which they ended
    assert (sent.name, attempt.name) == (
        f"send {provisioned.policy.dead_letter_topic}",
        f"process {provisioned.policy.topic}",
    )
    context = sent.get_span_context()
    assert context is not None
    assert sent.parent == attempt.get_span_context()
    (dead,) = provisioned.dead_letters(1)
    assert dead.properties()["traceparent"].startswith(f"00-{trace}-{context.span_id:016x}-")


def test_broker_shows_consumer_name_and_policy(provision_policy: ProvisionPolicy) -> None:
    provisioned = provision_policy()
    policy = replace(provisioned.policy, name="shop/orders", generation=7)
    with RetryConsumer(provisioned.client(provisioned.role), policy, name="worker-1"):
        for topic in (policy.topic, policy.retry_topic):
            answer = provisioned.broker.request("GET", f"{path(topic)}/stats")
            subscription = json.loads(answer.body)["subscriptions"][policy.subscription]
            (consumer,) = subscription["consumers"]
            assert consumer["consumerName"] == "worker-1"
            assert consumer["metadata"] == {
                "redrive.policy": "shop/orders",
                "redrive.generation": "7",
            }

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pulsar
import pytest
from prometheus_client import REGISTRY

from redrive import BroadcastConsumer, Event, prometheus
from redrive.delivery.receiving.fetcher import ConsumerStoppedError, SubscriptionLostError
from redrive.delivery.receiving.subscribe import SubscribeError
from redrive.policy.naming import TopicName
from tests.support.stage import path

SetStage = Callable[..., Any]
SECOND = timedelta(seconds=1)
SOON = 30 * SECOND


def listen(stage: Any, **choices: Any) -> BroadcastConsumer:  # noqa: ANN401 - see conftest
    """A consumer of a role that may consume the source topic and nothing else."""
    consumer = BroadcastConsumer(stage.client(stage.role), str(stage.policy.topic), **choices)
    stage.closing.callback(consumer.close)
    return consumer


@pytest.fixture
def stage(set_stage: SetStage) -> Any:  # noqa: ANN401
    stage = set_stage(partitions=2, retry_rights=["produce"])
    stage.broker.request(
        "POST",
        f"/admin/v2/namespaces/{stage.policy.topic.namespace_name}/autoSubscriptionCreation",
        {"allowAutoSubscriptionCreation": False},
    ).check("let nobody subscribe")
    return stage


def contents(consumer: BroadcastConsumer, count: int) -> list[bytes]:
    received = [consumer.receive(SOON) for _ in range(count)]
    assert consumer.receive(0.5 * SECOND) is None
    return sorted(message.data() for message in received if message)


def test_every_consumer_gets_every_message_from_its_beginning_on(stage: Any) -> None:  # noqa: ANN401
    stage.send(b"before")
    first, second = listen(stage), listen(stage)
    sent = [b"%d" % n for n in range(6)]
    stage.send(*sent)
    assert contents(first, 6) == contents(second, 6) == sent
    stage.broker.request("PUT", f"{path(stage.policy.topic)}/unload").check("unload")
    stage.send(b"after the move")
    assert contents(first, 1) == contents(second, 1) == [b"after the move"]
    first.close()
    stage.send(b"later")
    assert contents(second, 1) == [b"later"]
    assert contents(listen(stage), 0) == []


def test_a_failed_message_is_dropped_and_told(
    stage: Any,  # noqa: ANN401
    caplog: pytest.LogCaptureFixture,
) -> None:
    events: list[Event] = []
    consumer = listen(stage, on_event=events.append)
    handled: list[bytes] = []

    def handle(message: pulsar.Message) -> None:
        handled.append(message.data())
        if message.data() == b"bad":
            raise ValueError("no such price")
        if message.data() == b"last":
            consumer.stop()

    with caplog.at_level(logging.WARNING, "redrive"):
        for content in (b"bad", b"good", b"last"):  # in this order, wherever they lie
            stage.send(content, partition_key="one")
        consumer.run(handle)

    assert handled == [b"bad", b"good", b"last"]
    (record,) = caplog.records
    assert record.getMessage().startswith("dropped ")
    assert "ValueError: no such price" in record.getMessage()
    (event,) = events
    assert (event.event, event.reason, event.attempt) == ("redrive.dropped", "ValueError", 1)
    assert event.source == str(stage.policy.topic)
    stage.dead_letters(0)
    prometheus.count(event)
    labels = {
        "policy": "",
        "policy_namespace": "",
        "source_topic": event.source,
        "subscription": "",
        "reason": "ValueError",
    }
    assert REGISTRY.get_sample_value("redrive_consumer_dropped_messages_total", labels) == 1


def test_a_handler_out_of_time_has_failed_and_its_late_success_is_told(stage: Any) -> None:  # noqa: ANN401
    events: list[Event] = []
    given_up = threading.Event()

    def handle(_message: pulsar.Message) -> None:
        assert given_up.wait(10)
        consumer.stop()

    def hear(event: Event) -> None:
        events.append(event)
        given_up.set()

    consumer = listen(stage, on_event=hear)
    stage.send(b"slow")
    consumer.run(handle, timeout=0.2 * SECOND)
    assert [(event.event, event.reason) for event in events] == [
        ("redrive.dropped", "HandlerTimeoutError"),
        ("redrive.late_success", ""),
    ]


def test_it_pauses_and_stops_like_the_others(stage: Any) -> None:  # noqa: ANN401
    consumer = listen(stage)
    consumer.pause()
    stage.send(b"x")
    assert consumer.receive(0.5 * SECOND) is None
    consumer.resume()
    assert consumer.receive(SOON)
    consumer.stop()
    with pytest.raises(ConsumerStoppedError):
        consumer.receive()


def test_a_client_closed_too_early_is_said_so(stage: Any) -> None:  # noqa: ANN401
    client = stage.client(stage.role)
    with BroadcastConsumer(client, str(stage.policy.topic)) as consumer:
        client.close()
        with pytest.raises(SubscriptionLostError):
            consumer.receive(SOON)


def test_who_may_not_read_is_told_what_is_missing(stage: Any) -> None:  # noqa: ANN401
    topic: TopicName = stage.policy.dead_letter_topic
    with pytest.raises(SubscribeError, match=r"can't be read.*Authorization.*may consume it"):
        BroadcastConsumer(stage.client(stage.role), str(topic))

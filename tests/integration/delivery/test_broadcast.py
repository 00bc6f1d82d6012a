from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pulsar
import pulsar.schema
import pytest

from redrive import AsyncBroadcastConsumer, BroadcastConsumer, Event
from redrive.delivery.connection import SubscribeError
from redrive.delivery.fetcher import ConsumerStoppedError, SubscriptionLostError
from redrive.policy.naming import TopicName
from tests.support.consumers import SynchronousAdapter
from tests.support.topics import path, tell
from tests.support.waiting import wait_until

ProvisionPolicy = Callable[..., Any]
SECOND = timedelta(seconds=1)
SOON = 180 * SECOND


BOTH = pytest.mark.parametrize("kind", ["threads", "asyncio"], indirect=True)
"""Without it a test is about the consumer for threads, on which the other is built."""


def of_kind(kind: str, client: pulsar.Client, topic: str, **choices: Any) -> Any:  # noqa: ANN401
    """A consumer for `threads`, or the one for `asyncio` with the methods of the other."""
    if kind == "threads":
        return BroadcastConsumer(client, topic, **choices)
    return SynchronousAdapter(AsyncBroadcastConsumer(client, topic, **choices))


def listen(provisioned: Any, **choices: Any) -> Any:  # noqa: ANN401 - see conftest
    """A consumer of a role that may consume the source topic and nothing else."""
    consumer = of_kind(
        provisioned.kind,
        provisioned.client(provisioned.role),
        str(provisioned.policy.topic),
        **choices,
    )
    provisioned.closing.callback(consumer.close)
    return consumer


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    name: str = getattr(request, "param", "threads")
    return name


class Listening:
    """A provisioned policy, and which consumers listen."""

    def __init__(self, provisioned: Any, kind: str) -> None:  # noqa: ANN401
        self.kind = kind
        self._provisioned = provisioned

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as the policy has it
        return getattr(self._provisioned, name)


@pytest.fixture
def provisioned(
    kind: str,
    pulsar_namespace: str,
    provision_policy: ProvisionPolicy,
) -> Any:  # noqa: ANN401
    """Resources of a policy, in a namespace where a consumer creates no subscription."""
    provisioned = provision_policy(partitions=2, retry_rights=["produce"])
    provisioned.broker.request(
        "POST",
        f"/admin/v2/namespaces/{pulsar_namespace}/autoSubscriptionCreation",
        {"allowAutoSubscriptionCreation": False},
    ).check("let nobody subscribe")
    return Listening(provisioned, kind)


def contents(consumer: Any, count: int) -> list[bytes]:  # noqa: ANN401
    received = [consumer.receive(SOON) for _ in range(count)]
    assert consumer.receive(0.5 * SECOND) is None
    return sorted(message.data() for message in received if message)


@BOTH
def test_every_consumer_gets_each_message_after_its_start(provisioned: Any) -> None:  # noqa: ANN401
    provisioned.send(b"before")
    first, second = listen(provisioned), listen(provisioned)
    sent = [b"%d" % n for n in range(6)]
    provisioned.send(*sent)
    assert contents(first, 6) == contents(second, 6) == sent
    provisioned.broker.request("PUT", f"{path(provisioned.policy.topic)}/unload").check("unload")
    provisioned.send(b"after the move")
    assert contents(first, 1) == contents(second, 1) == [b"after the move"]
    first.close()
    provisioned.send(b"later")
    assert contents(second, 1) == [b"later"]
    assert contents(listen(provisioned), 0) == []


def test_schema_decodes_broadcast_messages(provisioned: Any) -> None:  # noqa: ANN401
    consumer = listen(provisioned, schema=pulsar.schema.StringSchema())
    provisioned.send("21 °C".encode())
    assert consumer.receive(SOON).value() == "21 °C"


@BOTH
def test_broadcast_survives_failures_that_are_no_exception(provisioned: Any) -> None:  # noqa: ANN401
    dropped: list[str] = []
    consumer = listen(provisioned, on_event=lambda event: dropped.append(event.reason))
    provisioned.send(b"panic", b"cancelled", b"good")
    handled: list[bytes] = []

    class Panic(BaseException):
        """A panic in Rust, as PyO3 raises it."""

    def handle(message: Any) -> None:  # noqa: ANN401 - the client publishes no types
        handled.append(message.data())
        if len(handled) == 3:
            consumer.stop()
        if message.data() == b"panic":
            raise Panic
        if message.data() == b"cancelled":
            raise asyncio.CancelledError

    consumer.run(handle)
    assert sorted(handled) == [b"cancelled", b"good", b"panic"]
    cancelled = "CancelledError" if provisioned.kind == "threads" else "HandlerCancelledError"
    assert sorted(dropped) == sorted([cancelled, "Panic"])


def test_prefetch_limits_messages_of_each_partition(provisioned: Any) -> None:  # noqa: ANN401
    listen(provisioned, prefetch=7)
    wait_until(lambda: [permits(provisioned, number) for number in (0, 1)] == [[7], [7]])


def permits(provisioned: Any, partition: int) -> list[int]:  # noqa: ANN401
    """Return the number of messages that each reader permits the broker to send."""
    topic = provisioned.policy.topic.partition(partition)
    subscriptions = tell(provisioned.broker, topic, "stats")["subscriptions"].values()
    return [
        listener["availablePermits"]
        for subscription in subscriptions
        for listener in subscription["consumers"]
    ]


@BOTH
def test_timed_out_handler_fails_and_late_success_is_reported(provisioned: Any) -> None:  # noqa: ANN401
    events: list[Event] = []
    given_up = threading.Event()

    def handle(_message: pulsar.Message) -> None:
        assert given_up.wait(60)
        consumer.stop()

    def record(event: Event) -> None:
        events.append(event)
        given_up.set()

    consumer = listen(provisioned, on_event=record)
    provisioned.send(b"slow")
    consumer.run(handle, timeout=0.2 * SECOND)
    assert [(event.event, event.reason) for event in events] == [
        ("redrive.dropped", "HandlerTimeoutError"),
        ("redrive.late_success", ""),
    ]


def test_broadcast_consumer_pauses_and_stops(provisioned: Any) -> None:  # noqa: ANN401
    consumer = listen(provisioned)
    consumer.pause()
    provisioned.send(b"x")
    assert consumer.receive(0.5 * SECOND) is None
    consumer.resume()
    assert consumer.receive(SOON)
    consumer.stop()
    with pytest.raises(ConsumerStoppedError):
        consumer.receive()


def test_receive_from_closed_client_names_the_mistake(provisioned: Any) -> None:  # noqa: ANN401
    client = provisioned.client(provisioned.role)
    with of_kind(provisioned.kind, client, str(provisioned.policy.topic)) as consumer:
        client.close()
        with pytest.raises(SubscriptionLostError):
            consumer.receive(SOON)


def test_missing_read_right_is_named(provisioned: Any) -> None:  # noqa: ANN401
    topic: TopicName = provisioned.policy.dead_letter_topic
    with pytest.raises(SubscribeError, match=r"can't be read.*Authorization.*may consume it"):
        of_kind(provisioned.kind, provisioned.client(provisioned.role), str(topic))

"""Messages redelivered after an unload or a reset: stored once, and attempts never overlap."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from redrive import RetryConsumer
from redrive.delivery import in_flight
from redrive.policy.model import SubscriptionType
from tests.support.consumers import handle_until_quiet, receive_until_quiet
from tests.support.provisioned_policy import ProvisionedPolicy
from tests.support.topics import path
from tests.support.waiting import wait_until

ProvisionPolicy = Callable[..., Any]
SOON = timedelta(seconds=180)
SECONDS = 180
REMEMBERED = 0.5
PARTITIONS = 2
MESSAGES = 300


@pytest.fixture(autouse=True)
def _forget_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remember settled messages for less than 3 s: handlers below take longer than that."""
    monkeypatch.setattr(in_flight, "REMEMBERED_SECONDS", REMEMBERED)


def move(provisioned: ProvisionedPolicy, unsettled: int) -> None:
    """Move the topics once all settlements are stored; return when the copies wait in the client.

    Args:
        unsettled: the number of messages that the broker delivers again.
    """
    topic = provisioned.policy.topic
    wait_until(lambda: provisioned.unsettled(PARTITIONS) == unsettled)
    provisioned.unload()
    wait_until(lambda: provisioned.given_out(topic) == unsettled)
    time.sleep(2 * REMEMBERED)


def test_next_attempt_waits_for_a_timed_out_handler(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy(delays=["1s"])
    provisioned.send(b"slow")
    consumer = provisioned.consumer()
    at_work: list[int] = []
    beside: list[list[int]] = []

    def handle(message: Any) -> None:  # noqa: ANN401 - the client publishes no types
        number = consumer.attempt_of(message).number
        beside.append(list(at_work))
        at_work.append(number)
        if number == 1:
            time.sleep(3)
        at_work.remove(number)
        if number == 2:
            consumer.stop()

    consumer.run(handle, workers=3, timeout=timedelta(seconds=1))
    assert beside == [[], []]


@pytest.mark.parametrize("end", ["out of time", "ack time-out"])
def test_next_message_of_a_key_waits_for_timed_out_handler(
    provision_policy: ProvisionPolicy, end: str
) -> None:
    provisioned = provision_policy(
        ordered=True, max_retries=0, kind=SubscriptionType.KEY_SHARED, delays=["1s"]
    )
    provisioned.send(b"slow", b"next", partition_key="k")
    short = timedelta(seconds=1)
    consumer = provisioned.consumer(**({} if end == "out of time" else {"ack_timeout": short}))
    at_work: list[bytes] = []
    beside: list[list[bytes]] = []

    def handle(message: Any) -> None:  # noqa: ANN401 - the client publishes no types
        beside.append(list(at_work))
        at_work.append(message.data())
        if message.data() == b"slow":
            time.sleep(3)
        at_work.remove(message.data())
        if message.data() == b"next":
            consumer.stop()

    late = threading.Timer(SECONDS, consumer.stop)
    late.start()
    consumer.run(handle, workers=3, timeout=short if end == "out of time" else timedelta(minutes=1))
    late.cancel()
    assert beside == [[], []]
    provisioned.dead_letters(1)


@pytest.mark.parametrize("ordered", [False, True])
def test_redelivered_partition_queue_is_handled_once(
    provision_policy: ProvisionPolicy,
    ordered: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    kind = SubscriptionType.KEY_SHARED if ordered else SubscriptionType.SHARED
    provisioned = provision_policy(partitions=PARTITIONS, ordered=ordered, kind=kind)
    sent = [b"%d" % number for number in range(300)]
    provisioned.send(*sent, partition_key="k")
    consumer = provisioned.consumer()
    handled: list[bytes] = []

    quiet = timedelta(seconds=2)
    backlog = partial(provisioned.unsettled, PARTITIONS)
    for message in receive_until_quiet(consumer, quiet=quiet, unsettled=backlog):
        handled.append(message.data())
        consumer.acknowledge(message)
        if len(handled) in {1, 100, 200}:
            move(provisioned, len(sent) - len(handled))
        if len(handled) == 250:
            time.sleep(2 * REMEMBERED)
    assert handled == sent


def test_redelivered_partition_queue_is_retried_once(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy(partitions=PARTITIONS, delays=["1h"])
    provisioned.send(*[b"%d" % number for number in range(100)])
    consumer = provisioned.consumer()
    for number in range(100):
        message = consumer.receive(SOON)
        if not number:
            move(provisioned, 100)
        consumer.reconsume_later(message)
    time.sleep(2 * REMEMBERED)  # a handler may be that slow, and the copies come last
    assert consumer.receive(timedelta(seconds=2)) is None
    consumer.close()
    assert provisioned.backlog(provisioned.policy.retry_topic) == 100


def send_batch(provisioned: Any) -> None:  # noqa: ANN401 - see conftest
    producer = provisioned.client("superuser").create_producer(
        str(provisioned.policy.topic),
        batching_enabled=True,
        batching_max_publish_delay_ms=60_000,
    )
    for number in range(10):
        producer.send_async(b"%d" % number, lambda *_: None)
    producer.flush()
    producer.close()


@pytest.mark.parametrize("cause", ["unload", "negative acknowledgement"])
def test_redelivered_entry_with_message_in_flight_is_acked(
    provision_policy: ProvisionPolicy, cause: str
) -> None:
    provisioned = provision_policy()
    send_batch(provisioned)
    consumer = provisioned.consumer(nack_delay=timedelta(milliseconds=100))
    taken = {message.data(): message for message in (consumer.receive(SOON) for _ in range(6))}
    kept = taken.pop(b"5")
    if cause == "unload":
        for message in taken.values():
            consumer.acknowledge(message)
        del message
        taken.clear()
        provisioned.unload()
        time.sleep(2)  # until the waiting messages are those of the redelivery
    else:
        consumer.negative_acknowledge(taken.pop(b"0"))
    while (again := consumer.receive(timedelta(seconds=2))) is not None:
        assert again.data() != b"5"
        consumer.acknowledge(again)
    for message in (kept, *taken.values()):
        consumer.acknowledge(message)
    handle_until_quiet(  # while the consumer lives; a slow broker may deliver it only now
        consumer,
        (),
        quiet=timedelta(seconds=0.2),
        unsettled=lambda: provisioned.backlog(provisioned.policy.topic),
    )


def handled(consumer: RetryConsumer) -> set[bytes]:
    """Receive and acknowledge as many messages as were sent, and no more."""
    messages = [consumer.receive(timedelta(seconds=60)) for _ in range(MESSAGES)]
    for message in messages:
        consumer.acknowledge(message)
    return {message.data() for message in messages if message is not None}


def test_reset_cursor_of_partitions_brings_all_messages_back(
    provision_policy: Callable[..., ProvisionedPolicy],
) -> None:
    provisioned = provision_policy(partitions=PARTITIONS)
    policy, consumer = provisioned.policy, provisioned.consumer()
    contents = {b"%d" % number for number in range(MESSAGES)}
    provisioned.send(*contents)
    assert handled(consumer) == contents
    settled = time.monotonic()
    # Without a call of `receive`, which would find out that no message waits.
    arrivals = consumer._processor.parts.incoming._topics[0].arrivals  # type: ignore[attr-defined]  # noqa: SLF001 - what it has seen of the queue
    wait_until(lambda: arrivals._empty_at > settled + REMEMBERED)  # noqa: SLF001 - likewise
    for number in range(PARTITIONS):
        topic = path(policy.topic.partition(number))
        url = f"{topic}/subscription/{policy.subscription}/resetcursor/1"
        provisioned.broker.request("POST", url).check("move the subscription back")
    assert handled(consumer) == contents

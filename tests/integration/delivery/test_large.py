"""Messages that are bigger than the broker takes as they are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pulsar
import pytest

from redrive.delivery.reporting import Event, Name
from sandbox.pulsar import SUPERUSER
from tests.support.provisioned_policy import ProvisionedPolicy
from tests.support.waiting import wait_until

ProvisionPolicy = Callable[..., ProvisionedPolicy]
SOON = timedelta(seconds=30)
LARGEST = 5 * 1024 * 1024
BIG = 8_960_000


def noise(size: int) -> bytes:
    """What no compression makes smaller."""
    return random.Random(size).randbytes(size)  # noqa: S311 - the same in each run, no secret


def send(provisioned: ProvisionedPolicy, payload: bytes) -> None:
    """Produce to the source topic what has to be compressed or cut."""
    producer = provisioned.client(SUPERUSER).create_producer(
        str(provisioned.policy.topic),
        batching_enabled=False,
        chunking_enabled=True,
        compression_type=pulsar.CompressionType.LZ4,
    )
    producer.send(payload)
    producer.close()


def failing() -> RuntimeError:
    """An error whose description takes some thousand bytes."""
    error = RuntimeError("x" * 2_000)
    error.__cause__ = ValueError("y" * 5_000)
    return error


@pytest.mark.parametrize(
    "payload",
    [b"0123456789" * (BIG // 10), noise(BIG), noise(LARGEST - 900)],
    ids=["compressed", "in chunks", "too big with its cause"],
)
def test_a_large_message_is_retried_and_dead_lettered_whole(
    provision_policy: ProvisionPolicy, payload: bytes
) -> None:
    provisioned = provision_policy(max_retries=2)
    send(provisioned, payload)
    events: list[Event] = []
    consumer = provisioned.consumer(on_event=events.append)
    for number in (1, 2, 3):
        message = consumer.receive(SOON)
        assert message is not None
        assert message.data() == payload
        assert consumer.attempt_of(message).number == number
        consumer.reconsume_later(message, cause=failing())
    consumer.close()

    assert [event.event for event in events] == [Name.RETRIED, Name.RETRIED, Name.DEAD_LETTERED]
    [dead] = provisioned.dead_letters(1)
    assert dead.data() == payload
    assert {"REDRIVE_CAUSE_MESSAGE", "REDRIVE_CAUSE_TRACE"} <= dead.properties().keys()
    wait_until(lambda: not provisioned.unsettled())


def test_large_messages_that_are_sent_on_side_by_side_all_arrive(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy(max_retries=1)
    payloads = {noise(BIG + number) for number in range(12)}
    for payload in payloads:
        send(provisioned, payload)
    consumer = provisioned.consumer()
    waiting = [consumer.receive(SOON) for _ in payloads]
    with ThreadPoolExecutor(6) as workers:
        list(workers.map(consumer.reconsume_later, waiting))

    consumers = itertools.cycle([consumer, provisioned.consumer()])
    arrived: list[bytes] = []
    while set(arrived) != payloads:  # one may come twice, where a broker takes its time
        one = next(consumers)
        message = one.receive(SOON if not arrived else timedelta(seconds=1))
        if message is not None:
            one.acknowledge(message)
            arrived.append(message.data())
    assert set(arrived) == payloads

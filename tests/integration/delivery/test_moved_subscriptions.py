"""Settled messages of a subscription that was moved back are handled again."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest

from redrive import RetryConsumer
from redrive.delivery import in_flight
from tests.support.provisioned_policy import ProvisionedPolicy, path
from tests.support.waiting import wait_until

PARTITIONS, MESSAGES = 2, 300
REMEMBERED_SECONDS = 0.5


def handled(consumer: RetryConsumer) -> set[bytes]:
    """Receive and acknowledge as many messages as were sent, and no more."""
    messages = [consumer.receive(timedelta(seconds=60)) for _ in range(MESSAGES)]
    for message in messages:
        consumer.acknowledge(message)
    return {message.data() for message in messages if message is not None}


def test_reset_cursor_of_partitions_brings_all_messages_back(
    provision_policy: Callable[..., ProvisionedPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_flight, "REMEMBERED_SECONDS", REMEMBERED_SECONDS)
    provisioned = provision_policy(partitions=PARTITIONS)
    policy, consumer = provisioned.policy, provisioned.consumer()
    contents = {b"%d" % number for number in range(MESSAGES)}
    provisioned.send(*contents)
    assert handled(consumer) == contents
    settled = time.monotonic()
    # Without a call of `receive`, which would find out that no message waits.
    arrivals = consumer._processor.parts.incoming._topics[0].arrivals  # type: ignore[attr-defined]  # noqa: SLF001 - what it has seen of the queue
    wait_until(lambda: arrivals._empty_at > settled + REMEMBERED_SECONDS)  # noqa: SLF001 - likewise
    for number in range(PARTITIONS):
        topic = path(policy.topic.partition(number))
        url = f"{topic}/subscription/{policy.subscription}/resetcursor/1"
        provisioned.broker.request("POST", url).check("move the subscription back")
    assert handled(consumer) == contents

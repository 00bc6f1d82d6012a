"""Retries in a namespace without delayed delivery come no earlier than their delays."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pulsar

from tests.support.provisioned_policy import ProvisionedPolicy

DELAYS = (1.0, 2.0)
EARLIER_SECONDS = 0.05
"""The client reads the time of a message a moment before it was sent."""


def test_ladder_is_kept_without_delayed_delivery(
    provision_policy: Callable[..., ProvisionedPolicy], pulsar_namespace: str
) -> None:
    provisioned: Any = provision_policy(delays=[f"{delay:g}s" for delay in DELAYS])
    provisioned.broker.request(
        "POST",
        f"/admin/v2/namespaces/{pulsar_namespace}/delayedDelivery",
        {"active": False, "tickTime": 1_000},
    ).check("switch delayed delivery off")
    consumer = provisioned.consumer()
    attempts, others = list[float](), list[float]()

    def handle(message: pulsar.Message) -> None:
        if message.data() == b"other":
            others.append(time.monotonic())
            return
        attempts.append(time.monotonic())
        if len(attempts) <= len(DELAYS):
            provisioned.send(b"other")
            raise ConnectionError
        consumer.stop()

    provisioned.send(b"failing")
    consumer.run(handle)
    waits = [second - first for first, second in pairwise(attempts)]
    assert all(delay - EARLIER_SECONDS <= wait for delay, wait in zip(DELAYS, waits, strict=True))
    assert len(others) == len(DELAYS)
    assert others[-1] < attempts[-1]  # the source topic waits for no retry

"""Topics unloaded while messages are handled at full speed, when they are received in bursts."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable

import pulsar
import pytest

from sandbox.pulsar import SUPERUSER
from tests.support.provisioned_policy import ProvisionedPolicy, provision_policy
from tests.support.waiting import wait_until

__all__ = ["provision_policy"]

MESSAGES = 60_000
UNLOADS = 6
MOST_HANDLED_AGAIN = 1_000


@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
@pytest.mark.parametrize("workers", [1, 8])
def test_unloads_at_full_speed_repeat_few_messages(
    provision_policy: Callable[..., ProvisionedPolicy], *, workers: int, batched: bool
) -> None:
    provisioned = provision_policy()
    fill(provisioned, batched=batched)
    consumer = provisioned.consumer()
    handled, numbers = Counter[int](), itertools.count(1)
    counted = 0

    def handle(message: pulsar.Message) -> None:
        nonlocal counted
        handled[int(message.data())] += 1  # each number has a single handler at a time
        counted = next(numbers)

    running = threading.Thread(target=consumer.run, args=(handle,), kwargs={"workers": workers})
    running.start()
    for unload in range(UNLOADS):
        wait_until(lambda at=unload * MESSAGES // UNLOADS + 1: counted >= at)  # type: ignore[misc]
        provisioned.unload()
    wait_until(lambda: len(handled) == MESSAGES and provisioned.unsettled() == 0)
    consumer.stop()
    running.join()
    again = sum(handled.values()) - MESSAGES
    assert again <= MOST_HANDLED_AGAIN


def fill(provisioned: ProvisionedPolicy, *, batched: bool) -> None:
    """Send numbered messages, which wait in the topic."""
    producer = provisioned.client(SUPERUSER).create_producer(
        str(provisioned.policy.topic), batching_enabled=batched, block_if_queue_full=True
    )
    for number in range(MESSAGES):
        producer.send_async(b"%d" % number, lambda *_: None)
    producer.flush()
    producer.close()

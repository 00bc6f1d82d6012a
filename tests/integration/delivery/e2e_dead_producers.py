"""Chunks whose producer died: the client gives them up after two minutes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from redrive.delivery import fetcher
from tests.integration.delivery.test_large import Applications, receive_all
from tests.support.provisioned_policy import ProvisionedPolicy
from tests.support.raw_entries import raw_producer
from tests.support.waiting import wait_until

ProvisionPolicy = Callable[..., ProvisionedPolicy]


def test_chunks_of_a_dead_producer_leave_the_backlog(
    provision_policy: ProvisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher, "_RECOVER_AFTER_SECONDS", (1.0, 1.0, 130.0))
    provisioned = provision_policy()
    with raw_producer(provisioned.broker, provisioned.policy.topic) as producer:
        dead, alive = Applications(producer, 12), Applications(producer, 12)
        dead.send(0, 2)
        alive.send()
    consumer = provisioned.consumer()
    assert receive_all(consumer, 12) == alive.contents
    wait_until(lambda: provisioned.unsettled() == 24)
    provisioned.wait_until_settled(400)
    assert consumer.receive(0) is None

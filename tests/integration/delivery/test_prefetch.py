"""What waits in a consumer is as much as it was given, and the rest goes to others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from redrive.errors import InvalidSpecError
from redrive.policy.model import SubscriptionType
from tests.support.messages import handle_until_quiet
from tests.support.waiting import wait_until

ProvisionPolicy = Callable[..., Any]


@pytest.mark.parametrize("kind", [SubscriptionType.SHARED, SubscriptionType.KEY_SHARED])
def test_a_consumer_that_joins_gets_what_a_busy_one_has_not_begun(
    provision_policy: ProvisionPolicy, kind: SubscriptionType
) -> None:
    provisioned = provision_policy(kind=kind)
    busy, go_on = provisioned.consumer(prefetch=4), threading.Event()
    held: list[bytes] = []

    def hold(message: Any) -> None:  # noqa: ANN401 - the client publishes no types
        held.append(message.data())
        go_on.wait(180)

    running = threading.Thread(target=busy.run, args=(hold,), kwargs={"workers": 2})
    running.start()
    for number in range(200):
        provisioned.send(b"%d" % number, partition_key=f"{number}")
        if number == 0:
            wait_until(lambda: held)
    joined = provisioned.consumer()
    found: list[bytes] = []
    while len(found) <= 50:  # of a key-shared subscription, about half of the keys are another's
        message = joined.receive(timedelta(seconds=60))
        found.append(message.data())
        joined.acknowledge(message)
    assert len(held) <= 2
    go_on.set()
    found += handle_until_quiet(
        joined,
        (),
        quiet=timedelta(seconds=0.2),
        unsettled=lambda: provisioned.backlog(provisioned.policy.topic),
    )
    busy.close()
    running.join(30)
    assert sorted([*found, *held]) == sorted(b"%d" % number for number in range(200))


def test_partitions_share_one_bound(provision_policy: ProvisionPolicy) -> None:
    provisioned = provision_policy(partitions=4)
    policy = provisioned.policy
    consumer = provisioned.consumer(prefetch=20)
    provisioned.send(*[b"%d" % number for number in range(200)])
    wait_until(lambda: provisioned.given_out(policy.topic) >= 20)
    time.sleep(2)  # until it has what is too much, if it takes that
    found = handle_until_quiet(
        provisioned.consumer(),
        (),
        quiet=timedelta(seconds=1),
        # The client has a queue of each partition and one of all.
        unsettled=lambda: provisioned.backlog(policy.topic) > 2 * 20,
    )
    assert 200 - 2 * 20 <= len(found) <= 200 - 20
    consumer.close()


@pytest.mark.parametrize("prefetch", [0, -1])
def test_a_consumer_without_room_for_a_message_is_refused(
    provision_policy: ProvisionPolicy, prefetch: int
) -> None:
    with pytest.raises(InvalidSpecError, match="prefetch"):
        provision_policy().consumer(prefetch=prefetch)

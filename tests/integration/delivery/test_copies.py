"""What an unload delivers again is stored once, and no attempt runs beside another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

ProvisionPolicy = Callable[..., Any]
SOON = timedelta(seconds=30)


def test_messages_that_wait_to_be_sent_on_are_stored_once_however_often_a_topic_moves(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy(retry_rights=["consume"], delays=["1h"])
    provisioned.send(*[b"%d" % number for number in range(20)])
    consumer = provisioned.consumer()

    def fail(_message: Any) -> None:  # noqa: ANN401 - the client publishes no types
        raise ConnectionError

    running = threading.Thread(target=consumer.run, args=(fail,), kwargs={"workers": 4})
    running.start()
    time.sleep(2)  # until some have failed
    for _ in range(5):
        provisioned.unload()
        time.sleep(1)
    provisioned.grant(provisioned.policy.retry_topic, "consume", "produce")
    end = time.monotonic() + 90
    while provisioned.backlog(provisioned.policy.topic):
        assert time.monotonic() < end, "messages were not sent on"
        time.sleep(0.2)
    consumer.close()
    running.join(30)
    assert provisioned.backlog(provisioned.policy.retry_topic) == 20


def test_the_next_attempt_waits_for_a_handler_that_is_out_of_time(
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
            time.sleep(6)
        at_work.remove(number)
        if number == 2:
            consumer.stop()

    consumer.run(handle, workers=3, timeout=timedelta(seconds=1))
    assert beside == [[], []]

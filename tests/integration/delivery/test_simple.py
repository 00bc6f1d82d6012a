"""What a crash of a simple consumer duplicates, and that it loses nothing."""

from __future__ import annotations

import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.support.user_programs import StartProgram, start_program
from tests.support.waiting import wait_until

__all__ = ["start_program"]
ProvisionPolicy = Callable[..., Any]
MINUTE = timedelta(minutes=1)


@pytest.mark.parametrize(
    ("boundary", "attempts"),
    [
        ("SimpleConsumer.attempt_of", [1]),  # with the message in flight
        ("pulsar.Producer.send", [1]),
        ("pulsar.Consumer.acknowledge", [1, 2]),  # it was sent on, and is there twice
    ],
)
def test_a_process_killed_with_a_message_in_flight_loses_nothing(
    provision_policy: ProvisionPolicy,
    start_program: StartProgram,
    boundary: str,
    attempts: list[int],
) -> None:
    provisioned = provision_policy()
    provisioned.send(b"precious")
    process = start_program(
        provisioned,
        f"""
import time
from datetime import timedelta
from redrive import SimpleConsumer
from redrive.delivery.consumers import simple
simple.MIN_INVISIBLE = timedelta(seconds=1)
{boundary} = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
consumer = SimpleConsumer(client, load_policy())
for message in consumer.receive(1, timedelta(seconds=1)):
    if "attempt_of" in "{boundary}":
        consumer.attempt_of(message)
time.sleep(30)
""",
    )
    output, _ = process.communicate(timeout=180)
    assert process.returncode == -signal.SIGKILL, output

    with provisioned.simple_consumer() as consumer:
        again = [consumer.receive(1, MINUTE, MINUTE)[0] for _ in attempts]
        assert sorted(consumer.attempt_of(message).number for message in again) == attempts
        assert len({consumer.attempt_of(message).origin for message in again}) == 1
        for message in again:
            consumer.acknowledge(message)
        assert consumer.receive(1, MINUTE, timedelta(seconds=0.5)) == []
    wait_until(lambda: not provisioned.unsettled())

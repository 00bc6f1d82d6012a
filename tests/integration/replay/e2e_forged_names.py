"""A role takes the producer names of a Replay each time that the target moves."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pulsar
import pytest

from redrive.policy.naming import TopicName
from tests.integration.replay.test_forgery import producer_of
from tests.support.local_runs import job_of, numbers, process, replay
from tests.support.subscriptions import tell
from tests.support.waiting import wait_until

ProvisionPolicy = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("replay_token")

COUNT = 2_000
UNLOADS = 30


@contextmanager
def forged_names(provisioned: Any, target: TopicName) -> Iterator[list[int]]:  # noqa: ANN401
    """Send the next sequence id of each disconnected producer of a Replay; yield these ids."""
    forged: list[int] = []
    names: set[str] = set()
    stop = threading.Event()

    def forge() -> None:
        while not stop.wait(0.01):
            publishers = tell(provisioned.broker, target, "stats")["publishers"]
            shown = {publisher["producerName"] for publisher in publishers}
            names.update(name for name in shown if name.startswith("redrive-replay-"))
            for name in names:
                try:
                    with producer_of(provisioned, target, producer_name=name) as producer:
                        number = producer.last_sequence_id() + 1
                        producer.send(b"", properties={"id": "forged"}, sequence_id=number)
                except pulsar.PulsarException:
                    continue  # the Replay has the name, or the target moves
                forged.append(number)

    forging = threading.Thread(target=forge)
    forging.start()
    try:
        yield forged
    finally:
        stop.set()
        forging.join()


def test_taken_producer_names_lose_and_double_nothing(provision_policy: ProvisionPolicy) -> None:
    """Each unload of an empty target deletes the ledger that proves what was stored."""
    provisioned = provision_policy()
    provisioned.bury_in_ranges(COUNT)
    target = provisioned.policy.retry_topic
    with forged_names(provisioned, target) as forged, process(job_of(provisioned), COUNT) as run:
        for _ in range(UNLOADS):
            run.send_signal(signal.SIGCONT)
            provisioned.admin("PUT", target, "unload")
            count = len(forged)
            wait_until(lambda: len(forged) > count or run.poll() is not None)  # noqa: B023
        wait_until(lambda: run.poll() is not None, seconds=180)
        assert run.returncode == 0, run.communicate()[1]

    account = replay(provisioned)

    moved = [number for number in provisioned.in_target() if number != "forged"]
    assert len(moved) == len(set(moved)) == COUNT - account.refused
    assert set(moved) <= set(numbers(COUNT))
    assert {entry.cause for entry in account.refusals} <= {"Unproven"}
    provisioned.check_audit()

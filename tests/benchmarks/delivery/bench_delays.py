"""The accuracy of delays: many retries at a time, on each rung of a ladder.

The retry topic has the tick that the operator sets; the broker's timer has another one.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pulsar

from redrive import FailureRules
from redrive.provision.desired import delay_policy
from tests.benchmarks.figures import Figure
from tests.support.provisioned_policy import ProvisionedPolicy, path

RUNGS = ("1s", "5s", "10s")
MESSAGES = 1_000
BROKERS_TICK_SECONDS = 1.0
EARLY, LATE = 0.1, 2.0
"""Bounds: earliness as a share of the delay, and lateness in ticks of the broker."""


def test_retries_are_punctual(provision_policy: Callable[..., Any], figures: list[Figure]) -> None:
    provisioned: ProvisionedPolicy = provision_policy(delays=RUNGS)
    _keep_delays(provisioned)
    delays = {type(rung, (Exception,), {}): timedelta(seconds=int(rung[:-1])) for rung in RUNGS}
    failures = dict(zip(RUNGS, delays, strict=True))
    failed: dict[bytes, float] = {}
    late: dict[str, list[float]] = defaultdict(list)
    consumer = provisioned.consumer()

    def handle(message: Any) -> None:  # noqa: ANN401 - the client publishes no types
        rung, content = message.properties()["rung"], message.data()
        if content not in failed:
            failed[content] = time.monotonic()
            raise failures[rung]
        asked = delays[failures[rung]].total_seconds()
        late[rung].append(time.monotonic() - failed[content] - asked)
        if sum(map(len, late.values())) == MESSAGES * len(RUNGS):
            consumer.stop()

    producing = threading.Thread(target=_produce, args=(provisioned,))
    producing.start()
    consumer.run(handle, workers=4, rules=FailureRules(delays=delays))
    producing.join()
    for rung in RUNGS:
        name = f"delay of {rung}, {MESSAGES} retries"
        asked = delays[failures[rung]].total_seconds()
        ticks = statistics.quantiles(late[rung], n=100)[98] / BROKERS_TICK_SECONDS
        figures += [
            Figure(name, "median of actual - asked", statistics.median(late[rung]), "s"),
            Figure(name, "99 % of actual - asked", ticks, "ticks", at_most=LATE),
            Figure(name, "earliest", min(late[rung]) / asked, "of asked", at_least=-EARLY),
        ]


def _keep_delays(provisioned: ProvisionedPolicy) -> None:
    """Set the tick of the retry topic to the operator's value."""
    policy = provisioned.policy
    release = tuple(map(int, provisioned.broker.version.split(".")))
    for write in delay_policy(min(policy.ladder.rungs), release).writes(None):
        at = f"{path(policy.retry_topic)}/{write.path}"
        provisioned.broker.request(write.method, at, write.body).check("set the tick")


def _produce(provisioned: ProvisionedPolicy) -> None:
    """Produce at a rate at which the consumer has no backlog."""
    producer = provisioned.client("superuser").create_producer(str(provisioned.policy.topic))
    for number in range(MESSAGES):
        for rung in RUNGS:
            producer.send_async(f"{number} {rung}".encode(), _sent, properties={"rung": rung})
        time.sleep(0.02)
    producer.flush()
    producer.close()


def _sent(result: pulsar.Result, _id: pulsar.MessageId) -> None:
    assert result == pulsar.Result.Ok

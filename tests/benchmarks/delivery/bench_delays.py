"""How exactly retries keep their delay: of many at a time, on each rung of a ladder."""

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
from tests.benchmarks.figures import Figure
from tests.support.provisioned_policy import ProvisionedPolicy

RUNGS = ("1s", "5s", "10s", "30s")
MESSAGES = 1_000
TICK_SECONDS = 1.0


def test_retries_are_punctual(provision_policy: Callable[..., Any], figures: list[Figure]) -> None:
    provisioned: ProvisionedPolicy = provision_policy()
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
        percentile_99 = statistics.quantiles(late[rung], n=100)[98]
        figures += [
            Figure(name, "median of actual - asked", statistics.median(late[rung]), "s"),
            Figure(name, "99 % of actual - asked", percentile_99, "s"),
            Figure(name, "earliest", min(late[rung]), "s", at_least=-TICK_SECONDS),
        ]


def _produce(provisioned: ProvisionedPolicy) -> None:
    """Produce at a rate that leaves the consumer at leisure: its own backlog is no delay."""
    producer = provisioned.client("superuser").create_producer(str(provisioned.policy.topic))
    for number in range(MESSAGES):
        for rung in RUNGS:
            producer.send_async(f"{number} {rung}".encode(), _sent, properties={"rung": rung})
        time.sleep(0.02)
    producer.flush()
    producer.close()


def _sent(result: pulsar.Result, _id: pulsar.MessageId) -> None:
    assert result == pulsar.Result.Ok

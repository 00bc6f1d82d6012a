"""Failing messages: the cost of a hop to the retry topic, and the accuracy of delays.

The hop is compared with a hand-written one. `reconsume_later`, a handler of `run` that raises, and
the script send the same properties, wait for the receipt and acknowledge, message by message. They
alternate on one topic, in one process. The retries are due long after the end.

The delays are those of many retries at a time, on each rung of a ladder. The retry topic has the
tick that the operator sets; the broker's timer has another one.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pulsar
import pytest

from redrive import FailureRules, PolicyFile, RetryConsumer
from redrive.delivery.parts import SystemClock
from redrive.messages import id_text
from redrive.policy import codec
from redrive.policy.envelope import Cause
from redrive.provision.desired import delay_policy
from tests.benchmarks.delivery.costs import Cost, cost_of
from tests.benchmarks.figures import Figure
from tests.support.provisioned_policy import ProvisionedPolicy
from tests.support.topics import path

PAIRS = 5
MESSAGES = 1_000
FLOOR = 0.8
MOST_PROCESSOR_TIME = 3.5
"""The bound for a message whose handler raises, as a ratio to the hand-written hop."""
NEVER = timedelta(days=1)


def test_a_retry_costs_little_more_than_one_written_by_hand(
    provision_policy: Callable[..., Any],
    figures: list[Figure],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    provisioned: ProvisionedPolicy = provision_policy(delays=["1d"])
    client = provisioned.client("superuser")
    # Writing the log costs as much as the handlers of the program, here those of pytest.
    events = logging.getLogger("redrive.delivery.events")
    monkeypatch.setattr(events, "handlers", [logging.NullHandler()])
    monkeypatch.setattr(events, "propagate", False)
    file = tmp_path / "policy.json"
    file.write_text(codec.encode(provisioned.policy), encoding="utf-8")
    by_hand, ours, failing = [], [], []
    for _ in range(PAIRS):
        by_hand.append(_cost_by_hand(provisioned, client))
        ours.append(_cost_of_ours(provisioned, client))
        failing.append(_cost_of_run(provisioned, client, file))
    # The ratio of each pair, because the load of the machine changes between pairs.
    ratio = statistics.median(its.wall / mine.wall for mine, its in zip(ours, by_hand, strict=True))
    ratios = sorted(
        mine.processor / its.processor for mine, its in zip(failing, by_hand, strict=True)
    )
    figures += [
        Figure("retry path", "ratio", ratio, "of by hand", at_least=FLOOR),
        Figure(
            "retry path", "processor time, run", statistics.median(ratios), "of by hand",
            at_most=MOST_PROCESSOR_TIME,
        ),
        Figure("retry path", "lowest of run", ratios[0], "of by hand"),
        Figure("retry path", "highest of run", ratios[-1], "of by hand"),
    ]  # fmt: skip
    for name, costs in (
        ("written by hand", by_hand), ("reconsume_later", ours), ("run", failing),
    ):  # fmt: skip
        wall, processor = (statistics.median(cost) for cost in zip(*costs, strict=True))
        figures += [
            Figure("retry path", name, 1 / wall, "messages/s"),
            Figure("retry path", f"processor time, {name}", processor * 1e6, "µs a message"),
        ]


def _cost_of_ours(provisioned: ProvisionedPolicy, client: pulsar.Client) -> Cost:
    provisioned.send(*[b"x" * 512] * (MESSAGES + 1), properties={"kind": "order"})
    failure = _raised()
    with RetryConsumer(client, provisioned.policy) as consumer:

        def hop(_number: int) -> None:
            consumer.reconsume_later(consumer.receive(), delay=NEVER, cause=failure)

        return cost_of(hop, MESSAGES)


def _cost_of_run(provisioned: ProvisionedPolicy, client: pulsar.Client, file: Path) -> Cost:
    provisioned.send(*[b"x" * 512] * (MESSAGES + 1), properties={"kind": "order"})
    moments: list[tuple[float, float]] = []

    def handle(_message: pulsar.Message) -> None:
        moments.append((time.perf_counter(), time.process_time()))
        if len(moments) > MESSAGES:
            consumer.stop()
        int("no such order")

    with RetryConsumer(client, PolicyFile(file)) as consumer:
        consumer.run(handle)
    (wall, processor), *_, (wall_end, processor_end) = moments[1:]
    hops = MESSAGES - 1
    return Cost((wall_end - wall) / hops, (processor_end - processor) / hops)


def _cost_by_hand(provisioned: ProvisionedPolicy, client: pulsar.Client) -> Cost:
    provisioned.send(*[b"x" * 512] * (MESSAGES + 1), properties={"kind": "order"})
    policy = provisioned.policy
    consumer = client.subscribe(
        str(policy.topic), policy.subscription, consumer_type=pulsar.ConsumerType.Shared
    )
    producer = client.create_producer(str(policy.retry_topic), batching_enabled=False)
    cause = _cause()

    def hop(_number: int) -> None:
        message = consumer.receive()
        producer.send(
            message.data(),
            properties=message.properties()
            | cause
            | {
                "RECONSUMETIMES": "1",
                "ORIGIN_MESSAGE_ID": id_text(message.message_id()),
                "REAL_TOPIC": str(policy.topic),
                "REAL_SUBSCRIPTION": policy.subscription,
                "RETRY_TOPIC": str(policy.retry_topic),
                "DELAY_TIME": str(NEVER // timedelta(milliseconds=1)),
            },
            partition_key=message.partition_key(),
            ordering_key=message.ordering_key(),
            event_timestamp=message.event_timestamp(),
            deliver_after=NEVER,
        )
        consumer.acknowledge(message)

    try:
        return cost_of(hop, MESSAGES)
    finally:
        consumer.close()
        producer.close()


def _cause() -> dict[str, str]:
    """The properties that redrive writes for the same exception, computed once for the script."""
    cause = Cause.from_error(
        _raised(), failed_at=SystemClock().now(), consumer="by hand", attempt=1, redact=str
    )
    return cause.to_properties()


def _raised() -> Exception:
    try:
        int("no such order")
    except ValueError as error:
        return error
    raise AssertionError


RUNGS = ("1s", "5s", "10s")
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

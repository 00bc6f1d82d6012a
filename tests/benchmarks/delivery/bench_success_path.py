"""Successful messages: the cost of the documented calls, compared with the bare client.

Each consumer has its default options and follows a `PolicyFile`. It alternates with a loop on the
bare client that does the same work, on one topic, with the same messages, in one process. The topic
is filled before it is consumed, so the producer does not affect the result.

Also the cost of sequenced dead letters, for which records are read before each message is handled.
Consumers with and without `sequenced` alternate in the same way.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pulsar
import pulsar.asyncio
import pytest

from redrive import (
    AsyncRetryConsumer,
    Policy,
    PolicyFile,
    RetryConsumer,
    SubscriptionType,
    load_policy,
)
from redrive.delivery.arrivals import BURST
from redrive.policy import codec
from redrive.policy.naming import TopicName
from sandbox.pulsar import SUPERUSER
from tests.benchmarks.delivery.costs import Cost, compared
from tests.benchmarks.figures import Figure
from tests.support.provisioned_policy import ProvisionedPolicy
from tests.support.waiting import wait_until

PAIRS = 9
WORKERS = 8
ASYNC_WORKERS = 20


class Queue(NamedTuple):
    """The receiver queue, by default that of the client and of a consumer.

    Attributes:
        await_messages: called before the first message is received.
    """

    prefetch: int = 1_000
    await_messages: Callable[[], object] = int


DEFAULT_QUEUE = Queue()


class Count:
    """A handler that reads each message, and calls *stop* with the last one of *messages*.

    The first message starts the measurement: it waits for connections.
    """

    def __init__(self, messages: int) -> None:
        self._messages = messages
        self._numbers = itertools.count(1)
        self.ended = threading.Event()
        self.stop: Callable[[], object] = self.ended.set

    def __call__(self, message: pulsar.Message) -> None:
        message.data()
        number = next(self._numbers)  # one step, for several threads
        if number == 1:
            self._began = time.perf_counter(), time.process_time()
        if number == self._messages:
            self._ended = time.perf_counter(), time.process_time()
            self.stop()

    def batch(self, messages: Sequence[pulsar.Message]) -> None:
        """Handle a batch."""
        for message in messages:
            self(message)

    async def alone(self, message: pulsar.Message) -> None:
        """Handle a message on an event loop."""
        self(message)

    @property
    def cost(self) -> Cost:
        """The cost of a message but the first."""
        (wall, processor), (wall_end, processor_end) = self._began, self._ended
        measured = self._messages - 1
        return Cost((wall_end - wall) / measured, (processor_end - processor) / measured)


Consume = Callable[[pulsar.Client, Path, Count], None]


def bare(
    client: pulsar.Client,
    file: Path,
    count: Count,
    *,
    threads: int = 1,
    queue: Queue = DEFAULT_QUEUE,
) -> None:
    """Consume by the client alone, with a pool of *threads*."""
    policy = load_policy(file)
    consumer = client.subscribe(
        str(policy.topic),
        policy.subscription,
        consumer_type=pulsar.ConsumerType.Shared,
        receiver_queue_size=queue.prefetch,
    )
    queue.await_messages()

    def work() -> None:
        while not count.ended.is_set():
            with suppress(pulsar.Timeout):
                message = consumer.receive(1_000)
                count(message)
                consumer.acknowledge(message)

    pool = [threading.Thread(target=work) for _ in range(threads - 1)]
    for thread in pool:
        thread.start()
    work()
    for thread in pool:
        thread.join()
    consumer.close()


def bare_pool(client: pulsar.Client, file: Path, count: Count) -> None:
    """Consume by the client alone, with as many threads as workers are measured."""
    bare(client, file, count, threads=WORKERS)


def run(
    client: pulsar.Client,
    file: Path,
    count: Count,
    *,
    workers: int = 1,
    queue: Queue = DEFAULT_QUEUE,
) -> None:
    """Consume as the guides show."""
    with RetryConsumer(client, PolicyFile(file), prefetch=queue.prefetch) as consumer:
        count.stop = consumer.stop
        queue.await_messages()
        consumer.run(count, workers=workers)


def run_pool(client: pulsar.Client, file: Path, count: Count) -> None:
    """Consume with several workers."""
    run(client, file, count, workers=WORKERS)


def run_batches(client: pulsar.Client, file: Path, count: Count) -> None:
    """Consume in batches."""
    with RetryConsumer(client, PolicyFile(file)) as consumer:
        count.stop = consumer.stop
        consumer.run_batches(count.batch)


def receive(client: pulsar.Client, file: Path, count: Count) -> None:
    """Consume by hand."""
    with RetryConsumer(client, PolicyFile(file)) as consumer:
        while not count.ended.is_set():
            message = consumer.receive()
            count(message)
            consumer.acknowledge(message)


def run_async(client: pulsar.Client, file: Path, count: Count) -> None:
    """Consume on an event loop."""

    async def consume() -> None:
        async with AsyncRetryConsumer(client, PolicyFile(file)) as consumer:
            count.stop = consumer.stop
            await consumer.run(count.alone, workers=ASYNC_WORKERS)

    asyncio.run(consume())


def bare_async(provisioned: ProvisionedPolicy) -> Consume:
    """Return a call that consumes by the client's own asyncio, with a task for each worker."""
    authentication = pulsar.AuthenticationToken(provisioned.broker.token(SUPERUSER))

    async def consume(policy: Policy, count: Count) -> None:
        client = pulsar.asyncio.Client(
            provisioned.broker.service_url,
            authentication=authentication,
            logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
        )
        consumer = await client.subscribe(
            str(policy.topic), policy.subscription, consumer_type=pulsar.ConsumerType.Shared
        )

        async def work() -> None:
            while not count.ended.is_set():
                message = await consumer.receive()
                await count.alone(message)
                await consumer.acknowledge(message)

        tasks = [asyncio.create_task(work()) for _ in range(ASYNC_WORKERS)]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        _, idle = await asyncio.wait(tasks, timeout=1)  # others acknowledge; the rest waits
        for task in idle:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.close()

    return lambda _client, file, count: asyncio.run(consume(load_policy(file), count))


@pytest.mark.parametrize(
    ("call", "reference", "producer", "partitions", "messages", "goal", "least", "most"),
    [
        (run, bare, "batched", 0, 80_000, 0.9, 0.8, 1.35),
        (run, bare, "unbatched", 0, 40_000, 0.9, 0.8, 2.0),
        (run, bare, "batched", 4, 80_000, 0.75, 0.65, 1.5),
        (run_pool, bare_pool, "batched", 0, 80_000, 0.8, 0.7, 1.6),
        (run_batches, bare, "batched", 0, 80_000, 1.0, 0.85, 1.4),
        (receive, bare, "batched", 0, 80_000, 0.9, 0.8, 1.5),
        (receive, bare, "batched", 1, 80_000, 0.85, 0.75, 1.5),
        (run_async, bare, "batched", 0, 20_000, 0.4, 0.3, 3.0),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_documented_call_costs_little_more_than_the_client(  # noqa: PLR0913, PLR0917 - a table
    provision_policy: Callable[..., Any],
    figures: list[Figure],
    tmp_path: Path,
    call: Consume,
    reference: Consume,
    producer: str,
    partitions: int,
    messages: int,
    goal: float,
    least: float,
    most: float,
) -> None:
    """*goal* and *least* are for the rate, *most* for the processor time, which varies less.

    Medians of two runs on an idle machine differ by a tenth.
    """
    provisioned: ProvisionedPolicy = provision_policy(partitions=partitions)
    file = tmp_path / "policy.json"
    pairs = alternated(provisioned, file, reference, call, messages, batched=producer == "batched")
    name = f"{call.__name__}, {producer}" + f", {partitions} partitions" * (partitions > 0)
    figures += compared(name, pairs, goal=goal, least=least, most=most)


def test_messages_in_the_client_cost_little_more(
    provision_policy: Callable[..., Any], figures: list[Figure], tmp_path: Path
) -> None:
    """All messages are in the client before the first is handled: the broker costs nothing."""
    provisioned: ProvisionedPolicy = provision_policy()
    file, messages, topic = tmp_path / "policy.json", 40_000, provisioned.policy.topic

    def await_messages() -> None:  # some more are redelivered after the run before
        wait_until(lambda: provisioned.given_out(topic) >= messages)

    queue = Queue(messages + BURST, await_messages)
    pairs = alternated(
        provisioned, file, partial(bare, queue=queue), partial(run, queue=queue), messages
    )
    figures += compared("run, messages in the client", pairs, goal=0.9, least=0.65, most=1.6)


def test_asyncio_beside_the_asyncio_of_the_client(
    provision_policy: Callable[..., Any], figures: list[Figure], tmp_path: Path
) -> None:
    provisioned: ProvisionedPolicy = provision_policy()
    file, messages = tmp_path / "policy.json", 20_000
    pairs = alternated(provisioned, file, bare_async(provisioned), run_async, messages)
    name = f"run_async, {ASYNC_WORKERS} workers, beside pulsar.asyncio"
    figures += compared(name, pairs)


def alternated(  # noqa: PLR0913 - a pair, and its messages
    provisioned: ProvisionedPolicy,
    file: Path,
    reference: Consume,
    call: Consume,
    messages: int,
    *,
    batched: bool = True,
) -> list[tuple[Cost, Cost]]:
    """Return pairs of costs; compare within each, for the load changes between pairs."""
    client, policy = provisioned.client(SUPERUSER), provisioned.policy
    file.write_text(codec.encode(policy), encoding="utf-8")

    def cost(consume: Consume) -> Cost:
        fill(client, policy.topic, messages, batched=batched)
        count = Count(messages)
        consume(client, file, count)
        return count.cost

    return [(cost(reference), cost(call)) for _ in range(PAIRS)]


def fill(client: pulsar.Client, topic: TopicName, messages: int, *, batched: bool) -> None:
    """Produce the messages of one run."""
    producer = client.create_producer(
        str(topic), batching_enabled=batched, block_if_queue_full=True, max_pending_messages=5_000
    )
    for number in range(messages):
        producer.send_async(
            b"x" * 100, lambda *_: None, properties={"number": f"{number}", "kind": "order"}
        )
    producer.flush()
    producer.close()


SEQUENCED_PAIRS = 3
SEQUENCED_MESSAGES = 4_000
KEYS = 1_000
SEQUENCED_FLOOR = 0.1


@pytest.mark.parametrize("workers", [1, 8])
def test_sequenced_policy_costs_one_request_per_message(
    provision_policy: Callable[..., Any], figures: list[Figure], workers: int
) -> None:
    provisioned: ProvisionedPolicy = provision_policy(
        kind=SubscriptionType.KEY_SHARED, ordered=True, sequenced=True
    )
    without = replace(provisioned.policy, sequenced=False)
    ordered, sequenced = [], []
    for _ in range(SEQUENCED_PAIRS):
        ordered.append(sequenced_rate(provisioned, without, workers))
        sequenced.append(sequenced_rate(provisioned, provisioned.policy, workers))
    # The ratio of each pair, because the load of the machine changes between pairs.
    ratio = statistics.median(mine / its for mine, its in zip(sequenced, ordered, strict=True))
    name = f"success path, sequenced, workers: {workers}"
    figures += [
        Figure(name, "ordered", statistics.median(ordered), "messages/s"),
        Figure(name, "ordered and sequenced", statistics.median(sequenced), "messages/s"),
        Figure(name, "ratio", ratio, "of ordered", at_least=SEQUENCED_FLOOR),
    ]


def sequenced_rate(provisioned: ProvisionedPolicy, policy: Policy, workers: int) -> float:
    """Produce messages, and return the number handled per second."""
    client = provisioned.client(SUPERUSER)
    producer = client.create_producer(
        str(policy.topic), batching_enabled=False, block_if_queue_full=True
    )
    for number in range(SEQUENCED_MESSAGES):
        producer.send_async(b"x" * 512, lambda *_: None, partition_key=f"{number % KEYS}")
    producer.flush()
    producer.close()
    moments: list[float] = []

    def handle(_message: pulsar.Message) -> None:
        moments.append(time.perf_counter())
        if len(moments) == SEQUENCED_MESSAGES:
            consumer.stop()

    with RetryConsumer(client, policy) as consumer:
        consumer.run(handle, workers=workers)
    return (SEQUENCED_MESSAGES - 1) / (
        moments[-1] - moments[0]
    )  # the first call waits for connections

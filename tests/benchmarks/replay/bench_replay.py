"""The rate of moving and counting dead letters, compared with hand-written loops.

By Spark with two tasks, which runs already; small messages, sent one by one. Both share the cores
with the broker, so one task is measured, too. The load of the machine affects both, so
each trial compares within a minute.
"""

from __future__ import annotations

import secrets
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import pulsar
import pytest
from pyspark.sql import SparkSession

from redrive.policy.envelope import (
    CAUSE_FINGERPRINT,
    CAUSE_MESSAGE,
    CAUSE_TRACE,
    CAUSE_TYPE,
    CONSUMER,
    DEAD_REASON,
    DELAY_TIME,
    ORIGIN_MESSAGE_ID,
    REAL_SUBSCRIPTION,
    REAL_TOPIC,
    RECONSUMETIMES,
)
from redrive.policy.naming import DEAD_LETTER_SUBSCRIPTION
from redrive.reading.ranges import RANGE_ENTRIES
from redrive.replay.job import run as runs
from redrive.replay.job.plan import Engine, Scanned
from redrive.replay.spark import Spark
from redrive.replay.spec import Choice, ReplayJob
from tests.benchmarks.figures import Figure
from tests.support.engines import Local
from tests.support.local_runs import Notes, job_of

ProvisionPolicy = Callable[..., Any]
TRIALS = 7
"""The number of trials; the ratio of two trials differs by up to a third."""
MESSAGES = 6 * RANGE_ENTRIES
"""The same number of ranges for each task, so that all tasks end at the same time."""
SELECTIVE = 100_000, 1_000_000
EVERY_SECOND = " or ".join(f"properties['id'] like '%{digit}'" for digit in "02468")
PAIRS = 3
DEAD_LETTER = {
    RECONSUMETIMES: "16",
    DELAY_TIME: "0",
    REAL_TOPIC: "persistent://shop/prod/orders",
    REAL_SUBSCRIPTION: "fulfilment",
    ORIGIN_MESSAGE_ID: "4711:3:0:0",
    CAUSE_TYPE: "WarehouseDown",
    CAUSE_FINGERPRINT: "9f31c2e07b1d02aa",
    CAUSE_MESSAGE: "no answer from the warehouse within 200 ms",
    CAUSE_TRACE: "\n".join(f"fulfil.py:{line} in _fulfil" for line in range(5)),
    CONSUMER: "fulfilment-7d9c4-x2x9k",
    DEAD_REASON: "Exhausted",
}
"""Properties of dead letters of a consumer in Python."""
BOUNDS = {"small": 4.0, "with a cause": 2.5}
"""Bounds of the processor time of a plan, in times of that of a bare reader."""
LEDGERS = 1, 200
LEDGER_MESSAGES, LEDGER_TRIALS = 1_000, 3
MOST_OF_LEDGERS = {"plan": 8.0, "replay": 20.0}
"""Bounds of the time for a topic of small ledgers, in times of that for one ledger. Each range has
its own lease, producer name and record. With a task for each range it was 46 and 34 times."""
WORKER = "pyspark.daemon"
pytestmark = pytest.mark.usefixtures("replay_token")


class Timed(Notes):
    """Notes when the first counts are reported, on the clock of `time.perf_counter`."""

    first = 0.0

    def report_scan(self, scanned: Scanned) -> None:
        self.first = self.first or time.perf_counter()
        super().report_scan(scanned)


class OneTask(Spark):
    """Moves the ranges one after the other."""

    slots = capacity = 1


def test_a_replay_beside_a_bare_pipeline(
    provision_policy: ProvisionPolicy, spark: SparkSession, figures: list[Figure]
) -> None:
    engine, one_task = partial(Spark, spark), partial(OneTask, spark)
    # Warm up: imports of the workers, and the broker's compiled code.
    for batch in (False, True):
        piped(provision_policy, MESSAGES, batch=batch)
        moved_by(engine, provision_policy, MESSAGES, batch=batch)
    bare, moved, by_one, synchronous = [], [], [], []
    bare_batched, batched = [], []
    for _ in range(TRIALS):
        bare.append(piped(provision_policy, MESSAGES))
        moved.append(moved_by(engine, provision_policy, MESSAGES))
        by_one.append(moved_by(one_task, provision_policy, MESSAGES))
        bare_batched.append(piped(provision_policy, MESSAGES, batch=True))
        batched.append(moved_by(engine, provision_policy, MESSAGES, batch=True))
        synchronous.append(sent_one_by_one(provision_policy, MESSAGES // 50))
    name, slow = "replay of everything", "of a loop that waits for each receipt"
    figures += [
        Figure(name, "bare pipeline", statistics.median(bare), "messages/s"),
        Figure(name, "replay", statistics.median(moved), "messages/s"),
        Figure(name, "of the pipeline", _ratio(moved, bare), "of bare", at_least=0.8),
        Figure(name, "by one task", _ratio(by_one, bare), "of bare", at_least=0.6),
        Figure(name, slow, _ratio(moved, synchronous), "times", at_least=10),
    ]
    name = "replay of everything in batches"
    figures += [
        Figure(name, "bare pipeline", statistics.median(bare_batched), "messages/s"),
        Figure(name, "replay", statistics.median(batched), "messages/s"),
        Figure(name, "of the pipeline", _ratio(batched, bare_batched), "of bare", at_least=0.6),
        Figure(name, "of a replay without", _ratio(batched, moved), "times", at_least=1.1),
        Figure(name, slow, _ratio(batched, synchronous), "times", at_least=10),
    ]


@pytest.mark.parametrize("kind", ["small", "with a cause"])
def test_a_plan_of_many_messages_beside_a_bare_reader(
    provision_policy: ProvisionPolicy, spark: SparkSession, figures: list[Figure], kind: str
) -> None:
    """Count the causes of many dead letters, as `causes --all` does in the cluster.

    They are stored one by one, as consumers of redrive write them, and by default those of the Java
    client. The bare reader reads the properties and the time of each message, as a plan does.
    """
    properties = DEAD_LETTER if kind == "with a cause" else {}
    # Warm up: imports of the workers, and the broker's compiled code.
    job = replace(job_of(buried(provision_policy, RANGE_ENTRIES, properties)), dry_run=True)
    runs.preview(job, Spark(spark, job), Notes())
    count = SELECTIVE[-1]
    provisioned = buried(provision_policy, count, properties)
    read, counted, firsts = [], [], []
    for _ in range(PAIRS):
        read.append(count / _seconds(lambda: read_all(provisioned, count)))
        rate, first = planned(spark, provisioned, count)
        counted.append(rate)
        firsts.append(first)
    name = f"plan of {count:,}, {kind}"
    figures += [
        Figure(name, "bare reader", statistics.median(read), "messages/s"),
        Figure(name, "plan", statistics.median(counted), "messages/s"),
        Figure(name, "ratio", _ratio(counted, read), "of bare", at_least=0.8),
        Figure(
            name,
            "first counts, without the first scans",
            statistics.median(firsts),
            "s",
            at_most=1.0,
        ),
    ]


@pytest.mark.parametrize("kind", ["small", "with a cause"])
def test_processor_time_of_a_plan_beside_a_bare_reader(
    provision_policy: ProvisionPolicy, figures: list[Figure], kind: str
) -> None:
    """Read and plan in this process; its processor time hardly depends on other load."""
    provisioned = buried(provision_policy, MESSAGES, DEAD_LETTER if kind == "with a cause" else {})
    job = replace(job_of(provisioned), choice=Choice(since=0), dry_run=True)
    read, counted = [], []
    for _ in range(TRIALS):
        read.append(_processor_time(lambda: read_all(provisioned, MESSAGES)))
        counted.append(_processor_time(lambda: runs.preview(job, Local(), Notes())))
    name = f"processor time of a plan, {kind}"
    reader, plan = (min(times) / MESSAGES * 1e6 for times in (read, counted))
    figures += [
        Figure(name, "bare reader", reader, "µs a message"),
        Figure(name, "plan", plan, "µs a message"),
        Figure(name, "ratio", plan / reader, "of bare", at_most=BOUNDS[kind]),
    ]


def test_many_small_ledgers_beside_one(
    provision_policy: ProvisionPolicy, figures: list[Figure]
) -> None:
    """Plan and move dead letters of a topic that was unloaded often, whose ranges are merged."""
    plans: dict[int, list[float]] = {ledgers: [] for ledgers in LEDGERS}
    replays: dict[int, list[float]] = {ledgers: [] for ledgers in LEDGERS}
    for trial in range(LEDGER_TRIALS + 1):
        for ledgers in LEDGERS:
            provisioned = buried_in_ledgers(provision_policy, ledgers)
            job = job_of(provisioned)
            preview = replace(job, choice=Choice(since=0), dry_run=True)
            times = (
                _seconds(partial(runs.preview, preview, Local(), Notes())),
                _seconds(partial(runs.run, job, Local(), Notes())),
            )
            assert len(provisioned.in_target()) == LEDGER_MESSAGES
            if trial:  # the first one warms up
                plans[ledgers].append(times[0])
                replays[ledgers].append(times[1])
    one, many = LEDGERS
    for name, seconds in (("plan", plans), ("replay", replays)):
        title = f"{name} of {LEDGER_MESSAGES:,} in {many} ledgers"
        ratio = statistics.median(
            of_many / of_one for of_one, of_many in zip(seconds[one], seconds[many], strict=True)
        )
        figures += [
            Figure(title, "in one ledger", statistics.median(seconds[one]), "s"),
            Figure(title, f"in {many} ledgers", statistics.median(seconds[many]), "s"),
            Figure(title, "ratio", ratio, "times", at_most=MOST_OF_LEDGERS[name]),
        ]


def test_a_selective_replay_of_many_messages(
    provision_policy: ProvisionPolicy, spark: SparkSession, figures: list[Figure]
) -> None:
    """Move every second message; the others stay, as holes in the acknowledgements."""
    engine = partial(Spark, spark)
    moved_by(engine, provision_policy, 1_000, EVERY_SECOND)
    few, many = SELECTIVE
    seconds_of_few = few / moved_by(engine, provision_policy, few, EVERY_SECOND)
    with peak_of_workers() as peak:
        each_of_many = few / moved_by(engine, provision_policy, many, EVERY_SECOND)
    name = f"replay of every second of {many:,}"
    figures += [
        Figure(name, "speed", few / each_of_many, "scanned messages/s"),
        Figure(
            name,
            f"time of each, beside {few:,}",
            each_of_many / seconds_of_few,
            "times",
            at_most=1.3,
        ),
        Figure(name, "both tasks", max(peak), "MiB at the most", at_most=768),
    ]


def buried(
    provision_policy: ProvisionPolicy, count: int, properties: Mapping[str, str] | None = None
) -> Any:  # noqa: ANN401 - see conftest
    """Return a new policy with *count* dead letters."""
    provisioned = provision_policy(topic=f"orders-{secrets.token_hex(4)}")
    provisioned.bury_many(count, more=properties or {})
    return provisioned


def buried_in_ledgers(provision_policy: ProvisionPolicy, ledgers: int) -> Any:  # noqa: ANN401
    """Return a new policy with dead letters in this number of ledgers."""
    provisioned = buried(provision_policy, 0)
    share = LEDGER_MESSAGES // ledgers
    for first in range(0, LEDGER_MESSAGES, share):
        provisioned.bury_many(share, first)
        provisioned.admin("PUT", provisioned.policy.dead_letter_topic, "unload")
    return provisioned


def planned(
    spark: SparkSession,
    provisioned: Any,  # noqa: ANN401 - see conftest
    count: int,
) -> tuple[float, float]:
    """Plan a Replay; return the messages per second, and the seconds until the first counts."""
    job = replace(job_of(provisioned), dry_run=True)
    engine, notes = Spark(spark, job), Timed()
    start = time.perf_counter()
    plan = runs.preview(job, engine, notes)
    took = time.perf_counter() - start
    assert sum(figures.messages for figures in plan.causes.values()) == count
    assert notes.scans[0].messages > 0
    return count / took, notes.first - start - took * engine.slots * RANGE_ENTRIES / count


def moved_by(
    engine: Callable[[ReplayJob], Engine],
    provision_policy: ProvisionPolicy,
    count: int,
    where: str | None = None,
    *,
    batch: bool = False,
) -> float:
    """Replay *count* dead letters; return the number scanned per second."""
    provisioned = buried(provision_policy, count)
    job = replace(job_of(provisioned, batch=batch), where=where)
    accounts = []
    took = _seconds(lambda: accounts.append(runs.run(job, engine(job), Notes())))
    (account,) = accounts
    expected = count if where is None else count // 2
    assert (account.scanned, account.moved, account.left) == (count, expected, 0)
    return count / took


def piped(provision_policy: ProvisionPolicy, count: int, *, batch: bool = False) -> float:
    """Receive, send, and acknowledge at each receipt; return the messages per second."""
    provisioned = buried(provision_policy, count)
    consumer, producer = _ends(provisioned, batch=batch)
    acknowledged = 0
    done = threading.Event()

    def pipe() -> None:
        for _ in range(count):
            message = consumer.receive()
            producer.send_async(
                message.data(),
                lambda result, _, message=message: settle(result, message),
                properties=message.properties(),
            )
        assert done.wait(60)

    def settle(result: pulsar.Result, message: pulsar.Message) -> None:
        nonlocal acknowledged
        if result == pulsar.Result.Ok:
            consumer.acknowledge(message)
            acknowledged += 1
        if acknowledged == count:
            done.set()

    return count / _seconds(pipe)


def sent_one_by_one(provision_policy: ProvisionPolicy, count: int) -> float:
    """Move messages as a typical script does; return the messages per second."""
    provisioned = buried(provision_policy, count)
    consumer, producer = _ends(provisioned)

    def move() -> None:
        for _ in range(count):
            message = consumer.receive()
            producer.send(message.data(), properties=message.properties())
            consumer.acknowledge(message)

    return count / _seconds(move)


def read_all(provisioned: Any, count: int) -> None:  # noqa: ANN401 - see conftest
    """Count the causes in the dead-letter topic from its beginning."""
    topic = str(provisioned.policy.dead_letter_topic)
    reader = provisioned.client.create_reader(topic, pulsar.MessageId.earliest)
    counts: Counter[str] = Counter()
    latest = 0
    for _ in range(count):
        message = reader.read_next()
        counts[message.properties().get(CAUSE_TYPE, "")] += 1
        latest = max(latest, message.publish_timestamp())
    reader.close()
    assert counts.total() == count
    assert latest


@contextmanager
def peak_of_workers() -> Iterator[list[float]]:
    """Append the memory of all Python workers of Spark in MiB, twice a second."""
    sizes: list[float] = [0.0]
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.5):
            sizes.append(sum(map(_resident, psutil.Process().children(recursive=True))) / 2**20)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield sizes
    finally:
        ended.set()
        thread.join()


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_full_info().uss if WORKER in process.cmdline() else 0
    except psutil.NoSuchProcess:  # a worker that has ended meanwhile
        return 0


def _ends(
    provisioned: Any,  # noqa: ANN401
    *,
    batch: bool = False,
) -> tuple[pulsar.Consumer, pulsar.Producer]:
    policy = provisioned.policy
    consumer = provisioned.client.subscribe(
        str(policy.dead_letter_topic),
        DEAD_LETTER_SUBSCRIPTION,
        consumer_type=pulsar.ConsumerType.Shared,
    )
    producer = provisioned.client.create_producer(
        str(policy.retry_topic), batching_enabled=batch, block_if_queue_full=True
    )
    return consumer, producer


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(mine / its for mine, its in zip(ours, theirs, strict=True))


def _processor_time(done: Callable[[], object]) -> float:
    start = time.process_time()
    done()
    return time.process_time() - start


def _seconds(done: Callable[[], object]) -> float:
    start = time.perf_counter()
    done()
    return time.perf_counter() - start

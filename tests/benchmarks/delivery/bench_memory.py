"""The cost of a consumer's process: the growth of its memory, and the import of redrive.

Memory grows for minutes of work while many messages wait. The import is compared with that of only
the client.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pulsar

from redrive.policy import codec
from tests.benchmarks.figures import Figure
from tests.support.provisioned_policy import ProvisionedPolicy

WAITING = 100_000
WARM_UP_SECONDS = 30
MOST_MB_PER_MINUTE = 1
PER_SECOND = 50
SOURCES = Path(__file__).parents[3] / "operator"
CONSUMER = """
import os, pulsar
from redrive import PolicyFile, RetryConsumer

def handle(message):
    if message.topic_name().endswith("/orders") and int(message.data()) % 2:
        raise LookupError(message.data())

client = pulsar.Client(
    os.environ["URL"], authentication=pulsar.AuthenticationToken(os.environ["TOKEN"])
)
with RetryConsumer(client, PolicyFile()) as consumer:
    consumer.run(handle, workers=2)
client.close()
"""


def test_a_consumer_does_not_grow(
    provision_policy: Callable[..., Any], figures: list[Figure], minutes: float, tmp_path: Path
) -> None:
    provisioned: ProvisionedPolicy = provision_policy(delays=["1s"])
    client = provisioned.client("superuser")
    _leave_waiting(provisioned, client)
    file = tmp_path / "policy.json"
    file.write_text(codec.encode(provisioned.policy), encoding="utf-8")
    variables = {
        "PYTHONPATH": str(SOURCES),
        "REDRIVE_POLICY": str(file),
        "URL": provisioned.broker.service_url,
        "TOKEN": provisioned.broker.token(provisioned.role),
    }
    consumer = subprocess.Popen(
        [sys.executable, "-c", CONSUMER], env=os.environ | variables, stderr=subprocess.DEVNULL
    )
    try:
        samples = _watch(provisioned, client, consumer.pid, 60 * minutes)
    finally:
        consumer.terminate()
    assert consumer.wait(30) == 0
    grown = statistics.linear_regression(*zip(*samples, strict=True)).slope * 60
    name = f"memory, {WAITING} messages waiting, {minutes:g} minutes"
    figures += [
        Figure(name, "in use", statistics.median(size for _, size in samples), "MB"),
        Figure(name, "growth", grown, "MB a minute", at_most=MOST_MB_PER_MINUTE),
    ]


def _leave_waiting(provisioned: ProvisionedPolicy, client: pulsar.Client) -> None:
    """Put messages into the retry topic with delays longer than the benchmark."""
    producer = client.create_producer(
        str(provisioned.policy.retry_topic), batching_enabled=False, block_if_queue_full=True
    )
    for number in range(WAITING):
        producer.send_async(b"%d" % number, lambda *_: None, deliver_after=timedelta(days=1))
    producer.flush()
    producer.close()


def _watch(
    provisioned: ProvisionedPolicy, client: pulsar.Client, pid: int, seconds: float
) -> list[tuple[float, float]]:
    """Produce messages, every second one to be retried, and sample the consumer's memory."""
    process, began = psutil.Process(pid), time.monotonic()
    producer = client.create_producer(str(provisioned.policy.topic))
    samples = []
    while (passed := time.monotonic() - began) < WARM_UP_SECONDS + seconds:
        for number in range(PER_SECOND):
            producer.send_async(b"%d" % number, lambda *_: None)
        time.sleep(1)
        if passed > WARM_UP_SECONDS:
            samples.append((passed, process.memory_info().rss / 1e6))
    producer.close()
    assert (
        provisioned.backlog(provisioned.policy.topic) < 10 * PER_SECOND
    )  # the consumer has no backlog
    return samples


RUNS = 15
MOST_RATIO = 2.0
PROGRAMS = {
    "pulsar": "import pulsar",
    "redrive": "import redrive",
    "names": "from redrive import PolicyFile, RetryConsumer",
}


def test_importing_costs_less_than_twice_the_client(figures: list[Figure], tmp_path: Path) -> None:
    taken: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for program in PROGRAMS.values():
        _seconds(program, tmp_path)  # compiles it
    for _ in range(RUNS):
        for name, program in PROGRAMS.items():
            taken[name].append(_seconds(program, tmp_path))
    median = {name: statistics.median(seconds) * 1_000 for name, seconds in taken.items()}
    ratio = median["names"] / median["pulsar"]
    figures += [
        Figure("import", "import pulsar", median["pulsar"], "ms"),
        Figure("import", "import redrive", median["redrive"], "ms"),
        Figure("import", PROGRAMS["names"], median["names"], "ms"),
        Figure("import", "ratio", ratio, "of import pulsar", at_most=MOST_RATIO),
    ]


def _seconds(program: str, byte_code: Path) -> float:
    """Run a Python until it ends. The byte code it writes is used by the next run.

    Installed packages have byte code as well, because pip compiles them.
    """
    kept = {"PYTHONPYCACHEPREFIX": str(byte_code), "PYTHONDONTWRITEBYTECODE": ""}
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(SOURCES)} | kept,
        check=True,
    )
    return time.perf_counter() - began

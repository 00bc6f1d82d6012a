"""A Replay by Spark or by a Job, in processes that can be killed and stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyspark

from redrive.messages import read_properties
from redrive.policy.envelope import REPLAY_SOURCE
from redrive.reading import broker
from redrive.reading.positions import Source
from redrive.replay import ledger
from redrive.replay.job import run as runs
from redrive.replay.records import Records
from redrive.replay.spec import PodSize, ReplayJob
from sandbox import spark as spark_of_sandbox
from tests.support.engines import SILENT

RUN = f"""{SILENT}
import sys
from redrive.replay.__main__ import _engine
from redrive.replay.job.run import run
from redrive.replay.spec import ReplayJob

if __name__ == "__main__":
    job = ReplayJob.decode(sys.argv[1])
    with _engine(job) as engine:
        print(run(job, engine, Silent()))
"""
JOB = "job"
"""No Spark: a Job of one pod, with child processes."""
POD = PodSize(cores=2, memory=1_434 * 2**20)
LOCAL = "local[2]"
CLUSTER = "local-cluster[2,1,1024]"
"""Two executors of one core each, which are processes."""
SECONDS = 240.0
WORKER = "pyspark.daemon"
CHILDREN = "multiprocessing.forkserver"
JAVA = {"jvm": "deploy.SparkSubmit", "executor": "CoarseGrainedExecutorBackend"}


@dataclass(frozen=True)
class SparkRun:
    """A run.

    Attributes:
        driver: the started process; the others are its descendants.
        log: the output of all processes.
    """

    driver: psutil.Process
    started: subprocess.Popen[bytes]
    log: Path

    def part(self, name: str) -> list[psutil.Process]:
        """Return the processes of a part.

        Args:
            name: `driver`, `jvm`, `executor`, `worker`, `child` or `node`, which has all of them.
                There may be two executors, and a worker or child for each task.
        """
        if name == "driver":
            return [self.driver]
        if name == "node":
            return [self.driver, *self.driver.children(recursive=True)]
        processes = [
            process for process in self.driver.children(recursive=True) if _is(name, process)
        ]
        assert processes, f"no {name}"
        return processes

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal: one executor, worker or child gets SIGKILL, all of them any other."""
        processes = self.part(name)
        one = number is signal.SIGKILL and name != "node"
        for process in processes[:1] if one else processes:
            with suppress(psutil.NoSuchProcess):  # it ended with one before it
                process.send_signal(number)

    def is_running(self) -> bool:
        """Return True if the run has not ended."""
        return self.started.poll() is None

    def wait(self) -> int:
        """Wait until it ends, and return its exit code."""
        return self.started.wait(SECONDS)


def _is(name: str, process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        if program := {"worker": WORKER, "child": CHILDREN}.get(name):  # forked from its server
            parent = process.parent()
            return parent is not None and _runs(program, process) and _runs(program, parent)
        return _runs(JAVA[name], process)
    return False


def _runs(program: str, process: psutil.Process) -> bool:
    return program in " ".join(process.cmdline())


def spark_environment(master: str, folder: Path) -> dict[str, str]:
    """Return the variables of a driver that runs Spark on *master*, with its files in a folder."""
    home = folder / "spark"
    home.mkdir(exist_ok=True)
    for file in Path(pyspark.__file__).parent.iterdir():  # it creates a folder there
        with suppress(FileExistsError):
            (home / file.name).symlink_to(file)
    image = spark_of_sandbox.image()
    return {
        **{variable: image[variable] for variable in ("JAVA_HOME", "PYSPARK_PYTHON")},
        # A stopped executor is not declared dead before it resumes.
        "PYSPARK_SUBMIT_ARGS": f"--master {master} --conf spark.ui.enabled=false"
        " --conf spark.network.timeout=600s pyspark-shell",
        "PYTHONPATH": str(Path(runs.__file__).parents[3]),
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(folder),
    }


@contextmanager
def spark_run(job: ReplayJob, master: str, folder: Path) -> Iterator[SparkRun]:
    """Run *job* by Spark on *master*, or as `JOB`; kill its remaining processes at the end."""
    if master == JOB:
        job = dataclasses.replace(job, pod=POD)
    env = spark_environment(master, folder)
    log = folder / "run.log"
    with log.open("ab") as written:
        started = subprocess.Popen(
            [sys.executable, "-c", RUN, job.encode()],
            env=os.environ | env, cwd=folder, stdout=written, stderr=subprocess.STDOUT,
        )  # fmt: skip
    run = SparkRun(psutil.Process(started.pid), started, log)
    seen: set[psutil.Process] = set()
    try:
        yield run
    finally:
        with suppress(psutil.NoSuchProcess):
            seen.update(run.driver.children(recursive=True))
        started.kill()
        started.wait()
        for process in seen:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def wait_until_under_way(run: SparkRun, provisioned: Any, count: int, total: int) -> None:  # noqa: ANN401
    """Wait until a share of *total* messages is stored, and several ranges are leased."""
    deadline = time.monotonic() + SECONDS
    while True:
        stats = provisioned.admin("GET", provisioned.policy.retry_topic, "stats")
        moved = json.loads(stats)["msgInCounter"]
        leased = leases(provisioned) if moved >= count else 0
        if leased > 1:
            assert 0 < moved < total
            return
        assert run.is_running(), run.log.read_text()[-3_000:]
        assert time.monotonic() < deadline, (moved, leased)
        time.sleep(0.1)


def stored(provisioned: Any) -> int:  # noqa: ANN401
    """Return the number of entries of the retry topic."""
    looked = broker.read_partitions(provisioned.broker.admin_url, provisioned.policy.retry_topic)
    return sum(count for partition in looked for _, count in partition.ledgers)


def records(provisioned: Any) -> Records:  # noqa: ANN401
    """Return the records of the ledger."""
    with broker.connect(provisioned.broker.service_url) as client:
        return ledger.read(client, provisioned.policy.ledger_topic, ledger.mounted_key())


def leases(provisioned: Any) -> int:  # noqa: ANN401
    """Return the number of leased ranges."""
    return sum(record.leased for record in records(provisioned).ranges.values())


def moved(provisioned: Any) -> list[tuple[str, Source]]:  # noqa: ANN401
    """Return the id and the source position of each message in the retry topic."""
    moves, entries = [], set()
    for message in provisioned.read_all(provisioned.policy.retry_topic):
        carried = read_properties(message) or {}
        source = Source.parse(carried[REPLAY_SOURCE])
        assert source is not None
        moves.append((carried["id"], source))
        message_id = message.message_id()
        entries.add((message_id.ledger_id(), message_id.entry_id()))
    assert len(entries) == stored(provisioned)
    return sorted(moves)

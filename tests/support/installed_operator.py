"""The operator of a sandbox: its metrics, its replicas, and one for a single namespace."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sandbox import chart, installation
from sandbox.sandbox import Sandbox


def metric(sandbox: Sandbox, name: str, *, seconds: float = 60, **labels: str) -> float:
    """Return the sum of a metric's samples with these labels.

    Args:
        sandbox: of the operator.
        name: of the samples.
        seconds: the time that the operator has to answer.
        labels: those that samples must have, besides others.
    """
    url = f"{installation.endpoint(sandbox)}/metrics"
    with urllib.request.urlopen(url, timeout=seconds) as answer:  # noqa: S310 - our own
        families = list(text_string_to_metric_families(answer.read().decode()))
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


NAMES = ("redrive-one", "redrive-two")


@dataclass
class OperatorReplica:
    """An operator of the release: its process, and its log since its start."""

    name: str
    process: psutil.Process
    log: Path
    begin: int

    def logged(self) -> str:
        return self.log.read_text(encoding="utf-8")[self.begin :]

    def takes_over(self) -> None:
        """Wait until it serves."""
        deadline = time.monotonic() + 180
        while "redrive serves" not in self.logged():
            assert time.monotonic() < deadline, self.logged()
            time.sleep(0.1)


StartReplica = Callable[[str, str], OperatorReplica]


@pytest.fixture
def start_replica(installed: Sandbox) -> Iterator[StartReplica]:
    """Starts an operator in place of the session's, and waits until it logs *until*."""

    def start_replica(name: str, until: str) -> OperatorReplica:
        log = installed.processes.log(name)
        begin = len(log.read_text(encoding="utf-8")) if log.exists() else 0
        installation.start_operator(installed, name=name, until=until)
        record = installed.state / "processes" / f"{name}.json"
        return OperatorReplica(
            name, psutil.Process(json.loads(record.read_text())["pid"]), log, begin
        )

    installed.processes.stop(installation.OPERATOR)
    try:
        with ExitStack() as stopping:
            for name in NAMES:
                stopping.callback(installed.processes.stop, name)
            yield start_replica
    finally:
        installation.start_operator(installed)


@contextmanager
def namespaced_operator(sandbox: Sandbox, namespace: str, **values: object) -> Iterator[str]:
    """Run the operator of a release of its own in place of that of *sandbox*.

    Args:
        sandbox: no other worker may use it meanwhile.
        namespace: the only one that the operator serves.
        values: of the chart, in addition to those of the sandbox.

    Yields:
        the Kubernetes namespace of the release.
    """
    release_in = f"{namespace}-redrive"
    values = {
        **installation.VALUES,
        **values,
        "namespaces": [namespace],
        "clusterId": "ours",
        "crds": {"install": False},
    }
    sandbox.processes.stop(installation.OPERATOR)
    try:
        chart.install(sandbox.cluster, installation.RELEASE, release_in, values)
        installation.start_operator(sandbox, namespace=release_in, name=release_in)
        yield release_in
    finally:
        sandbox.processes.stop(release_in)
        sandbox.cluster.objects.delete("namespace", release_in)
        installation.start_operator(sandbox)

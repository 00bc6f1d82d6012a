"""Processor time of `redrive status` at many policies, with the start of the program."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

from redrive.api.crds import crds
from redrive.cli.cluster import Cluster as Client
from redrive.cli.frame import ClusterFlags
from redrive.kube.resources import CONNECTIONS, POLICIES
from sandbox import SOURCE_ROOT
from sandbox.kubernetes import Cluster
from tests.benchmarks.figures import Figure
from tests.integration.cli.conftest import condition, put

TRIALS, NUMBER = 5, 1_000
READY = condition("Ready", "True", "Provisioned")
BACKLOG = {"retry": 1, "retryDue": 0, "deadLetter": 3, "observedTime": "2026-11-27T01:00:00Z"}


def test_status_at_many_policies(control_plane: Cluster, figures: list[Figure]) -> None:
    control_plane.define(crds())
    control_plane.objects.create_namespace("shop")
    kubeconfig = str(control_plane.kubeconfig)
    client = Client(ClusterFlags(namespace="shop", kubeconfig=kubeconfig))
    put(client, CONNECTIONS, "main", {"conditions": [READY]})
    for number in range(NUMBER):
        status = {"conditions": [READY], "topic": f"orders-{number}", "backlog": BACKLOG}
        put(client, POLICIES, f"orders-{number}", status)
    for arguments in (["status", "-A"], ["status", "-A", "--all", "-o", "json"], ["--help"]):
        times = [processor_time(kubeconfig, *arguments) for _ in range(TRIALS)]
        quantity = f"processor time of {' '.join(arguments)} at {NUMBER:,} policies"
        at_most = 0.6 if arguments == ["status", "-A"] else None
        figures.append(Figure("status", quantity, statistics.median(times), "s", at_most=at_most))


def processor_time(kubeconfig: str, *arguments: str) -> float:
    """Run a command; return the processor time of its process, without the API server's."""
    process = subprocess.Popen(
        [sys.executable, "-m", "redrive", *arguments],
        env=os.environ | {"PYTHONPATH": str(SOURCE_ROOT), "KUBECONFIG": kubeconfig},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime

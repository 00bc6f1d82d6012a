"""Memory of an operator process for foreign objects with redrive's label."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

import redrive
from redrive.api.crds import crds
from redrive.kube import resources
from redrive.kube.client import Kubernetes
from sandbox import spark
from sandbox.kubernetes import Cluster
from tests.support.engines import PEAK

pytestmark = pytest.mark.xdist_group("control plane")

LONG, BYTES = 120, 900_000
MOST_MEBIBYTES = 160
"""Less than a third of the operator's limit in the chart. 12 take 98, 60 take 119 and 120 take 123;
all 120 at once, and only as bytes, are another 103."""
OPERATOR = f"""{PEAK}
import os, signal
from redrive.__main__ import main
from redrive.kube.cache import Cache

before, shown, put = peak(), set(), Cache.on_event

def on_event(cache, event):
    put(cache, event)
    name = event["object"]["metadata"]["name"]
    if name.startswith("long-") and name not in shown:
        shown.add(name)
        if len(shown) == {LONG}:
            print(peak() - before, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)

Cache.on_event = on_event
main()
"""


async def test_labelled_config_maps_are_not_in_memory_together(
    cluster: Cluster, kube_namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.define([*crds(), *spark.definitions()])
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    async with Kubernetes.connect() as kubernetes:
        for number in range(LONG):
            metadata = {
                "name": f"long-{number}",
                "namespace": kube_namespace,
                "labels": dict([resources.MANAGED]),
            }
            body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
            data = {"policy.json": "x" * BYTES}
            await kubernetes.create(resources.CONFIG_MAPS, {**body, "data": data})
    command = ("-c", OPERATOR, "operator", "--cluster-id=here", f"--namespace={kube_namespace}")
    # It lists them all, then kopf lists them all and shows each.
    operator = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(Path(redrive.__file__).parents[1])},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    assert int(operator.stdout) < MOST_MEBIBYTES

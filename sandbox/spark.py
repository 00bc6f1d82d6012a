"""Starts the stand-in for the Spark operator beside a control plane.

Called by whatever composes a sandbox, and by the tests of the stand-in. The stand-in itself knows
nothing of this package: what it needs is on its command line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from sandbox import CHECKOUT, SOURCE_ROOT, spark_operator, toolchain
from sandbox.kubernetes import Cluster
from sandbox.process import Processes

_START_SECONDS = 120.0
_APIS = 2
"""The stand-in watches so many, in each namespace."""


def start(
    processes: Processes,
    cluster: Cluster,
    work_dir: Path,
    *,
    namespaces: Sequence[str] = (),
    name: str = "spark-operator",
) -> None:
    """Install the SparkApplication API and run its applications; ready when this returns.

    Args:
        processes: where the stand-in is started, as *name*.
        cluster: whose applications are run.
        work_dir: where the logs of drivers go, as NAMESPACE/APPLICATION-driver.log.
        namespaces: the only ones to watch; all if empty.
        name: of the process.

    Raises:
        SandboxError: the API could not be installed, or the stand-in did not start.
    """
    cluster.define(spark_operator.CRD.read_text(encoding="utf-8"))
    watched = ["--namespace", *namespaces] if namespaces else []
    settings = [f"--image-env={variable}={value}" for variable, value in image().items()]
    log = processes.log(name)
    before = log.stat().st_size if log.exists() else 0
    processes.start(
        name,
        [
            *(sys.executable, "-m", spark_operator.__name__, f"--kubeconfig={cluster.kubeconfig}"),
            *(f"--work-dir={work_dir}", *settings, *watched),
        ],
        env={"PYTHONPATH": str(CHECKOUT)},
    )
    processes.wait_until(
        name,
        lambda: log.read_bytes()[before:].count(b"watching") >= _APIS * max(1, len(namespaces)),
        seconds=_START_SECONDS,
    )


def image() -> dict[str, str]:
    """What an image for jobs would hold, as environment: Java, Spark, the libraries, this code."""
    return {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "LANG": "C.UTF-8",  # else Java 17 cannot pass on an argument that is not ASCII
        "JAVA_HOME": str(toolchain.java_home(for_spark=True)),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(SOURCE_ROOT),
    }

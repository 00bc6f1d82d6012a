"""Starts the Spark operator stand-in for a control plane.

Called by `sandbox.installation` and by the tests of the stand-in. The stand-in does not import this
package; its command line contains all that it needs.
"""

from __future__ import annotations

import hashlib
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from sandbox import CHECKOUT, SOURCE_ROOT, cache, spark_operator, toolchain
from sandbox.errors import SandboxError
from sandbox.kubernetes import Cluster
from sandbox.process import Processes

_START_SECONDS = 120.0
_APIS = 3
"""The number of APIs that the stand-in watches in each namespace."""

SUBMIT = str(Path(sys.executable).with_name("spark-submit"))
"""The command that starts Spark, of the installed pyspark."""
_QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_ARCHIVED = """\
from pyspark.sql import SparkSession

spark = SparkSession.builder.getOrCreate()
rows = spark.createDataFrame([(1, "a"), (2, "b")], "id bigint, cause string")
rows.where("id % 2 = 1 and cause like 'a%'").rdd.map(tuple).collect()
spark.stop()
"""
"""A program that loads the same classes as a job."""
_ARCHIVE = "classes.jsa"
_PYTHON = f"""\
#!/bin/sh
PYTHONPATH=$(printf %s "$PYTHONPATH" | sed 's#[^:]*/pyspark[.]zip:##')
exec {shlex.quote(sys.executable)} "$@"
"""
"""Runs Spark's Python with the installed pyspark. Spark puts a zip archive of pyspark before it,
which each process would compile again: one second of a start."""


def definitions() -> list[dict[str, Any]]:
    """Return the CustomResourceDefinitions of the Spark operators."""
    return list(yaml.load_all(spark_operator.CRD.read_text("utf-8"), yaml.CSafeLoader))


def start(
    processes: Processes,
    cluster: Cluster,
    work_dir: Path,
    *,
    namespaces: Sequence[str] = (),
    name: str = "spark-operator",
) -> None:
    """Install the SparkApplication API, start the stand-in, and wait until it is ready.

    Args:
        processes: where the stand-in is started, as *name*.
        cluster: the cluster to watch.
        work_dir: the folder of the drivers' logs, NAMESPACE/APPLICATION-driver.log.
        namespaces: to watch; all if empty.
        name: of the process.

    Raises:
        SandboxError: the API could not be installed, or the stand-in did not start.
    """
    cluster.define(definitions())
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
    """Return the environment that replaces a job image: Java, Spark, the libraries, this code.

    Raises:
        SandboxError: Java could not be installed, or Spark does not run on it.
    """
    bare = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "LANG": "C.UTF-8",  # else Java 17 cannot pass on an argument that is not ASCII
        "JAVA_HOME": str(toolchain.java_home(for_spark=True)),
        "PYSPARK_PYTHON": str(_python()),
        "PYTHONPATH": str(SOURCE_ROOT),
    }
    options = f"{_QUICK} -XX:SharedArchiveFile={_class_archive(bare)}"
    return bare | {"SPARK_SUBMIT_OPTS": options}


def _python() -> Path:
    def write(target: Path) -> None:
        (target / "python").write_text(_PYTHON)
        (target / "python").chmod(0o755)

    name = f"spark-python-{hashlib.sha256(_PYTHON.encode()).hexdigest()[:12]}"
    return cache.artifact(name, write, doing="write the wrapper of Spark's Python") / "python"


def _class_archive(image: dict[str, str]) -> Path:
    """Return an archive of Spark's parsed classes, which saves over half of a short job's work.

    A Java without class data sharing writes none, and ignores the option.
    """
    installed = metadata.distribution("pyspark")
    jars = sorted(Path(str(installed.locate_file("pyspark/jars"))).iterdir())
    inputs = [image["JAVA_HOME"], *(f"{jar} {jar.stat().st_mtime_ns}" for jar in jars)]
    digest = hashlib.sha256("\n".join(inputs).encode()).hexdigest()

    def write(target: Path) -> None:
        job = target / "job.py"
        job.write_text(_ARCHIVED)
        run = subprocess.run(  # noqa: S603  our own Spark
            [SUBMIT, "--master=local[2]", "--conf=spark.ui.enabled=false", str(job)],
            env=image
            | {
                "SPARK_LOCAL_IP": "127.0.0.1",
                "SPARK_SUBMIT_OPTS": f"{_QUICK} -XX:ArchiveClassesAtExit={target / _ARCHIVE}",
            },
            cwd=target, check=False, text=True, capture_output=True,
        )  # fmt: skip
        if run.returncode != 0:
            raise SandboxError(
                f"Spark does not run here:\n{run.stderr[-3000:]}",
                remedy="read this output; Java is that of JAVA_HOME, or the one on the PATH",
            )

    name = f"spark-{installed.version}-{digest[:12]}"
    return cache.artifact(name, write, doing="archive the classes of Spark") / _ARCHIVE

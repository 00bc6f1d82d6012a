"""redrive itself in a sandbox, installed as in production and with no more rights.

Called by the command ``python -m redrive.sandbox up``, the demo, and the fixtures of the tests.
"""

from __future__ import annotations

import os
import sys
from importlib import resources
from pathlib import Path

import yaml

from redrive.api.crds import crds
from redrive.sandbox import toolchain
from redrive.sandbox.sandbox import Sandbox
from redrive.sandbox.steps import step

OPERATOR, SPARK_OPERATOR = "redrive-operator", "spark-operator"
_SOURCE_ROOT = Path(__file__).resolve().parents[2]
_EXAMPLES = _SOURCE_ROOT.parent / "examples"


def install(sandbox: Sandbox) -> None:
    """Install the CRDs and start the operator, as its ServiceAccount, and the stand-in for Spark's.

    Raises:
        SandboxError: the API server refused a manifest.
    """
    with step("install redrive"):
        _apply_manifests(sandbox)
        start_operator(sandbox)
        start_spark_operator(sandbox)


def start_operator(sandbox: Sandbox) -> None:
    """Start the operator under the ServiceAccount that `examples/operator.yaml` describes."""
    account = sandbox.cluster.service_account_kubeconfig("redrive-system", OPERATOR)
    application = _SOURCE_ROOT / "redrive" / "replay" / "__main__.py"
    sandbox.processes.start(
        OPERATOR,
        [sys.executable, "-m", "redrive", "operator",
         "--replay-image=sandbox", f"--replay-application=local://{application}"],
        env={"KUBECONFIG": str(account), "PYTHONPATH": str(_SOURCE_ROOT)},
    )  # fmt: skip


def start_spark_operator(sandbox: Sandbox) -> None:
    """Start the stand-in that runs SparkApplications on this machine."""
    image = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}",
        "PYTHONPATH": str(_SOURCE_ROOT),
        "PYSPARK_PYTHON": sys.executable,
        "JAVA_HOME": str(toolchain.java_home(for_spark=True)),
    }
    sandbox.processes.start(
        SPARK_OPERATOR,
        [sys.executable, "-m", "redrive.sandbox.spark_operator",
         f"--kubeconfig={sandbox.cluster.kubeconfig}",
         f"--work-dir={sandbox.state / 'spark'}",
         *(f"--image-env={name}={value}" for name, value in image.items())],
        env={"PYTHONPATH": str(_SOURCE_ROOT)},
    )  # fmt: skip


def _apply_manifests(sandbox: Sandbox) -> None:
    kubectl = sandbox.cluster.kubectl
    spark = resources.files("redrive.sandbox.spark_operator").joinpath("crd.yaml")
    definitions = f"{yaml.safe_dump_all(crds())}---\n{spark.read_text(encoding='utf-8')}"
    kubectl("apply", "-f", "-", input=definitions)
    kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
    kubectl("apply", "-f", str(_EXAMPLES / "operator.yaml"))

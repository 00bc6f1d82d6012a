"""redrive itself in a sandbox, installed as in production and with no more rights.

Called by the command ``python -m redrive.sandbox up``, the demo, and the fixtures of the tests.
"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from redrive.api.crds import crds
from redrive.sandbox import spark
from redrive.sandbox.sandbox import Sandbox
from redrive.sandbox.steps import step

OPERATOR = "redrive-operator"
_SOURCE_ROOT = Path(__file__).resolve().parents[2]
_EXAMPLES = _SOURCE_ROOT.parent / "examples"
_START_SECONDS = 60.0


def install(sandbox: Sandbox) -> None:
    """Install the CRDs and start the operator, as its ServiceAccount, and the stand-in for Spark's.

    Raises:
        SandboxError: the API server refused a manifest, or one of the two did not start.
    """
    with step("install redrive"):
        spark.start(sandbox.processes, sandbox.cluster, sandbox.state / "spark")
        sandbox.cluster.define(yaml.safe_dump_all(crds()))
        sandbox.cluster.kubectl("apply", "-f", str(_EXAMPLES / "operator.yaml"))
        start_operator(sandbox)


def start_operator(sandbox: Sandbox) -> None:
    """Start the operator under the ServiceAccount that `examples/operator.yaml` describes.

    Raises:
        SandboxError: it ended, or did not serve in time.
    """
    account = sandbox.cluster.service_account_kubeconfig("redrive-system", OPERATOR)
    application = _SOURCE_ROOT / "redrive" / "replay" / "__main__.py"
    log = sandbox.processes.log(OPERATOR)
    before = log.stat().st_size if log.exists() else 0
    sandbox.processes.start(
        OPERATOR,
        [sys.executable, "-m", "redrive", "operator",
         "--replay-image=sandbox", f"--replay-application=local://{application}"],
        env={"KUBECONFIG": str(account), "PYTHONPATH": str(_SOURCE_ROOT)},
    )  # fmt: skip
    sandbox.processes.wait_until(
        OPERATOR, lambda: b"redrive serves" in log.read_bytes()[before:], seconds=_START_SECONDS
    )

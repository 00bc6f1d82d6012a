"""The reference of metrics holds all that the operator shows, and nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import redrive


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does."""
    root = str(Path(redrive.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-m", "redrive", *arguments],
        env=os.environ | {"PYTHONPATH": root} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_user_error_prints_one_line_and_exits_with_1(tmp_path: Path) -> None:
    done = run("operator", KUBECONFIG=str(tmp_path / "absent"))
    assert done.returncode == 1
    told = done.stderr.splitlines()[-1]
    assert told.startswith("redrive: NoCluster: no Kubernetes cluster to talk to; got ")
    assert told.endswith("; set KUBECONFIG, or run this in a cluster")
    assert "Traceback" not in done.stderr


def test_help_lists_the_subcommands() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "operator" in done.stdout


REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
# In a process of its own: here, other tests have loaded the metrics of consumers too.
SHOWN = """
import json
from prometheus_client import REGISTRY
from redrive.cli import operator
from redrive.kube.observability import counting_objects
from redrive.kube.cache import Cache
from redrive.replay.controller import metrics as replay_metrics
with counting_objects({}), replay_metrics.counting(Cache(), Cache()):
    print(json.dumps([metric.name for metric in REGISTRY.collect()]))
"""


def test_every_metric_of_the_operator_is_documented() -> None:
    environment = {"PYTHONPATH": str(Path(redrive.__file__).parents[1])}
    told = subprocess.run(
        [sys.executable, "-c", SHOWN], env=environment, check=True, text=True, capture_output=True
    ).stdout
    shown = {name for name in json.loads(told) if name.startswith("redrive_")}
    rows = re.findall(r"^\| `(redrive_\w+)` \|", REFERENCE.read_text("utf-8"), re.MULTILINE)
    assert {name.removesuffix("_total") for name in rows} == shown

"""Command line of redrive, and the reference of the operator's metrics."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    process = run("operator", KUBECONFIG=str(tmp_path / "absent"))
    assert process.returncode == 1
    line = process.stderr.splitlines()[-1]
    assert line.startswith("redrive: NoCluster: no Kubernetes cluster is configured; got ")
    assert line.endswith("; set KUBECONFIG, or run in a cluster")
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize("lease", ["redrive", "redrive/", "/operator"])
def test_incomplete_lease_name_is_refused(lease: str, tmp_path: Path) -> None:
    process = run("operator", "--lease", lease, KUBECONFIG=str(tmp_path / "absent"))
    assert process.returncode == 2
    assert f"argument --lease: not written NAMESPACE/NAME: {lease!r}" in process.stderr


def test_help_lists_the_subcommands() -> None:
    process = run("--help")
    assert process.returncode == 0
    assert "operator" in process.stdout


REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
# In a process of its own: here, other tests have loaded the metrics of consumers too.
SHOWN = """
import json
from prometheus_client import REGISTRY
from redrive.cli import operator
from redrive.kube.observability import counting_objects
from redrive.kube.cache import Cache
from redrive.kube.context import wall_clock
from redrive.provision.metrics import TopicMetrics
from redrive.replay.controller import metrics as replay_metrics
TopicMetrics(wall_clock)
with counting_objects({}), replay_metrics.counting(Cache(), {}):
    families = list(REGISTRY.collect())
print(json.dumps([family.name + "_info" * (family.type == "info") for family in families]))
"""


def test_every_metric_of_the_operator_is_documented() -> None:
    environment = {"PYTHONPATH": str(Path(redrive.__file__).parents[1])}
    output = subprocess.run(
        [sys.executable, "-c", SHOWN], env=environment, check=True, text=True, capture_output=True
    ).stdout
    shown = {name for name in json.loads(output) if name.startswith("redrive_")}
    rows = re.findall(r"^\| `(redrive_\w+)` \|", REFERENCE.read_text("utf-8"), re.MULTILINE)
    assert {name.removesuffix("_total") for name in rows} == shown


def test_missing_extra_names_the_installation(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise ModuleNotFoundError(name='click')", "utf-8")
    root = Path(redrive.__file__).parents[1]
    process = run("status", PYTHONPATH=f"{tmp_path}:{root}")
    assert (process.returncode, process.stdout) == (1, "")
    (line,) = process.stderr.splitlines()
    assert line.startswith("redrive: MissingExtra: `redrive status` needs redrive[cli]: ")
    assert line.endswith("; pip install 'redrive[cli]'")


def test_unknown_command_exits_with_2() -> None:
    process = run("stats")
    assert process.returncode == 2
    assert process.stderr == "error: No such command 'stats'.\nhelp: redrive --help\n"


def test_closed_reader_ends_the_command_without_a_message() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "redrive", "--help"]
    ended = subprocess.run(command, check=False, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, "")

from __future__ import annotations

import os
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


def test_what_a_user_can_fix_is_one_line_and_the_code_1(tmp_path: Path) -> None:
    done = run("operator", KUBECONFIG=str(tmp_path / "absent"))
    assert done.returncode == 1
    told = done.stderr.splitlines()[-1]
    assert told.startswith("redrive: NoCluster: no Kubernetes cluster to talk to; got ")
    assert told.endswith("; set KUBECONFIG, or run this in a cluster")
    assert "Traceback" not in done.stderr


def test_help_names_the_subcommands() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "operator" in done.stdout

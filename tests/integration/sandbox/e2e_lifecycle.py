from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from sandbox import CHECKOUT, SOURCE_ROOT, installation, kubernetes, pulsar
from sandbox.errors import SandboxError
from sandbox.sandbox import Sandbox

pytestmark = pytest.mark.xdist_group("own sandbox")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": f"{SOURCE_ROOT}{os.pathsep}{CHECKOUT}"},
        check=False, text=True, capture_output=True,
    )  # fmt: skip


def command(state: Path, name: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "sandbox", f"--state={state}", name)


def pids(state: Path) -> dict[str, int]:
    records = (state / "processes").glob("*.json")
    return {record.stem: json.loads(record.read_text())["pid"] for record in records}


def test_up_prints_how_to_use_a_sandbox_that_runs(sandbox: Sandbox) -> None:
    started = pids(sandbox.state)
    up = command(sandbox.state, "up")
    assert up.returncode == 0, up.stderr
    assert f"export KUBECONFIG={sandbox.cluster.kubeconfig}" in up.stdout
    assert f"export PULSAR_SERVICE_URL={sandbox.pulsar.service_url}" in up.stdout
    assert sandbox.pulsar.token("superuser") not in up.stdout + up.stderr
    assert pids(sandbox.state) == started


def test_started_sandbox_has_all_parts_in_a_private_folder(sandbox: Sandbox) -> None:
    started = pids(sandbox.state)
    assert {pulsar.NAME, *kubernetes.NAMES, installation.OPERATOR} <= set(started)
    assert all(psutil.pid_exists(pid) for pid in started.values())
    assert sandbox.state.stat().st_mode & 0o777 == 0o700
    assert sandbox.pulsar.request("GET", "/admin/v2/tenants").status == 200


STARTS = """
import sys
from pathlib import Path
from sandbox.process import Processes

processes = Processes(Path(sys.argv[1]))
processes.start("part", [sys.executable, "-c", "import time; time.sleep(600)"])
processes.leave()
"""


def test_down_ends_all_processes_and_deletes_the_folder(tmp_path: Path) -> None:
    state = tmp_path / "state"
    run("-c", STARTS, str(state)).check_returncode()
    (pid,) = pids(state).values()
    assert psutil.pid_exists(pid)
    down = command(state, "down")
    assert down.returncode == 0, down.stderr
    assert not psutil.pid_exists(pid)
    assert not state.exists()


def test_down_where_nothing_runs_is_no_error(tmp_path: Path) -> None:
    assert command(tmp_path / "state", "down").returncode == 0


def test_every_part_listens_on_the_loopback_only(sandbox: Sandbox) -> None:
    connections = {
        name: psutil.Process(pids(sandbox.state)[name]).net_connections()
        for name in (pulsar.NAME, *kubernetes.NAMES)
    }
    listening = {
        name: {
            connection.laddr.ip for connection in sockets if connection.status == psutil.CONN_LISTEN
        }
        for name, sockets in connections.items()
    }
    assert listening == {part: {"127.0.0.1"} for part in (pulsar.NAME, *kubernetes.NAMES)}


def test_a_directory_that_is_in_use_is_not_used_again(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError, match=r"is not empty; attach .* or stop it"):
        Sandbox.start(sandbox.state)


def test_directory_unusable_for_pulsar_is_refused_with_reason(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match=r"no path with white space"):
        Sandbox.start(tmp_path / "my sandbox")


def test_attach_without_running_sandbox_fails(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match=r"no sandbox runs with the state directory"):
        Sandbox.attach(tmp_path)

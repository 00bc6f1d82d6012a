"""Processes that the sandbox starts, and the steps that it reports."""

from __future__ import annotations

import gc
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from sandbox import CHECKOUT, steps
from sandbox.errors import SandboxError
from sandbox.process import Processes, free_port

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal as s, time; s.signal(s.SIGTERM, s.SIG_IGN); print(1, flush=True); time.sleep(9)",
]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.stop_all()


def pid(state: Path, name: str) -> int:
    record = json.loads((state / "processes" / f"{name}.json").read_text())
    assert isinstance(record["pid"], int)
    return record["pid"]


def test_started_processes_are_stopped_by_a_later_run(processes: Processes, tmp_path: Path) -> None:
    processes.start("first", SLEEP)
    processes.start("second", SLEEP)
    pids = [pid(tmp_path, name) for name in ("first", "second")]

    later = Processes(tmp_path)
    assert later.names() == ["first", "second"]
    assert later.alive("first")
    assert later.alive("second")

    later.stop_all()

    assert later.names() == []
    assert not any(
        psutil.pid_exists(process_id)
        and psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
        for process_id in pids
    )


def test_process_left_to_a_later_run_continues_without_warning(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    processes = Processes(tmp_path)
    processes.start("lasting", SLEEP)
    processes.leave()
    del processes
    gc.collect()
    later = Processes(tmp_path)
    assert later.alive("lasting")
    later.stop_all()
    assert not later.alive("lasting")
    assert list(recwarn) == []


def test_process_that_ignores_sigterm_is_killed(processes: Processes, tmp_path: Path) -> None:
    processes.start("deaf", STUBBORN)
    processes.wait_until("deaf", lambda: processes.log("deaf").read_text() == "1\n", seconds=20)
    process_id = pid(tmp_path, "deaf")
    processes.stop("deaf", grace=0.2)
    assert not psutil.pid_exists(process_id)


def test_foreign_process_with_reused_id_is_not_stopped(
    processes: Processes, tmp_path: Path
) -> None:
    processes.start("ours", SLEEP)
    processes.stop("ours")
    with subprocess.Popen(SLEEP) as stranger:
        record = {"pid": stranger.pid, "started": time.time() - 3600}
        (tmp_path / "processes" / "ours.json").write_text(json.dumps(record))
        assert not processes.alive("ours")
        processes.stop_all()
        assert stranger.poll() is None
        stranger.kill()


def test_process_that_ends_early_is_reported_with_its_log(
    processes: Processes,
) -> None:
    processes.start("broken", [sys.executable, "-c", "raise SystemExit('the port is taken')"])
    with pytest.raises(SandboxError, match=r"broken ended while it started(.|\n)*port is taken"):
        processes.wait_until("broken", lambda: False, seconds=20)


def test_process_that_is_not_ready_in_time_is_reported(processes: Processes) -> None:
    processes.start("slow", SLEEP)
    with pytest.raises(SandboxError, match="slow was not ready after 0 s"):
        processes.wait_until("slow", lambda: False, seconds=0.3)


def test_free_ports_are_unique_across_processes() -> None:
    ask = "from sandbox.process import free_port\nprint(*(free_port() for _ in range(200)))"
    asking = [
        subprocess.Popen([sys.executable, "-c", ask], stdout=subprocess.PIPE, cwd=CHECKOUT)
        for _ in range(3)
    ]
    ports = [int(port) for process in asking for port in process.communicate()[0].split()]
    assert len(set(ports)) == len(ports) == 600
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_port_in_use_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr("sandbox.process._PORTS", range(taken, taken + 1))
        with pytest.raises(SandboxError, match=f"no free port .* {taken}"):
            free_port()


def test_killed_process_can_be_started_again(processes: Processes, tmp_path: Path) -> None:
    processes.start("deaf", STUBBORN)
    processes.wait_until("deaf", lambda: bool(processes.log("deaf").read_text()), seconds=10)
    first = pid(tmp_path, "deaf")
    processes.kill("deaf")
    assert not processes.alive("deaf")
    assert processes.names() == []
    processes.again("deaf")
    anew = psutil.Process(pid(tmp_path, "deaf"))
    processes.wait_until("deaf", lambda: anew.cmdline() == STUBBORN, seconds=10)
    assert pid(tmp_path, "deaf") != first
    processes.kill("deaf")


def test_step_without_terminal_prints_start_and_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with steps.step("build [etcd]"):
        pass
    start, end = capsys.readouterr().err.splitlines()
    assert start == " start: build [etcd]"
    assert end.startswith("  done: build [etcd] (0.")


def test_long_step_prints_its_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "HEARTBEAT_SECONDS", 0.05)
    output, deadline = "", time.monotonic() + 60
    with steps.step("build etcd"):
        while output.count("   ...: build etcd (") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
            output += capsys.readouterr().err
    assert " s so far)" in output


def test_failed_step_reports_and_raises_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    message = "no compiler"
    with pytest.raises(ValueError, match=message), steps.step("build etcd"):
        raise ValueError(message)
    assert "failed: build etcd (0." in capsys.readouterr().err


def test_step_on_terminal_may_be_nested(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Console(stderr=True, force_terminal=True, width=80)
    monkeypatch.setattr(steps, "_console", terminal)
    with steps.step("build etcd"), steps.step("fetch Go"):
        pass
    shown = capsys.readouterr().err
    assert "done: fetch Go" in shown
    assert "done: build etcd" in shown

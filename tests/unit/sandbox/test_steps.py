from __future__ import annotations

import time

import pytest
from rich.console import Console

from sandbox import steps


def test_without_a_terminal_a_step_is_a_line_at_its_start_and_one_at_its_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with steps.step("build [etcd]"):
        pass
    start, end = capsys.readouterr().err.splitlines()
    assert start == " start: build [etcd]"
    assert end.startswith("  done: build [etcd] (0.")


def test_a_long_step_is_never_silent_for_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "HEARTBEAT_SECONDS", 0.05)
    said, deadline = "", time.monotonic() + 60
    with steps.step("build etcd"):
        while said.count("   ...: build etcd (") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
            said += capsys.readouterr().err
    assert " s so far)" in said


def test_a_step_that_fails_says_so_and_hides_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    message = "no compiler"
    with pytest.raises(ValueError, match=message), steps.step("build etcd"):
        raise ValueError(message)
    assert "failed: build etcd (0." in capsys.readouterr().err


def test_on_a_terminal_a_step_may_run_inside_another(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Console(stderr=True, force_terminal=True, width=80)
    monkeypatch.setattr(steps, "_console", terminal)
    with steps.step("build etcd"), steps.step("fetch Go"):
        pass
    shown = capsys.readouterr().err
    assert "done: fetch Go" in shown
    assert "done: build etcd" in shown

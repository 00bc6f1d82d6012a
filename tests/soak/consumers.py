"""The consumers of the soak, each a process, restarted after its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from redrive.policy import codec
from tests.support.provisioned_policy import ProvisionedPolicy

ROOT = Path(__file__).parents[2]
END_SECONDS = 180.0


class Consumers:
    """One process of each kind; each start has a new name and journal."""

    def __init__(self, provisioned: ProvisionedPolicy, folder: Path) -> None:
        self._folder = folder
        policy = folder / "policy.json"
        policy.write_text(codec.encode(provisioned.policy), encoding="utf-8")
        self._environment = os.environ | {
            "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT}",
            "URL": provisioned.broker.service_url,
            "TOKEN": provisioned.broker.token(provisioned.role),
            "REDRIVE_POLICY": str(policy),
        }
        self._running: dict[str, tuple[str, subprocess.Popen[bytes]]] = {}
        self._started = 0
        self._changing = threading.Lock()
        self.failed: list[str] = []

    def start(self, kind: str) -> None:
        """Start one of *kind*."""
        with self._changing:
            self._started += 1
            name = f"{kind}-{self._started}"
            with (self._folder / f"{name}.log").open("wb") as log:
                command = [sys.executable, "-m", "tests.soak.program", kind]
                self._running[kind] = name, subprocess.Popen(
                    [*command, str(self._folder / f"{name}.jsonl")],
                    env=self._environment, cwd=ROOT, stderr=subprocess.STDOUT, stdout=log,
                )  # fmt: skip

    def name(self, kind: str) -> str:
        """Return the name of the running process of *kind*."""
        return self._running[kind][0]

    def signal(self, kind: str, number: int) -> None:
        """Send a signal to the process of *kind*."""
        self._running[kind][1].send_signal(number)

    def wait(self, kind: str) -> None:
        """Wait for the end of a process, and record an unexpected one.

        A process that does not end in time prints the stacks of its threads.
        """
        name, process = self._running[kind]
        try:
            status = process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGUSR1)
            time.sleep(1)
            text = (self._folder / f"{name}.log").read_text(errors="replace")
            pytest.fail(f"{name} does not end: {text[-10_000:]}")
        log = (self._folder / f"{name}.log").read_text(errors="replace")
        # A program that starts while the broker is down ends with an error, as documented.
        if status not in {0, -signal.SIGKILL} and "SubscribeError" not in log:
            self.failed.append(f"{name} ended with {status}: {log[-2_000:]}")

    def revive(self) -> None:
        """Restart processes that have ended, as after a start while the broker is down."""
        for kind, (_, process) in list(self._running.items()):
            if process.poll() is not None:
                self.wait(kind)
                time.sleep(1)
                self.start(kind)

    def kill_all(self) -> None:
        """Kill all processes."""
        for _, process in self._running.values():
            process.kill()
            process.wait()

    def journals(self) -> dict[str, Path]:
        """Return the journals by process name."""
        return {file.stem: file for file in sorted(self._folder.glob("*.jsonl"))}

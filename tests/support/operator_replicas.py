"""Replicas of the operator, as processes that a test can kill, freeze and read the logs of."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from sandbox import installation
from sandbox.sandbox import Sandbox

NAMES = ("redrive-one", "redrive-two")


@dataclass
class OperatorReplica:
    """An operator of the release: its process, and its log since its start."""

    name: str
    process: psutil.Process
    log: Path
    begin: int

    def logged(self) -> str:
        return self.log.read_text(encoding="utf-8")[self.begin :]

    def takes_over(self) -> None:
        """Wait until it serves."""
        deadline = time.monotonic() + 180
        while "redrive serves" not in self.logged():
            assert time.monotonic() < deadline, self.logged()
            time.sleep(0.1)


StartReplica = Callable[[str, str], OperatorReplica]


@pytest.fixture
def start_replica(installed: Sandbox) -> Iterator[StartReplica]:
    """Starts an operator in place of the session's, and waits until it logs *until*."""

    def start_replica(name: str, until: str) -> OperatorReplica:
        log = installed.processes.log(name)
        begin = len(log.read_text(encoding="utf-8")) if log.exists() else 0
        installation.start_operator(installed, name=name, until=until)
        record = installed.state / "processes" / f"{name}.json"
        return OperatorReplica(
            name, psutil.Process(json.loads(record.read_text())["pid"]), log, begin
        )

    installed.processes.stop(installation.OPERATOR)
    try:
        with ExitStack() as stopping:
            for name in NAMES:
                stopping.callback(installed.processes.stop, name)
            yield start_replica
    finally:
        installation.start_operator(installed)

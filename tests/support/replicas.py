"""Several operators of one release, as processes that can be killed, frozen and watched."""

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
TAKEOVER_SECONDS = 20.0


@dataclass
class Replica:
    """An operator of the release: its process, and what it logs from its start on."""

    name: str
    process: psutil.Process
    log: Path
    begin: int

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8")[self.begin :]

    def takes_over(self) -> float:
        """Wait until it serves; return after how many seconds."""
        since = time.monotonic()
        while "redrive serves" not in self.said():
            assert time.monotonic() - since < TAKEOVER_SECONDS, self.said()
            time.sleep(0.1)
        return time.monotonic() - since


StartReplica = Callable[[str, str], Replica]


@pytest.fixture
def start(installed: Sandbox) -> Iterator[StartReplica]:
    """Starts an operator in place of the session's, and waits until it says something."""

    def start(name: str, until: str) -> Replica:
        log = installed.processes.log(name)
        begin = len(log.read_text(encoding="utf-8")) if log.exists() else 0
        installation.start_operator(installed, name=name, until=until)
        record = installed.state / "processes" / f"{name}.json"
        return Replica(name, psutil.Process(json.loads(record.read_text())["pid"]), log, begin)

    installed.processes.stop(installation.OPERATOR)
    try:
        with ExitStack() as stopping:
            for name in NAMES:
                stopping.callback(installed.processes.stop, name)
            yield start
    finally:
        installation.start_operator(installed)

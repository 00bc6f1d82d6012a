"""The processes of a sandbox, recorded on disk, so that exactly those are stopped.

Used by all modules of `sandbox`. A process may outlive the Python that started it; a later run
with the same state directory can watch and stop it. A process is identified by its id *and* its
start time, so a reused id is never stopped.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import psutil
from filelock import FileLock

from sandbox import cache
from sandbox.errors import SandboxError

# Below the ephemeral ports of systems, so that no connection takes one in between.
_PORTS = range(20_000, 32_000)
_KILLED_SECONDS = 10.0  # for the system to free the memory of a big process
_LOG_LINES_SHOWN = 30
# Systems derive the start time of a process from a clock that may be set meanwhile.
_START_TOLERANCE_SECONDS = 2.0
FOR_GO: Mapping[str, str] = {"GOGC": "400", "GOMEMLIMIT": "500MiB"}
"""The environment of programs in Go: they collect garbage seldom while they use little memory,
which saves up to a fifth of their processor time."""


def free_port() -> int:
    """Return the next free port on 127.0.0.1 after the last returned one.

    All processes share this order, so a port is not returned twice before its user listens:
    a broker needs many seconds for that.

    Raises:
        SandboxError: all ports are taken.
    """
    last = cache.root() / "last-port"
    last.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(last.with_suffix(".lock")):
        # Missing at first, empty if its writer was killed.
        begin = bisect(_PORTS, int(last.read_text() or 0)) if last.exists() else 0
        for port in chain(_PORTS[begin:], _PORTS[:begin]):
            if _is_free(port):
                last.write_text(str(port))
                return port
    raise SandboxError(
        "no free port was found on 127.0.0.1",
        got=f"{_PORTS.start} to {_PORTS.stop - 1} taken",
        remedy="end some processes that listen there",
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # Like servers: a port with connections in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class Processes:
    """The processes of one sandbox, by name.

    Args:
        state: the sandbox's directory; logs go to ``logs/NAME.log``, ids to ``processes/``.
    """

    def __init__(self, state: Path) -> None:
        self._logs = state / "logs"
        self._records = state / "processes"
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._starts: dict[str, Callable[[], None]] = {}

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        """Start *command* as *name*, in its own session, with *env* added to this environment.

        Arguments are visible to every user of the machine: pass secrets in files or *env*.
        """
        self._starts[name] = lambda: self.start(name, command, env=env, cwd=cwd)
        for folder in (self._logs, self._records):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self.log(name).open("ab") as log:
            child = subprocess.Popen(  # noqa: S603 - commands of this package
                command, cwd=cwd, env={**os.environ, **(env or {})}, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._children[name] = child
        record = {"pid": child.pid, "started": psutil.Process(child.pid).create_time()}
        self._record(name).write_text(json.dumps(record))

    def again(self, name: str) -> None:
        """Start *name*, which has ended, again with the same arguments."""
        self._starts[name]()

    def log(self, name: str) -> Path:
        """Return the log file of *name*."""
        return self._logs / f"{name}.log"

    def alive(self, name: str) -> bool:
        """Return True if the process *name* runs."""
        return self._find(name) is not None

    def names(self) -> list[str]:
        """Return the names of processes that were started and not stopped, oldest first."""
        records = [(json.loads(file.read_text())["started"], file.stem) for file in self._files()]
        return [name for _, name in sorted(records)]

    def wait_until(self, name: str, ready: Callable[[], bool], *, seconds: float) -> None:
        """Wait until *ready* returns True.

        Raises:
            SandboxError: *name* ended, or was not ready in time; with the end of its log.
        """
        deadline = time.monotonic() + seconds
        while not ready():
            if not self.alive(name):
                raise SandboxError(f"{name} ended while it started", remedy=self._last_words(name))
            if time.monotonic() > deadline:
                raise SandboxError(
                    f"{name} was not ready after {seconds:.0f} s", remedy=self._last_words(name)
                )
            time.sleep(0.2)

    def stop(self, name: str, *, grace: float = 10.0) -> None:
        """Terminate *name* if it runs, and kill it after *grace* seconds."""
        process = self._find(name)
        if process is not None:
            process.terminate()
            try:
                process.wait(grace)
            except psutil.TimeoutExpired:
                process.kill()
                process.wait(_KILLED_SECONDS)
        if child := self._children.pop(name, None):
            child.wait()
        self._record(name).unlink(missing_ok=True)

    def kill(self, name: str) -> None:
        """Kill *name*, as a crash would."""
        process = self._find(name)
        if process is not None:
            process.kill()
            process.wait(_KILLED_SECONDS)
        if child := self._children.pop(name, None):
            child.wait()
        self._record(name).unlink(missing_ok=True)

    def pid(self, name: str) -> int:
        """Return the process id of *name*.

        Raises:
            SandboxError: it does not run.
        """
        process = self._find(name)
        if process is None:
            raise SandboxError(f"{name} does not run", remedy=self._last_words(name))
        return int(process.pid)

    def stop_all(self) -> None:
        """Stop every process of this sandbox, the youngest first."""
        for name in reversed(self.names()):
            self.stop(name)
        for child in self._children.values():  # stopped by another run, reaped here
            child.wait()
        self._children.clear()

    def kill_all(self) -> None:
        """Kill every process of this sandbox; their data may be lost."""
        for name in self.names():
            self.kill(name)

    def leave(self) -> None:
        """Let all processes continue for a later run, which stops them."""
        for child in self._children.values():
            child.returncode = 0  # otherwise Python warns of a process that outlives its Popen
        self._children.clear()

    def _find(self, name: str) -> psutil.Process | None:
        file = self._record(name)
        if not file.is_file():
            return None
        record = json.loads(file.read_text())
        try:
            process = psutil.Process(record["pid"])
            ended = process.status() == psutil.STATUS_ZOMBIE
            drift = abs(process.create_time() - record["started"])
        except psutil.NoSuchProcess:
            return None
        return None if ended or drift > _START_TOLERANCE_SECONDS else process

    def _last_words(self, name: str) -> str:
        lines = self.log(name).read_text(errors="replace").splitlines()[-_LOG_LINES_SHOWN:]
        return "\n".join([f"see the end of {self.log(name)}:", *lines])

    def _record(self, name: str) -> Path:
        return self._records / f"{name}.json"

    def _files(self) -> list[Path]:
        return list(self._records.glob("*.json"))

"""Starts the processes of a sandbox, remembers them on disk, and stops exactly those.

Called by each part of `sandbox`. A process outlives the Python that started it; whoever
opens the same state directory later can watch and stop it. A process is known by its id *and* the
moment it started, so an id that another process has got since is left alone.
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

# Below the ports that systems hand out by themselves, so that no connection takes one in between.
_PORTS = range(20_000, 32_000)
_KILLED_SECONDS = 10.0  # for the system to take back the memory of a big process
_LOG_LINES_SHOWN = 30
# Systems derive the moment a process started from a clock that may be set meanwhile.
_START_TOLERANCE_SECONDS = 2.0


def free_port() -> int:
    """A port on 127.0.0.1 that nothing listens on, the next one after the last that was returned.

    Processes share that order, so none is given the same port before whoever asked for it listens:
    a broker takes many seconds for that.

    Raises:
        SandboxError: all of them are taken.
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
        remedy="end what listens there",
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: a port whose last connections are still fading away is free.
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
        """Start *command* as *name*, in a session of its own, with *env* added to ours.

        Arguments are visible to every user of the machine: secrets belong into files or *env*.
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
        """Start *name*, which has ended, just as it was started here before."""
        self._starts[name]()

    def log(self, name: str) -> Path:
        """Return the log file of *name*."""
        return self._logs / f"{name}.log"

    def alive(self, name: str) -> bool:
        """Whether the process that was started as *name* still runs."""
        return self._find(name) is not None

    def names(self) -> list[str]:
        """The processes that were started and not stopped since, oldest first."""
        records = [(json.loads(file.read_text())["started"], file.stem) for file in self._files()]
        return [name for _, name in sorted(records)]

    def wait_until(self, name: str, ready: Callable[[], bool], *, seconds: float) -> None:
        """Return once *ready* says so.

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
        """Stop *name* if it still runs: ask it to end, after *grace* seconds make it end."""
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
        """Return the id of *name*, which runs.

        Raises:
            SandboxError: it does not.
        """
        process = self._find(name)
        if process is None:
            raise SandboxError(f"{name} does not run", remedy=self._last_words(name))
        return int(process.pid)

    def stop_all(self) -> None:
        """Stop every process of this sandbox, the youngest first."""
        for name in reversed(self.names()):
            self.stop(name)
        for child in self._children.values():  # stopped by another run: only reaped here
            child.wait()
        self._children.clear()

    def leave(self) -> None:
        """Let all that was started run on, for a later run to find; nothing is reaped here then."""
        for child in self._children.values():
            child.returncode = 0  # else Python warns of a process that outlives its Popen
        self._children.clear()

    def _find(self, name: str) -> psutil.Process | None:
        record = self._record(name)
        if not record.is_file():
            return None
        known = json.loads(record.read_text())
        try:
            process = psutil.Process(known["pid"])
            ended = process.status() == psutil.STATUS_ZOMBIE
            drift = abs(process.create_time() - known["started"])
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

"""One operating-system process with its children, ended together like those of a container.

Run by the pod. The children are identified by their session, because PySpark's workers leave the
process group of their parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

# Time between the request to stop and the kill.
GRACE_SECONDS = 5

# Systems derive the start time of a process from a clock that may be set meanwhile.
_START_TOLERANCE_SECONDS = 2

_CHUNK_BYTES = 65536

log = logging.getLogger(__name__)


class Process:
    """A running process, leader of its own session; created by `start`."""

    def __init__(self, process: asyncio.subprocess.Process, record: Path, output: int) -> None:
        self._process = process
        self._record = record
        self._output = output

    @classmethod
    async def start(
        cls, argv: Sequence[str], *, env: Mapping[str, str], folder: Path, record: Path
    ) -> Process:
        """Start *argv* in *folder* with exactly *env*, and write its id into *record*.

        The process writes into a pipe of this one, so it ends soon after this one is killed;
        `stop_orphans` ends the others.

        Raises:
            OSError, ValueError: the program cannot be started.
        """
        ours, theirs = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                env=dict(env),
                cwd=folder,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=theirs,
                stderr=theirs,
                start_new_session=True,
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        _note(process.pid, record)
        return cls(process, record, ours)

    async def run(self, on_line: Callable[[bytes], None]) -> int:
        """Pass every line of output to *on_line*, and return the exit code.

        A signal counts as 128 plus its number, as in a container's status.
        """
        reading = asyncio.create_task(self._read(on_line))
        code = await self._process.wait()
        _kill_session(self._process.pid)
        await reading
        self._record.unlink(missing_ok=True)
        return code if code >= 0 else 128 - code

    async def stop(self) -> None:
        """Terminate the process; after `GRACE_SECONDS` kill it with its children.

        A concurrent `run` must wait for it, and returns then.
        """
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), GRACE_SECONDS)
        except TimeoutError:
            log.warning("process %d did not stop in %d s", self._process.pid, GRACE_SECONDS)
            _kill_session(self._process.pid)

    async def _read(self, on_line: Callable[[bytes], None]) -> None:
        stream = asyncio.StreamReader()
        pipe = os.fdopen(self._output, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), pipe
        )
        rest = b""
        try:
            while chunk := await stream.read(_CHUNK_BYTES):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    on_line(line)
            if rest:
                on_line(rest)
        finally:
            transport.close()


def stop_orphans(folder: Path) -> None:
    """Kill the processes of an interrupted earlier run, from the records in *folder*."""
    for record in folder.rglob("*.pid"):
        noted = json.loads(record.read_text())
        with contextlib.suppress(psutil.NoSuchProcess):
            # A pid alone may belong to another process by now.
            drift = abs(psutil.Process(noted["pid"]).create_time() - noted["started"])
            if drift < _START_TOLERANCE_SECONDS:
                log.warning("killing process %d, left by an earlier run", noted["pid"])
                _kill_session(noted["pid"])
        record.unlink()


def _note(pid: int, record: Path) -> None:
    record.write_text(json.dumps({"pid": pid, "started": psutil.Process(pid).create_time()}))


def _kill_session(leader: int) -> None:
    for pid in _members(leader):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _members(leader: int) -> Iterator[int]:
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == leader:
                yield pid

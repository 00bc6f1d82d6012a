"""Operators forked from one process that has imported the package: an import takes seconds."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from redrive.cli import main

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["redrive.cli.operator", __name__])


class OperatorProcess:
    """A running operator, with methods like those of processes of asyncio.

    Args:
        before: code that the process runs first.
        log: the file of its output.
    """

    def __init__(
        self, arguments: tuple[str, ...], before: str, environment: Mapping[str, str], log: Path
    ) -> None:
        self._process = FORKS.Process(
            target=_operate, args=(arguments, before, environment, log), daemon=True
        )
        self._ended = asyncio.Event()
        self._process.start()
        asyncio.get_running_loop().add_reader(self._process.sentinel, self._end)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._process.join()
        self._ended.set()

    @property
    def pid(self) -> int:
        """The id of the process."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or None while the process runs."""
        return self._process.exitcode if self._ended.is_set() else None

    async def wait(self) -> int | None:
        """Wait for its end; return the exit code."""
        await self._ended.wait()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if not self._ended.is_set():
            os.kill(self.pid, number)


def _operate(
    arguments: tuple[str, ...], before: str, environment: Mapping[str, str], log: Path
) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["redrive", "operator", *arguments]
    exec(before, {})  # noqa: S102 - code of a test
    sys.exit(main())

"""Threads of another process, frozen like one that waits for its disk.

A signal stops a process as a whole; a tracer stops single threads. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_WALL = 0x40000000
"""Also wait for threads."""
_AT_WORK = "-1"
"""The kernel's text in place of a system call."""


@contextmanager
def frozen_threads(process: int, name: str) -> Iterator[None]:
    """Freeze the threads of *process* whose names begin with *name*.

    A thread is frozen in a system call: a virtual machine that collects its garbage would wait for
    one that is frozen at work.
    """
    assert sys.platform == "linux"
    tasks = Path(f"/proc/{process}/task")
    threads = [task for task in tasks.iterdir() if (task / "comm").read_text().startswith(name)]
    assert threads, f"no thread {name}"
    for task in threads:
        while not _freeze(task):
            time.sleep(0.01)
    try:
        yield
    finally:
        for task in threads:
            _trace(_DETACH, task)


def _freeze(task: Path) -> bool:
    _trace(_SEIZE, task)
    _trace(_INTERRUPT, task)
    os.waitpid(int(task.name), _WALL)
    if (task / "syscall").read_text().split()[0] != _AT_WORK:
        return True
    _trace(_DETACH, task)
    return False


def _trace(request: int, task: Path) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    library.ptrace.restype = ctypes.c_long
    arguments = (ctypes.c_long(thread) for thread in (request, int(task.name), 0, 0))
    if library.ptrace(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

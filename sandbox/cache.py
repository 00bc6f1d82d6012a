"""Keeps what was fetched or built, outside of the checkout, whole or not at all.

Called by `sandbox.toolchain` and `sandbox.builds`, once per artifact. An artifact
is a directory whose name tells all that went into it, so it is never changed once it is there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from sandbox import steps


def root() -> Path:
    """The cache's directory: ``$REDRIVE_CACHE``, else ``redrive`` in the user's cache directory."""
    if chosen := os.environ.get("REDRIVE_CACHE"):
        return Path(chosen).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "redrive"


def artifact(name: str, make: Callable[[Path], None], *, doing: str) -> Path:
    """The directory of the artifact *name*, made by *make* unless it is there already.

    *make* fills the empty directory it is given; *doing* is what is shown meanwhile. Runs that
    want the same artifact wait for the first of them. The directory appears under its name in one
    step after *make* has returned: one that failed or was killed leaves nothing that is used, and
    the next run starts it afresh.
    """
    final = root() / name
    if final.is_dir():
        return final
    unfinished = root() / "unfinished" / name
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    # The system drops the lock of a process that dies, so no process works on a leftover below.
    with steps.step(doing), FileLock(unfinished.with_name(f"{name}.lock")):
        if final.is_dir():
            return final
        if unfinished.exists():
            shutil.rmtree(unfinished)
        unfinished.mkdir()
        make(unfinished)
        unfinished.rename(final)
    return final

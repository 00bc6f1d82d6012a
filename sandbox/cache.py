"""The cache of downloads and builds, outside the checkout. An artifact is complete or missing.

Called by `sandbox.toolchain` and `sandbox.builds`, once per artifact. An artifact is a directory
whose name contains the versions of all its inputs, so its content never changes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from sandbox import steps


def root() -> Path:
    """Return the cache's directory: ``$REDRIVE_CACHE``, else ``redrive`` in the user's cache."""
    if chosen := os.environ.get("REDRIVE_CACHE"):
        return Path(chosen).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "redrive"


def artifact(name: str, make: Callable[[Path], None], *, doing: str) -> Path:
    """Return the directory of the artifact *name*; create it by *make* if it is missing.

    *make* fills an empty directory, and *doing* is shown as progress. Concurrent runs that need the
    same artifact wait for the first of them. The directory is renamed after *make* has returned, so
    a failed or killed run leaves no artifact, and the next run starts from scratch.
    """
    final = root() / name
    if final.is_dir():
        return final
    unfinished = root() / "unfinished" / name
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    # The lock of a killed process is released, so an unfinished directory has no writer.
    with steps.step(doing), FileLock(unfinished.with_name(f"{name}.lock")):
        if final.is_dir():
            return final
        if unfinished.exists():
            shutil.rmtree(unfinished)
        unfinished.mkdir()
        make(unfinished)
        unfinished.rename(final)
    return final

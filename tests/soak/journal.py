"""The journal of a consumer of the soak; a kill of its process loses no line."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Journal:
    """Lines of JSON, each written immediately, so that they outlive the process."""

    def __init__(self, file: Path) -> None:
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, event: str, **fields: object) -> None:
        """Record *event* with the current time."""
        line = json.dumps({"at": time.time(), "what": event, **fields})
        os.write(self._file, f"{line}\n".encode())


def read(file: Path) -> Iterator[dict[str, Any]]:
    """Return the complete lines; a kill may have cut the last one."""
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return

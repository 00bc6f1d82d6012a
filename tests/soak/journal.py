"""What consumers of the soak did, written down so that no kill of their process loses a line."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Journal:
    """Lines of JSON, each written at once: what was written outlives the process."""

    def __init__(self, file: Path) -> None:
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, what: str, **fields: object) -> None:
        """Write down that *what* happened now."""
        line = json.dumps({"at": time.time(), "what": what, **fields})
        os.write(self._file, f"{line}\n".encode())


def read(file: Path) -> Iterator[dict[str, Any]]:
    """Return what was written; a kill may have cut the last line."""
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return

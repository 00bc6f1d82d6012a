"""A command of the program at a terminal, and checks of documents by the published schemas."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from sandbox import SOURCE_ROOT

CODE = """
import signal, sys
# As a terminal starts it: tests may run in the background of a shell, which ignores the signal.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv[0] = 'kubectl-redrive'
from redrive.cli import main
sys.exit(main())
"""


class Terminal:
    """A command of the program at a terminal."""

    def __init__(self, kubeconfig: Path, *arguments: str) -> None:
        self._primary, secondary = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-c", CODE, *arguments],
            env=os.environ | {"PYTHONPATH": str(SOURCE_ROOT), "KUBECONFIG": str(kubeconfig)},
            stdin=secondary,
            stdout=secondary,
            stderr=secondary,
        )
        os.close(secondary)
        self.text = ""

    def read_until(self, words: str) -> None:
        while words not in self.text:
            try:
                self.text += os.read(self._primary, 65_536).decode()
            except OSError as error:  # the end of a terminal
                raise AssertionError(self.text) from error

    def type(self, line: str) -> None:
        os.write(self._primary, line.encode())

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def end(self, seconds: float = 60) -> int:
        """Return the exit code, after all output was read."""
        with suppress(OSError):  # the end of a terminal
            while part := os.read(self._primary, 65_536):
                self.text += part.decode()
        os.close(self._primary)
        return self._process.wait(seconds)


ROOT = Path(__file__).parents[2]
SCHEMAS = json.loads((ROOT / "docs/reference/cli.schema.json").read_text("utf-8"))


def check(value: object, schema: dict[str, Any], path: str = "$") -> None:
    """Check *value* against the keywords that the published schemas use."""
    if "$ref" in schema:
        schema = SCHEMAS["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    if "anyOf" in schema:
        nullable = {"type": "null"} in schema["anyOf"]
        assert value is not None or nullable, path
        rest = [choice for choice in schema["anyOf"] if choice != {"type": "null"}]
        if value is not None:
            check(value, rest[0], path)
        return
    types = {"string": str, "integer": int, "array": list, "object": dict, None: object}
    assert isinstance(value, types[schema.get("type")]), path
    assert value in schema.get("enum", [value]), path
    if isinstance(value, dict):
        assert sorted(value) == sorted(schema["properties"]), path
        for name, field in schema["properties"].items():
            check(value[name], field, f"{path}.{name}")
    if isinstance(value, list):
        for item in value:
            check(item, schema["items"], f"{path}[]")

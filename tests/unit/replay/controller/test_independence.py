"""The operator launches jobs without having what they are made of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from redrive.replay.controller import launch

PROGRAM = """
import sys
import redrive.cli
print(*sorted({"pyspark", "pyarrow"} & {name.partition(".")[0] for name in sys.modules}))
"""


def test_the_operator_needs_neither_spark_nor_arrow() -> None:
    source_root = str(Path(launch.__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"PYTHONPATH": source_root},
        capture_output=True,
        check=True,
        text=True,
    )
    assert done.stdout.strip() == ""

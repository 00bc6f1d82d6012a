"""A user's consumer program in a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from redrive.policy import codec

SOURCES = Path(__file__).parents[2] / "operator"
PROGRAM = """
import os, signal, pulsar
from redrive import RetryConsumer, load_policy

client = pulsar.Client(
    os.environ["URL"],
    authentication=pulsar.AuthenticationToken(os.environ["TOKEN"]),
    logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
)
"""


StartProgram = Callable[[Any, str], subprocess.Popen[str]]


@pytest.fixture
def start_program(tmp_path: Path) -> StartProgram:
    """Start a Python process that consumes as the policy's role; `PROGRAM` is its beginning."""

    def start_program(provisioned: Any, program: str) -> subprocess.Popen[str]:  # noqa: ANN401 - see conftest
        file = tmp_path / "policy.json"
        new = file.with_suffix(".new")
        new.write_text(codec.encode(provisioned.policy), encoding="utf-8")
        new.replace(file)  # another program may be reading it
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM + program],
            env=os.environ
            | {
                "PYTHONPATH": str(SOURCES),
                "PYTHONUNBUFFERED": "1",
                "URL": provisioned.broker.service_url,
                "TOKEN": provisioned.broker.token(provisioned.role),
                "REDRIVE_POLICY": str(file),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start_program


def interrupted(process: subprocess.Popen[str], sent: signal.Signals, workers: int = 1) -> str:
    """Send a signal after each worker has printed "handling", and return the output."""
    assert process.stdout is not None
    for _ in range(workers):
        assert process.stdout.readline() == "handling\n"
    process.send_signal(sent)
    output, _ = process.communicate(timeout=180)
    return output

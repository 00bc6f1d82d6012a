"""Programs of users, run in processes of their own."""

from __future__ import annotations

import os
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


@pytest.fixture
def start(tmp_path: Path) -> Callable[[Any, str], subprocess.Popen[str]]:
    """Start a Python process that consumes as the stage's role; `PROGRAM` is its beginning."""

    def start(stage: Any, program: str) -> subprocess.Popen[str]:  # noqa: ANN401 - see conftest
        file = tmp_path / "policy.json"
        file.write_text(codec.encode(stage.policy), encoding="utf-8")
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM + program],
            env=os.environ
            | {
                "PYTHONPATH": str(SOURCES),
                "PYTHONUNBUFFERED": "1",
                "URL": stage.broker.service_url,
                "TOKEN": stage.broker.token(stage.role),
                "REDRIVE_POLICY": str(file),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


Start = Callable[[Any, str], subprocess.Popen[str]]

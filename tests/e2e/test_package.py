"""The package as its users get it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, f"--wheel-dir={folder}", str(ROOT)], check=True)
    (built,) = folder.iterdir()
    return built


def test_the_consumer_library_alone_needs_nothing_but_the_pulsar_client(wheel: Path) -> None:
    """`pip install redrive` brings neither kopf nor pyspark."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        metadata = message_from_bytes(archive.read(path))
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert [line.split(">")[0] for line in required] == ["pulsar-client"]


def test_the_wheel_can_be_imported_and_consumes_without_the_extras(wheel: Path) -> None:
    """What a consumer imports works from the wheel alone and loads nothing of the operator."""
    code = (
        "import sys, redrive; redrive.RetryConsumer, redrive.load_policy; "
        "heavy = {'kopf', 'kubernetes', 'pyspark', 'pydantic', 'aiohttp', "
        "'prometheus_client', 'opentelemetry'}; "
        "print(redrive.__file__); sys.exit(bool(heavy & set(sys.modules)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(wheel)},
        cwd=wheel.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(str(wheel))


def test_the_wheel_carries_its_types_and_its_command(wheel: Path) -> None:
    """Type checkers find `py.typed`; `redrive` is a command."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (path,) = [name for name in names if name.endswith("/entry_points.txt")]
        commands = archive.read(path).decode()
    assert "redrive/py.typed" in names
    assert "redrive = redrive.cli:main" in commands

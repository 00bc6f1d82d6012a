"""The package as installed by users."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
import yaml

import redrive
from tests.support.documented import CHECK, FIRST_CONSUMER, block, commands

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def plain(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of the `redrive` command in an environment with only the wheel."""
    programs = tmp_path_factory.mktemp("plain") / "bin"
    venv.create(programs.parent)
    pip = [sys.executable, "-m", "pip", f"--python={programs / 'python'}", "install"]
    subprocess.run([*pip, "--quiet", "--no-index", "--no-deps", str(wheel)], check=True)
    return programs / "redrive"


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env={}, capture_output=True, text=True, check=False)


def test_consumer_library_depends_on_the_pulsar_client_only(wheel: Path) -> None:
    """`pip install redrive` brings neither kopf nor pyspark."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        metadata = message_from_bytes(archive.read(path))
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert [line.split(">")[0] for line in required] == ["pulsar-client"]


def test_wheel_without_extras_can_be_imported_and_consumes(wheel: Path) -> None:
    """The imports of a consumer work with the wheel alone, and load no module of the operator."""
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
    assert "kubectl-redrive = redrive.cli:main" in commands


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--help"], "provision policies and run replays"),
        (["--version"], f"redrive {redrive.__version__}\n"),
        (["operator", "--help"], "--cluster-id ID"),
    ],
)
def test_the_command_describes_itself_without_the_extras(
    plain: Path, arguments: list[str], shown: str
) -> None:
    done = run(plain, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert shown in done.stdout


@pytest.mark.parametrize(("command", "extra"), [("operator", "operator"), ("status", "cli")])
def test_command_names_the_extra_that_it_lacks(plain: Path, command: str, extra: str) -> None:
    done = run(plain, command)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    problem = f"redrive: MissingExtra: `redrive {command}` needs redrive[{extra}]: "
    assert line.startswith(problem)
    assert line.endswith(f"; pip install 'redrive[{extra}]'")


def test_documented_installation_names_the_wheel_and_an_extra(wheel: Path) -> None:
    command = block(CHECK, "Check manifests in CI and in the editor", "sh")
    assert command == f'pipx install "{wheel.name}[cli]"\n'
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        metadata = message_from_bytes(archive.read(path))
    assert "cli" in metadata.get_all("Provides-Extra", [])


def without_pythonpath() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_tutorial_installs_the_library(tmp_path: Path) -> None:
    """The commands run as they are; the environment has no other packages than they install."""
    first, second = (block.text for block in commands(FIRST_CONSUMER, "1. Install the library"))
    script = f"{first}{second}python3 -c 'import redrive; print(redrive.__file__)'"
    done = subprocess.run(
        ["/bin/sh", "-euc", script],
        cwd=ROOT,
        env={**without_pythonpath(), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(str(tmp_path / "redrive-tutorial"))


def test_the_chart_installs_the_version_that_it_lies_beside() -> None:
    chart = yaml.safe_load((ROOT / "charts" / "redrive" / "Chart.yaml").read_text("utf-8"))
    assert (chart["version"], chart["appVersion"]) == (redrive.__version__, redrive.__version__)

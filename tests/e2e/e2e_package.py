"""The package as installed by users, and the guide; tests/images builds and runs its images."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import Any

import pytest
import yaml

import redrive
from release import chart_readme
from sandbox import chart
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


GUIDE = (ROOT / "docs" / "howto" / "install.md").read_text("utf-8").replace("\\\n", " ")
INSTALL = next(line for line in GUIDE.splitlines() if line.startswith("helm upgrade --install "))
BUILDS = re.findall(r"^docker build --file (\S+) --tag (\S+) \.$", GUIDE, re.MULTILINE)
IGNORE = (ROOT / ".dockerignore").read_text("utf-8").splitlines()


def rendered(*flags: str) -> list[dict[str, Any]]:
    """Return the rendered chart of the guide's installation, with additional *flags*."""
    _, release, folder, *options = shlex.split(INSTALL.removeprefix("helm upgrade "))
    made = chart.helm("template", release, str(ROOT / folder), *options, *flags)
    return [document for document in yaml.load_all(made, yaml.CSafeLoader) if document]


def container(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (pod,) = [body for body in objects if body["kind"] == "Deployment"]
    (operator,) = pod["spec"]["template"]["spec"]["containers"]
    return dict(operator)


def test_the_installation_uses_the_images_that_the_guide_builds() -> None:
    built = dict(BUILDS)
    objects = rendered()
    assert container(objects)["image"] == built["images/operator.Dockerfile"]
    (template,) = (body["template"] for body in objects if body["kind"] == "PodTemplate")
    assert template["spec"]["containers"][0]["image"] == built["images/replay.Dockerfile"]


def test_the_chart_has_every_value_that_the_guide_names() -> None:
    text = (chart.CHART / "values.yaml").read_text("utf-8")
    paths = {value.path for value in chart_readme.values(text)}
    named = set(re.findall(r"`((?:namespaces|clusterId|\w+\.\w+)(?:\.\w+)?)(?:=\w+)?`", GUIDE))
    values = {
        name for name in named if name.partition(".")[0] in {k.partition(".")[0] for k in paths}
    }
    assert {"namespaces", "rbac.secretNamespaces", "replay.namespaces"} <= values
    groups = {path.rpartition(".")[0] for path in paths}
    assert values <= paths | groups


@pytest.mark.parametrize("file", ["operator", "replay"])
def test_what_an_image_is_built_from_is_there_and_not_ignored(file: str) -> None:
    recipe = (ROOT / "images" / f"{file}.Dockerfile").read_text("utf-8")
    copied = re.findall(r"^COPY (?!--from)(?:--chmod=\d+ )?(.+) \S+$", recipe, re.MULTILINE)
    sources = [source for line in copied for source in line.split()]
    assert sources
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in IGNORE
    assert IGNORE[1] == "*"  # the context has nothing else


def test_the_job_lies_where_the_operator_looks_for_it() -> None:
    (path,) = (a for a in container(rendered())["args"] if a.startswith("--replay-application="))
    job = path.removeprefix("--replay-application=local://")
    recipe = (ROOT / "images" / "replay.Dockerfile").read_text("utf-8")
    assert f'redrive/replay/__main__.py" {job}' in recipe

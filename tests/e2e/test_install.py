"""The guide to installing works as it is written, as far as it can without a container engine."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import venv
from pathlib import Path
from typing import Any

import pytest
import yaml

from sandbox import chart

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "howto" / "install.md").read_text("utf-8").replace("\\\n", " ")
RECIPES = re.findall("^```dockerfile\n(.+?)^```", GUIDE, re.MULTILINE | re.DOTALL)
INSTALL = next(line for line in GUIDE.splitlines() if line.startswith("helm upgrade --install "))


def rendered(*flags: str) -> list[dict[str, Any]]:
    """What the guide's installation makes, with *flags* in addition."""
    _, release, folder, *given = shlex.split(INSTALL.removeprefix("helm upgrade "))
    made = chart.helm("template", release, str(ROOT / folder), *given, *flags)
    return [document for document in yaml.safe_load_all(made) if document]


def container(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (pod,) = [each for each in objects if each["kind"] == "Deployment"]
    (found,) = pod["spec"]["template"]["spec"]["containers"]
    return dict(found)


def test_the_chart_takes_the_values_of_the_installation() -> None:
    assert container(rendered())["image"] == "registry.example/redrive:1"


@pytest.mark.parametrize("flags", re.findall("`(--set [^`]+)`", GUIDE))
def test_the_chart_takes_every_value_that_the_guide_sets(flags: str) -> None:
    rendered(*shlex.split(re.sub(r"\$\(.*\)", "an-id", flags)))


def test_images_have_a_python_that_the_package_supports() -> None:
    bases = [re.findall(r"^FROM (\S+)", recipe, re.MULTILINE)[-1] for recipe in RECIPES]
    versions = [re.fullmatch(r"python:3\.(\d+)-slim", base) for base in bases]
    assert [int(version[1]) >= 11 for version in versions if version] == [True, True]


def test_images_install_the_wheel_and_the_job_lies_where_the_operator_looks_for_it(
    wheel: Path, tmp_path: Path
) -> None:
    """Without dependencies: they are large, and the guide does not name them."""
    assert "\npip wheel --no-deps --wheel-dir=dist .\n" in GUIDE  # as the fixture does
    shutil.copy(wheel, tmp_path)
    programs = tmp_path / "python" / "bin"
    venv.create(programs.parent, with_pip=True)
    environment = {"PATH": f"{programs}:{os.defpath}", "PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1"}
    for recipe in RECIPES:
        (run,) = re.findall("^RUN (pip install .+)", recipe, re.MULTILINE)
        here = run.replace("/tmp/", f"{tmp_path}/").replace("/opt/", f"{tmp_path}/opt/")  # noqa: S108
        subprocess.run(["/bin/sh", "-ec", here], env=environment, check=True)
    assert (programs / "redrive").is_file()
    (job,) = (tmp_path / "opt" / "redrive").iterdir()
    assert job.samefile(*programs.parent.glob("lib/*/site-packages/redrive/replay/__main__.py"))
    looked_for = f"--replay-application=local:///{job.relative_to(tmp_path)}"
    assert looked_for in container(rendered())["args"]

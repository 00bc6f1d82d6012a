"""The installation guide works as written; tests/images builds and runs its images."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from release import chart_readme
from sandbox import chart

ROOT = Path(__file__).resolve().parents[2]
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

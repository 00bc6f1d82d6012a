"""Contents of the images: redrive, a user that is not root, and no build tools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import redrive
from tests.images.conftest import BASE, BUILDS, RELEASE_BUILDS, REVISION, VERSION, Engine
from tests.support.documented import ROOT

TOOLS = ("gcc", "cc", "g++", "make", "mvn", "go", "git")
USERS = {"operator": "65532:65532", "replay": "185:185"}


@pytest.mark.parametrize("kind", USERS)
def test_the_user_is_a_number_and_not_root(
    engine: Engine, images: dict[str, str], kind: str
) -> None:
    assert engine.config(images[kind])["User"] == USERS[kind]
    assert engine.run(images[kind], "id", "-u").strip() == USERS[kind].partition(":")[0]


@pytest.mark.parametrize("kind", USERS)
def test_the_labels_say_what_it_is(engine: Engine, images: dict[str, str], kind: str) -> None:
    labels = engine.config(images[kind])["Labels"]
    assert labels["org.opencontainers.image.title"] == images[kind].rpartition("/")[2].split(":")[0]
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"


@pytest.mark.parametrize("kind", USERS)
def test_it_holds_no_tools_to_build_with_and_no_installer(
    engine: Engine, images: dict[str, str], kind: str
) -> None:
    look = f"for tool in {' '.join(TOOLS)}; do command -v $tool; done; true"
    assert engine.run(images[kind], "sh", "-c", look) == ""
    programs = engine.run(images[kind], "ls", "/opt/redrive/bin").split()
    assert "python3" in programs
    assert not [program for program in programs if program.startswith("pip")]


def test_operator_starts_for_a_user_without_passwd_entry(
    engine: Engine, images: dict[str, str]
) -> None:
    version = engine.run(images["operator"], "redrive", "--version")
    assert version == f"redrive {redrive.__version__}\n"
    assert "--lease" in engine.run(images["operator"], "redrive", "operator", "--help")
    assert engine.config(images["operator"])["Entrypoint"] == ["redrive"]


def test_the_image_of_replays_holds_one_spark_and_the_job(
    engine: Engine, images: dict[str, str]
) -> None:
    image = images["replay"]
    jars = engine.run(image, "sh", "-c", "find / -xdev -name 'spark-core_*.jar' 2>/dev/null; true")
    assert len(jars.splitlines()) == 1
    code = (
        "import pyspark, os, google_crc32c, redrive.replay.__main__ as main; "
        "import redrive.replay.mover; "  # in a task
        "print(pyspark.__version__, google_crc32c.implementation, "
        "os.path.samefile('/opt/redrive/spark', pyspark.__path__[0]), "
        "os.path.samefile('/opt/redrive/replay.py', main.__file__))"
    )
    version, checksums, *same = engine.run(image, "python3", "-c", code).split()
    assert version in (ROOT / "requirements.lock").read_text("utf-8")
    assert checksums == "c"  # in Python this takes most of the time of a message
    assert same == ["True", "True"]
    shown = engine.run(image, "sh", "-c", "SPARK_LOCAL_IP=127.0.0.1 spark-submit --version 2>&1")
    assert f"version {version}" in shown


@pytest.mark.parametrize("kind", USERS)
def test_the_labels_of_a_release_say_what_it_was_built_from(
    engine: Engine, released: dict[str, str], kind: str
) -> None:
    labels = engine.config(released[kind])["Labels"]
    assert labels["org.opencontainers.image.version"] == VERSION
    assert labels["org.opencontainers.image.revision"] == REVISION
    assert labels["org.opencontainers.image.source"] == "https://git.example/redrive"
    digest = engine("images", "--format={{.Digest}}", BASE).strip()
    assert labels["org.opencontainers.image.base.digest"] == digest


@pytest.mark.usefixtures("images")
def test_an_sbom_lists_the_packages(engine: Engine, tmp_path: Path) -> None:
    engine.build(BUILDS[2].replace("--output dist", f"--output {tmp_path}"))
    assert {"redrive", "kopf", "pulsar-client", "libc6"} <= listed_in(tmp_path)


@pytest.mark.parametrize(
    ("kind", "packages"),
    [
        ("operator", {"redrive", "kopf", "libc6"}),
        ("replay", {"redrive", "pyspark", "spark-core_2.13", "tini", "openjdk-17-jre-headless"}),
    ],
)
def test_a_release_has_an_sbom_of_each_image(
    engine: Engine, released: dict[str, str], tmp_path: Path, kind: str, packages: set[str]
) -> None:
    (command,) = (build for build in RELEASE_BUILDS[2:] if f"IMAGE={released[kind]} " in build)
    folder = f"sbom/{released[kind].rpartition('/')[2].partition(':')[0]} "
    assert f"--output {folder}" in command
    engine.build(command.replace(f"--output {folder}", f"--output {tmp_path} "))
    assert packages <= listed_in(tmp_path)


def listed_in(folder: Path) -> set[str]:
    """Return the names of the packages in an SBOM."""
    listed = json.loads((folder / "sbom.cdx.json").read_text("utf-8"))
    return {part["name"] for part in listed["components"]}

"""Images built by the documented commands, on a base image that replaces one of a registry.

In addition to `make test` they need root, mmdebstrap, and buildah, which builds without a daemon
(on Debian: `apt install mmdebstrap buildah`).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sandbox import cache as sandbox_cache
from tests.support.documented import INSTALL, RELEASE, ROOT, commands


def builds(page: str, heading: str) -> list[str]:
    """Return the builds that the commands of a page begin."""
    script = "".join(block.text for block in commands(page, heading)).replace("\\\n", " ")
    return re.findall(r"^docker (build .+)$", script, re.MULTILINE)


BUILDS = builds(INSTALL, "Images")
VERSION, REVISION = "1.2.3", "0123456789abcdef"
RELEASE_BUILDS = [
    command.replace("X.Y.Z", VERSION).replace("$(git rev-parse HEAD)", REVISION)
    for command in builds(RELEASE, "Release redrive")
]
"""The commands with which a release builds both images, and then their SBOMs."""
BASE = "localhost/redrive-test-base:1"


@dataclass(frozen=True)
class Engine:
    """buildah with its own store.

    Args:
        store: the folder of images and containers.
        cache: pip's downloads, kept between runs.
    """

    store: Path
    cache: Path

    @property
    def program(self) -> list[str]:
        """The command that starts buildah with that store."""
        return [_program("buildah"), f"--root={self.store}/root", f"--runroot={self.store}/run"]

    @property
    def settings(self) -> list[str]:
        """The arguments of a build in addition to those of the guide."""
        volume = f"--volume={self.cache}:/root/.cache/pip"
        return ["--network=host", "--layers", volume, f"--build-arg=BASE_IMAGE={BASE}"]

    def __call__(self, *arguments: str) -> str:
        """Run buildah; a failure raises with its output."""
        run = subprocess.run(
            [*self.program, *arguments],
            env={**os.environ, "BUILDAH_ISOLATION": "chroot"},
            cwd=ROOT, check=False, text=True, capture_output=True,
        )  # fmt: skip
        assert run.returncode == 0, f"{arguments}\n{run.stdout[-4000:]}\n{run.stderr[-4000:]}"
        return run.stdout

    def build(self, command: str) -> None:
        """Run a documented `docker build`, on the base of the tests."""
        digest = self("images", "--format={{.Digest}}", BASE).strip()
        build, *arguments = shlex.split(command.replace("$BASE_DIGEST", digest))
        self(build, *self.settings, *arguments)

    def run(self, image: str, *command: str) -> str:
        """Run *command* in a container of *image*, as its user."""
        container = self("from", image).strip()
        try:
            return self("run", container, "--", *command)
        finally:
            self("rm", container)

    def config(self, image: str) -> dict[str, Any]:
        """Return the configuration of the image."""
        config: dict[str, Any] = json.loads(self("inspect", "--type=image", image))["OCIv1"][
            "config"
        ]
        return config


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    # Not in a folder of pytest, which cannot delete it: buildah mounts a part of it.
    store = sandbox_cache.root() / "images"
    store.mkdir(parents=True, exist_ok=True)
    cache = Path.home() / ".cache" / "pip"
    cache.mkdir(parents=True, exist_ok=True)
    made = Engine(store, cache)
    _make_base(made, store)
    # Images of earlier builds, tens of gigabytes; the layers of the last build stay.
    made("rm", "--all")
    made("rmi", "--prune")
    yield made
    mounted = store / "root" / "overlay"
    if mounted.is_mount():
        subprocess.run([_program("umount"), str(mounted)], check=True)


@pytest.fixture(scope="session")
def images(engine: Engine) -> dict[str, str]:
    """The two images by purpose, with the names of the guide."""
    return _built(engine, BUILDS[:2])


@pytest.fixture(scope="session")
def released(engine: Engine, images: dict[str, str]) -> dict[str, str]:
    """The images as a release builds them, from the layers of `images`."""
    assert images
    return _built(engine, RELEASE_BUILDS[:2])


def _built(engine: Engine, commands: list[str]) -> dict[str, str]:
    names = {}
    for command in commands:
        file = re.search(r"--file images/(\w+)\.Dockerfile", command)
        name = re.search(r"--tag (\S+)", command)
        assert file
        assert name
        engine.build(command)
        # With a name, the stage that compiles stays for the next run.
        stage = f"--target build --tag localhost/redrive-test-{file[1]}-build:1"
        engine.build(command.replace(name[0], stage))
        names[file[1]] = name[1]
    return names


def _program(name: str) -> str:
    path = shutil.which(name)
    assert path is not None, f"install {name} to test the images"
    return path


def _make_base(engine: Engine, folder: Path) -> None:
    """Build an image of Debian with Python and the trusted certificates of this machine."""
    if BASE in engine("images", "--format={{.Name}}:{{.Tag}}").splitlines():
        return
    archive = folder / "base.tar"
    packages = "python3,python3-venv,ca-certificates"
    subprocess.run(
        [_program("mmdebstrap"), "--quiet", "--variant=minbase", f"--include={packages}",
         "bookworm", str(archive)],
        check=True,
    )  # fmt: skip
    container = engine("from", "scratch").strip()
    engine("add", "--quiet", container, str(archive), "/")
    trusted = ssl.get_default_verify_paths().cafile
    assert trusted is not None
    bundle = "/etc/ssl/certs/ca-certificates.crt"
    engine("add", "--quiet", container, trusted, bundle)
    engine("config", f"--env=PIP_CERT={bundle}", container)
    engine("commit", "--quiet", container, BASE)
    engine("rm", container)
    archive.unlink()

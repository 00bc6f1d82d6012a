"""A cluster with a kubelet, and the commands of the documentation, run as they are written.

Any cluster will do whose pods reach this machine. What it needs is in the environment:

- `KUBECONFIG`, of an administrator;
- `REDRIVE_NODE_LOAD`: a command that gives the cluster an image, such as
  `kind load image-archive`; the path of an archive is added to it;
- `REDRIVE_NODE_HOST`: the address of this machine, as pods reach it; by default that of its route.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from sandbox import builds, pulsar
from sandbox.process import Processes
from sandbox.pulsar import SUPERUSER, Broker
from tests.images.conftest import BUILDS, Engine
from tests.images.conftest import engine as engine  # noqa: PLC0414  a fixture
from tests.images.conftest import images as images  # noqa: PLC0414  a fixture

ROOT = Path(__file__).resolve().parents[2]
LOAD = "REDRIVE_NODE_LOAD"


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """Yield the heading above each `sh` block of a page, and the block."""
    text = (ROOT / page).read_text("utf-8")
    heading = ""
    for found in re.finditer(r"^#+ ([^\n]+)$|^```sh\n(.+?)^```", text, re.MULTILINE | re.DOTALL):
        if found[1]:
            heading = found[1]
        else:
            yield heading, found[2]


def run(block: str, environment: Mapping[str, str], folder: Path) -> str:
    """Run a block as a user would paste it, ending at the first command that fails."""
    ran = subprocess.run(
        [shutil.which("bash") or "", "-euo", "pipefail", "-c", block],
        env=environment, cwd=folder, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    print(f"$ {block}{ran.stdout}")  # noqa: T201  the log of an installation
    assert ran.returncode == 0, f"{block}\n{ran.stdout}"
    return ran.stdout


@pytest.fixture(scope="session")
def host() -> str:
    """The address at which pods reach this machine."""
    if given := os.environ.get("REDRIVE_NODE_HOST"):
        return given
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: chooses a route
        address: str = probe.getsockname()[0]
        return address


@pytest.fixture(scope="session")
def broker(host: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker on this machine, for pods to use."""
    state = tmp_path_factory.mktemp("node")
    processes = Processes(state)
    started = pulsar.launch(state, processes, address=host)
    try:
        pulsar.wait(started, processes)
        yield started
    finally:
        processes.stop_all()


@pytest.fixture(scope="session")
def user(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a user who has kubectl, helm and Pulsar's tools, set up as an admin."""
    folder = tmp_path_factory.mktemp("user")
    conf = folder / "client.conf"
    conf.write_text(
        f"webServiceUrl={broker.admin_url}\nbrokerServiceUrl={broker.service_url}\n"
        "authPlugin=org.apache.pulsar.client.impl.auth.AuthenticationToken\n"
        f"authParams={broker.token_file(SUPERUSER).as_uri()}\n"
    )
    assert "KUBECONFIG" in os.environ, "KUBECONFIG: say which cluster to install into"
    programs = [builds.kubernetes(), builds.helm(), builds.pulsar() / "bin"]
    return {
        **os.environ,
        "PATH": ":".join([*map(str, programs), os.environ["PATH"]]),
        "PULSAR_CLIENT_CONF": str(conf),
        "PULSAR_URL": broker.service_url,
        "PULSAR_ADMIN_URL": broker.admin_url,
        "PULSAR_SECRET_KEY": broker.token_key.as_uri(),
    }


@pytest.fixture(scope="session")
def loaded(engine: Engine, images: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> int:
    """Give the cluster the images that the documented commands have built; their number."""
    assert LOAD in os.environ, f"{LOAD}: say which command loads an image into the cluster"
    folder = tmp_path_factory.mktemp("archives")
    for kind, name in images.items():
        archive = folder / f"{kind}.tar"
        engine("push", "--quiet", name, f"oci-archive:{archive}:{name}")
        subprocess.run([*shlex.split(os.environ[LOAD]), str(archive)], check=True)
        archive.unlink()
    assert len(images) == len(BUILDS) - 1  # without the SBOM's
    return len(images)

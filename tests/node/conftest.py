"""A cluster with a kubelet, and the documented commands, run as written.

The pods of the cluster must reach this machine, with room for requests of 1 CPU and 6 GiB. All
objects are removed at the end. The settings are environment variables:

- `KUBECONFIG`, of an administrator;
- `REDRIVE_NODE_LOAD`: a command that loads an image into the cluster, such as
  `kind load image-archive`; the path of an archive is added to it;
- `REDRIVE_NODE_HOST`: the address of this machine, as pods reach it; by default that of its route;
- `REDRIVE_NODE_SPARK=installed`: the cluster has a Spark operator, which serves the namespace
  `shop`. Otherwise the stand-in of the sandbox is installed, by the command for Kubeflow's;
- `REDRIVE_NODE_LOST`: a command by which all containers of the node end at once, its Node is
  deleted with its pods, and the node is there again, with a new kube-proxy: that one ends with its
  Node. Otherwise these tests are skipped.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandbox import CHECKOUT, SOURCE_ROOT, builds, pulsar, spark_operator
from sandbox.kubernetes import Cluster
from sandbox.process import Processes
from sandbox.pulsar import SUPERUSER, Broker
from tests.images.conftest import Engine
from tests.images.conftest import engine as engine  # noqa: PLC0414  a fixture
from tests.support.documented import INSTALL, commands

LOAD, LOST = "REDRIVE_NODE_LOAD", "REDRIVE_NODE_LOST"
PUSH = "--quiet", "--disable-compression"
SPARK = os.environ.get("REDRIVE_NODE_SPARK", "")
SPARK_INSTALLED = SPARK == "installed"
PUBLISHED = "spark-operator --repo https://kubeflow.github.io/spark-operator"
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"
STAND_IN = Path(__file__).with_name("spark-operator.yaml")


def pytest_configure() -> None:
    if SPARK not in ("", "installed"):
        msg = f"REDRIVE_NODE_SPARK has one value, installed; got {SPARK!r}: use that, or unset it"
        raise pytest.UsageError(msg)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that need a cluster without a Spark operator if it has one."""
    out = [
        item
        for item in items
        if SPARK_INSTALLED
        and isinstance(item, pytest.Function)
        and "without_spark_operator" in item.fixturenames
    ]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in out]


class Node(Cluster):
    """The cluster of KUBECONFIG."""

    @property
    def kubeconfig(self) -> Path:
        """The kubeconfig of its administrator."""
        assert "KUBECONFIG" in os.environ, "KUBECONFIG: say which cluster to install into"
        return Path(os.environ["KUBECONFIG"])

    def evict(self, namespace: str, pod: str) -> None:
        """Evict a pod, as `kubectl drain` does."""
        metadata = {"name": pod, "namespace": namespace}
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
        self.kubectl("create", "--raw", path, "-f", "-", input=json.dumps(eviction))


@dataclass(frozen=True)
class User:
    """A user with the checkout, kubectl, helm, docker and Pulsar's tools.

    Args:
        environment: of the shell.
        folder: the root of the checkout.
    """

    environment: dict[str, str]
    folder: Path

    def paste(self, block: str) -> str:
        """Run a block of commands as written, until the first failure."""
        ran = subprocess.run(
            [shutil.which("bash") or "", "-euo", "pipefail", "-c", block],
            env=self.environment, cwd=self.folder, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        print(f"$ {block}{ran.stdout}")  # noqa: T201  the log of an installation
        assert ran.returncode == 0, f"{block}\n{ran.stdout}"
        return ran.stdout

    def follow(self, page: str, heading: str) -> str:
        """Run the commands of a page under *heading*."""
        return "".join(self.paste(block.text) for block in commands(page, heading))


def checkout(folder: Path) -> Path:
    """Copy the checkout, so that the commands do not change it."""
    passing = shutil.ignore_patterns(".git", ".*_cache", "__pycache__", ".hypothesis", "dist")
    shutil.copytree(CHECKOUT, folder, symlinks=True, ignore=passing)
    return folder


@pytest.fixture(scope="session")
def programs(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a user with the programs that the pages call."""
    assert LOAD in os.environ, f"{LOAD}: say which command loads an image into the cluster"
    folder = tmp_path_factory.mktemp("programs")
    # A push loads the image into the cluster, so no registry is needed.
    archive = folder / "image.tar"
    lines = (
        "#!/usr/bin/env bash", "set -euo pipefail", "export BUILDAH_ISOLATION=chroot",
        'case "$1" in',
        f'build) shift; exec {shlex.join([*engine.program, "build", *engine.settings])} "$@" ;;',
        f'push) {shlex.join([*engine.program, "push", *PUSH])} "$2" oci-archive:{archive}:"$2"',
        f"  {os.environ[LOAD]} {archive}; rm {archive} ;;", "*) exit 2 ;;", "esac",
    )  # fmt: skip
    (folder / "docker").write_text("\n".join(lines))
    redrive = f'PYTHONPATH={SOURCE_ROOT} exec {sys.executable} -m redrive "$@"'
    for name in ("redrive", "kubectl-redrive"):
        (folder / name).write_text(f"#!/bin/sh\n{redrive}\n")
    for program in folder.iterdir():
        program.chmod(0o755)
    folders = [folder, builds.kubernetes(), builds.helm(), builds.pulsar() / "bin"]
    return {**os.environ, "PATH": ":".join([*map(str, folders), os.environ["PATH"]])}


@pytest.fixture(scope="session")
def images(programs: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> User:
    """Build both images and load them into the cluster, by the documented commands."""
    user = User(programs, checkout(tmp_path_factory.mktemp("images") / "redrive"))
    user.follow(INSTALL, "Images")
    return user


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker on this machine, for pods to use."""
    state = tmp_path_factory.mktemp("node")
    processes = Processes(state)
    started = pulsar.launch(state, processes, address=_host())
    try:
        pulsar.wait(started, processes)
        yield started
    finally:
        processes.stop_all()


@pytest.fixture(scope="module")
def user(images: User, broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> User:
    """A user with the images in the cluster, who administers the broker."""
    folder = tmp_path_factory.mktemp("user")
    conf = folder / "client.conf"
    conf.write_text(
        f"webServiceUrl={broker.admin_url}\nbrokerServiceUrl={broker.service_url}\n"
        "authPlugin=org.apache.pulsar.client.impl.auth.AuthenticationToken\n"
        f"authParams={broker.token_file(SUPERUSER).as_uri()}\n"
    )
    pulsar_settings = {
        "PULSAR_CLIENT_CONF": str(conf),
        "PULSAR_URL": broker.service_url,
        "PULSAR_ADMIN_URL": broker.admin_url,
        "PULSAR_SECRET_KEY": broker.token_key.as_uri(),
    }
    return User({**images.environment, **pulsar_settings}, checkout(folder / "redrive"))


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Node:
    return Node(tmp_path_factory.mktemp("cluster"), 0)


@contextmanager
def spark_operator_running(node: Node, user: User) -> Iterator[None]:
    """A Spark operator in the cluster: its own, or the stand-in in a pod, which is restricted."""
    if SPARK_INSTALLED:
        yield
        return
    try:
        make_restricted(node, "spark-operator")
        install_spark_operator(user)
        yield
    finally:
        remove_spark_operator(node)


def install_spark_operator(user: User) -> str:
    """Run the documented command, with the chart of the stand-in for Kubeflow's."""
    (block,) = commands(INSTALL, "A Spark operator")
    assert PUBLISHED in block.text
    chart = write_chart_of_stand_in(user.folder / "stand-in")
    return user.paste(block.text.replace(PUBLISHED, str(chart)))


def write_chart_of_stand_in(folder: Path) -> Path:
    """Create a chart in *folder* that installs the stand-in and its CRDs."""
    program = Path(spark_operator.__file__).parent
    shutil.copytree(program, folder / "program", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("crds", "templates"):
        (folder / name).mkdir()
    shutil.copy(spark_operator.CRD, folder / "crds")
    about = "{apiVersion: v2, name: spark-operator, version: 2.5.0}\n"
    (folder / "Chart.yaml").write_text(about, "utf-8")
    files = (
        "---\napiVersion: v1\nkind: ConfigMap\n"
        "metadata: {name: program, namespace: spark-operator}\n"
        'data: {{- (.Files.Glob "program/*").AsConfig | nindent 2 }}\n'
    )
    template = folder / "templates" / STAND_IN.name
    template.write_text(STAND_IN.read_text("utf-8") + files, "utf-8")
    return folder


def remove_spark_operator(node: Node) -> None:
    """Remove the stand-in, even if it is incomplete."""
    for manifest in (spark_operator.CRD, STAND_IN):
        node.kubectl("delete", "--ignore-not-found", "--filename", str(manifest))
    node.kubectl("delete", "--ignore-not-found", "namespace", "spark-operator")


def remove_redrive(node: Node) -> None:
    """Remove the shop and then the operator, even if they are incomplete.

    In this order: objects of the shop may have finalizers that the operator removes.
    """
    for namespace in ("shop", "redrive-system"):
        node.kubectl("delete", "namespace", "--ignore-not-found", namespace)


def make_restricted(node: Node, namespace: str) -> None:
    """Create a namespace that admits pods of the restricted pod security only."""
    node.kubectl("create", "namespace", namespace)
    node.kubectl("label", "namespace", namespace, RESTRICTED)


def left_in(node: Node, namespace: str) -> set[str]:
    """Wait until *namespace* has no pod; return the remaining objects of a release of the chart."""
    node.kubectl("wait", "--for=delete", "pod", "--all", "-n", namespace, "--timeout=2m")
    kinds = "all,pdb,secrets,configmaps,serviceaccounts,roles,rolebindings,leases"
    everywhere = (
        "clusterroles,clusterrolebindings,validatingadmissionpolicies,"
        "validatingadmissionpolicybindings"
    )

    def found(kinds: str, *where: str) -> set[str]:
        return set(node.kubectl("get", kinds, "--output=name", *where).split())

    inside = found(kinds, "-n", namespace)
    labelled = found(kinds, "-A", "-l", "app.kubernetes.io/name=redrive")
    named = {name for name in found(everywhere) if namespace in name or "redrive" in name}
    # Kubernetes creates these in every namespace.
    return (inside | labelled | named) - {"configmap/kube-root-ca.crt", "serviceaccount/default"}


def _host() -> str:
    """Return the address at which pods reach this machine."""
    if host := os.environ.get("REDRIVE_NODE_HOST"):
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: chooses a route
        address: str = probe.getsockname()[0]
        return address

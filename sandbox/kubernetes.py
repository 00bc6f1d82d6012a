"""A real Kubernetes control plane: etcd, the API server with RBAC, the controller manager.

Called by `sandbox.sandbox`. There is no kubelet, so pods stay pending. The API server and its
controllers work as in production: admission, RBAC, tokens of ServiceAccounts, deletion of
namespaces, garbage collection by owner references (which detects a new kind within 30 s).
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import trustme

from sandbox import builds
from sandbox.errors import SandboxError
from sandbox.objects import Objects
from sandbox.process import FOR_GO, Processes, free_port

ETCD, API_SERVER, CONTROLLER_MANAGER = NAMES = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
)
_SERVICE_RANGE = "10.0.0.0/24"
_CONTROLLERS = (
    "clusterrole-aggregation-controller,garbage-collector-controller,namespace-controller,"
    "root-ca-certificate-publisher-controller,serviceaccount-controller"
)
_START_SECONDS = 120.0
_ESTABLISH_SECONDS = 30.0
_TOKEN_SECONDS = 8_760 * 3_600  # a sandbox may run for long, and its key is deleted with it


@dataclass(frozen=True)
class Cluster:
    """A running control plane.

    Args:
        state: the sandbox's directory.
        port: of the API server, on 127.0.0.1.
    """

    state: Path
    port: int

    @property
    def kubeconfig(self) -> Path:
        """The kubeconfig of the cluster's administrator."""
        return _folder(self.state) / "admin.kubeconfig"

    @cached_property
    def objects(self) -> Objects:
        """The objects of the cluster, with the administrator's rights."""
        return self.objects_as("")

    def objects_as(self, user: str) -> Objects:
        """The objects of the cluster, with the rights of *user*."""
        return Objects(self.kubeconfig, _folder(self.state) / "kinds.json", user)

    def kubectl(
        self,
        *args: str,
        input: str | None = None,  # noqa: A002 - as `subprocess.run` calls it
        kubeconfig: Path | None = None,
    ) -> str:
        """Return the output of ``kubectl``, called as the administrator unless *kubeconfig* is set.

        Raises:
            SandboxError: kubectl failed; the message contains its standard error.
        """
        command = [
            str(builds.kubernetes() / "kubectl"),
            f"--kubeconfig={kubeconfig or self.kubeconfig}",
            # The default is below $HOME, or below the working directory if that is not set.
            f"--cache-dir={_folder(self.state) / 'kubectl'}",
        ]
        run = subprocess.run(  # noqa: S603 - kubectl of our own building
            [*command, *args],
            input=input,
            env={**os.environ, **FOR_GO},
            check=False,
            text=True,
            capture_output=True,
        )
        if run.returncode != 0:
            raise SandboxError(
                f"kubectl {' '.join(args)} ended with {run.returncode}: {run.stderr.strip()}",
                remedy="fix the call, or see logs/kube-apiserver.log of the sandbox",
            )
        return run.stdout

    def define(self, definitions: Sequence[Mapping[str, Any]]) -> None:
        """Install CustomResourceDefinitions, and wait until they are established.

        Raises:
            SandboxError: one was refused, or not established in time.
        """
        # Not by server-side apply: it would conflict with Helm, which may have installed them.
        listed = {"apiVersion": "v1", "kind": "List", "items": definitions}
        self.kubectl("apply", "-f", "-", input=json.dumps(listed))
        self.wait_for_kinds([definition["metadata"]["name"] for definition in definitions])

    def wait_for_kinds(self, names: Sequence[str]) -> None:
        """Wait until these CustomResourceDefinitions are established.

        Raises:
            SandboxError: one was not established in time.
        """
        deadline = time.monotonic() + _ESTABLISH_SECONDS
        # Not by `kubectl wait`: it fails on a definition that has no conditions yet.
        while missing := [name for name in names if not self._is_established(name)]:
            if time.monotonic() > deadline:
                raise SandboxError(
                    f"definitions were not established in {_ESTABLISH_SECONDS:.0f} s",
                    got=", ".join(missing),
                    remedy="see logs/kube-apiserver.log of the sandbox",
                )
            time.sleep(0.1)

    def _is_established(self, name: str) -> bool:
        crd = self.objects.get("customresourcedefinition", name)
        conditions = crd.get("status", {}).get("conditions") or []
        return ("Established", "True") in [(c["type"], c["status"]) for c in conditions]

    def service_account_kubeconfig(self, namespace: str, name: str) -> Path:
        """Write and return a kubeconfig of the ServiceAccount *name* in *namespace*.

        Wait for the account: the default one is created a moment after its namespace.

        Raises:
            SandboxError: there is no such ServiceAccount.
        """
        deadline = time.monotonic() + _ESTABLISH_SECONDS
        while (token := self.objects.token(name, namespace, _TOKEN_SECONDS)) is None:
            if time.monotonic() > deadline:
                raise SandboxError(
                    "there is no such ServiceAccount", got=f"{namespace}/{name}", remedy="create it"
                )
            time.sleep(0.1)
        file = _folder(self.state) / f"{namespace}.{name}.kubeconfig"
        authority = _folder(self.state) / "ca.crt"
        _write_kubeconfig(file, self.port, authority.read_bytes(), token)
        return file


def start(state: Path, processes: Processes) -> Cluster:
    """Start a control plane with its data under *state*, and wait until it is ready.

    Raises:
        SandboxError: a process ended or did not answer in time.
    """
    kubernetes = builds.kubernetes()
    folder = _folder(state)
    folder.mkdir(mode=0o700)
    cluster = Cluster(state, free_port())
    _write_identities(folder, cluster.port)
    _start_etcd(folder, processes)
    start_api_server(cluster, processes)
    processes.start(
        CONTROLLER_MANAGER,
        [str(kubernetes / CONTROLLER_MANAGER), *_controller_manager_flags(folder)],
        env=FOR_GO,
    )
    processes.wait_until(
        CONTROLLER_MANAGER, lambda: _controllers_work(cluster), seconds=_START_SECONDS
    )
    return cluster


def start_api_server(cluster: Cluster, processes: Processes) -> None:
    """Start or restart the API server of *cluster*, and wait until it is ready.

    Raises:
        SandboxError: it ended or did not answer in time.
    """
    folder = _folder(cluster.state)
    flags = _api_server_flags(folder, cluster.port, _etcd_url(folder).read_text())
    processes.start(API_SERVER, [str(builds.kubernetes() / API_SERVER), *flags], env=FOR_GO)
    processes.wait_until(API_SERVER, lambda: _ready(cluster), seconds=_START_SECONDS)


def _start_etcd(folder: Path, processes: Processes) -> None:
    binary = str(builds.etcd() / ETCD)
    clients, peers = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    processes.start(ETCD, [
        binary, "--name=sandbox", f"--data-dir={folder / 'etcd'}", "--unsafe-no-fsync",
        "--log-level=warn", f"--listen-client-urls={clients}", f"--advertise-client-urls={clients}",
        f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}",
        f"--initial-cluster=sandbox={peers}",
        # Milliseconds. etcd refuses a write after twice this time and 5 s, by default after 7 s:
        # too soon on a busy or suspended machine.
        "--election-timeout=10000",
    ], env=FOR_GO)  # fmt: skip
    _etcd_url(folder).write_text(clients)


def _etcd_url(folder: Path) -> Path:
    return folder / "etcd.url"


def _api_server_flags(folder: Path, port: int, etcd_url: str) -> list[str]:
    return [
        f"--etcd-servers={etcd_url}",
        "--bind-address=127.0.0.1", f"--secure-port={port}",
        # By default it needs a route to other machines.
        "--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none",
        f"--tls-cert-file={folder / 'server.crt'}",
        f"--tls-private-key-file={folder / 'server.key'}",
        f"--token-auth-file={folder / 'tokens.csv'}",
        "--authorization-mode=RBAC", "--anonymous-auth=false",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={folder / 'service-accounts.key'}",
        f"--service-account-signing-key-file={folder / 'service-accounts.key'}",
        f"--service-cluster-ip-range={_SERVICE_RANGE}",
    ]  # fmt: skip


def _controller_manager_flags(folder: Path) -> list[str]:
    return [
        f"--kubeconfig={folder / 'controller-manager.kubeconfig'}",
        "--bind-address=127.0.0.1", f"--secure-port={free_port()}",
        "--leader-elect=false", f"--controllers={_CONTROLLERS}",
        "--use-service-account-credentials",
        f"--service-account-private-key-file={folder / 'service-accounts.key'}",
        f"--root-ca-file={folder / 'ca.crt'}",
    ]  # fmt: skip


def _write_identities(folder: Path, port: int) -> None:
    """Write the server's certificate, the keys, and the kubeconfigs with fixed tokens."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.crt")
    server = authority.issue_cert("127.0.0.1", "localhost", "kubernetes.default.svc")
    _write_private(folder / "server.crt", b"".join(pem.bytes() for pem in server.cert_chain_pems))
    _write_private(folder / "server.key", server.private_key_pem.bytes())
    signing = authority.issue_cert(common_name="service-accounts")
    _write_private(folder / "service-accounts.key", signing.private_key_pem.bytes())
    lines = []
    for file, user, group in (
        ("admin", "admin", "system:masters"),
        ("controller-manager", "system:kube-controller-manager", ""),
    ):
        token = secrets.token_urlsafe()
        lines.append(f"{token},{user},{user},{group}\n")
        _write_kubeconfig(folder / f"{file}.kubeconfig", port, authority.cert_pem.bytes(), token)
    _write_private(folder / "tokens.csv", "".join(lines).encode())


def _write_kubeconfig(file: Path, port: int, authority: bytes, token: str) -> None:
    cluster = {
        "server": f"https://127.0.0.1:{port}",
        "certificate-authority-data": base64.b64encode(authority).decode(),
    }
    document = {
        "apiVersion": "v1", "kind": "Config", "current-context": "sandbox",
        "clusters": [{"name": "sandbox", "cluster": cluster}],
        "users": [{"name": "sandbox", "user": {"token": token}}],
        "contexts": [{"name": "sandbox", "context": {"cluster": "sandbox", "user": "sandbox"}}],
    }  # fmt: skip
    _write_private(file, json.dumps(document, indent=1).encode())


def _write_private(file: Path, content: bytes) -> None:
    file.touch(mode=0o600)
    file.write_bytes(content)


def _ready(cluster: Cluster) -> bool:
    return _succeeds(cluster, "get", "--raw=/readyz")


def _controllers_work(cluster: Cluster) -> bool:
    """Return True if the default namespace has its ServiceAccount, created by a controller."""
    return _succeeds(cluster, "get", "serviceaccount", "default", "--namespace=default")


def _succeeds(cluster: Cluster, *args: str) -> bool:
    try:
        cluster.kubectl(*args)
    except SandboxError:
        return False
    return True


def _folder(state: Path) -> Path:
    return state / "kubernetes"

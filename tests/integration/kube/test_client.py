"""Requests to a real API server, also through a proxy by CONNECT, and to a broker through one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from redrive.admin.access import Access
from redrive.admin.client import Admin
from redrive.admin.http import Http
from redrive.kube import resources
from redrive.kube.client import Kubernetes, UnavailableError
from sandbox.pulsar import SUPERUSER, Broker
from sandbox.sandbox import Sandbox
from tests.support.http_servers import HttpProxy, http_proxy


async def test_versions_are_listed_of_built_in_and_of_custom_kinds(
    installed: Sandbox, kube_namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = {"name": "ours", "labels": dict([resources.MANAGED])}
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
    made = installed.cluster.objects.create(body, kube_namespace)["metadata"]
    monkeypatch.setenv("KUBECONFIG", str(installed.cluster.kubeconfig))
    async with Kubernetes.connect() as kubernetes:
        versions = await kubernetes.versions(resources.CONFIG_MAPS, kube_namespace)
        custom = await kubernetes.versions(resources.SPARK_APPLICATIONS, kube_namespace)
    assert versions.by_uid == {made["uid"]: int(made["resourceVersion"])}
    assert custom.by_uid == {}
    assert custom.latest >= versions.by_uid[made["uid"]]


@pytest.fixture
def proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpProxy]:
    with http_proxy(tmp_path) as proxy:
        for name in ("HTTPS_PROXY", "HTTP_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield proxy


@pytest.fixture
def addresses(installed: Sandbox, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Log entries of a proxy that both were reached through."""
    monkeypatch.setenv("KUBECONFIG", str(installed.cluster.kubeconfig))
    api_server = installed.cluster.kubectl(
        "config", "view", "-o=jsonpath={.clusters[0].cluster.server}"
    )
    return [
        f"CONNECT {urlsplit(api_server).netloc}",
        f"GET {urlsplit(broker.admin_url).netloc}/admin/v2/brokers/version",
    ]


async def ask_both(broker: Broker) -> None:
    """Read from the API server and from the broker, as the operator does."""
    async with Kubernetes.connect() as kubernetes:
        await kubernetes.list(resources.CONNECTIONS, "default")
    async with Http.open() as http:
        await Admin(http, broker.admin_url, Access.bearer(broker.token(SUPERUSER))).version()


def status(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command for people."""
    command = [sys.executable, "-m", "redrive", "status", *arguments]
    return subprocess.run(command, check=False, text=True, capture_output=True)


async def test_api_server_and_broker_are_reached_by_the_proxy(
    proxy: HttpProxy, broker: Broker, addresses: list[str]
) -> None:
    await ask_both(broker)
    proxy.wait_for(*addresses)


async def test_excluded_networks_are_reached_directly(
    proxy: HttpProxy, broker: Broker, addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "10.0.0.0/8,127.0.0.0/8,.svc")
    await ask_both(broker)
    assert status("-A").returncode == 0
    monkeypatch.delenv("NO_PROXY")
    async with Kubernetes.connect() as kubernetes:
        await kubernetes.list(resources.CONNECTIONS, "default")
    assert proxy.wait_for(addresses[0]).count("127.0.0.1") == 2  # the client and the API server


@pytest.mark.usefixtures("addresses")
async def test_refusal_of_the_proxy_is_named(
    proxy: HttpProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", f"http://bob:wrong@127.0.0.1:{proxy.port}")
    with pytest.raises(UnavailableError, match="the proxy of the environment refuses"):
        async with Kubernetes.connect() as kubernetes:
            await kubernetes.list(resources.CONNECTIONS, "default")


def test_command_logs_in_at_the_proxy(proxy: HttpProxy, addresses: list[str]) -> None:
    result = status("-A")
    assert (result.returncode, result.stderr) == (0, "")
    proxy.wait_for(addresses[0])

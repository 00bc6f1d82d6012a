"""Proxies of HTTP connections by the variables of the environment, and their refusals."""

from __future__ import annotations

import asyncio
import ssl
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from redrive.admin.access import Access
from redrive.admin.client import Admin
from redrive.admin.http import CallSlots, Endpoint, Http
from redrive.admin.proxies import proxy_for
from redrive.errors import RedriveError
from redrive.kube import informer, resources
from redrive.kube.client import Kubernetes
from redrive.kube.observability import Liveness
from redrive.kube.resources import Key
from redrive.reasons import Reason
from tests.support.reasons import raises
from tests.unit.kube.test_client import api_server, write_kubeconfig

NAMES = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY")
PROXY = "http://proxy.shop.example:3128"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.mark.parametrize(
    ("variables", "url", "proxy"),
    [
        ({}, "https://10.0.0.1", None),
        ({"HTTPS_PROXY": PROXY}, "https://10.0.0.1", PROXY),
        ({"https_proxy": PROXY}, "https://10.0.0.1", PROXY),
        ({"HTTPS_PROXY": "ann:s3cret@proxy:3128"}, "https://a", "http://ann:s3cret@proxy:3128"),
        ({"HTTPS_PROXY": PROXY}, "http://10.0.0.1:8080", None),
        ({"HTTP_PROXY": PROXY}, "http://10.0.0.1:8080", PROXY),
        ({"ALL_PROXY": PROXY}, "http://10.0.0.1:8080", PROXY),
        ({"HTTPS_PROXY": ""}, "https://10.0.0.1", None),
        ({"HTTPS_PROXY": PROXY, "NO_PROXY": "*"}, "https://10.0.0.1", None),
        ({"HTTPS_PROXY": PROXY, "NO_PROXY": "10.0.0.0/8"}, "https://10.9.9.9:6443", None),
        ({"HTTPS_PROXY": PROXY, "NO_PROXY": "10.0.0.0/8"}, "https://11.0.0.1:6443", PROXY),
        ({"HTTPS_PROXY": PROXY, "NO_PROXY": "a.b, .svc"}, "https://broker.pulsar.svc:8443", None),
        ({"HTTPS_PROXY": PROXY, "NO_PROXY": "pulsar.example"}, "https://eu.pulsar.example", None),
        ({"HTTPS_PROXY": PROXY, "NO_PROXY": "pulsar.example"}, "https://notpulsar.example", PROXY),
    ],
)
def test_proxy_of_a_url_follows_the_environment(
    variables: dict[str, str], url: str, proxy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert proxy_for(url) == proxy


@pytest.mark.parametrize(
    ("entries", "url", "excluded"),
    [
        ("fd00::/8", "https://[fd00::1]:443", True),
        ("[fd00::1]", "https://[fd00::1]:443", True),
        ("fd00::1", "https://[fd00::1]:443", True),
        ("[fd00::1]:443", "https://[fd00::1]", True),
        ("[fd00::1]:8443", "https://[fd00::1]", False),
        ("fd00::2,10.0.0.0/8", "https://[fd00::1]", False),
        ("10.0.0.1:6443", "https://10.0.0.1:6443", True),
        ("10.0.0.1:6443", "https://10.0.0.1", False),
        ("10.0.0.1/8", "https://10.9.9.9", True),
        ("0.0.0.0/0", "https://10.1.2.3", True),
        ("0.0.0.0/0", "https://[fd00::1]", False),
        ("0.0.0.0/0", "https://broker.pulsar.svc", False),
        ("*.svc", "https://kubernetes.default.svc", True),
        ("*.svc", "https://svc", False),
        (".svc", "https://svc", False),
        ("kubernetes.default.svc:443", "https://kubernetes.default.svc", True),
        ("kubernetes.default.svc:80", "http://kubernetes.default.svc", True),
        ("kubernetes.default.svc:6443", "https://kubernetes.default.svc", False),
        ("default.svc", "https://kubernetes.default.svc.:6443", True),
        ("PULSAR.example", "https://pulsar.EXAMPLE", True),
        ("x,*", "https://10.0.0.1", True),
        ("x *", "https://broker", True),
        ("*roker", "https://broker", False),
        ("broker:x", "https://broker", False),
        (",", "https://broker", False),
    ],
)
def test_excluded_hosts_are_those_of_kubectl(
    entries: str, url: str, monkeypatch: pytest.MonkeyPatch, *, excluded: bool
) -> None:
    monkeypatch.setenv("ALL_PROXY", PROXY)
    monkeypatch.setenv("NO_PROXY", entries)
    assert proxy_for(url) == (None if excluded else PROXY)
    assert proxy_for(url, "https://other") == "https://other"


@pytest.mark.parametrize(
    ("proxy", "got"),
    [
        ("socks5://ann:s3cret@proxy", "socks5://proxy"),
        ("https://ann:s3cret@proxy", "https://proxy"),
        ("ann:s3://cret@", "http://"),
        ("http://ann:s3cret@[::1", "http://[::1"),
        ("http://ann:s3cret@proxy:abc", "http://proxy:abc"),
        ("http://ann:s3#cret@proxy", "http://proxy"),
        ("http://", "http://"),
    ],
)
def test_unusable_proxy_is_refused_without_its_password(
    proxy: str, got: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    with raises(Reason.PROXY_INVALID, match="environment is not an HTTP proxy") as refused:
        proxy_for("https://10.0.0.1:6443")
    assert f"got {got!r}" in str(refused.value)
    assert "exclude 10.0.0.1 in NO_PROXY" in str(refused.value)


def test_unusable_proxy_of_a_kubeconfig_is_refused() -> None:
    with raises(Reason.PROXY_INVALID, match=r"kubeconfig is not .*; got 'http://\[::1'; set its"):
        proxy_for("https://10.0.0.1", "http://ann:s3cret@[::1")


async def list_policies(kubeconfig: Path) -> None:
    write_kubeconfig(kubeconfig, 6443, scheme="https")
    async with Kubernetes.connect() as kubernetes:
        await kubernetes.get(resources.POLICIES, Key("shop", "orders"))


async def read_version(_: Path) -> None:
    async with Http.open() as http:
        await Admin(http, "https://broker", Access()).version()


async def ask_issuer(_: Path) -> None:
    async with Http.open() as http:
        issuer = Endpoint("https://issuer", Access(), CallSlots(1))
        await http.ask_issuer("GET", issuer.url, None, issuer)


async def watch(_: Path) -> None:
    tls, server = ssl.create_default_context(), "https://10.0.0.1"
    async with informer.session(
        Liveness(), asyncio.Event(), tls=tls, headers={}, proxy=proxy_for(server)
    ) as session:
        await session.get(f"{server}/apis/replays?watch=true")


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "the proxy of the environment refuses"),
        (b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", "the proxy of the environment"),
        (b"SSH-2.0\r\n\r\n", "an answer that is not complete, valid HTTP"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "ClientConnectorError"),
    ],
    ids=["503", "407", "no HTTP", "closed"],
)
@pytest.mark.parametrize("call", [list_policies, read_version, ask_issuer, watch])
async def test_refusal_of_a_proxy_is_shown_without_its_login(
    call: Callable[[Path], Awaitable[None]],
    answer: bytes,
    got: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a `ClientConnectionError` kopf retries; other errors end the operator."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    async with api_server(answer) as port:
        monkeypatch.setenv("HTTPS_PROXY", f"http://ann:s%40cret@127.0.0.1:{port}")
        with pytest.raises((aiohttp.ClientConnectionError, RedriveError), match=got) as failed:
            await call(tmp_path / "kubeconfig")
    shown = "".join(traceback.format_exception(failed.value)) + repr(failed.value)
    assert "cret" not in shown
    assert "YW5uOnNAY3JldA" not in shown  # in base64

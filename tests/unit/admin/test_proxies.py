"""Proxies of HTTP connections by the variables of the environment."""

from __future__ import annotations

import pytest

from redrive.admin.proxies import proxy_for
from redrive.reasons import Reason
from tests.support.reasons import raises

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

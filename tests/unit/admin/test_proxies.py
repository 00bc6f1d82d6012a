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
    "proxy", ["socks5://ann:s3cret@proxy", "https://ann:s3cret@proxy", "http://"]
)
def test_unusable_proxy_is_refused_without_its_password(
    proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    with raises(Reason.PROXY_INVALID, match="not an HTTP proxy") as refused:
        proxy_for("https://10.0.0.1:6443")
    assert "s3cret" not in str(refused.value)
    assert "exclude 10.0.0.1 in NO_PROXY" in str(refused.value)

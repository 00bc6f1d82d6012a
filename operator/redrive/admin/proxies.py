"""Proxies of HTTP connections, from the environment or the kubeconfig.

One rule applies to all HTTP connections of redrive: to the Kubernetes API, brokers' admin APIs and
token issuers. The variables are those of curl and kubectl, in upper or lower case: `HTTPS_PROXY`,
`HTTP_PROXY` and `ALL_PROXY` have the address of a proxy. `NO_PROXY` excludes hosts by the rules of
kubectl, see `_excludes`. Unlike kubectl, addresses of this machine are not excluded by default. The
`proxy-url` of a kubeconfig file has priority. A `.netrc` file is never read: it would add
credentials to calls that have their own.

Connections by Pulsar's binary protocol use no proxy.
"""

from __future__ import annotations

import re
from ipaddress import ip_address, ip_network
from urllib.parse import urlsplit
from urllib.request import getproxies_environment

from redrive.reasons import Reason

_PORTS = {"http": 80, "https": 443}
_PROXY = re.compile(r"(?:(?P<scheme>[\w.+-]+)://)?(?P<login>.*@)?(?P<place>.*)", re.DOTALL)
_WITH_PORT = re.compile(r"(?P<host>\[.+\]|[^:]+):(?P<port>\d+)")


def proxy_for(url: str, configured: str | None = None) -> str | None:
    """Return the address of the proxy for *url*, with its credentials; None without a proxy.

    Args:
        url: the URL to call.
        configured: the `proxy-url` of the kubeconfig, which has priority over the environment.

    Raises:
        ProxyInvalid: it is not an HTTP proxy, or its host or port is not valid.
    """
    proxy = configured or _of_environment(url)
    if not proxy:
        return None
    parts = _PROXY.fullmatch(proxy)
    assert parts is not None  # noqa: S101  any text matches
    scheme, place = (parts["scheme"] or "http").lower(), parts["place"]
    address = f"{scheme}://{parts['login'] or ''}{place}"
    if configured:
        source, schemes = "kubeconfig", {"http", "https"}
        remedy = "set its proxy-url to http://HOST:PORT"
    else:
        source, schemes = "environment", {"http"}
        remedy = (
            "set HTTPS_PROXY, HTTP_PROXY or ALL_PROXY to http://HOST:PORT, or exclude "
            f"{urlsplit(url).hostname} in NO_PROXY"
        )
    if scheme not in schemes or not _has_host(address):
        raise Reason.PROXY_INVALID.error(
            f"the proxy of the {source} is not an HTTP proxy with a valid host and port",
            got=f"{scheme}://{place}",  # without the login
            remedy=remedy,
        )
    return address


def _of_environment(url: str) -> str | None:
    proxies = getproxies_environment()
    if not proxies:
        return None
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    port = parts.port or _PORTS.get(parts.scheme)
    entries = proxies.get("no", "").lower().replace(",", " ").split()
    if any(_excludes(entry, host, port) for entry in entries):
        return None
    return proxies.get(parts.scheme) or proxies.get("all")


def _excludes(entry: str, host: str, port: int | None) -> bool:
    """Return True if *entry* of NO_PROXY excludes *host*.

    An entry is an IP address, a network, a domain with its subdomains, `.domain` or `*.domain` for
    its subdomains alone, or `*` for all hosts. With `:port` it excludes that port alone.
    """
    if match := _WITH_PORT.fullmatch(entry):
        if int(match["port"]) != port:
            return False
        entry = match["host"]
    if entry == "*":
        return True
    try:
        return ip_address(host) in ip_network(entry.strip("[]"), strict=False)
    except ValueError:  # one of them is a name
        domain = entry.removeprefix("*") if entry.startswith("*.") else entry
        return host == domain or host.endswith(f".{domain.removeprefix('.')}")


def _has_host(address: str) -> bool:
    try:
        parts = urlsplit(address)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port, or of brackets
        return False

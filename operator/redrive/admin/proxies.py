"""Proxies of HTTP connections, from the environment.

One rule applies to all HTTP connections of redrive: to the Kubernetes API, brokers' admin APIs and
token issuers. The variables are those of curl and kubectl, in upper or lower case: `HTTPS_PROXY`,
`HTTP_PROXY` and `ALL_PROXY` have the address of a proxy. `NO_PROXY` excludes hosts, domains with
their subdomains, IPv4 addresses and IPv4 networks. The `proxy-url` of a kubeconfig file has
priority. A `.netrc` file is never read: it would add credentials to calls that have their own.

Connections by Pulsar's binary protocol use no proxy.
"""

from __future__ import annotations

from urllib.parse import urlsplit
from urllib.request import getproxies

from redrive.reasons import Reason


def proxy_for(url: str) -> str | None:
    """Return the address of the proxy for *url*, with its credentials; None without a proxy.

    Raises:
        ProxyInvalid: it is not an HTTP proxy, or has no host.
    """
    if not getproxies():
        return None
    from requests.utils import get_environ_proxies, select_proxy  # noqa: PLC0415  takes 0.2 s

    proxy = select_proxy(url, get_environ_proxies(url))
    if not proxy:
        return None
    address = proxy if "://" in proxy else f"http://{proxy}"
    parts = urlsplit(address)
    if parts.scheme != "http" or not parts.hostname:
        raise Reason.PROXY_INVALID.error(
            "the proxy of the environment is not an HTTP proxy",
            got=f"{parts.scheme}://{parts.hostname or ''}",
            remedy="set HTTPS_PROXY, HTTP_PROXY or ALL_PROXY to http://HOST:PORT, or exclude "
            f"{urlsplit(url).hostname} in NO_PROXY",
        )
    return address

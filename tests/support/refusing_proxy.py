"""Plugin of proxy.py that refuses connections while a file exists."""

from __future__ import annotations

import os
from pathlib import Path

from proxy.http.exception import HttpRequestRejected
from proxy.http.parser import HttpParser
from proxy.http.proxy import HttpProxyBasePlugin

REFUSES = "PROXY_REFUSES"
"""Environment variable with the path of the file."""


class Refusing(HttpProxyBasePlugin):
    """Answers 503 while the file exists."""

    def before_upstream_connection(self, request: HttpParser) -> HttpParser | None:
        """Refuse the connection, or let it pass."""
        if Path(os.environ[REFUSES]).exists():
            raise HttpRequestRejected(status_code=503, reason=b"Service Unavailable")
        return request

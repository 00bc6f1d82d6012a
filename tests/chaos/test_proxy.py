from __future__ import annotations

import gc
import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psutil
import pytest

from tests.chaos.proxy import Proxy, hanging, passing


class Target(BaseHTTPRequestHandler):
    """Answers, and keeps the connection."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@contextmanager
def target() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Target)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def sockets(*ports: int) -> list[Any]:
    """Return the sockets of this process with one of *ports*, except the target's own."""
    return [
        connection
        for connection in psutil.Process().net_connections("tcp")
        if connection.laddr.port == ports[0]
        or (connection.raddr and connection.raddr.port in ports)
    ]


@pytest.mark.parametrize("fault", [passing, hanging])
def test_a_proxy_that_ends_leaves_no_socket_open(fault: object) -> None:
    with target() as port:
        with Proxy.before(f"http://127.0.0.1:{port}") as proxy:
            client = http.client.HTTPConnection("127.0.0.1", int(proxy.url.rsplit(":", 1)[1]))
            client.request("GET", "/first")
            assert client.getresponse().read() == b""
            with proxy.trap("", 1, fault) as trap:  # type: ignore[arg-type]
                client.request("GET", "/second")
                assert trap.sprung.wait(10)
            own = int(proxy.url.rsplit(":", 1)[1])
            assert sockets(own, port)
        client.close()
        assert sockets(own, port) == []


def test_ending_proxy_leaves_no_socket_open_to_new_clients() -> None:
    def knock(port: int) -> None:
        with suppress(OSError):  # it has ended
            while True:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()

    for _ in range(20):
        with Proxy.before("http://127.0.0.1:1") as proxy:
            own = int(proxy.url.rsplit(":", 1)[1])
            client = threading.Thread(target=knock, args=(own,))
            client.start()
        client.join()
        assert [connection for connection in sockets(own) if connection.status != "TIME_WAIT"] == []
        gc.collect()  # an open socket warns here

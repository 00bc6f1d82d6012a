"""The operator's own HTTP endpoint: `/metrics`, `/livez` and `/readyz`.

Served by threads, so that it answers even while the event loop hangs. It shows no secret and needs
no authentication: bind it where only the kubelet and Prometheus can reach it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from redrive.errors import RedriveError
from redrive.kube.liveness import Liveness

IDLE_SECONDS = 10.0
"""How long a client may leave its connection idle."""

_StartResponse = Callable[..., Any]
_App = Callable[[dict[str, Any], _StartResponse], Iterable[bytes]]


class EndpointError(RedriveError):
    """The endpoint can't be served at the given address."""

    reason = "EndpointUnavailable"


@contextmanager
def serving(address: str, port: int, health: Liveness) -> Iterator[int]:
    """Serve while the block runs; yield the port.

    Args:
        address: of this machine, on which to listen; `0.0.0.0` is all of IPv4.
        port: 0 takes a free one.
        health: what the probes show.

    Raises:
        EndpointError: the address is not one of this machine, or the port is taken.
    """
    try:
        server = make_server(
            address, port, _app(health), server_class=ThreadingWSGIServer, handler_class=Handler
        )
    except OSError as error:
        raise EndpointError(
            f"metrics and probes can't be served: {error.strerror}",
            got=f"{address}:{port}",
            remedy="choose another --listen",
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="endpoint", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Handler(WSGIRequestHandler):
    """Handles a connection in a thread of its own, which an idle client does not keep."""

    timeout = IDLE_SECONDS

    def handle(self) -> None:
        """Answer the request, if one comes in time."""
        with suppress(TimeoutError, ConnectionError):
            super().handle()

    def log_message(self, *_: object) -> None:
        """Log nothing: the kubelet and Prometheus send requests all the time."""


def _app(health: Liveness) -> _App:
    metrics: _App = make_wsgi_app()

    def livez() -> tuple[str, str]:
        text = [
            f"{part}: last active {silence:.0f} s ago"
            for part, silence in health.silent_for().items()
        ]
        return ("503 Stalled" if health.has_stalled() else "200 OK", "\n".join(sorted(text)))

    def readyz() -> tuple[str, str]:
        return ("200 OK", "ready") if health.ready else ("503 Starting", "starting")

    probes = {"/livez": livez, "/readyz": readyz}

    def app(environ: dict[str, Any], start_response: _StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            return metrics(environ, start_response)
        status, text = probes[path]() if path in probes else ("404 Not Found", "no such page")
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{text}\n".encode()]

    return app

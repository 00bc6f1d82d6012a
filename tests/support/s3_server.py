"""A server with the API of S3, as a process on a free port."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from sandbox import process, toolchain, versions
from tests.support.waiting import wait_until


@contextmanager
def s3_server() -> Iterator[str]:
    """Start a server; yield its URL."""
    program = toolchain.python_environment(versions.MOTO_LOCK) / "bin" / "moto_server"
    port = process.free_port()
    command = [str(program), "--host=127.0.0.1", f"--port={port}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:

        def serves() -> bool:
            assert server.poll() is None
            with socket.socket() as client:
                return client.connect_ex(("127.0.0.1", port)) == 0

        try:
            wait_until(serves)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()

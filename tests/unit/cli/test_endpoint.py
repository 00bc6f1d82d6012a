"""Over real sockets, as the kubelet and Prometheus ask."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from redrive.cli.operator import IDLE_SECONDS, EndpointError, Handler, serving_endpoint
from redrive.kube.observability import STALL_SECONDS, Liveness


class Clock:
    """Seconds that pass when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Liveness:
    return Liveness(clock)


@pytest.fixture
def port(health: Liveness) -> Iterator[int]:
    with serving_endpoint("127.0.0.1", 0, health) as port:
        yield port


def get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_it_is_ready_once_somebody_says_so(port: int, health: Liveness) -> None:
    assert get(port, "/readyz") == (503, "starting\n")
    health.ready = True
    assert get(port, "/readyz") == (200, "ready\n")


def test_it_lives_until_a_part_has_stalled_and_says_which(
    port: int, health: Liveness, clock: Clock
) -> None:
    health.beat("watch of x")
    health.beat("event loop")
    assert get(port, "/livez") == (
        200,
        "event loop: last active 0 s ago\nwatch of x: last active 0 s ago\n",
    )
    clock.now = STALL_SECONDS + 1
    health.beat("event loop")
    assert get(port, "/livez") == (
        503,
        "event loop: last active 0 s ago\nwatch of x: last active 61 s ago\n",
    )


def test_who_connects_and_says_nothing_is_hung_up_on(
    port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert Handler.timeout == IDLE_SECONDS
    monkeypatch.setattr(Handler, "timeout", 0.05)
    for said in (b"", b"GET /livez HTTP/1.1\r\nHost: "):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as silent:
            silent.sendall(said)
            assert silent.recv(1) == b""
    assert capfd.readouterr() == ("", "")


async def test_it_answers_while_the_event_loop_hangs(port: int) -> None:
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(get, port, "/readyz")
        assert asked.result(timeout=10) == (503, "starting\n")  # waiting for it hangs the loop


def test_it_shows_metrics_and_nothing_else(port: int) -> None:
    status, shown = get(port, "/metrics")
    assert status == 200
    assert "# TYPE redrive_admin_calls_total counter" in shown
    assert get(port, "/") == (404, "no such page\n")


def test_a_port_that_is_taken_is_refused_with_the_remedy(port: int) -> None:
    with (
        pytest.raises(EndpointError, match=rf"in use; got '127\.0\.0\.1:{port}'; choose another"),
        serving_endpoint("127.0.0.1", port, Liveness()),
    ):
        pass

"""The parts of the sandbox as fixtures.

A test that asks for `sandbox`, `broker` or `cluster` gets the one sandbox of the session, started
when the first test asks for it. If it does not start, the tests that need it fail. With xdist each
worker is a session with a sandbox of its own.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import psutil
import pytest
from hypothesis import HealthCheck, settings

from sandbox import installation, versions
from sandbox.kubernetes import Cluster
from sandbox.pulsar import Broker
from sandbox.sandbox import Sandbox

# Next to a broker that is starting, an example takes as long as it takes. The same tree gives the
# same examples, so that a run says something of a change; --hypothesis-profile=explore has others.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("redrive", settings.get_profile("explore"), derandomize=True)
settings.load_profile("redrive")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sandbox",
        type=Path,
        metavar="STATE_DIR",
        help="use the sandbox that runs with this state directory instead of starting one",
    )

    parser.addoption(
        "--minutes", type=float, help="how long benchmarks of long runs, and the soak, run"
    )
    parser.addoption(
        "--pulsar",
        choices=versions.PULSARS,
        default=versions.PULSAR,
        help="the release that a sandbox started for this run has for its broker",
    )
    parser.addoption(
        "--full-jit", action="store_true", help="have that broker compile as a server does"
    )


def pytest_configure() -> None:
    def terminate(_signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pytest.exit("terminated", returncode=128 + signal.SIGTERM)

    # So that a sandbox is stopped when a CI system or `timeout` ends the run.
    signal.signal(signal.SIGTERM, terminate)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Stop sandboxes undisturbed; those of workers too, which xdist kills after an interruption."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if session.config.pluginmanager.hasplugin("dsession"):
        workers = psutil.Process().children()
        deadline = time.monotonic() + 180
        while workers and time.monotonic() < deadline:
            # One at work ends its session at this, one that has ended its session ends.
            _, workers = psutil.wait_procs(workers, timeout=1)
            for worker in workers:
                worker.terminate()


def pytest_unconfigure() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture(scope="session")
def sandbox(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sandbox]:
    running: Path | None = request.config.getoption("--sandbox")
    if running is not None:
        attached = Sandbox.attach(running)
        yield attached
        attached.processes.leave()  # what a test started anew runs on as it was found
        return
    version: str = request.config.getoption("--pulsar")
    full_jit: bool = request.config.getoption("--full-jit")
    state = tmp_path_factory.mktemp("sandbox")
    with Sandbox.start(state, version, full_jit=full_jit) as started:
        yield started


@pytest.fixture(scope="session")
def installed(sandbox: Sandbox) -> Iterator[Sandbox]:
    """The sandbox with redrive and the stand-in for the Spark operator running in it.

    What it starts in a sandbox that outlives the tests is stopped with them.
    """
    processes = sandbox.processes
    before = processes.names()
    try:
        if not processes.alive(installation.OPERATOR):
            installation.install(sandbox)
        yield sandbox
    finally:
        for name in reversed(processes.names()):
            if name not in before:
                processes.stop(name)


@pytest.fixture(scope="session")
def broker(sandbox: Sandbox) -> Broker:
    return sandbox.pulsar


@pytest.fixture(scope="session")
def cluster(sandbox: Sandbox) -> Cluster:
    return sandbox.cluster


@pytest.fixture
def kube_namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace of this test's own; its deletion is not waited for."""
    name = f"t-{secrets.token_hex(4)}"
    cluster.objects.create_namespace(name)
    yield name
    cluster.objects.delete("namespace", name)


@pytest.fixture
def pulsar_namespace(broker: Broker) -> str:
    """``tenant/namespace`` of this test's own."""
    tenant = f"t-{secrets.token_hex(4)}"
    broker.create_namespace(tenant, "test")
    return f"{tenant}/test"

"""The components of the sandbox as fixtures.

All workers of a run share one sandbox, started by the first test that needs it. Modules that stop,
replace or reconfigure a part of it are marked `xdist_group("own sandbox")`, and named `e2e_*.py`:
one worker of `make e2e` runs them in a second sandbox. Modules that need an API server without an
operator are marked `xdist_group("control plane")`. The components of one group are stopped after
its last test: an unused broker or API server takes three per cent of a processor. Tests fail if
their sandbox does not start.
"""

from __future__ import annotations

import gc
import json
import re
import secrets
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from urllib.parse import quote

import psutil
import pytest
from filelock import FileLock
from hypothesis import HealthCheck, Phase, settings
from xdist.remote import Producer
from xdist.scheduler import LoadGroupScheduling

from sandbox import installation, kubernetes, versions
from sandbox import rocketmq as rocketmq_cluster
from sandbox.kubernetes import Cluster
from sandbox.process import Processes
from sandbox.pulsar import Broker
from sandbox.rocketmq import RocketMQ
from sandbox.sandbox import Sandbox, is_described
from tests.support.namespaces import PolicyNamespace, new_namespace

# While a broker starts, the time of an example is unlimited. The same tree gives the
# same examples, so runs can be compared; `make release-check` has more, and others.
settings.register_profile(
    "explore", max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "redrive", settings.get_profile("explore"), derandomize=True, max_examples=50
)
# For `make mutants`: no time is spent on making a failing example small.
settings.register_profile(
    "mutants",
    settings.get_profile("redrive"),
    phases=[Phase.explicit, Phase.generate],
    report_multiple_bugs=False,
)
settings.load_profile("redrive")

BEFORE = pytest.StashKey[list[str]]()
"""The processes of a sandbox of `--sandbox` that ran before the tests."""
STARTED = pytest.StashKey[Counter[str]]()
"""The processes that the run started, by name."""
STACKS = pytest.StashKey[defaultdict[str, ExitStack]]()
"""Stacks of resources that the tests of a group share; see `stack_of_group`."""


def tier_seconds(reports: Iterable[pytest.TestReport]) -> dict[str, float]:
    """Sum the seconds of setup, call and teardown by tier: the first folder below `tests`."""
    seconds = defaultdict[str, float](float)
    for report in reports:
        seconds[report.nodeid.split("/")[1]] += report.duration
    return seconds


def started_processes(folder: Path) -> Counter[str]:
    """Count the processes of all sandboxes below *folder* by name: each has a log."""
    logs = (log.stem for log in folder.rglob("logs/*.log"))
    return Counter(name for name in logs if not re.match("pulsar[-_]", name))  # Pulsar's own


def write_summary(terminal: pytest.TerminalReporter, started: Counter[str]) -> None:
    """Write two lines of the tiers and the processes, most expensive first."""
    reports = (
        report
        for group in terminal.stats.values()
        for report in group
        if isinstance(report, pytest.TestReport)
    )
    tiers = sorted(tier_seconds(reports).items(), key=lambda tier: -tier[1])
    shown = ", ".join(f"{tier} {seconds / 60:.1f} min" for tier, seconds in tiers)
    terminal.write_line(f"Time of the workers: {shown}")
    shown = ", ".join(f"{count} {name}" for name, count in started.most_common()) or "none"
    terminal.write_line(f"Processes started: {shown}")


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


OWN_SANDBOX = "own sandbox"
"""The group of modules that may stop or change the sandbox; see the top of this file."""
CONTROL_PLANE = "control plane"
"""The group of modules that need an API server without an operator."""
ROCKETMQ = "rocketmq"
"""The group of modules that need a RocketMQ: one worker starts one."""
SECURITY_MODEL = Path(__file__).parents[1] / "docs/explanation/security-model.md"
NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py::test_\w+)`")


class GroupScheduling(LoadGroupScheduling):  # type: ignore[misc]  # it has no types
    """Scheduling by group, or by file for tests without a group: they share fixtures."""

    def _split_scope(self, nodeid: str) -> str:
        return str(super()._split_scope(nodeid)).split("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GroupScheduling:
    return GroupScheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the groups first, one by one: they are long, and no worker is idle at the end.

    Mark the tests that the security model names.
    """
    named = set(NAMED_TEST.findall(SECURITY_MODEL.read_text("utf-8")))
    for item in items:
        if re.split(r"[@\[]", item.nodeid)[0] in named:  # without parameters and group
            item.add_marker("attack")
    items.sort(key=lambda item: (group_of(item) is None, group_of(item) or ""))


def group_of(item: pytest.Item | None) -> str | None:
    mark = None if item is None else item.get_closest_marker("xdist_group")
    return None if mark is None else str(mark.args[0])


def stack_of_group(request: pytest.FixtureRequest, group: str) -> ExitStack:
    """Return a stack that is closed after the last test of *group*, else with the session."""
    stack = request.config.stash[STACKS][group]
    request.addfinalizer(stack.close)
    return stack


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    yield
    group = group_of(item)
    if group is not None and group != group_of(nextitem):
        item.config.stash[STACKS][group].close()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STACKS] = defaultdict[str, ExitStack](ExitStack)

    def terminate(_signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pytest.exit("terminated", returncode=128 + signal.SIGTERM)

    # So that a sandbox is stopped when a CI system or `timeout` ends the run.
    signal.signal(signal.SIGTERM, terminate)
    if not hasattr(config, "workerinput"):
        running: Path | None = config.getoption("--sandbox")
        config.stash[BEFORE] = [] if running is None else Processes(running).names()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None]:
    """Collect all tests without the garbage collector, which would search them again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Stop all sandboxes without interruption, including those of workers that xdist kills."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if hasattr(session.config, "workerinput"):
        return
    if session.config.pluginmanager.hasplugin("dsession"):
        workers = psutil.Process().children()
        deadline = time.monotonic() + 180
        while workers and time.monotonic() < deadline:
            # A working process ends its session now; one that has ended its session exits.
            _, workers = psutil.wait_procs(workers, timeout=1)
            for worker in workers:
                worker.terminate()
    session.config.stash[STARTED] = started_processes(run_folder(session.config))
    processes = Processes(shared_state(session.config))
    for name in reversed(processes.names()):
        if name not in session.config.stash[BEFORE]:
            processes.stop(name)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if not hasattr(config, "workerinput"):
        write_summary(terminalreporter, config.stash[STARTED])


def pytest_unconfigure() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def shared_state(config: pytest.Config) -> Path:
    """Return the state directory of the sandbox that all workers share."""
    running: Path | None = config.getoption("--sandbox")
    if running is not None:
        return running
    return run_folder(config) / "sandbox"


def run_folder(config: pytest.Config) -> Path:
    """Return the temporary folder of the run, in which those of its workers are."""
    factory: pytest.TempPathFactory = config._tmp_path_factory  # type: ignore[attr-defined]  # noqa: SLF001 - hooks have no fixtures
    folder = factory.getbasetemp()
    return folder.parent if hasattr(config, "workerinput") else folder


@pytest.fixture(scope="session")
def shared_sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """The sandbox of the run, started by the first worker that needs it; see the top."""
    state = shared_state(request.config)
    with FileLock(state.with_name(f"{state.name}.lock")):
        if not is_described(state):
            version: str = request.config.getoption("--pulsar")
            full_jit: bool = request.config.getoption("--full-jit")
            started = Sandbox.start(state, version, full_jit=full_jit)
            started.processes.leave()  # stopped at the end, after all workers
    attached = Sandbox.attach(state)
    yield attached
    attached.processes.leave()


@pytest.fixture(scope="session")
def own_sandbox(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Sandbox:
    """A sandbox with redrive for the group of this name only."""
    state = tmp_path_factory.mktemp("own") / "sandbox"
    started = installation.start(state, request.config.getoption("--pulsar"))
    return stack_of_group(request, OWN_SANDBOX).enter_context(started)


@pytest.fixture(scope="session")
def control_plane(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Cluster:
    """An API server without a broker, for the group of this name only; no operator serves it."""
    state = tmp_path_factory.mktemp("control-plane")
    processes = Processes(state)
    stack_of_group(request, CONTROL_PLANE).callback(processes.stop_all)
    return kubernetes.start(state, processes)


@pytest.fixture(scope="session")
def rocketmq(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RocketMQ:
    """A RocketMQ with one master, for the group of this name only."""
    state = tmp_path_factory.mktemp("rocketmq")
    processes = Processes(state)
    stack_of_group(request, ROCKETMQ).callback(processes.kill_all)
    return rocketmq_cluster.start(state, processes)


@pytest.fixture(scope="module")
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    is_own = group_of(request.node) == OWN_SANDBOX
    running: Sandbox = request.getfixturevalue("own_sandbox" if is_own else "shared_sandbox")
    return running


@pytest.fixture(scope="module")
def installed(sandbox: Sandbox) -> Sandbox:
    """The sandbox with running redrive and Spark operator stand-in."""
    with FileLock(sandbox.state / "installation.lock"):
        if not sandbox.processes.alive(installation.OPERATOR):
            installation.install(sandbox)
    return sandbox


@pytest.fixture(scope="module")
def broker(sandbox: Sandbox) -> Broker:
    return sandbox.pulsar


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Cluster:
    if group_of(request.node) == CONTROL_PLANE:
        alone: Cluster = request.getfixturevalue("control_plane")
        return alone
    running: Sandbox = request.getfixturevalue("sandbox")
    return running.cluster


@pytest.fixture
def kube_namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace for one test, deleted without waiting."""
    with new_namespace(cluster) as name:
        yield name


@pytest.fixture(scope="module")
def shared_namespace(broker: Broker) -> str:
    """``tenant/namespace`` for tests of one module whose topics have names of their own.

    A new namespace costs the broker as much as the topics of four tests.
    """
    tenant = f"t-{secrets.token_hex(4)}"
    broker.create_namespace(tenant, "test")
    return f"{tenant}/test"


def unload(broker: Broker, namespace: str, topic: str) -> None:
    path = f"/admin/v2/persistent/{namespace}/{quote(topic, safe='')}"
    broker.request("PUT", f"{path}/unload")


@pytest.fixture
def policy_namespace(request: pytest.FixtureRequest, broker: Broker) -> Iterator[PolicyNamespace]:
    """The namespace for the policies of one test: that of its module, with names of their own.

    A test that changes its namespace, or names other topics in it, uses the fixture
    `pulsar_namespace`, which is this one then.
    """
    if "pulsar_namespace" in request.fixturenames:
        yield PolicyNamespace(request.getfixturevalue("pulsar_namespace"), "")
        return
    shared = request.getfixturevalue("shared_namespace")
    namespace = PolicyNamespace(shared, f"-{secrets.token_hex(3)}")
    yield namespace
    for topic in namespace.topics:  # like those of `pulsar_namespace`
        unload(broker, shared, topic.local)


@pytest.fixture
def pulsar_namespace(broker: Broker) -> Iterator[str]:
    """``tenant/namespace`` for one test, whose topics are unloaded after it.

    The first topic of each namespace makes the broker apply the policies of all loaded topics, so
    that the cost of a test would grow with the number of tests before it. The system topics stay:
    an unload of their bundle sometimes makes the broker close its connection to all of them.
    """
    tenant = f"t-{secrets.token_hex(4)}"
    broker.create_namespace(tenant, "test")
    yield f"{tenant}/test"
    for topic in json.loads(broker.request("GET", f"/admin/v2/persistent/{tenant}/test").body):
        unload(broker, f"{tenant}/test", topic.rpartition("/")[2])

"""Operator process from start to SIGTERM, its endpoint, and the tests of a release.

`tests/integration/chart` runs the tests of a release at an API server.
"""

from __future__ import annotations

import asyncio
import http.client
import secrets
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import trustme
from aiohttp import web
from aiohttp.test_utils import RawTestServer

import redrive
from redrive.cli import release_test
from redrive.cli.operator import IDLE_SECONDS, Handler, serving_endpoint
from redrive.cli.release_test import check_endpoint, rights
from redrive.kube import leader_election, resources
from redrive.kube.observability import STALL_SECONDS, Liveness
from redrive.kube.resources import Resource
from tests.support.forked_operator import OperatorProcess
from tests.support.http_servers import http_proxy
from tests.support.reasons import raises
from tests.support.waiting import wait_until
from tests.unit.kube.test_client import write_kubeconfig

UNUSED_UID = 65532
"""The user id of a pod of the chart; no image has an entry for it in /etc/passwd."""
BECOME_UNUSED_USER = f"""
import os, pwd
if os.geteuid() == 0:
    os.setresuid({UNUSED_UID}, 0, 0)  # files are still those that root may read
else:  # only root can become another user: hide the entry instead
    pwd.getpwuid = dict().__getitem__
"""
LOOK_AGAIN_SOON = """
from redrive.kube import informer
informer.RELIST_SECONDS = informer.KINDS_SECONDS = 0.2
"""
CLOSE_INACTIVE_WATCHES_SOON = """
from redrive.kube import informer
informer.INACTIVITY_SECONDS = 0.2
"""
WHEN_KOPF_SAYS = """
import logging, os, signal

class Listener(logging.Handler):
    def emit(self, record):
        if record.getMessage().startswith({!r}):
            {}

running = logging.getLogger("kopf._core.reactor.running")
running.setLevel("DEBUG")
running.addHandler(Listener())
"""
EXIT_IF_ANYTHING_HANGS = WHEN_KOPF_SAYS.format("Hung tasks are", "os._exit(1)")
SIGNAL_WHILE_IT_LOADS_AGAIN = WHEN_KOPF_SAYS.format(
    "Stop-flag is set", "os.kill(os.getpid(), signal.SIGTERM)"
)
WATCHED = (
    resources.CONNECTIONS,
    resources.POLICIES,
    resources.ROCKETMQ_POLICIES,
    resources.REPLAYS,
    resources.INSPECTIONS,
    resources.JOBS,
    resources.SPARK_APPLICATIONS,
    resources.CONFIG_MAPS,
)
APACHE = resources.APACHE_SPARK_APPLICATIONS
NAMESPACES = Resource("", "v1", "namespaces", "Namespace")
CRDS = Resource(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition"
)


class ApiServer:
    """Has no objects; watches show nothing until the client goes."""

    def __init__(self) -> None:
        self.forbidden = ""
        self.refused: set[str] = set()
        self.missing = ""
        self.objects: dict[str, list[dict[str, Any]]] = {}
        self.version = 1
        self.watched = asyncio.Queue[web.BaseRequest]()
        self.missed = asyncio.Queue[web.BaseRequest]()
        self.listed = asyncio.Queue[str]()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer any request."""
        if self.forbidden and self.forbidden in request.path:
            self.refused.add(request.path)
            return web.json_response({"kind": "Status", "message": "no"}, status=403)
        if self.missing and self.missing in request.path:
            self.missed.put_nowait(request)
            return web.json_response({"kind": "Status", "message": "none"}, status=404)
        if request.query.get("watch") != "true":
            self.listed.put_nowait(request.path)
            items = self.objects.get(request.path, [])
            listing = {"items": items, "metadata": {"resourceVersion": str(self.version)}}
            return web.json_response(_discovery(self.missing).get(request.path, listing))
        self.watched.put_nowait(request)
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.Event().wait()
        return response

    async def until_missed(self, path: str) -> None:
        """Wait until a watch of the missing kind was refused."""
        request = await self.missed.get()
        while request.path != path or request.query.get("watch") != "true":
            request = await self.missed.get()

    async def until_listed(self, path: str, times: int) -> None:
        """Wait until *path* was listed so many times more."""
        while not self.listed.empty():
            self.listed.get_nowait()
        for _ in range(times):
            while await self.listed.get() != path:
                pass

    async def until_watched(self, *paths: str) -> dict[str, str]:
        """Wait until watches of all these began; return the label selector of each."""
        selectors: dict[str, str] = {}
        while not selectors.keys() >= set(paths):
            request = await self.watched.get()
            selectors[request.path] = request.query.get("labelSelector", "")
        return {path: selectors[path] for path in paths}


@asynccontextmanager
async def operator(
    api: ApiServer,
    folder: Path,
    *arguments: str,
    before: str = "",
    code: int | None = 0,
    authority: trustme.CA | None = None,
) -> AsyncIterator[OperatorProcess]:
    """Run the operator while the block runs, then stop it as a kubelet does.

    Args:
        before: code that its process runs first.
        code: the exit code that it must have; None for any.
        authority: signs the certificate of the API server; None for HTTP.
    """
    tls = None
    if authority is not None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(tls)
    server = RawTestServer(api.answer)
    await server.start_server(ssl=tls)
    kubeconfig, log = folder / "kubeconfig", folder / f"{secrets.token_hex(4)}.log"
    # Container runtimes set this HOME for a user without an entry.
    environment = {"HOME": "/", "KUBECONFIG": str(kubeconfig)}
    arguments = ("--cluster-id=here", "--replay-template=redrive/replay", *arguments)
    async with asyncio.timeout(180), server:
        write_kubeconfig(kubeconfig, server.port or 0, server.scheme, authority)
        process = OperatorProcess(arguments, before, environment, log)
        try:
            yield process
            process.send_signal(signal.SIGTERM)
            await process.wait()
            assert code in {None, process.returncode}
        finally:
            process.send_signal(signal.SIGKILL)
            await process.wait()
            sys.stderr.write(log.read_text() if log.exists() else "")


def logged(folder: Path) -> str:
    """Return the output of the operators of *folder*."""
    return "".join(log.read_text("utf-8") for log in folder.glob("*.log"))


def _discovery(missing: str) -> dict[str, dict[str, Any]]:
    """Discovery documents of an API server, by path; one group may be *missing*."""
    paths: dict[str, dict[str, Any]] = {"/api": {"versions": ["v1"]}, "/apis": {"groups": []}}
    for kind in (*WATCHED, APACHE, NAMESPACES, CRDS):
        if missing and kind.group == missing:
            continue
        root = f"/apis/{kind.api_version}" if kind.group else "/api/v1"
        if root not in paths and kind.group:
            version = {"version": kind.version}
            paths["/apis"]["groups"].append(
                {"name": kind.group, "preferredVersion": version, "versions": [version]}
            )
        paths.setdefault(root, {"resources": []})["resources"].append(
            {
                "name": kind.plural,
                "kind": kind.kind,
                "singularName": kind.kind.lower(),
                "namespaced": kind not in {NAMESPACES, CRDS},
                "verbs": ["list", "watch", "patch"],
            }
        )
    return paths


async def test_operator_as_unknown_user_watches_and_ends_cleanly(tmp_path: Path) -> None:
    api = ApiServer()
    async with operator(api, tmp_path, before=BECOME_UNUSED_USER + EXIT_IF_ANYTHING_HANGS):
        selectors = await api.until_watched(*(kind.path() for kind in WATCHED))
    ours = "app.kubernetes.io/managed-by=redrive"
    for kind in (resources.CONFIG_MAPS, resources.JOBS, resources.SPARK_APPLICATIONS):
        assert selectors.pop(kind.path()) == ours
    assert set(selectors.values()) == {""}


async def test_hung_watch_is_restarted(tmp_path: Path) -> None:
    api = ApiServer()
    async with operator(api, tmp_path, before=CLOSE_INACTIVE_WATCHES_SOON):
        for _ in range(3):
            await api.until_watched(*(kind.path() for kind in WATCHED))


async def test_forbidden_namespace_is_retried_and_blocks_no_other(
    tmp_path: Path,
) -> None:
    api = ApiServer()
    api.forbidden = "/namespaces/gone/"
    async with operator(api, tmp_path, "--namespace=gone", "--namespace=shop"):
        await api.until_watched(*(kind.path("shop") for kind in WATCHED))
        assert api.refused == {kind.path("gone") for kind in WATCHED}
        api.forbidden = ""
        await api.until_watched(*(kind.path("gone") for kind in WATCHED))


@pytest.mark.parametrize(
    ("kind", "launchers"),
    [(resources.SPARK_APPLICATIONS, ()), (APACHE, ("Kubeflow", "Apache"))],
    ids=["default", "second"],
)
async def test_spark_applications_are_watched_once_installed(
    tmp_path: Path, kind: Resource, launchers: tuple[str, ...]
) -> None:
    api = ApiServer()
    api.missing = kind.group
    others = [other for other in WATCHED if other != kind]
    arguments = [f"--replay-launcher={launcher}" for launcher in launchers]
    async with operator(api, tmp_path, *arguments, before=LOOK_AGAIN_SOON):
        await api.until_watched(*(other.path() for other in others))
        assert api.watched.empty()
        api.missing = ""
        selectors = await api.until_watched(*(other.path() for other in {*WATCHED, kind}))
    assert selectors[kind.path()] == "app.kubernetes.io/managed-by=redrive"


async def test_spark_applications_are_watched_again_once_reinstalled(tmp_path: Path) -> None:
    api = ApiServer()
    async with operator(api, tmp_path, before=CLOSE_INACTIVE_WATCHES_SOON + LOOK_AGAIN_SOON):
        await api.until_watched(*(kind.path() for kind in WATCHED))
        api.missing = resources.SPARK_APPLICATIONS.group
        await api.until_missed(resources.SPARK_APPLICATIONS.path())
        api.missing = ""
        await api.until_watched(*(kind.path() for kind in WATCHED))


async def test_sigterm_during_reload_is_not_lost(tmp_path: Path) -> None:
    api = ApiServer()
    api.missing = resources.SPARK_APPLICATIONS.group
    before = SIGNAL_WHILE_IT_LOADS_AGAIN + LOOK_AGAIN_SOON
    async with operator(api, tmp_path, before=before) as process:
        await api.until_watched(resources.POLICIES.path())
        api.missing = ""
        assert await process.wait() == 0


async def test_etcd_restore_relists_and_rewatches_all_kinds(tmp_path: Path) -> None:
    api = ApiServer()
    path = resources.CONFIG_MAPS.path()
    metadata = {"namespace": "n", "name": "a", "uid": "1", "resourceVersion": "900"}
    api.objects, api.version = {path: [{"metadata": metadata}]}, 1000
    async with operator(api, tmp_path, before=LOOK_AGAIN_SOON):
        await api.until_watched(*(kind.path() for kind in WATCHED))
        await api.until_listed(path, 3)
        assert api.watched.empty()
        api.objects[path] = [{"metadata": metadata | {"resourceVersion": "700"}}]
        api.version = 800
        await api.until_watched(*(kind.path() for kind in WATCHED))
        await api.until_listed(path, 3)
        assert api.watched.empty()


class Clock:
    """Seconds that a test advances."""

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


def test_readyz_is_503_until_the_operator_is_ready(port: int, health: Liveness) -> None:
    assert get(port, "/readyz") == (503, "starting\n")
    health.ready = True
    assert get(port, "/readyz") == (200, "ready\n")


def test_livez_is_503_with_the_stalled_part(port: int, health: Liveness, clock: Clock) -> None:
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


def test_endpoint_serves_ipv6(health: Liveness) -> None:
    """Such a socket takes connections of IPv4 too, so this needs no address of IPv6."""
    with serving_endpoint("::", 0, health) as port:
        assert get(port, "/readyz") == (503, "starting\n")


def test_idle_connection_to_endpoint_is_closed(
    port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert Handler.timeout == IDLE_SECONDS
    monkeypatch.setattr(Handler, "timeout", 0.05)
    for request in (b"", b"GET /livez HTTP/1.1\r\nHost: "):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as silent:
            silent.sendall(request)
            assert silent.recv(1) == b""
    assert capfd.readouterr() == ("", "")


async def test_endpoint_answers_while_the_event_loop_hangs(port: int) -> None:
    with ThreadPoolExecutor() as threads:
        request = threads.submit(get, port, "/readyz")
        assert request.result(timeout=10) == (503, "starting\n")  # waiting for it hangs the loop


def test_endpoint_serves_metrics_and_no_other_page(port: int) -> None:
    status, shown = get(port, "/metrics")
    assert status == 200
    assert "# TYPE redrive_admin_calls_total counter" in shown
    assert f'version="{redrive.__version__}"' in shown
    assert get(port, "/") == (404, "no such page\n")


def test_endpoint_port_in_use_is_refused_with_remedy(port: int) -> None:
    with (
        raises("EndpointUnavailable", match=rf"in use; got '127\.0\.0\.1:{port}'; choose another"),
        serving_endpoint("127.0.0.1", port, Liveness()),
    ):
        pass


async def test_watches_use_the_proxy_of_the_environment(tmp_path: Path) -> None:
    api = ApiServer()
    with http_proxy(tmp_path) as proxy:
        before = f"import os\nos.environ['HTTP_PROXY'] = {proxy.url!r}\n"
        async with operator(api, tmp_path, before=before) as process:
            await api.until_watched(*(kind.path() for kind in WATCHED))
            connections = psutil.Process(process.pid).net_connections("tcp")
            assert {c.raddr.port for c in connections if c.raddr} == {proxy.port}


async def test_watches_resume_after_a_refusal_of_the_proxy(tmp_path: Path) -> None:
    api, authority = ApiServer(), trustme.CA()
    paths = [kind.path() for kind in WATCHED]
    with http_proxy(tmp_path) as proxy:
        before = f"import os\nos.environ['HTTPS_PROXY'] = {proxy.url!r}\n"
        before += CLOSE_INACTIVE_WATCHES_SOON
        async with operator(api, tmp_path, before=before, authority=authority):
            await api.until_watched(*paths)
            proxy.refuses.touch()
            refusal = "the proxy of the environment refuses the connection"
            await asyncio.to_thread(wait_until, lambda: refusal in logged(tmp_path))
            while not api.watched.empty():
                api.watched.get_nowait()
            proxy.refuses.unlink()
            async with asyncio.timeout(60):
                await api.until_watched(*paths)
    assert "cret" not in logged(tmp_path)


def test_rights_are_rules_by_namespace_and_name() -> None:
    rules = [
        {"apiGroups": ["redrive.io"], "resources": ["replays/status"], "verbs": ["patch"]},
        {"apiGroups": [""], "resources": ["a"], "resourceNames": ["b"], "verbs": ["get", "list"]},
    ]
    expected = [
        "patch replays/status.redrive.io in all namespaces",
        "get a/b in namespace shop",
        "list a/b in namespace shop",
    ]
    grants = [{"namespace": "", "rules": rules[:1]}, {"namespace": "shop", "rules": rules[1:]}]
    assert [str(right) for right in rights(grants)] == expected
    attributes = next(rights(grants)).attributes
    assert (attributes["resource"], attributes["subresource"]) == ("replays", "status")


@pytest.mark.parametrize("ready", [True, False])
def test_endpoint_is_ready_in_time_or_fails(
    monkeypatch: pytest.MonkeyPatch, *, ready: bool
) -> None:
    monkeypatch.setattr(release_test, "SECONDS", 0.5)
    monkeypatch.setattr(release_test, "PAUSE_SECONDS", 0.05)
    assert leader_election  # its metric is served
    health = Liveness()
    health.ready = ready
    with serving_endpoint("127.0.0.1", 0, health) as port:
        url = f"http://127.0.0.1:{port}"
        if ready:
            check_endpoint(url)
        else:
            with raises("ReleaseTestFailed", match=r"does not answer as it should; got .*503"):
                check_endpoint(url)

"""The client of the Kubernetes API, over real sockets, and the start of an operator."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from inspect import iscoroutinefunction
from itertools import cycle
from pathlib import Path
from types import FunctionType
from urllib.parse import unquote
from uuid import uuid4

import pytest
import trustme
from aiohttp import web
from aiohttp.test_utils import RawTestServer

from redrive.api.conditions import ObjectEvent
from redrive.errors import RedriveError
from redrive.kube import client, resources
from redrive.kube.cache import Cache
from redrive.kube.client import (
    ForbiddenError,
    Kubernetes,
    KubernetesError,
    UnavailableError,
    Versions,
    kubernetes_error,
)
from redrive.kube.context import Context, Settings
from redrive.kube.resources import Key, Resource
from redrive.kube.status import Publisher
from tests.support.fake_kubernetes import FakeKubernetes


def write_kubeconfig(
    path: Path, port: int, scheme: str = "http", authority: trustme.CA | None = None
) -> None:
    server = {"server": f"{scheme}://127.0.0.1:{port}"}
    if authority is not None:
        pem = authority.cert_pem.bytes()
        server["certificate-authority-data"] = base64.b64encode(pem).decode()
    cluster = {"name": "it", "cluster": server}
    context = {"name": "it", "context": {"cluster": "it", "user": "it"}}
    user = {"name": "it", "user": {}}
    written = {"clusters": [cluster], "users": [user], "contexts": [context]}
    path.write_text(json.dumps(written | {"current-context": "it"}), encoding="utf-8")


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of the kubeconfig of this process."""
    path = tmp_path / "kubeconfig"
    monkeypatch.setenv("KUBECONFIG", str(path))
    return path


@asynccontextmanager
async def api_server(answer: bytes, asked: list[str] | None = None) -> AsyncIterator[int]:
    """Serve *answer* to any call, then hang up; yield the port, and record calls in *asked*."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        call = await reader.readuntil(b"\r\n\r\n")
        if asked is not None:
            asked.append(call.decode())
        writer.write(answer)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"hidden words\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nhidden",
        b"HTTP/1.1 503 X\r\nContent-Length: 6\r\n\r\nhidden",
    ],
    ids=["disconnected", "cut off", "garbled", "no JSON", "not an error of an API server"],
)
async def test_server_without_valid_answer_is_unavailable(answer: bytes, kubeconfig: Path) -> None:
    async with api_server(answer) as port:
        write_kubeconfig(kubeconfig, port)
        async with Kubernetes.connect() as kubernetes:
            with pytest.raises(UnavailableError) as unavailable:
                await kubernetes.get(resources.POLICIES, Key("n", "a"))
    assert "hidden" not in str(unavailable.value)


STATUSES = (100, 204, 206, 301, 302, 304, 400, 401, 403, 404, 405, 406, 409, 410, 413, 415, 422,
            429, 500, 501, 502, 503, 504, 520, 599, 999)  # fmt: skip
CONDITIONS = (
    b"7", b'"x"', b'{"type": "Ready"}', b"[7]", b"[null]", b"[[]]", b"[{}]",
    b'[{"type": "Ready"}]', b'[{"type": 1, "status": "True"}]', b'[{"type": "Ready", "status": 1}]',
    b'[{"type": "Ready", "status": "True", "reason": []}]',
    b'[{"type": "Ready", "status": "True", "lastTransitionTime": 1}]',
)  # fmt: skip
OBJECT = b'{"metadata": {"name": "a", "namespace": "n", "uid": "1", "resourceVersion": "1"%s}%s}'
BODIES = (
    b"", b"null", b"[]", b"7", b'"text"', b"{}", b"{nonsense", b"\xff\xfe\x00", b"<html>no</html>",
    b"[" * 100_000, b'{"metadata": ' + b"9" * 5_000 + b"}",
    b'{"metadata": null}', b'{"metadata": []}', b'{"metadata": {}}', b'{"metadata": {"uid": 1}}',
    b'{"metadata": {"uid": "1", "resourceVersion": 1}}',
    b'{"metadata": {"uid": "1", "resourceVersion": "x"}}',
    b'{"metadata": {"uid": "1", "resourceVersion": "' + b"9" * 5_000 + b'"}}',
    OBJECT % (b', "labels": []', b""), OBJECT % (b', "ownerReferences": 1', b""),
    OBJECT % (b', "finalizers": 1', b""), OBJECT % (b', "generation": "1"', b""),
    OBJECT % (b', "creationTimestamp": 1', b""),
    OBJECT % (b', "ownerReferences": [null]', b""), OBJECT % (b"", b', "spec": []'),
    OBJECT % (b"", b', "status": "x"'), OBJECT % (b"", b', "data": 1'),
    OBJECT % (b', "annotations": {"a": 1}', b""), OBJECT % (b', "labels": {"a": null}', b""),
    *(OBJECT % (b"", b', "status": {"conditions": %s}' % conditions) for conditions in CONDITIONS),
)  # fmt: skip
PAGE = b'{"metadata": {"resourceVersion": "1"}, "items": [%s]}'
PAGES = (
    b'{"metadata": {}}', b'{"metadata": {}, "items": {}}', b'{"metadata": {}, "items": [null]}',
    b'{"metadata": null, "items": []}', b'{"metadata": {}, "items": [{"metadata": 1}]}',
    b'{"metadata": {"continue": 1}, "items": []}',
    PAGE % (OBJECT % (b', "labels": 1', b"")),
)  # fmt: skip
REVIEWS = tuple(
    b'{"metadata": {}, "status": %s}' % status
    for status in (b"null", b"[]", b"{}", b'{"allowed": null}', b'{"allowed": "true"}')
)
BODY = {
    "apiVersion": "v1",
    "kind": "Thing",
    "metadata": {"namespace": "n", "name": "a", "uid": "1", "resourceVersion": "1"},
}
KEY = Key("n", "a")
Call = Callable[[Kubernetes], Awaitable[object]]
CALLS: dict[str, Call] = {
    "list": lambda api: api.list(resources.POLICIES),
    "versions": lambda api: api.versions(resources.POLICIES),
    "get": lambda api: api.get(resources.POLICIES, KEY),
    "cluster id": lambda api: api.cluster_id(),
    "create": lambda api: api.create(resources.CONFIG_MAPS, BODY),
    "patch": lambda api: api.patch(resources.LEASES, KEY, {}),
    "patch status": lambda api: api.patch_status(resources.POLICIES, KEY, {}),
    "apply status": lambda api: api.apply_status(resources.REPLAYS, BODY, {}, "m"),
    "annotations": lambda api: api.annotations(resources.SECRETS, KEY),
    "read a token": lambda api: api.read_secret_key(KEY, "token"),
    "read a key": lambda api: api.read_key(resources.CONFIG_MAPS, KEY, "ca.crt"),
    "own right": lambda api: api.is_allowed({"verb": "get"}),
    "right of an account": lambda api: api.account_may(KEY, {"verb": "get"}),
}
UNREAD: dict[str, Call] = {
    "dry run": lambda api: api.dry_run(resources.CONFIG_MAPS, BODY),
    "delete": lambda api: api.delete(resources.POLICIES, BODY),
}


def publisher(api: Kubernetes) -> Publisher:
    return Publisher(api, resources.POLICIES, Cache(), lambda: datetime(2026, 1, 1, tzinfo=UTC))


LOGGED: dict[str, Call] = {
    "emit": lambda api: publisher(api).emit(
        {**BODY, "metadata": {**KEY._asdict(), "uid": str(uuid4())}}, ObjectEvent("Done", "m")
    ),
}
ALL_KINDS = [kind for kind in vars(resources).values() if isinstance(kind, Resource)]
Answer = tuple[int, bytes]


def wrong_answers(name: str) -> Iterator[Answer]:
    """Yield statuses and bodies that an API server, or a proxy before it, can give to a call."""
    yield from ((s, b'{"kind": "Status"}') for s in STATUSES if name not in UNREAD or s // 100 != 2)
    # Of calls whose answer is not read, the status alone counts, and a body that is a JSON object.
    bodies = BODIES[:5] if name in UNREAD else BODIES
    bodies += PAGES if name in {"list", "versions"} else ()
    bodies += REVIEWS if "right" in name else ()
    yield from ((200, body) for body in bodies)
    errors = cycle(status for status in STATUSES if status >= 400)
    yield from zip(errors, bodies, strict=False)


async def accepted(call: Call, answers: Iterable[Answer], kubeconfig: Path) -> list[Answer]:
    """Return the answers with which *call* raised no `RedriveError`."""
    reply, without_error = b"", list[Answer]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        write_kubeconfig(kubeconfig, server.sockets[0].getsockname()[1])
        async with Kubernetes.connect() as kubernetes:
            for status, body in answers:
                head = f"HTTP/1.1 {status} x\r\nContent-Length: {len(body)}\r\n\r\n"
                reply = head.encode() + body
                try:
                    await call(kubernetes)
                except RedriveError:
                    continue
                without_error.append((status, body[:100]))
    return without_error


@pytest.mark.parametrize("name", [*CALLS, *UNREAD])
async def test_each_wrong_answer_is_a_redrive_error(name: str, kubeconfig: Path) -> None:
    assert await accepted((CALLS | UNREAD)[name], wrong_answers(name), kubeconfig) == []


async def test_each_wrong_answer_to_an_event_is_logged(
    kubeconfig: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers = list(wrong_answers("emit"))
    assert len(await accepted(LOGGED["emit"], answers, kubeconfig)) == len(answers)
    logged = [record for record in caplog.records if "was not created" in record.getMessage()]
    assert len(logged) == len(answers)
    assert not any(record.exc_info for record in logged)


@pytest.mark.parametrize("kind", ALL_KINDS, ids=lambda kind: f"{kind.plural}.{kind.group}")
async def test_malformed_object_in_a_list_is_a_redrive_error(
    kind: Resource, kubeconfig: Path
) -> None:
    """Conditions of kinds that may have no schema are the text of a user, and never read."""
    pages = {PAGE % body: body for body in BODIES if body.startswith(b'{"metadata"')}
    answers = [(200, page) for page in pages]
    got = await accepted(lambda api: api.list(kind), answers, kubeconfig)
    free = [body for body in pages.values() if b"conditions" in body]
    expected = free if kind in resources.APPLICATIONS.values() else []
    assert got == [(200, (PAGE % body)[:100]) for body in expected]


def test_every_call_gets_each_wrong_answer() -> None:
    calls = (CALLS | UNREAD | LOGGED).values()
    tried = {name for call in calls if isinstance(call, FunctionType)
             for name in call.__code__.co_names}  # fmt: skip
    public = {name for name, method in vars(Kubernetes).items() if iscoroutinefunction(method)}
    assert {name for name in public if not name.startswith("_")} <= tried


@pytest.mark.parametrize("status", [status for status in STATUSES if status >= 300])
def test_error_status_with_any_body_is_an_error_of_that_status(status: int) -> None:
    for body in (*BODIES, *PAGES, b'{"message": 1}', b'{"message": null}', b'{"message": []}'):
        error = kubernetes_error("GET x", status, body.decode(errors="replace"))
        assert str(status) in str(error)


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        ('User "system:serviceaccount:quota:a" cannot create resource "jobs"', ForbiddenError),
        ("exceeded quota: small, requested: count/jobs.batch=1, used: 0", KubernetesError),
        ("failed quota: small: must specify limits.cpu", KubernetesError),
        ("ValidatingAdmissionPolicy p denied request: no Jobs", KubernetesError),
    ],
)
def test_refusal_by_admission_asks_for_no_permission(
    cause: str, kind: type[KubernetesError]
) -> None:
    message = f'jobs.batch "a" is forbidden: {cause}'
    error = kubernetes_error("POST x", 403, json.dumps({"message": message}))
    assert type(error) is kind
    assert message in str(error)
    assert ("ServiceAccount" in str(error)) is (kind is ForbiddenError)


@pytest.mark.parametrize(
    "date", ["", "x", "Fri, 31 Dec 9999 23:59:59 -2359", "Fri, 1 Jan 2026 00:00:00 +" + "9" * 30]
)
async def test_invalid_time_of_an_answer_is_none(date: str, kubeconfig: Path) -> None:
    head = f"HTTP/1.1 200 OK\r\nDate: {date}\r\nContent-Length: "
    body = OBJECT % (b"", b"")
    async with api_server(f"{head}{len(body)}\r\n\r\n".encode() + body) as port:
        write_kubeconfig(kubeconfig, port)
        async with Kubernetes.connect() as kubernetes:
            assert (await kubernetes.get(resources.POLICIES, KEY))["metadata"]["uid"] == "1"
            assert kubernetes.server_time is None


@pytest.mark.parametrize("name", ["get", "list", "delete"])
async def test_endless_answer_is_cut_and_unavailable(
    name: str, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "LONGEST_ANSWER", 10_000)
    monkeypatch.setattr(client, "LONGEST_PAGE", 1_000)
    sent = 0

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        with suppress(ConnectionError):
            while True:
                await response.write(b"[" * 1_000)
                sent += 1_000
        return response

    async with asyncio.timeout(30), RawTestServer(answer) as server:
        write_kubeconfig(kubeconfig, server.port or 0)
        async with Kubernetes.connect() as kubernetes:
            with pytest.raises(UnavailableError, match="more than 10000 bytes"):
                await (CALLS | UNREAD)[name](kubernetes)
    assert sent < 10**8


async def test_config_maps_are_selected_by_label(kubeconfig: Path) -> None:
    asked: list[str] = []
    metadata = {"name": "a", "uid": "1", "resourceVersion": "1"}
    page = json.dumps({"items": [{"metadata": metadata, "data": {}}], "metadata": {}}).encode()
    async with api_server(b"HTTP/1.1 200 OK\r\n\r\n" + page, asked) as port:
        write_kubeconfig(kubeconfig, port)
        async with Kubernetes.connect() as kubernetes:
            listed = await kubernetes.list(resources.CONFIG_MAPS, "shop")
    typed = {"apiVersion": "v1", "kind": "ConfigMap"}
    assert listed == [{**typed, "metadata": metadata}]
    path, _, query = asked[0].split()[1].partition("?")
    assert path == "/api/v1/namespaces/shop/configmaps"
    assert unquote(query) == "limit=500&labelSelector=app.kubernetes.io/managed-by=redrive"


async def test_long_lists_are_paged_and_versions_have_metadata_only(kubeconfig: Path) -> None:
    asked: list[web.BaseRequest] = []

    async def answer(request: web.BaseRequest) -> web.Response:
        asked.append(request)
        going_on = request.query.get("continue", "")
        version = len(going_on) + 1
        items = [{"metadata": {"uid": f"u{version}", "resourceVersion": str(version)}}]
        more = {"continue": going_on + "x"} if version < 3 else {}
        return web.json_response({"items": items, "metadata": {"resourceVersion": "9", **more}})

    async with RawTestServer(answer) as server:
        write_kubeconfig(kubeconfig, server.port or 0)
        async with Kubernetes.connect() as kubernetes:
            assert len(await kubernetes.list(resources.POLICIES)) == 3
            versions = await kubernetes.versions(resources.POLICIES)
    assert versions == Versions(9, {"u1": 1, "u2": 2, "u3": 3})
    assert [request.query["limit"] for request in asked] == ["500"] * 6
    accepted = [request.headers["Accept"] for request in asked]
    assert accepted[:3] == ["application/json"] * 3
    # With any other version than this one a real API server answers 406.
    metadata = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
    assert accepted[3:] == [metadata] * 3


@pytest.mark.parametrize(
    ("length", "sizes"), [(100_000, {500, 100, 20}), (10**6, {500, 100, 20, 4})]
)
async def test_pages_of_long_objects_get_smaller(
    length: int, sizes: set[int], kubeconfig: Path
) -> None:
    pages: list[int] = []
    count = 90
    identity = '"uid": "1", "resourceVersion": "1", '
    rest = f'"}}, "data": {{"long": "{"x" * length}"}}}}'

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        begin, limit = int(request.query.get("continue", "0")), int(request.query["limit"])
        pages.append(limit)
        end = min(begin + limit, count)
        page = web.StreamResponse()
        await page.prepare(request)
        going_on = f'"continue": "{end}"' if end < count else '"continue": ""'
        await page.write(f'{{"metadata": {{{going_on}}}, "items": ['.encode())
        for number in range(begin, end):
            item = (
                f'{"," if number > begin else ""}{{"metadata": {{{identity}"name": "{number}{rest}'
            )
            with suppress(ConnectionError):  # where that was too much
                await page.write(item.encode())
        with suppress(ConnectionError):
            await page.write(b"]}")
        return page

    async with RawTestServer(answer) as server:
        write_kubeconfig(kubeconfig, server.port or 0)
        async with Kubernetes.connect() as kubernetes:
            objects = await kubernetes.list(resources.CONFIG_MAPS)
    assert [body["metadata"]["name"] for body in objects] == [str(n) for n in range(count)]
    assert all("data" not in body for body in objects)
    assert set(pages) == sizes
    assert pages == sorted(pages, reverse=True)


async def test_long_object_is_read_alone(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LONGEST_PAGE", 100)
    metadata = {"name": "a", "uid": "1", "resourceVersion": "1"}
    item = {"metadata": metadata, "data": {"long": "x" * 200}}

    async def answer(_: web.BaseRequest) -> web.Response:
        return web.json_response({"metadata": {}, "items": [item]})

    async with RawTestServer(answer) as server:
        write_kubeconfig(kubeconfig, server.port or 0)
        async with Kubernetes.connect() as kubernetes:
            (object_,) = await kubernetes.list(resources.CONFIG_MAPS)
    assert object_["metadata"] == metadata


@pytest.mark.parametrize(
    ("status", "allowed"), [({"allowed": True}, True), ({"allowed": False}, False), ({}, None)]
)
async def test_access_review_is_answered_without_identity(
    kubeconfig: Path, status: dict[str, bool], *, allowed: bool | None
) -> None:
    async def answer(request: web.BaseRequest) -> web.Response:
        review = await request.json()
        assert review["spec"]["resourceAttributes"] == {"verb": "get"}
        return web.json_response({**review, "metadata": {}, "status": status})

    async with RawTestServer(answer) as server:
        write_kubeconfig(kubeconfig, server.port or 0)
        async with Kubernetes.connect() as kubernetes:
            if allowed is None:
                with pytest.raises(UnavailableError, match="a review without a decision"):
                    await kubernetes.is_allowed({"verb": "get"})
            else:
                assert await kubernetes.is_allowed({"verb": "get"}) is allowed


async def test_deletion_has_uid_and_version_as_preconditions(kubeconfig: Path) -> None:
    calls: list[tuple[str, str, object]] = []

    async def answer(request: web.BaseRequest) -> web.Response:
        calls.append((request.method, request.path, await request.json()))
        return web.json_response({})

    identity = {"uid": "u", "resourceVersion": "7"}
    body = {"metadata": {"namespace": "shop", "name": "orders", **identity}}
    async with RawTestServer(answer) as server:
        write_kubeconfig(kubeconfig, server.port or 0)
        async with Kubernetes.connect() as kubernetes:
            await kubernetes.delete(resources.POLICIES, body)
    path = resources.POLICIES.path("shop", "orders")
    assert calls == [("DELETE", path, {"preconditions": identity})]


async def test_held_calls_of_a_namespace_delay_no_other(kubeconfig: Path) -> None:
    released = asyncio.Event()

    async def answer(request: web.BaseRequest) -> web.Response:
        *_, namespace, _, name = request.path.split("/")
        if namespace == "crowd":
            await released.wait()
        identity = {"namespace": namespace, "name": name, "uid": "u", "resourceVersion": "1"}
        return web.json_response({"metadata": identity})

    async with RawTestServer(answer) as server, asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        write_kubeconfig(kubeconfig, server.port or 0)
        async with Kubernetes.connect() as kubernetes:
            crowd = [
                tasks.create_task(kubernetes.get(resources.POLICIES, Key("crowd", str(number))))
                for number in range(101)
            ]
            await asyncio.sleep(0)
            await kubernetes.get(resources.POLICIES, Key("shop", "orders"))
            released.set()
            await asyncio.gather(*crowd)


async def test_empty_list_of_versions_is_accepted(kubeconfig: Path) -> None:
    page = b'{"items": null, "metadata": {"resourceVersion": "9"}}'
    async with api_server(b"HTTP/1.1 200 OK\r\n\r\n" + page, []) as port:
        write_kubeconfig(kubeconfig, port)
        async with Kubernetes.connect() as kubernetes:
            assert await kubernetes.versions(resources.POLICIES) == Versions(9, {})


KINDS = (
    resources.CONNECTIONS,
    resources.POLICIES,
    resources.ROCKETMQ_POLICIES,
    resources.REPLAYS,
    resources.INSPECTIONS,
    resources.JOBS,
    resources.SPARK_APPLICATIONS,
    resources.CONFIG_MAPS,
)


def two_namespaces(*forbidden: str) -> FakeKubernetes:
    """Two namespaces with an object of each kind; those that are *forbidden* may not be listed."""

    def refuse(verb: str, _resource: Resource, key: Key) -> None:
        if verb == "list" and key.namespace in forbidden:
            raise ForbiddenError("may not list", remedy="grant it")

    api = FakeKubernetes()
    for namespace in ("deleted", "shop"):
        metadata = {"namespace": namespace, "name": "a", "uid": "1", "resourceVersion": "1"}
        for resource in KINDS:
            api.add(resource, {"metadata": metadata})
    api.before = refuse
    return api


def connect_to(api: Kubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def connect(_fence: object = None) -> AsyncIterator[Kubernetes]:
        yield api

    monkeypatch.setattr(Kubernetes, "connect", connect)


def settings_for(*namespaces: str) -> Settings:
    return Settings("here", namespaces, Key("redrive", "replay"), "local:///job.py", "account")


async def test_forbidden_namespace_does_not_block_others_at_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connect_to(two_namespaces("deleted"), monkeypatch)
    async with asyncio.timeout(60), Context.open(settings_for("deleted", "shop")) as ctx:
        for cache in ctx.caches.values():
            assert [Key.of(body) for body in cache] == [Key("shop", "a")]
    assert caplog.text.count("namespace skipped, access is forbidden: may not list") == 8


async def test_namespace_labels_are_read_at_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api = FakeKubernetes()
    identity = {"uid": "1", "resourceVersion": "1"}
    selecting = {
        "name": "one",
        "namespaces": {"selector": {"matchLabels": {"team": "shop"}}},
        "topics": [],
    }
    for name, allow in (("own", [{"name": "one", "topics": []}]), ("selecting", [selecting])):
        metadata = {"namespace": "brokers", "name": name, **identity}
        api.add(resources.CONNECTIONS, {"metadata": metadata, "spec": {"allow": allow}})
        reference = {"connectionRef": {"namespace": "brokers", "name": name}}
        metadata = {"namespace": f"uses-{name}", "name": "orders", **identity}
        api.add(resources.POLICIES, {"metadata": metadata, "spec": reference})
    read = list[Key]()
    api.before = lambda verb, _, key: read.append(key) if verb == "get" else None
    labelled = {"metadata": {"name": "uses-selecting", "labels": {"team": "shop"}}}
    api.objects[resources.NAMESPACES][Key("", "uses-selecting")] = labelled
    connect_to(api, monkeypatch)
    async with asyncio.timeout(60), Context.open(settings_for()) as ctx:
        assert ctx.namespaces.of("uses-selecting") == {"team": "shop"}
        assert read == [Key("", "uses-selecting")]


def test_pod_connects_by_its_service_account(tmp_path: Path) -> None:
    """A process of its own: tests have a kubeconfig, and have imported the library."""
    token, authority = tmp_path / "token", tmp_path / "ca.crt"
    token.write_text("token", "utf-8")
    trustme.CA().cert_pem.write_to_path(str(authority))
    code = f"""
import asyncio
from redrive.kube.client import Kubernetes
from kubernetes.aio.config import incluster_config
incluster_config.SERVICE_TOKEN_FILENAME = {str(token)!r}
incluster_config.SERVICE_CERT_FILENAME = {str(authority)!r}
async def connect():
    async with Kubernetes.connect() as connected:
        print(type(connected).__name__)
asyncio.run(connect())
"""
    environment = {name: text for name, text in os.environ.items() if name != "KUBECONFIG"}
    pod = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment | pod, check=True, capture_output=True,
        text=True,
    )  # fmt: skip
    assert ran.stdout == "Kubernetes\n"

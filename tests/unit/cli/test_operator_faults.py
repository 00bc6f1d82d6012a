"""The operator's process when the API server answers a watch, a list or the Lease wrongly.

Each fault comes once. Then the operator watches again, or has ended with code 1, so that its
container is started again and a standby takes over.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from redrive.cli.operator import END_SECONDS, EXIT_SECONDS
from redrive.kube import resources
from tests.unit.cli.test_operator import WATCHED, ApiServer, operator

POLICIES = resources.POLICIES.path()
SECONDS = 20.0
MOST_TRACEBACKS = 8
"""Each task of kopf that fails logs one."""
NO_WATCH_ENDS = """
import kopf, asyncio
async def endless(**_):
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass
kopf.operator = endless
"""
SOON = """
from redrive.cli import operator
operator.END_SECONDS, operator.CANCEL_SECONDS, operator.EXIT_SECONDS = 0.5, 0.2, 2.0
"""
WATCHES: Mapping[str, bytes] = {
    "text": b"{nonsense\n",
    "null object": b'{"type": "ADDED", "object": null}\n',
    "empty object": b'{"type": "MODIFIED", "object": {}}\n',
    "unknown type": b'{"type": "RENAMED", "object": {"metadata": {}}}\n',
    "expired": b'{"type": "ERROR", "object": {"code": 410}}\n',
    "error": b'{"type": "ERROR", "object": {"code": 500}}\n',
    "deep": b"[" * 100_000 + b"\n",
}
LISTS: Mapping[str, bytes] = {
    "page": b"<html>no</html>",
    "null": b"null",
    "null items": b'{"items": null, "metadata": {"resourceVersion": "1"}}',
    "null metadata": b'{"items": [], "metadata": null}',
}
JOBS = resources.JOBS.path()
KNOWN = [kind for kind in WATCHED if kind != resources.SPARK_APPLICATIONS]
"""Kinds whose conditions have a schema."""
MALFORMED = {
    "metadata": {"namespace": "n", "name": "a", "uid": "1", "resourceVersion": "9"},
    "status": {"conditions": 7},
}
IGNORED = "an event of a watch is ignored"
STATUSES = [(400, True), (401, True), (410, True), (503, True), (401, False), (422, False)]
"""A status, and True for a watch or False for a list. kopf treats other statuses like these."""


class FaultyApiServer(ApiServer):
    """Gives one wrong answer, to kopf's first list or watch of policies."""

    def __init__(self, *, watch: bool, status: int = 200, body: bytes = b"{}") -> None:
        super().__init__()
        self._is_due = True
        self._watch = watch
        self._answer = status, body
        self.given = asyncio.Event()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer any request, the chosen one wrongly."""
        is_watch = request.query.get("watch") == "true"
        by_kopf = is_watch if self._watch else request.query.get("limit") == "10"
        if not (self._is_due and by_kopf and request.path == POLICIES):
            return await super().answer(request)
        self._is_due = False
        self.given.set()
        status, body = self._answer
        headers = {"Content-Type": "application/json"}
        response = web.StreamResponse(status=status, headers=headers)
        await response.prepare(request)
        await response.write(body)
        if is_watch and status == 200:
            await asyncio.sleep(1)
        return response


async def recovers(api: FaultyApiServer, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Wait until the operator watches again, or has ended."""
    async with asyncio.timeout(2 * SECONDS), operator(api, folder, before=SOON, code=None) as run:
        await api.given.wait()
        while not api.watched.empty():
            api.watched.get_nowait()
        ended = asyncio.create_task(run.wait())
        again = asyncio.create_task(api.until_watched(POLICIES))
        began = time.monotonic()
        await asyncio.wait([ended, again], return_when=asyncio.FIRST_COMPLETED)
        assert time.monotonic() - began < SECONDS
        again.cancel()
        assert run.returncode in {None, 1}
        is_alive = run.returncode is None
    assert run.returncode == (0 if is_alive else 1)
    log = capfd.readouterr().err
    assert log.count("Traceback (most recent call last)") <= MOST_TRACEBACKS
    if not is_alive:
        assert "redrive: WatchesEnded: the watches of the Kubernetes API ended" in log
        assert "got None" not in log


@pytest.mark.parametrize("line", WATCHES.values(), ids=WATCHES)
async def test_malformed_watch_line_ends_or_restarts(
    line: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    await recovers(FaultyApiServer(watch=True, body=line), tmp_path, capfd)


@pytest.mark.parametrize("page", LISTS.values(), ids=LISTS)
async def test_malformed_list_ends_or_restarts_watches(
    page: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    await recovers(FaultyApiServer(watch=False, body=page), tmp_path, capfd)


@pytest.mark.parametrize(("status", "watch"), STATUSES)
async def test_refused_watch_or_list_ends_or_restarts(
    status: int, *, watch: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    await recovers(FaultyApiServer(watch=watch, status=status), tmp_path, capfd)


async def test_expired_continuation_restarts_the_list(tmp_path: Path) -> None:
    api = FaultyApiServer(watch=False, status=410)
    async with operator(api, tmp_path):
        await api.given.wait()
        await api.until_watched(*(kind.path() for kind in WATCHED))


class MalformedApiServer(ApiServer):
    """Gives a malformed object in the first list of Jobs, and in each watch of a known kind."""

    def __init__(self) -> None:
        super().__init__()
        self.objects = {JOBS: [MALFORMED]}

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer any request."""
        if request.query.get("watch") != "true":
            response = await super().answer(request)
            if request.path == JOBS:
                self.objects = {}
            return response
        self.watched.put_nowait(request)
        response = web.StreamResponse()
        await response.prepare(request)
        if request.path in {kind.path() for kind in KNOWN}:
            await response.write(json.dumps({"type": "MODIFIED", "object": MALFORMED}).encode())
            await response.write(b"\n")
        await asyncio.Event().wait()
        return response


def logged(folder: Path) -> str:
    """Return the log of the operator that runs in *folder*."""
    return "".join(log.read_text() for log in folder.glob("*.log"))


async def test_malformed_object_of_each_kind_is_ignored(tmp_path: Path) -> None:
    api = MalformedApiServer()
    async with operator(api, tmp_path) as run, asyncio.timeout(90):
        await api.until_watched(*(kind.path() for kind in KNOWN))
        while logged(tmp_path).count(IGNORED) < len(KNOWN):
            assert run.returncode is None
            await asyncio.sleep(0.05)
        log = logged(tmp_path)
    assert "unexpected answer about jobs" in log
    assert "Traceback" not in log


async def test_watches_that_never_end_do_not_hold_up_sigterm(tmp_path: Path) -> None:
    api = ApiServer()
    async with operator(api, tmp_path, before=NO_WATCH_ENDS + SOON, code=1) as run:
        await api.until_listed(resources.CONFIG_MAPS.path(), 1)
        await asyncio.sleep(1)  # until kopf is called
        run.send_signal(signal.SIGTERM)
        async with asyncio.timeout(15):
            await run.wait()


class LeasingApiServer(FaultyApiServer):
    """Keeps a Lease, too."""

    def __init__(self, *, watch: bool, status: int = 200, body: bytes = b"{}") -> None:
        super().__init__(watch=watch, status=status, body=body)
        self.lease: dict[str, Any] | None = None
        self.taken_over = asyncio.Event()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer any request."""
        if "/leases" not in request.path:
            return await super().answer(request)
        if request.method == "GET" and self.lease is None:
            return web.json_response({"kind": "Status"}, status=404)
        if request.method != "GET":
            spec = (self.lease or {}).get("spec", {}) | (await request.json())["spec"]
            version = int(self.lease["metadata"]["resourceVersion"]) + 1 if self.lease else 1
            metadata = {"name": "l", "namespace": "n", "uid": "1", "resourceVersion": str(version)}
            self.lease = {"metadata": metadata, "spec": spec}
            if spec["holderIdentity"] == "two":
                self.taken_over.set()
        return web.json_response(self.lease)


async def test_standby_takes_over_after_the_watches_failed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    api = LeasingApiServer(watch=True, body=WATCHES["text"])
    one, two = ("--lease=n/l", "--identity=one"), ("--lease=n/l", "--identity=two")
    async with operator(api, tmp_path, *one, code=1) as first:
        await api.given.wait()
        async with operator(api, tmp_path, *two):
            await first.wait()
            await api.taken_over.wait()
            await api.until_watched(POLICIES)
    assert "WatchesEnded" in capfd.readouterr().err


def test_process_ends_before_a_kubelet_kills_it() -> None:
    assert 2 * END_SECONDS < EXIT_SECONDS < 30

"""The operator's process, from its start to SIGTERM, before an API server's part in memory."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer

import redrive
from redrive.kube import resources
from redrive.kube.resources import Resource
from tests.unit.kube.test_client import write_kubeconfig

UNUSED_UID = 65532
"""As which a pod of the chart runs; no image has an entry for it in its /etc/passwd."""
START_AS_UNUSED_USER = f"""
import os
os.setresuid({UNUSED_UID}, 0, 0)  # files are still those that root may read
from redrive.__main__ import main
main()
"""
WATCHED = (
    resources.CONNECTIONS,
    resources.POLICIES,
    resources.REPLAYS,
    resources.SPARK_APPLICATIONS,
    resources.CONFIG_MAPS,
)
NAMESPACES = Resource("", "v1", "namespaces", "Namespace")
CRDS = Resource(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition"
)


class ApiServer:
    """Has no objects; watches show nothing until the client goes."""

    def __init__(self) -> None:
        self.watched = asyncio.Queue[web.BaseRequest]()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer any request."""
        if request.query.get("watch") != "true":
            empty = {"items": [], "metadata": {"resourceVersion": "1"}}
            return web.json_response(_discovery().get(request.path, empty))
        self.watched.put_nowait(request)
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.Event().wait()
        return response


def _discovery() -> dict[str, dict[str, Any]]:
    """What an API server says of the kinds that it serves, by path."""
    found: dict[str, dict[str, Any]] = {"/api": {"versions": ["v1"]}, "/apis": {"groups": []}}
    for kind in (*WATCHED, NAMESPACES, CRDS):
        root = f"/apis/{kind.api_version}" if kind.group else "/api/v1"
        if root not in found and kind.group:
            version = {"version": kind.version}
            found["/apis"]["groups"].append(
                {"name": kind.group, "preferredVersion": version, "versions": [version]}
            )
        found.setdefault(root, {"resources": []})["resources"].append(
            {
                "name": kind.plural,
                "kind": kind.kind,
                "singularName": kind.kind.lower(),
                "namespaced": kind not in {NAMESPACES, CRDS},
                "verbs": ["list", "watch", "patch"],
            }
        )
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can become another user")
async def test_it_starts_as_a_user_without_an_entry_in_passwd_and_ends_when_it_is_stopped(
    tmp_path: Path,
) -> None:
    api, kubeconfig = ApiServer(), tmp_path / "kubeconfig"
    async with asyncio.timeout(60), RawTestServer(api.answer) as server:
        write_kubeconfig(kubeconfig, server.port or 0)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-c", START_AS_UNUSED_USER, "operator", "--cluster-id=here"),
            env={
                "HOME": "/",  # as container runtimes set it for such a user
                "KUBECONFIG": str(kubeconfig),
                "PYTHONPATH": str(Path(redrive.__file__).parents[1]),
            },
            stderr=asyncio.subprocess.PIPE,
        )
        ended = asyncio.ensure_future(process.communicate())
        watches: dict[str, str] = {}
        while len(watches) < len(WATCHED) and not ended.done():
            begun = asyncio.ensure_future(api.watched.get())
            await asyncio.wait({begun, ended}, return_when=asyncio.FIRST_COMPLETED)
            if begun.done():
                watches[begun.result().path] = begun.result().query.get("labelSelector", "")
            begun.cancel()
        if not ended.done():
            process.send_signal(signal.SIGTERM)
        _, log = await ended
        assert process.returncode == 0, log.decode()
        assert set(watches) == {kind.path() for kind in WATCHED}

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import aiohttp

from redrive.admin.access import Access
from redrive.admin.client import Admin
from redrive.admin.http import Http
from redrive.api.connection import PulsarConnectionSpec
from redrive.errors import Requeue
from redrive.kube import status
from redrive.kube.cache import Cache
from redrive.kube.client import Kubernetes
from redrive.kube.connections import Connection
from redrive.kube.context import wall_clock
from redrive.kube.errors import SecretNotFoundError
from redrive.kube.resources import Body, Key, Resource
from redrive.provision.connection import reconcile
from tests.support.fake_admin import SUPERUSER, FakeBroker

KEY = Key("shop", "main")


class Statuses(Kubernetes):
    """An API server's part in it: it keeps the status, and forgets Events."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.patches = 0

    async def patch_status(self, resource: Resource, key: Key, status: Body) -> Body:
        """Keep the status."""
        assert (resource.kind, key) == ("PulsarConnection", KEY)
        self.patches += 1
        metadata = {**self.body["metadata"], "resourceVersion": str(1 + self.patches)}
        self.body = {**self.body, "metadata": metadata, "status": status}
        return self.body

    async def emit(self, *_: object, **__: object) -> None:
        """Forget it."""


async def test_a_connection_that_stands_as_before_costs_two_calls_and_no_write(
    connection: dict[str, Any],
) -> None:
    identity = {"namespace": "shop", "name": "main", "uid": "u", "resourceVersion": "1"}
    body = {"metadata": {**identity, "generation": 1}, "spec": connection}
    kubernetes, missing = Statuses(body), list[SecretNotFoundError]()
    async with FakeBroker.serving() as broker, aiohttp.ClientSession() as session:
        broker.tenants = {"shop": []}
        admin = Admin(Http(session), broker.url, Access.bearer(FakeBroker.token(SUPERUSER)))
        spec = PulsarConnectionSpec.model_validate(connection)

        async def open_(key: Key) -> Connection:
            for error in missing:
                raise error
            return Connection(key, spec, admin)

        ctx: Any = SimpleNamespace(
            kubernetes=kubernetes,
            connections=Cache([body]),
            brokers=SimpleNamespace(open=open_),
            clock=wall_clock,
        )
        assert await reconcile(KEY, ctx) is Requeue.ON_CHANGE
        assert status.reason(kubernetes.body) == "Connected"
        patches, calls = kubernetes.patches, len(broker.calls)
        assert await reconcile(KEY, ctx) is Requeue.ON_CHANGE
        assert (kubernetes.patches, len(broker.calls)) == (patches, calls + 2)

        missing.append(SecretNotFoundError("the Secret is not there", remedy="make it"))
        assert await reconcile(KEY, ctx) is Requeue.BACKOFF
        assert status.reason(kubernetes.body) == "SecretNotFound"

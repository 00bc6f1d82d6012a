from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import aiohttp
from tests.fake_admin import SUPERUSER, FakeBroker

from redrive.admin.access import Access
from redrive.admin.client import Admin
from redrive.admin.http import Http
from redrive.api.connection import PulsarConnectionSpec
from redrive.cluster import status
from redrive.cluster.client import Kubernetes
from redrive.cluster.connections import Connection
from redrive.cluster.errors import SecretNotFoundError
from redrive.cluster.keeper import Again
from redrive.cluster.resources import Body, Key, Resource
from redrive.cluster.table import Table
from redrive.cluster.world import wall_clock
from redrive.provision.connection import reconcile

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

        world: Any = SimpleNamespace(
            kubernetes=kubernetes,
            connections=Table([body]),
            brokers=SimpleNamespace(open=open_),
            clock=wall_clock,
        )
        assert await reconcile(KEY, world) is Again.WHEN_WOKEN
        assert status.reason(kubernetes.body) == "Connected"
        patches, calls = kubernetes.patches, len(broker.calls)
        assert await reconcile(KEY, world) is Again.WHEN_WOKEN
        assert (kubernetes.patches, len(broker.calls)) == (patches, calls + 2)

        missing.append(SecretNotFoundError("the Secret is not there", remedy="make it"))
        assert await reconcile(KEY, world) is Again.SOON
        assert status.reason(kubernetes.body) == "SecretNotFound"

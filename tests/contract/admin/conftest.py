"""Two brokers for one suite: the real one, and the fake that faults are injected into."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Protocol

import pytest

from redrive.admin.access import Access
from redrive.admin.client import Admin
from redrive.admin.http import Call, CallSlots, Endpoint, Http
from sandbox.pulsar import Broker
from tests.support.fake_admin import SUPERUSER, FakeBroker


class Tokens(Protocol):
    """Source of tokens for a broker."""

    def token(self, role: str) -> str:
        """A token whose bearer acts as *role*."""


@dataclass(frozen=True)
class World:
    """A broker with one tenant, and a namespace `<tenant>/prod` in it."""

    http: Http
    url: str
    tokens: Tokens
    tenant: str

    @property
    def namespace(self) -> str:
        return f"{self.tenant}/prod"

    @property
    def admin(self) -> Admin:
        """A client of the tenant's administrator."""
        return self.client(f"{self.tenant}-admin")

    def client(self, role: str) -> Admin:
        """A client of *role*."""
        return self.client_with(self.tokens.token(role))

    def client_with(self, token: str) -> Admin:
        """A client with that very token."""
        return Admin(self.http, self.url, Access.bearer(token))

    async def send(self, method: str, path: str, body: object = None) -> object:
        """Return the broker's answer to the administrator of the tenant."""
        token = self.tokens.token(f"{self.tenant}-admin")
        call = Call("try", method, path, body)
        return await self.http.send(call, Endpoint(self.url, Access.bearer(token), CallSlots(1)))


@pytest.fixture(params=["fake", "broker"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(Http.open())
        tokens: Tokens
        if request.param == "broker":
            broker: Broker = request.getfixturevalue("broker")
            tokens, url = broker, broker.admin_url
        else:
            tokens = fake = await stack.enter_async_context(FakeBroker.serving())
            url = fake.url
        tenant = f"t-{secrets.token_hex(4)}"
        admins = {"adminRoles": [f"{tenant}-admin"], "allowedClusters": ["standalone"]}
        for path, body in ((f"tenants/{tenant}", admins), (f"namespaces/{tenant}/prod", None)):
            call = Call("make a tenant", "PUT", path, body)
            await http.send(
                call, Endpoint(url, Access.bearer(tokens.token(SUPERUSER)), CallSlots(1))
            )
        yield World(http, url, tokens, tenant)

"""A crash at every write about a BrokerConnection: its life ends as it does in peace."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from redrive.admin.client import Admin
from redrive.admin.http import Access, Http
from redrive.api import Body
from redrive.api.connection import BrokerConnectionSpec
from redrive.errors import RedriveError, Requeue
from redrive.kube.cache import Cache
from redrive.kube.connections import Connection
from redrive.kube.resources import CONNECTIONS, Key
from redrive.provision.connection import reconcile
from tests.support.crashes import Crash, Fault, Faulty
from tests.support.fake_admin import SUPERUSER, FakeBroker

KEY = Key("shop", "main")
NOW = datetime(2026, 1, 1, tzinfo=UTC)
MakeBody = Callable[..., dict[str, Any]]


@dataclass
class Life:
    """A connection that a policy uses, that is deleted then, and goes once the policy has gone.

    Attributes:
        stale: whether an operator that starts after a crash knows the connection as it was before.
        states: what is stored after each part of it.
    """

    admin: Admin
    connection: Body
    policy: Body
    stale: bool = False
    fault: Fault = field(default_factory=lambda: Fault(0, done=False))
    states: list[Body | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kubernetes = Faulty()
        self.kubernetes.fault = self.fault
        self.kubernetes.add(CONNECTIONS, self.connection)

    @property
    def stored(self) -> dict[str, Any] | None:
        return self.kubernetes.objects[CONNECTIONS].get(KEY)

    async def lived(self) -> Life:
        """Live it, in three parts."""
        await self._part([self.policy])
        assert self.stored is not None
        self.stored["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        await self._part([self.policy])
        await self._part([])
        return self

    async def _part(self, policies: Sequence[Body]) -> None:
        known = copy.deepcopy([self.stored] if self.stored else [])
        try:
            await self._reconcile(known, policies)
        except Crash:
            if self.stale:
                with suppress(RedriveError):
                    await self._reconcile(known, policies)
            await self._reconcile([self.stored] if self.stored else [], policies)
        state = copy.deepcopy(self.stored)
        if state is not None:
            del state["metadata"]["resourceVersion"]
        self.states.append(state)

    async def _reconcile(self, known: Sequence[Body], policies: Sequence[Body]) -> None:
        async def open_(key: Key) -> Connection:
            spec = BrokerConnectionSpec.model_validate(self.connection["spec"])
            return Connection(key, spec, self.admin)

        ctx: Any = SimpleNamespace(
            kubernetes=self.kubernetes,
            connections=Cache(copy.deepcopy(list(known))),
            policies=Cache(policies),
            namespaces=None,
            brokers=SimpleNamespace(open=open_),
            clock=lambda: NOW,
        )
        assert await reconcile(KEY, ctx) is Requeue.ON_CHANGE

    @property
    def history(self) -> Counter[str]:
        return Counter(write.verb for write in self.kubernetes.writes)


MakeLife = Callable[..., Life]


@pytest.fixture
async def live(connection: dict[str, Any], policy: MakeBody) -> AsyncIterator[MakeLife]:
    identity = {"namespace": "shop", "name": "main", "uid": "u", "resourceVersion": "1"}
    typed = {"apiVersion": CONNECTIONS.api_version, "kind": CONNECTIONS.kind}
    body = {**typed, "metadata": {**identity, "generation": 1}, "spec": connection}
    async with FakeBroker.serving() as broker, aiohttp.ClientSession() as session:
        broker.tenants = {"shop": []}
        admin = Admin(Http(session), broker.url, Access.bearer(FakeBroker.token(SUPERUSER)))
        yield lambda **options: Life(admin, body, policy(), **options)


@pytest.mark.parametrize("stale", [False, True], ids=["seen", "stale"])
@pytest.mark.parametrize("done", [False, True], ids=["not done", "done"])
async def test_a_crash_at_any_write_ends_as_peace_does_and_repeats_little(
    live: MakeLife, *, done: bool, stale: bool
) -> None:
    peace = await live().lived()
    used, blocked, gone = peace.states
    assert used is not None
    assert used["metadata"]["finalizers"]
    assert blocked is not None
    assert "DeletionBlocked" in str(blocked["status"])
    assert gone is None
    writes = peace.fault.count
    assert writes >= 5
    for number in range(1, writes + 1):
        disturbed = await live(stale=stale, fault=Fault(number, done=done)).lived()
        assert disturbed.states == peace.states, f"write {number}"
        more = disturbed.history - peace.history
        # One that is behind has the finalizer, and the progress, written again.
        assert more["patch"] <= 1, f"write {number}: {more}"
        assert more["patch_status"] <= 2, f"write {number}: {more}"

"""A connection stays until no policy uses it, and tells its own namespace what it waits for."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from redrive.admin.client import Admin
from redrive.admin.http import Access, Http
from redrive.api import Body
from redrive.api.conditions import find, reason
from redrive.api.connection import BrokerConnectionSpec
from redrive.errors import Requeue
from redrive.kube.cache import Cache
from redrive.kube.client import ConflictError
from redrive.kube.connections import Connection
from redrive.kube.context import wall_clock
from redrive.kube.resources import CONNECTIONS, Key
from redrive.provision.connection import DELETION_BLOCKED, IN_USE, is_protection_due, reconcile
from tests.support.fake_admin import SUPERUSER, FakeBroker
from tests.support.fake_kubernetes import FakeKubernetes

KEY = Key("shop", "main")
MakeBody = Callable[..., dict[str, Any]]
ALIEN = "example.com/other"


@dataclass(frozen=True)
class Lent:
    """A connection that is for namespaces `shop` and `payments`, and what there is of policies."""

    kubernetes: FakeKubernetes
    ctx: Any

    @property
    def stored(self) -> dict[str, Any] | None:
        """The connection as the API server has it."""
        return self.kubernetes.objects[CONNECTIONS].get(KEY)

    @property
    def finalizers(self) -> list[str]:
        """Those of the connection."""
        assert self.stored is not None
        return list(self.stored["metadata"].get("finalizers", []))

    async def reconcile(self, *policies: Body) -> str:
        """Reconcile it with these policies; return what its deletion waits for."""
        for body in tuple(self.ctx.policies):
            self.ctx.policies.drop(body)
        for body in policies:
            self.ctx.policies.put(body)
        assert await reconcile(KEY, self.ctx) is Requeue.ON_CHANGE
        found = None if self.stored is None else find(self.stored, DELETION_BLOCKED)
        return "" if found is None else found.message

    def delete(self) -> None:
        """Ask for its deletion, as the API server does where there are finalizers."""
        stored = self.stored
        assert stored is not None
        if not stored["metadata"].get("finalizers"):
            del self.kubernetes.objects[CONNECTIONS][KEY]
            self.ctx.connections.drop(stored)
            return
        stored["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        self.kubernetes.add(CONNECTIONS, stored)
        self.ctx.connections.renew(copy.deepcopy(stored))


@pytest.fixture
async def lent(connection: dict[str, Any]) -> AsyncIterator[Lent]:
    names = {"names": ["shop", "payments"]}
    connection["allow"] = [rule | {"namespaces": names} for rule in connection["allow"]]
    identity = {"namespace": "shop", "name": "main", "uid": "u", "resourceVersion": "1"}
    typed = {"apiVersion": CONNECTIONS.api_version, "kind": CONNECTIONS.kind}
    body = {**typed, "metadata": {**identity, "generation": 1}, "spec": connection}
    kubernetes = FakeKubernetes()
    kubernetes.add(CONNECTIONS, body)
    async with FakeBroker.serving() as broker, aiohttp.ClientSession() as session:
        broker.tenants = {"shop": []}
        admin = Admin(Http(session), broker.url, Access.bearer(FakeBroker.token(SUPERUSER)))

        async def open_(key: Key) -> Connection:
            return Connection(key, BrokerConnectionSpec.model_validate(connection), admin)

        yield Lent(
            kubernetes,
            SimpleNamespace(
                kubernetes=kubernetes,
                connections=Cache([body]),
                policies=Cache(),
                namespaces=None,
                brokers=SimpleNamespace(open=open_),
                clock=wall_clock,
            ),
        )


def of(namespace: str, body: dict[str, Any]) -> dict[str, Any]:
    """The policy, in another namespace than the connection."""
    ref = {"name": "main", "namespace": "shop"}
    metadata = body["metadata"] | {"namespace": namespace}
    return body | {"metadata": metadata, "spec": body["spec"] | {"connectionRef": ref}}


async def test_a_connection_has_the_finalizer_while_policies_use_it(
    lent: Lent, policy: MakeBody
) -> None:
    await lent.reconcile()
    assert lent.finalizers == []
    for used in ((policy(),), (of("payments", policy()),), (policy("a"), policy("b"))):
        assert await lent.reconcile(*used) == ""
        assert lent.finalizers == [IN_USE]
        stored = lent.stored
        assert stored is not None
        assert stored["status"]["policies"] == len(used)
    writes = len(lent.kubernetes.writes)
    await lent.reconcile(policy("a"), policy("b"))
    assert len(lent.kubernetes.writes) == writes
    await lent.reconcile()
    assert lent.finalizers == []


async def test_a_deletion_waits_for_the_last_policy_and_names_those_of_its_namespace(
    lent: Lent, policy: MakeBody
) -> None:
    own = [policy(f"own-{number}") for number in range(6)]
    others = [of("payments", policy(f"hidden-{number}")) for number in range(2)]
    await lent.reconcile(*own, *others)
    lent.delete()
    said = await lent.reconcile(*own, *others)
    named = ", ".join(f"RetryPolicy own-{number}" for number in range(5))
    assert f"got {named}, 1 more, 2 of other namespaces; delete them, or have them use" in said
    stored = lent.stored
    assert stored is not None
    assert reason(stored) == "Connected"  # those policies go on
    assert stored["status"]["warnings"] == DELETION_BLOCKED
    assert "got 2 of other namespaces; delete" in await lent.reconcile(*others)
    assert "hidden" not in str(lent.stored)
    warned = [event for event in lent.kubernetes.announced() if event[1] == DELETION_BLOCKED]
    assert {event[0] for event in warned} == {"Warning"}
    await lent.reconcile()
    assert lent.stored is None


async def test_a_namespace_that_a_connection_is_not_for_can_not_keep_it(
    lent: Lent, policy: MakeBody
) -> None:
    await lent.reconcile(of("stranger", policy()))
    assert lent.finalizers == []
    await lent.reconcile(policy(), of("stranger", policy()))
    lent.delete()
    await lent.reconcile(of("stranger", policy()))
    assert lent.stored is None


async def test_finalizers_of_others_stay_and_a_change_meanwhile_is_seen(
    lent: Lent, policy: MakeBody
) -> None:
    await lent.reconcile(policy())
    stored = lent.stored
    assert stored is not None
    stored["metadata"]["finalizers"] = [ALIEN, IN_USE]
    lent.kubernetes.add(CONNECTIONS, stored)
    lent.ctx.connections.renew(copy.deepcopy(stored))
    lent.delete()
    stored = lent.stored
    assert stored is not None
    stored["metadata"]["resourceVersion"] = "9999"  # another finalizer may have come or gone
    with pytest.raises(ConflictError):
        await lent.reconcile()
    lent.ctx.connections.renew(copy.deepcopy(stored))
    await lent.reconcile()
    assert lent.finalizers == [ALIEN]


def test_a_connection_is_looked_at_when_its_first_policy_comes_and_its_last_goes() -> None:
    def made(**metadata: object) -> dict[str, Any]:
        return {"metadata": {"name": "main", "namespace": "shop", **metadata}}

    assert is_protection_due(made(), used=True)
    assert not is_protection_due(made(), used=False)
    assert is_protection_due(made(finalizers=[IN_USE]), used=False)
    assert not is_protection_due(made(finalizers=[IN_USE]), used=True)
    assert is_protection_due(made(finalizers=[IN_USE], deletionTimestamp="x"), used=True)

"""What a reconcile at a broker proves, and what it finds proven meanwhile by another."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from redrive.admin.model import broker_at
from redrive.api.connection import BrokerConnectionSpec
from redrive.provision.claims import Conflicts, resolve
from redrive.provision.reconciler import Converged, converge
from redrive.provision.request import ResourceConflictError
from tests.support.fake_admin import Do
from tests.unit.provision.test_faults import Shop, shop
from tests.unit.provision.test_standing import provisioned

MakeBody = Callable[..., dict[str, Any]]


async def provision(
    there: Shop,
    ctx: Any,  # noqa: ANN401
    read: BrokerConnectionSpec | None = None,
) -> Converged:
    """Reconcile the policy; *read* is what its connection was when the reconcile began."""
    conflicts = Conflicts(ctx.policies, ctx.connections, lambda _: None)
    request = resolve(there.stored, ctx)
    if read is not None:
        request = dataclasses.replace(request, connection=read)
    return await converge(request, there.stored, ctx, conflicts)


async def test_the_broker_that_is_proven_is_the_one_that_answered(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    """Not the one that the connection named a moment before, or names a moment later."""
    async with shop(connection, policy()) as there:
        elsewhere = connection | {"adminUrl": "http://elsewhere:8080"}
        read = BrokerConnectionSpec.model_validate(elsewhere)
        made = await provision(there, there.ctx(None), read)
        assert made.broker == broker_at(connection["adminUrl"])


async def test_a_rival_that_is_provisioned_while_the_broker_is_read_comes_first(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    """Of two namespaces that begin at once, the one that comes later writes nothing."""
    lent = copy.deepcopy(connection)
    lent["allow"][0]["namespaces"] = {"names": ["shop", "other"]}
    rival = policy("rival", connectionRef={"namespace": "shop", "name": "main"})
    rival["metadata"] |= {"namespace": "other", "creationTimestamp": "2025-01-01T00:00:00Z"}
    async with shop(lent, policy()) as there:
        ctx = there.ctx(None)
        ctx.policies.put(rival)

        async def meanwhile(_: web.Request, do: Do) -> web.StreamResponse:
            ctx.policies.put(rival | {"status": provisioned()})
            return await do()

        there.broker.fault = meanwhile
        with pytest.raises(ResourceConflictError, match="got 'RetryPolicy other/rival'"):
            await provision(there, ctx)
        assert {method for method, _ in there.broker.calls} == {"GET"}
        assert there.stored["metadata"].get("finalizers", []) == []

"""The components of the benchmarks, with a few policies."""

from __future__ import annotations

from typing import Any

import pytest

from tests.benchmarks.provision.bench_hostile import delays
from tests.benchmarks.provision.bench_standing import is_of_namespace, writes
from tests.benchmarks.provision.crowd import crowd, provision_calls, run_script, source_calls
from tests.benchmarks.provision.in_process import brokers, calls, cluster, settled
from tests.benchmarks.provision.in_process import operator as operator_here
from tests.benchmarks.provision.operator import Operator, counting
from tests.integration.provision.conftest import MakeShop, Shop

NAMES = ["orders-0", "orders-1", "orders-2"]


async def test_the_bare_script_makes_what_the_operator_makes(
    make_shop: MakeShop, operator: Operator
) -> None:
    shop, other = make_shop(), make_shop()
    async with counting(shop.broker.admin_url) as proxy, crowd(shop, operator.kubeconfig) as people:
        shop.connection(adminURL=proxy.url)
        await people.make_sources(NAMES)
        assert not writes(proxy.calls)
        await people.make(NAMES)
        await people.settled(len(NAMES))
        assert any(is_of_namespace(call, f"{shop.tenant}/prod") for call in proxy.calls)
        made = writes(proxy.calls)

    url, token = other.broker.admin_url, other.broker.token(other.role)
    topics = [f"{other.tenant}/prod/{name}" for name in NAMES]
    await run_script(source_calls(topics), url, token)
    phases = provision_calls(topics, "fulfilment")
    await run_script(phases, url, token)
    assert state_of(other) == state_of(shop)
    calls = sum(map(len, phases))
    assert (
        calls <= made <= calls + len(NAMES)
    )  # a role may have been granted its rights in another call
    assert operator.memory() > 10


@pytest.mark.parametrize(("apart", "connections"), [(1, 1), (1, 3), (3, 1)])
async def test_operator_in_process_writes_nothing_after_a_restart(
    apart: int, connections: int
) -> None:
    async with brokers(apart, 4) as urls:
        kubernetes = cluster(urls * connections, range(4))
        before = calls(only_writes=True)
        async with operator_here(kubernetes) as ctx:
            await settled(ctx)
        made = calls(only_writes=True)
        assert made > before
        async with operator_here(kubernetes) as ctx:
            await settled(ctx)
        assert calls(only_writes=True) == made


def state_of(shop: Shop) -> dict[str, Any]:
    """Return topics and rights of a shop, without its name and the owner properties."""
    rights = shop.request("GET", f"namespaces/{shop.tenant}/prod")["auth_policies"]
    topics = {name: {**state, "properties": None} for name, state in shop.topics().items()}
    parts: dict[str, Any] = {"rights": rights["destination_auth"], "topics": topics}
    return {
        kind: {name.rsplit("/", 1)[1]: value for name, value in things.items()}
        for kind, things in parts.items()
    }


async def test_new_policies_settle_beside_hostile_objects() -> None:
    """Times are compared by `make bench` alone; here each new policy settles."""
    quiet, _, duration = await delays(20)
    assert quiet.value > 0
    assert duration.value > 0

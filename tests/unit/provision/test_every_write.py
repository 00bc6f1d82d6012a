"""A fault at every write of a reconcile, at the broker or in Kubernetes: the end is as in peace."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from aiohttp import web

from redrive.api import Body
from redrive.errors import RedriveError, Requeue
from redrive.kube import resources
from redrive.kube.cache import Cache
from tests.support.crashes import Crash, Fault, Faulty
from tests.support.fake_admin import Do
from tests.support.reconcile_harness import KEY, ReconcileHarness, reconcile_harness

MakeBody = Callable[..., dict[str, Any]]
STATUS, FINALIZER = ("patch_status", "RetryPolicy"), ("patch", "RetryPolicy")
LOOKS = 6
"""So many reconciles are enough for any fault."""


def at_broker(fault: Fault) -> Callable[[web.Request, Do], Any]:
    """Have the operator crash at a write to the broker, too."""

    async def befall(request: web.Request, do: Do) -> web.StreamResponse:
        if request.method == "GET":
            return await do()
        try:
            answer: web.StreamResponse = await fault.befall(do)
        except Crash:
            return web.Response(status=503)
        return answer

    return befall


async def run(here: ReconcileHarness, fault: Fault) -> None:
    """Have the operator reconcile until all is done."""
    kubernetes = here.kubernetes
    assert isinstance(kubernetes, Faulty)
    kubernetes.fault, here.broker.fault = fault, at_broker(fault)
    for _ in range(LOOKS):
        if await here.reconcile() is Requeue.ON_CHANGE:
            return
    raise AssertionError("it never ends")


def restart(here: ReconcileHarness, shown: list[Body]) -> None:
    """Start another operator, to which a list shows *shown* of the policies."""
    here.ctx.policies = Cache(shown)
    here.ctx.config_maps = Cache()
    here.__post_init__()


def stored(here: ReconcileHarness) -> dict[str, Any]:
    """All that there is in the end, without what counts versions and tells times."""
    objects = copy.deepcopy(here.kubernetes.objects)
    for by_key in objects.values():
        for body in by_key.values():
            body["metadata"].pop("resourceVersion", None)
    for body in objects[resources.CONFIG_MAPS].values():
        body["metadata"].pop("uid")
    kinds = (resources.POLICIES, resources.CONFIG_MAPS)
    return {"broker": here.broker.namespaces, **{kind.kind: objects[kind] for kind in kinds}}


def history(here: ReconcileHarness) -> Counter[tuple[str, str]]:
    """How often each write was made, in Kubernetes and at the broker."""
    in_kubernetes = ((write.verb, write.resource.kind) for write in here.kubernetes.writes)
    return Counter([*here.broker.writes, *in_kubernetes])


@pytest.mark.parametrize("stale", [False, True], ids=["seen", "stale"])
@pytest.mark.parametrize("done", [False, True], ids=["not done", "done"])
async def test_a_crash_at_any_write_ends_as_peace_does_and_repeats_only_that_write(
    connection: dict[str, Any], policy: MakeBody, *, done: bool, stale: bool
) -> None:
    body = policy(deletionPolicy="Delete")
    async with reconcile_harness(connection, body, Faulty()) as peaceful:
        fault = Fault(0, done=False)
        await run(peaceful, fault)
        right, before, writes = stored(peaceful), history(peaceful), fault.count
    assert writes > 10
    for number in range(1, writes + 1):
        async with reconcile_harness(connection, body, Faulty()) as here:
            kubernetes = here.kubernetes
            assert isinstance(kubernetes, Faulty)
            kubernetes.fault = fault = Fault(number, done=done)
            here.broker.fault = at_broker(fault)
            with suppress(Crash, RedriveError):
                await here.reconcile()
            now = copy.deepcopy(kubernetes.objects[resources.POLICIES][KEY])
            restart(here, [body if stale else now])
            if stale:
                await reconcile_from_behind(here, now)
            await run(here, Fault(0, done=False))
            assert stored(here) == right, f"write {number}"
            more = history(here) - before
            at_the_broker = {each: count for each, count in more.items() if each[0].isupper()}
            assert sum(at_the_broker.values()) <= 1, f"write {number}: {more}"
            # A stale cache shows no progress and no intent: both are written again.
            assert more.keys() - at_the_broker <= {STATUS, FINALIZER}, f"write {number}: {more}"
            assert max(more[STATUS] - 1, more[FINALIZER]) <= 1, f"write {number}: {more}"


async def reconcile_from_behind(here: ReconcileHarness, now: Body) -> None:
    """Reconcile once with a cache that is behind; then a watch shows the policy as it is."""
    with suppress(RedriveError):
        await here.reconcile()
    here.ctx.policies.put(now)

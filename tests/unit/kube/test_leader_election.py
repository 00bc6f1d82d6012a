"""Leader election against an API server in memory, which refuses outdated writes."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest
from prometheus_client import REGISTRY

from redrive.admin.guards import Fence
from redrive.api import Body
from redrive.kube import resources
from redrive.kube.leader_election import (
    FENCE_SECONDS,
    LEASE_SECONDS,
    PART,
    RENEW_SECONDS,
    LeaderElector,
    holding,
)
from redrive.kube.observability import Liveness
from redrive.kube.resources import Key, Resource
from redrive.reasons import Reason
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.reasons import raises

KEY = Key("redrive-system", "redrive")


class Clock:
    """Seconds that pass when the test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Operator:
    """One of several operators."""

    def __init__(self, api: FakeKubernetes, clock: Clock, identity: str) -> None:
        self.fence = Fence(clock)
        self.lease = LeaderElector(api, KEY, identity, self.fence, clock=a_moment, elapsed=clock)


def a_moment() -> datetime:
    return datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def api() -> FakeKubernetes:
    return FakeKubernetes()


@pytest.fixture
def one(api: FakeKubernetes, clock: Clock) -> Operator:
    return Operator(api, clock, "one")


@pytest.fixture
def two(api: FakeKubernetes, clock: Clock) -> Operator:
    return Operator(api, clock, "two")


async def test_first_operator_leads_while_it_renews(
    one: Operator, two: Operator, clock: Clock
) -> None:
    assert await one.lease.try_to_take()
    assert one.fence.is_open()
    for _ in range(20):
        assert not await two.lease.try_to_take()
        clock.now += RENEW_SECONDS
        await one.lease.renew()
    assert one.fence.is_open()
    assert not two.fence.is_open()


async def test_standby_takes_over_within_20_seconds(
    one: Operator, two: Operator, clock: Clock
) -> None:
    await one.lease.try_to_take()
    last = clock.now
    while not await two.lease.try_to_take():
        clock.now += RENEW_SECONDS
    assert clock.now - last <= 20


async def test_unchanged_lease_is_taken_over_after_its_duration(
    one: Operator, two: Operator, api: FakeKubernetes, clock: Clock
) -> None:
    await one.lease.try_to_take()
    clock.now += 100
    assert not await two.lease.try_to_take()  # it may have been renewed just now
    clock.now += LEASE_SECONDS - 0.1
    assert not await two.lease.try_to_take()
    clock.now += 0.1
    assert not one.fence.is_open()
    assert await two.lease.try_to_take()
    assert two.fence.is_open()
    spec = api.objects[resources.LEASES][KEY]["spec"]
    assert spec["holderIdentity"] == "two"
    assert spec["leaseTransitions"] == 1
    assert REGISTRY.get_sample_value("redrive_lease_transitions_total") == 1
    with raises(Reason.LEASE_LOST, match="another operator has taken the lease; got 'two'"):
        await one.lease.renew()
    assert not one.fence.is_open()


async def test_fence_closes_before_others_take_over(
    one: Operator, api: FakeKubernetes, clock: Clock
) -> None:
    slow = 3.0

    def spend(verb: str, _resource: Resource, _key: Key) -> None:
        if verb in {"create", "patch"}:
            clock.now += slow

    api.before = spend
    await one.lease.try_to_take()
    clock.now += FENCE_SECONDS - slow - 0.1
    assert one.fence.is_open()
    clock.now += 0.1
    assert not one.fence.is_open()
    assert FENCE_SECONDS < LEASE_SECONDS


async def test_late_renewal_resumes_if_none_took_over(
    one: Operator, two: Operator, clock: Clock
) -> None:
    await one.lease.try_to_take()
    clock.now += 1000
    assert not one.fence.is_open()
    await one.lease.renew()
    assert one.fence.is_open()
    assert not await two.lease.try_to_take()


async def test_concurrent_takeovers_have_one_winner(
    one: Operator, two: Operator, api: FakeKubernetes, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await Operator(api, clock, "dead").lease.try_to_take()
    await one.lease.try_to_take()
    await two.lease.try_to_take()
    clock.now += LEASE_SECONDS
    seen = await api.get(resources.LEASES, KEY)
    assert await one.lease.try_to_take()

    async def stale(*_: object) -> Body:
        return seen

    with monkeypatch.context() as patched:
        patched.setattr(api, "get", stale)
        assert not await two.lease.try_to_take()
    assert one.fence.is_open()
    assert not two.fence.is_open()


async def test_changed_or_deleted_lease_is_restored(one: Operator, api: FakeKubernetes) -> None:
    await one.lease.try_to_take()
    await api.patch(resources.LEASES, KEY, {"spec": {"note": "by hand"}})
    await one.lease.renew()
    del api.objects[resources.LEASES][KEY]
    await one.lease.renew()
    assert (await api.get(resources.LEASES, KEY))["spec"]["holderIdentity"] == "one"


@pytest.mark.parametrize("holder", [None, "", "three", "two"])
async def test_standby_waits_when_lease_is_deleted_or_reassigned(
    one: Operator, two: Operator, api: FakeKubernetes, clock: Clock, holder: str | None
) -> None:
    await one.lease.try_to_take()
    assert not await two.lease.try_to_take()
    if holder is None:
        del api.objects[resources.LEASES][KEY]
    else:
        await api.patch(resources.LEASES, KEY, {"spec": {"holderIdentity": holder}})
    for _ in range(5):
        assert not await two.lease.try_to_take()
        assert not (one.fence.is_open() and two.fence.is_open())
        clock.now += LEASE_SECONDS / 5
    assert not one.fence.is_open()
    assert await two.lease.try_to_take()


@pytest.mark.parametrize("taken", [True, False])
async def test_lost_lease_closes_the_fence(
    one: Operator, api: FakeKubernetes, clock: Clock, *, taken: bool
) -> None:
    await one.lease.try_to_take()
    holder = {"holderIdentity": "two" if taken else "one"}
    await api.patch(resources.LEASES, KEY, {"spec": holder})
    if taken:
        with raises(Reason.LEASE_LOST):
            await one.lease.renew()
    else:
        await one.lease.renew()
    assert clock.now == 0
    assert one.fence.is_open() is not taken


async def test_restarted_operator_resumes_its_lease(
    one: Operator, api: FakeKubernetes, clock: Clock
) -> None:
    await one.lease.try_to_take()
    again = Operator(api, clock, "one")
    assert await again.lease.try_to_take()
    assert not await Operator(api, clock, "two").lease.try_to_take()


async def test_released_lease_is_taken_at_once(one: Operator, two: Operator) -> None:
    await one.lease.try_to_take()
    assert not await two.lease.try_to_take()
    await one.lease.release()
    assert not one.fence.is_open()
    assert await two.lease.try_to_take()


async def test_lease_is_released_despite_unanswered_renewal(
    one: Operator, two: Operator, api: FakeKubernetes, clock: Clock
) -> None:
    await one.lease.try_to_take()
    assert not await two.lease.try_to_take()
    await Operator(api, clock, "one").lease.try_to_take()
    await one.lease.release()
    assert await two.lease.try_to_take()
    await one.lease.release()
    assert not await Operator(api, clock, "three").lease.try_to_take()


async def test_release_leaves_the_lease_of_another(
    one: Operator, two: Operator, api: FakeKubernetes, clock: Clock
) -> None:
    await one.lease.try_to_take()
    assert not await two.lease.try_to_take()
    clock.now += LEASE_SECONDS
    assert await two.lease.try_to_take()
    with raises(Reason.LEASE_LOST):
        await one.lease.renew()
    await one.lease.release()
    assert api.objects[resources.LEASES][KEY]["spec"]["holderIdentity"] == "two"


@pytest.mark.parametrize("spec", [None, {"holderIdentity": 7, "leaseTransitions": "x"}])
async def test_malformed_lease_is_taken(
    one: Operator, api: FakeKubernetes, spec: Body | None
) -> None:
    metadata = {**KEY._asdict(), "uid": "1", "resourceVersion": "1"}
    api.add(resources.LEASES, {"metadata": metadata, "spec": spec})
    assert await one.lease.try_to_take()
    assert api.objects[resources.LEASES][KEY]["spec"]["leaseTransitions"] == 1


async def test_cancelled_renewal_ends_the_block_and_releases(one: Operator, two: Operator) -> None:
    await one.lease.try_to_take()

    async def lead() -> None:
        async with asyncio.timeout(10), holding(one.lease, Liveness()):
            (renewal,) = (task for task in asyncio.all_tasks() if task.get_name() == PART)
            renewal.cancel()
            await asyncio.sleep(60)

    with raises(Reason.LEASE_LOST, match="the renewal of the lease ended; got 'a cancellation'"):
        await lead()
    assert not one.fence.is_open()
    assert await two.lease.try_to_take()

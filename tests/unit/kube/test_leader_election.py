"""Leader election against an API server in memory, which refuses outdated writes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from redrive.admin.fence import Fence
from redrive.kube import resources
from redrive.kube.client import Kubernetes
from redrive.kube.errors import ConflictError, LeaseLostError, NotFoundError
from redrive.kube.leader_election import FENCE_SECONDS, LEASE_SECONDS, RENEW_SECONDS, LeaderElector
from redrive.kube.resources import Body, Key, Resource

KEY = Key("redrive-system", "redrive")


class Clock:
    """Seconds that pass when the test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Leases(Kubernetes):
    """One Lease; each write gets a version, and costs `slow` seconds."""

    def __init__(self, clock: Clock) -> None:
        self.record: dict[str, Any] | None = None
        self.clock = clock
        self.slow = 0.0
        self.version = 0

    async def get(self, resource: Resource, key: Key) -> Body:
        assert (resource, key) == (resources.LEASES, KEY)
        if self.record is None:
            raise NotFoundError("no such lease", remedy="make it")
        return self.record

    async def create(self, resource: Resource, body: Body) -> Body:
        assert resource == resources.LEASES
        if self.record is not None:
            raise ConflictError("it is there", remedy="read it")
        return self.write(dict(body["spec"]))

    async def patch(self, resource: Resource, key: Key, patch: Body) -> Body:
        record = await self.get(resource, key)
        if record["metadata"]["resourceVersion"] != patch["metadata"]["resourceVersion"]:
            raise ConflictError("it has changed", remedy="read it")
        return self.write(record["spec"] | patch["spec"])

    def write(self, spec: dict[str, Any]) -> Body:
        self.version += 1
        self.clock.now += self.slow
        metadata = {"namespace": KEY.namespace, "name": KEY.name}
        self.record = {"metadata": metadata | {"resourceVersion": str(self.version)}, "spec": spec}
        return self.record


class Operator:
    """One of several operators."""

    def __init__(self, api: Leases, identity: str) -> None:
        self.fence = Fence(api.clock)
        self.lease = LeaderElector(
            api, KEY, identity, self.fence, clock=a_moment, elapsed=api.clock
        )


def a_moment() -> datetime:
    return datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def api(clock: Clock) -> Leases:
    return Leases(clock)


@pytest.fixture
def one(api: Leases) -> Operator:
    return Operator(api, "one")


@pytest.fixture
def two(api: Leases) -> Operator:
    return Operator(api, "two")


async def test_the_first_gets_it_and_others_stand_by_while_it_renews(
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


async def test_it_is_taken_over_when_it_has_not_changed_for_as_long_as_it_lasts(
    one: Operator, two: Operator, api: Leases, clock: Clock
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
    assert api.record is not None
    assert api.record["spec"]["holderIdentity"] == "two"
    assert api.record["spec"]["leaseTransitions"] == 1
    with pytest.raises(LeaseLostError, match="another operator has taken the lease; got 'two'"):
        await one.lease.renew()
    assert not one.fence.is_open()


async def test_a_fence_counts_from_before_the_renewal_so_it_closes_before_others_take_over(
    one: Operator, api: Leases, clock: Clock
) -> None:
    api.slow = 3.0
    await one.lease.try_to_take()
    clock.now += FENCE_SECONDS - api.slow - 0.1
    assert one.fence.is_open()
    clock.now += 0.1
    assert not one.fence.is_open()
    assert FENCE_SECONDS < LEASE_SECONDS


async def test_who_could_not_renew_for_long_goes_on_if_nobody_took_over(
    one: Operator, two: Operator, clock: Clock
) -> None:
    await one.lease.try_to_take()
    clock.now += 1000
    assert not one.fence.is_open()
    await one.lease.renew()
    assert one.fence.is_open()
    assert not await two.lease.try_to_take()


async def test_of_two_that_try_at_once_one_gets_it(
    one: Operator, two: Operator, api: Leases, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await Operator(api, "dead").lease.try_to_take()
    await one.lease.try_to_take()
    await two.lease.try_to_take()
    clock.now += LEASE_SECONDS
    seen = await api.get(resources.LEASES, KEY)
    assert await one.lease.try_to_take()

    async def stale(*_: object) -> Body:
        return seen

    with monkeypatch.context() as patched:
        patched.setattr(api, "get", stale)
        patched.setattr(api, "patch", _refuse)
        assert not await two.lease.try_to_take()
    assert one.fence.is_open()
    assert not two.fence.is_open()


async def _refuse(*_: object) -> Body:
    raise ConflictError("it has changed", remedy="read it")


async def test_a_lease_that_somebody_changed_or_deleted_is_made_good(
    one: Operator, api: Leases
) -> None:
    await one.lease.try_to_take()
    assert api.record is not None
    api.write(api.record["spec"] | {"note": "by hand"})
    await one.lease.renew()
    api.record = None
    await one.lease.renew()
    assert (await api.get(resources.LEASES, KEY))["spec"]["holderIdentity"] == "one"


@pytest.mark.parametrize("holder", [None, "", "three", "two"])
async def test_a_standby_waits_when_the_lease_is_deleted_or_its_holder_replaced_by_hand(
    one: Operator, two: Operator, api: Leases, clock: Clock, holder: str | None
) -> None:
    await one.lease.try_to_take()
    assert not await two.lease.try_to_take()
    assert api.record is not None
    if holder is None:
        api.record = None
    else:
        api.write(api.record["spec"] | {"holderIdentity": holder})
    for _ in range(5):
        assert not await two.lease.try_to_take()
        assert not (one.fence.is_open() and two.fence.is_open())
        clock.now += LEASE_SECONDS / 5
    assert not one.fence.is_open()
    assert await two.lease.try_to_take()


@pytest.mark.parametrize("taken", [True, False])
async def test_who_loses_the_lease_writes_nothing_more(
    one: Operator, api: Leases, clock: Clock, *, taken: bool
) -> None:
    await one.lease.try_to_take()
    assert api.record is not None
    api.write(api.record["spec"] | {"holderIdentity": "two" if taken else "one"})
    if taken:
        with pytest.raises(LeaseLostError):
            await one.lease.renew()
    else:
        await one.lease.renew()
    assert clock.now == 0
    assert one.fence.is_open() is not taken


async def test_who_starts_again_under_its_name_need_not_wait_and_others_need(
    one: Operator, api: Leases
) -> None:
    await one.lease.try_to_take()
    again = Operator(api, "one")
    assert await again.lease.try_to_take()
    assert not await Operator(api, "two").lease.try_to_take()


async def test_what_is_given_up_is_taken_at_once(one: Operator, two: Operator) -> None:
    await one.lease.try_to_take()
    assert not await two.lease.try_to_take()
    await one.lease.release()
    assert not one.fence.is_open()
    assert await two.lease.try_to_take()

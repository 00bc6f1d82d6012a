"""Leader election against an API server in memory, which refuses outdated writes."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from redrive.admin.guards import Fence
from redrive.api import Body
from redrive.kube import resources
from redrive.kube.client import LeaseLostError
from redrive.kube.leader_election import FENCE_SECONDS, LEASE_SECONDS, RENEW_SECONDS, LeaderElector
from redrive.kube.resources import Key, Resource
from tests.support.fake_kubernetes import FakeKubernetes

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
    with pytest.raises(LeaseLostError, match="another operator has taken the lease; got 'two'"):
        await one.lease.renew()
    assert not one.fence.is_open()


async def test_a_fence_counts_from_before_the_renewal_so_it_closes_before_others_take_over(
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


async def test_who_could_not_renew_for_long_goes_on_if_none_took_over(
    one: Operator, two: Operator, clock: Clock
) -> None:
    await one.lease.try_to_take()
    clock.now += 1000
    assert not one.fence.is_open()
    await one.lease.renew()
    assert one.fence.is_open()
    assert not await two.lease.try_to_take()


async def test_of_two_that_try_at_once_one_gets_it(
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


async def test_a_lease_that_was_changed_or_deleted_is_made_good(
    one: Operator, api: FakeKubernetes
) -> None:
    await one.lease.try_to_take()
    await api.patch(resources.LEASES, KEY, {"spec": {"note": "by hand"}})
    await one.lease.renew()
    del api.objects[resources.LEASES][KEY]
    await one.lease.renew()
    assert (await api.get(resources.LEASES, KEY))["spec"]["holderIdentity"] == "one"


@pytest.mark.parametrize("holder", [None, "", "three", "two"])
async def test_a_standby_waits_when_the_lease_is_deleted_or_its_holder_replaced_by_hand(
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
async def test_who_loses_the_lease_writes_nothing_more(
    one: Operator, api: FakeKubernetes, clock: Clock, *, taken: bool
) -> None:
    await one.lease.try_to_take()
    holder = {"holderIdentity": "two" if taken else "one"}
    await api.patch(resources.LEASES, KEY, {"spec": holder})
    if taken:
        with pytest.raises(LeaseLostError):
            await one.lease.renew()
    else:
        await one.lease.renew()
    assert clock.now == 0
    assert one.fence.is_open() is not taken


async def test_who_starts_again_under_its_name_need_not_wait_and_others_need(
    one: Operator, api: FakeKubernetes, clock: Clock
) -> None:
    await one.lease.try_to_take()
    again = Operator(api, clock, "one")
    assert await again.lease.try_to_take()
    assert not await Operator(api, clock, "two").lease.try_to_take()


async def test_what_is_given_up_is_taken_at_once(one: Operator, two: Operator) -> None:
    await one.lease.try_to_take()
    assert not await two.lease.try_to_take()
    await one.lease.release()
    assert not one.fence.is_open()
    assert await two.lease.try_to_take()


async def test_it_is_given_up_though_the_answer_to_its_renewal_was_not_waited_for(
    one: Operator, two: Operator, api: FakeKubernetes, clock: Clock
) -> None:
    await one.lease.try_to_take()
    assert not await two.lease.try_to_take()
    await Operator(api, clock, "one").lease.try_to_take()
    await one.lease.release()
    assert await two.lease.try_to_take()
    await one.lease.release()
    assert not await Operator(api, clock, "three").lease.try_to_take()

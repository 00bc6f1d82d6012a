"""A claim of which nothing comes keeps none from working, and takes nothing back."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from redrive.kube.resources import Body
from redrive.provision.admission_checks import prior_claim
from redrive.provision.errors import PartitionsDifferError
from redrive.provision.facts import Request
from redrive.provision.outcome import Outcome
from redrive.provision.standing import Standing

MakeBody = Callable[..., dict[str, Any]]
MakeRequest = Callable[..., Request]
FAULT = PartitionsDifferError("it can't be built", remedy="change it")


@dataclass
class Rivals:
    """Policies for one subscription, the oldest first, and what a reconcile makes of each.

    Attributes:
        faulty: those that can't be built, for a reason of their own.
    """

    policy: MakeBody
    requested: MakeRequest
    count: int
    faulty: set[int] = field(default_factory=set)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bodies = [self.policy(f"p{number}", age=number) for number in range(self.count)]

    def settle(self) -> None:
        """Reconcile all until nothing changes; fails if that never ends."""
        for _ in range(10):
            before = str(self.bodies)
            for number in range(self.count):
                self._reconcile(number)
            if str(self.bodies) == before:
                return
        raise AssertionError(f"they never come to rest: {self.bodies}")

    def standings(self) -> list[Standing]:
        """How each stands."""
        return [Standing.of(body) for body in self.bodies]

    def _reconcile(self, number: int) -> None:
        requests = [self._request(body) for body in self.bodies]
        prior = prior_claim(requests[number], [r for r in requests if r is not requests[number]])
        error = prior or (FAULT if number in self.faulty else None)
        body = self.bodies[number]
        if error is None:
            body["status"] = {"retryTopic": "r", "conditions": [condition("Ready", "Provisioned")]}
            return
        outcome = Outcome.failed(error)
        stalled = [condition("Stalled", error.reason)]
        body["status"] = {**body.get("status", {}), **outcome.fields, "conditions": stalled}

    def _request(self, body: Body) -> Request:
        return self.requested(body)


def condition(kind: str, reason: str) -> dict[str, str]:
    return {
        "type": kind,
        "status": "True",
        "reason": reason,
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(count=st.integers(1, 4), data=st.data())
def test_of_rivals_one_works_if_any_can_and_keeps_what_it_has(
    policy: MakeBody, requested: MakeRequest, count: int, data: st.DataObject
) -> None:
    rivals = Rivals(policy, requested, count)
    numbers = st.sets(st.integers(0, count - 1))
    holder = None
    for _ in range(4):
        rivals.faulty = data.draw(numbers)
        rivals.settle()
        holding = [n for n, each in enumerate(rivals.standings()) if each is Standing.HELD]
        sound = set(range(count)) - rivals.faulty
        assert len(holding) == (1 if sound else 0)
        assert set(holding) <= sound
        if holder in sound:
            assert holding == [holder]
        holder = holding[0] if holding else None


def test_one_that_only_observes_gives_way(policy: MakeBody, requested: MakeRequest) -> None:
    rivals = Rivals(policy, requested, 2)
    rivals.bodies[0]["spec"]["managementPolicy"] = "Observe"
    rivals._reconcile(1)  # noqa: SLF001
    assert rivals.standings() == [Standing.DEAD, Standing.HELD]
    rivals._reconcile(0)  # noqa: SLF001
    assert rivals.bodies[0]["status"]["blockedBy"] == "shop/p1"
    del rivals.bodies[0]["spec"]["managementPolicy"]
    rivals.settle()
    assert rivals.standings() == [Standing.OPEN, Standing.HELD]


def test_one_that_was_provisioned_and_stalls_gives_way_within_its_namespace_alone(
    policy: MakeBody, requested: MakeRequest
) -> None:
    for namespace, standings in (
        ("shop", [Standing.OPEN, Standing.HELD]),
        ("other", [Standing.HELD, Standing.OPEN]),
    ):
        rivals = Rivals(policy, requested, 2)
        rivals.bodies[1]["metadata"]["namespace"] = namespace
        rivals.settle()
        assert rivals.standings() == [Standing.HELD, Standing.OPEN]
        for faulty in ({0}, set[int]()):
            rivals.faulty = faulty
            rivals.settle()
        assert rivals.standings() == standings


def test_of_two_that_hold_something_the_owner_of_a_topic_keeps_it(
    policy: MakeBody, requested: MakeRequest
) -> None:
    named = {"naming": {"deadLetterTopic": "persistent://shop/prod/dead"}}
    older = policy("older", age=0, topic="persistent://shop/prod/other", **named)
    younger = policy("younger", age=1, **named)
    for body in (older, younger):
        body["status"] = {"retryTopic": "r"}
    for mine, theirs in ((older, younger), (younger, older)):
        assert not requested(mine).yields_to(requested(theirs))


@pytest.mark.parametrize(("mine", "theirs"), list(itertools.product(Standing, Standing)))
def test_of_two_claims_at_most_one_comes_first(mine: Standing, theirs: Standing) -> None:
    for is_older in (False, True):
        before = mine.precedes(theirs, is_older=is_older)
        after = theirs.precedes(mine, is_older=not is_older)
        assert not (before and after)


def test_a_policy_that_is_deleted_keeps_its_claim_until_it_is_gone(policy: MakeBody) -> None:
    body = policy()
    stalled = [condition("Stalled", "PartitionsDiffer")]
    body["status"] = {"retryTopic": "r", "conditions": stalled}
    assert Standing.of(body) is Standing.FAULTY
    body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert Standing.of(body) is Standing.HELD

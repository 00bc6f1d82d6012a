"""A claim of which nothing comes keeps none from working, and takes nothing back."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from redrive.errors import PartitionsDifferError, RedriveError
from redrive.kube.client import SecretNotFoundError
from redrive.kube.resources import Key
from redrive.provision.checks import prior_claim
from redrive.provision.outcome import Outcome
from redrive.provision.request import BROKER_DIGEST, ContestedError, Request, Standing, digest_of

MakeBody = Callable[..., dict[str, Any]]
MakeRequest = Callable[..., Request]
FAULT = PartitionsDifferError("it can't be built", remedy="change it")
POWERLESS = SecretNotFoundError("there is no such Secret", remedy="create it")


@dataclass
class Rivals:
    """Policies for one subscription, the oldest first, and what a reconcile makes of each.

    Attributes:
        faulty: those that can't be built, for a reason of their own.
        powerless: those that are not stalled, and whose connections open nothing.
    """

    policy: MakeBody
    requested: MakeRequest
    count: int
    faulty: set[int] = field(default_factory=set)
    powerless: set[int] = field(default_factory=set)
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

    def move(self, number: int, namespace: str) -> None:
        """Put one into another namespace; all use one connection."""
        body = self.bodies[number]
        body["metadata"]["namespace"] = namespace
        body["spec"]["connectionRef"] = {"namespace": "shop", "name": "main"}

    def admit(self, number: int) -> ContestedError | None:
        """Find whose claim comes before that of one."""
        requests = [self.requested(body) for body in self.bodies]
        return prior_claim(requests[number], [r for r in requests if r is not requests[number]])

    def _reconcile(self, number: int) -> None:
        self.end(number, self.admit(number))

    def end(self, number: int, prior: ContestedError | None) -> None:
        """Write what a reconcile comes to that found *prior* when it began."""
        faults: dict[int, RedriveError] = dict.fromkeys(self.faulty, FAULT)
        error = prior or (faults | dict.fromkeys(self.powerless, POWERLESS)).get(number)
        body = self.bodies[number]
        if error is None:
            body["status"] = provisioned()
            return
        outcome = Outcome.failed(error)
        kind = "Stalled" if error.stalls else "Reconciling"
        shown = [condition(kind, error.reason)]
        body["status"] = {**body.get("status", {}), **outcome.fields, "conditions": shown}


def provisioned(broker: str = "http://pulsar:8080") -> dict[str, Any]:
    """Return the status of a policy that is Ready."""
    return {
        "retryTopic": "r",
        "connection": "shop/main",
        BROKER_DIGEST: digest_of(broker),
        "conditions": [condition("Ready", "Provisioned")],
    }


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
        rivals.move(1, namespace)
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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(count=st.integers(2, 5), data=st.data())
def test_between_namespaces_only_what_was_proven_at_the_broker_counts(
    policy: MakeBody, requested: MakeRequest, count: int, data: st.DataObject
) -> None:
    """Whichever is looked at first, and however many at once; each has a namespace of its own."""
    rivals = Rivals(policy, requested, count)
    for number in range(1, count):
        rivals.move(number, f"tenant-{number}")
    numbers = st.integers(0, count - 1)
    honest = data.draw(st.sets(numbers, min_size=1))
    rivals.powerless = set(range(count)) - honest
    for at_once in data.draw(st.lists(st.sets(numbers), max_size=6)):
        found = {number: rivals.admit(number) for number in at_once}
        blockers = {str(each.rival) for each in found.values() if each is not None}
        held = rivals.standings()
        for number, body in enumerate(rivals.bodies):
            if str(Key.of(body)) in blockers:
                assert number in honest
                assert held[number] is Standing.HELD
        for number, prior in found.items():
            rivals.end(number, prior)
    working = [n for n, each in enumerate(rivals.standings()) if each is Standing.HELD]
    rivals.settle()
    (holder,) = [n for n, each in enumerate(rivals.standings()) if each is Standing.HELD]
    # Of those that were provisioned at once the oldest keeps what it has.
    assert holder == min(working, default=holder)
    rivals.powerless = set(range(count))  # their credentials are gone
    rivals.settle()
    assert rivals.standings()[holder] is Standing.HELD


@pytest.mark.parametrize("annotations", [{}, {"redrive.io/paused": "true"}])
@pytest.mark.parametrize(
    "status",
    [
        {},
        {"conditions": [condition("Reconciling", "SecretNotFound")]},
        provisioned("http://attacker:8080"),
        provisioned() | {"connection": "shop/former"},
    ],
)
def test_an_unproven_claim_of_another_namespace_keeps_no_name(
    policy: MakeBody,
    requested: MakeRequest,
    status: dict[str, Any],
    annotations: dict[str, str],
) -> None:
    """Of a policy that was never provisioned, or at another broker, or by others' rights."""
    victim = policy("victim", age=5)
    retry = str(requested(victim).spec.retry_topic)
    for spec in ({}, {"topic": retry}, {"subscription": "s", "naming": {"retryTopic": retry}}):
        squatter = policy("squatter", age=1, **spec)
        squatter["metadata"] |= {"namespace": "other", "annotations": annotations}
        squatter["spec"]["connectionRef"] = {"namespace": "shop", "name": "main"}
        squatter["status"] = status
        assert prior_claim(requested(victim), [requested(squatter)]) is None
        squatter["status"] = provisioned()
        assert prior_claim(requested(victim), [requested(squatter)]) is not None

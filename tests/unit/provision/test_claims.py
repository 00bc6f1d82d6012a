"""Claims of policies on topics: conflicts, priority, proof, and the specs behind them."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from redrive.admin.model import broker_at
from redrive.api.conditions import written
from redrive.api.connection import BrokerConnectionSpec
from redrive.api.model import parse_spec
from redrive.api.retrypolicy import RetryPolicySpec
from redrive.errors import InvalidSpecError, RedriveError
from redrive.kube import connections, resources
from redrive.kube.cache import Cache, Turn
from redrive.kube.client import ReferenceNotFoundError
from redrive.kube.context import Context
from redrive.kube.resources import Key
from redrive.policy.model import OutageLimits
from redrive.provision import claims
from redrive.provision.checks import prior_claim
from redrive.provision.claims import Conflicts, admit, check_number, resolve
from redrive.provision.outcome import Outcome
from redrive.provision.reconciler import Converged, converge
from redrive.provision.request import (
    BROKER_DIGEST,
    ContestedError,
    Priority,
    Request,
    digest_of,
)
from redrive.reasons import Reason
from tests.support.fake_admin import Do
from tests.support.fake_kubernetes import edit
from tests.support.manifests import changed
from tests.support.reasons import raises
from tests.unit.provision.test_faults import Shop, deleted, shop

MakeBody = Callable[..., dict[str, Any]]
TOPICS = {
    "a": ("persistent://shop/prod/orders-eu", "billing"),
    "b": ("persistent://shop/prod/orders", "eu-billing"),  # meets "a" in one name
    "c": ("persistent://shop/prod/orders", "fulfilment"),
    "d": ("persistent://shop/test/orders", "fulfilment"),
    "e": ("persistent://shop/prod/orders", "short"),
    "f": ("persistent://shop/prod/returns", "short"),  # meets "e" under a scheme without the topic
    "g": ("persistent://shop/prod/orders", "short"),  # the subscription of "e" under other names
    "h": ("persistent://shop/prod/gifts", "box"),  # its retry topic is the source of "f"
    "i": ("persistent://shop/prod/bills", "box"),  # its dead-letter topic is the ledger of "c"
    "j": ("persistent://shop/prod/fees", "box"),  # its ledger is the source of "k"
    "k": ("persistent://shop/prod/rest-LEDGER", "box"),
    "broken": ("persistent://shop/prod/orders-partition-3", "fulfilment"),
}
MEET = {
    "a": "ab",
    "b": "ab",
    "c": "ci",
    "d": "d",
    "e": "efg",
    "f": "efh",
    "g": "eg",
    "h": "fh",
    "i": "ci",
    "j": "jk",
    "k": "jk",
}
NAMING = {
    "e": {"scheme": "SubscriptionUpper"},
    "f": {"scheme": "SubscriptionUpper"},
    "h": {"retryTopic": "persistent://shop/prod/returns"},
    "i": {"deadLetterTopic": "persistent://shop/prod/orders-fulfilment-DLQ-LEDGER"},
    "j": {"deadLetterTopic": "persistent://shop/prod/rest"},
}


BROKERS = {"main": "http://Pulsar:8080/", "twin": "http://pulsar:8080", "stage": "http://stage"}


def connection_body(name: str, url: str, generation: int = 1) -> dict[str, Any]:
    metadata = {"namespace": "shop", "name": name, "uid": name, "generation": generation}
    metadata["resourceVersion"] = str(generation)
    return {"metadata": metadata, "spec": {"pulsar": {"adminURL": url}}}


def make_policy(
    policy: MakeBody, name: str, pair: str, generation: int = 1, through: str = "main"
) -> dict[str, Any]:
    topic, subscription = TOPICS[pair]
    naming = NAMING.get(pair, {})
    spec = {"topic": topic, "subscription": subscription, "naming": naming}
    return policy(name, generation=generation, connectionRef={"name": through}, **spec)


def broker_named(through: str) -> str:
    return "one" if through in {"main", "twin"} else through


def rivals(pairs: dict[str, tuple[str, str]], name: str) -> set[Key]:
    """Expected rivals of a policy, by comparison with every other policy."""
    pair, through = pairs.get(name, ("", ""))
    together = MEET.get(pair, "")
    return {
        Key("shop", n)
        for n, (other, by) in pairs.items()
        if other in together and broker_named(by) == broker_named(through) and n != name
    }


changes = st.lists(
    st.tuples(
        st.sampled_from("uvwxyz"),
        st.sampled_from([*TOPICS, "going", "gone"]),
        st.sampled_from([*BROKERS]),
    ),
    max_size=20,
)


@given(changes, changes)
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_conflicts_index_finds_rivals_and_enqueues_changes(
    policy: MakeBody, at_first: list[tuple[str, str, str]], later: list[tuple[str, str, str]]
) -> None:
    pairs = {name: (pair, through) for name, pair, through in at_first if pair in TOPICS}
    table = Cache(make_policy(policy, name, pair, 1, by) for name, (pair, by) in pairs.items())
    connections = Cache(connection_body(*item) for item in BROKERS.items())
    woken: set[Key] = set()
    conflicts = Conflicts(table, connections, woken.add)
    for generation, (name, pair, through) in enumerate(later, start=2):
        before = {other: rivals(pairs, other) for other in pairs}
        for other in pairs:
            conflicts.unblock(Key("shop", other))  # by its reconcile
        woken.clear()
        pairs.pop(name, None)
        if pair == "gone":
            table.drop(policy(name))
        elif pair == "going":
            body = make_policy(policy, name, "a", generation, through)
            body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            table.put(body)
            pairs[name] = "a", through  # until it is gone, its topics are not free
        else:
            pairs[name] = pair, through
            table.put(make_policy(policy, name, pair, generation, through))
        for other in pairs:
            assert set(conflicts.oldest_first(Key("shop", other))) == rivals(pairs, other)
            if other != name and before[other] != rivals(pairs, other):
                assert Key("shop", other) in woken


def test_changed_spec_with_same_names_enqueues_rivals(
    policy: MakeBody,
) -> None:
    refused = policy("older", consumerRoles=["root"])
    table = Cache([refused, policy("younger"), policy("other", subscription="another")])
    woken: list[Key] = []
    Conflicts(table, Cache(connection_body(*item) for item in BROKERS.items()), woken.append)
    table.put(policy("older", generation=8, consumerRoles=["fulfilment"]))
    table.put(policy("older", generation=9, connectionRef={"name": "stage"}))
    assert woken == [Key("shop", "younger")] * 2


def test_changed_status_enqueues_rivals_if_claim_changes(
    policy: MakeBody,
) -> None:
    table = Cache([policy("a"), policy("b"), policy("c", subscription="another")])
    woken: list[Key] = []
    Conflicts(table, Cache([connection_body("main", "http://pulsar")]), woken.append)
    table.put(policy("a") | {"status": {"maxRetries": 3}})
    assert woken == []
    table.put(policy("a") | {"status": {"retryTopic": "x"}})
    assert woken == [Key("shop", "b")]
    table.put(policy("a") | {"status": {"retryTopic": "x", "maxRetries": 4}})
    assert woken == [Key("shop", "b")]
    table.put(policy("a") | {"status": {"retryTopic": "x", "blockedBy": "shop/b"}})
    assert woken == [Key("shop", "b")] * 2
    for count, broker in enumerate(("one", "two"), start=3):
        internal = {"brokerDigest": broker}
        proven = {"retryTopic": "x", "connection": "shop/main", "internal": internal}
        table.put(policy("a") | {"status": proven})
        assert woken == [Key("shop", "b")] * count


def test_same_names_at_different_brokers_do_not_conflict(
    policy: MakeBody,
) -> None:
    numbers = [str(number) for number in range(100)]
    connections = Cache(connection_body(n, f"http://broker-{n}:8080") for n in numbers)
    table = Cache(policy(n, connectionRef={"name": n}) for n in numbers)
    woken: list[Key] = []
    conflicts = Conflicts(table, connections, woken.append)
    assert not any(conflicts.has_rivals(Key("shop", n)) for n in numbers)
    table.put(policy("7", connectionRef={"name": "7"}, generation=8, maxRetries=3))
    assert woken == []


def test_changed_broker_of_connection_updates_conflicts(policy: MakeBody) -> None:
    connections = Cache([connection_body("main", "http://one")])
    table = Cache([policy("a"), policy("b", connectionRef={"name": "late"})])
    woken: set[str] = set()
    conflicts = Conflicts(table, connections, lambda key: woken.add(key.name))
    steps = [("http://two", set()), ("http://one", {"b"}), ("http://three", set())]
    for generation, (url, met) in enumerate(steps, start=1):
        woken.clear()
        before = {key.name for key in conflicts.oldest_first(Key("shop", "a"))}
        connections.put(connection_body("late", url, generation))
        assert {key.name for key in conflicts.oldest_first(Key("shop", "a"))} == met
        assert ("a" in woken) == (before != met)


def test_policy_without_connection_keeps_its_claim(
    policy: MakeBody,
) -> None:
    main = connection_body("main", "http://one")
    connections = Cache([main, connection_body("twin", "http://one")])
    table = Cache([policy("a"), policy("b", connectionRef={"name": "twin"})])
    conflicts = Conflicts(table, connections, lambda _: None)
    connections.drop(main)
    assert [*conflicts.oldest_first(Key("shop", "b"))] == [Key("shop", "a")]
    table.drop(policy("a"))
    assert not conflicts.has_rivals(Key("shop", "b"))


class Colliding:
    """Policies of one subscription, reconciled as the work queue does.

    Attributes:
        reconciles: their number.
        readings: the number of requests that were read of rivals.
    """

    def __init__(self, ctx: Context, policy: MakeBody, patch: pytest.MonkeyPatch) -> None:
        self.ctx, self._policy = ctx, policy
        self._queue: dict[Key, None] = {}
        self.reconciles = self.readings = 0
        self.conflicts = Conflicts(ctx.policies, ctx.connections, self._enqueue)

        def counted(body: dict[str, Any], ctx: Context) -> Request:
            self.readings += 1
            return resolve(body, ctx)

        patch.setattr(claims, "resolve", counted)

    def _enqueue(self, key: Key) -> None:
        self._queue[key] = None

    def add(self, number: int) -> None:
        body = self._policy(f"p{number:04}")
        self.ctx.policies.put(body)
        self._enqueue(Key.of(body))

    def reconcile_all(self) -> None:
        while self._queue:
            key = next(iter(self._queue))
            del self._queue[key]
            body = self.ctx.policies.get(key)
            if body is None:
                continue
            self.reconciles += 1
            try:
                admit(resolve(body, self.ctx), self.ctx, self.conflicts)
                status = provisioned()
            except ContestedError as error:
                status = {**Outcome.failed(error).fields, "conditions": []}
            if status != body.get("status"):
                version = str(int(body["metadata"]["resourceVersion"]) + 1)
                metadata = body["metadata"] | {"resourceVersion": version}
                self.ctx.policies.put({**body, "metadata": metadata, "status": status})

    def holders(self) -> list[str]:
        return [Key.of(b).name for b in self.ctx.policies if "retryTopic" in b["status"]]


@pytest.mark.parametrize("together", [True, False], ids=["at once", "one by one"])
def test_colliding_policies_cost_few_reconciles_each(
    ctx: Context,
    connection: dict[str, Any],
    policy: MakeBody,
    monkeypatch: pytest.MonkeyPatch,
    *,
    together: bool,
) -> None:
    count = 100
    for rule in connection["allow"]:
        rule["limits"] = {"policies": count}
    ctx.connections.put(connection_body("main", "") | {"spec": connection})
    colliding = Colliding(ctx, policy, monkeypatch)
    for number in range(count):
        colliding.add(number)
        if not together:
            colliding.reconcile_all()
    colliding.reconcile_all()
    assert colliding.holders() == ["p0000"]
    assert colliding.reconciles <= 3 * count
    assert colliding.readings <= 5 * count
    holder = ctx.policies.get(Key("shop", "p0000"))
    assert holder is not None
    ctx.policies.drop(holder)
    colliding.reconciles = colliding.readings = 0
    colliding.reconcile_all()
    assert colliding.holders() == ["p0001"]
    assert colliding.reconciles <= 3 * count
    assert colliding.readings <= 5 * count


def test_rival_is_resolved_again_only_if_its_claim_changes(
    ctx: Context, connection: dict[str, Any], policy: MakeBody, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of thousands of rivals reads all of them, and their statuses change often."""
    resolved: list[object] = []

    def count(body: dict[str, Any], context: Context) -> Request:
        resolved.append(body["metadata"]["name"])
        return resolve(body, context)

    monkeypatch.setattr(claims, "resolve", count)
    through = connection_with(connection)
    ctx.connections.put(through)
    conflicts = Conflicts(ctx.policies, ctx.connections, lambda _: None)
    body, version = policy(), 1

    def resolutions(**changes: object) -> int:
        nonlocal body, version
        version += 1
        body = body | changes
        body = body | {"metadata": body["metadata"] | {"resourceVersion": str(version)}}
        ctx.policies.put(body)
        resolved.clear()
        request = conflicts.admissible(Key("shop", "orders"), ctx)
        assert request is not None
        assert request.priority is Priority.of(body)
        return len(resolved)

    assert resolutions() == 1
    blocked = {"conditions": [{"type": "Ready", "status": "False", "reason": "ResourceConflict"}]}
    assert resolutions(status=blocked) == 0
    shown = {"status": {"policies": 9}, "metadata": through["metadata"] | {"resourceVersion": "2"}}
    ctx.connections.put(through | shown)
    assert resolutions() == 0
    assert resolutions(status=blocked | {"retryTopic": "x"}) == 1
    assert resolutions(metadata=body["metadata"] | {"generation": 8}) == 1
    ctx.connections.put(connection_with(connection, 3))
    assert resolutions() == 1


MakeRequest = Callable[..., Request]
FAULT = Reason.PARTITIONS_DIFFER.error("it can't be built", remedy="change it")
POWERLESS = ReferenceNotFoundError("there is no such Secret", remedy="create it")


@dataclass
class Rivals:
    """Policies for one subscription, the oldest first, and the results of their reconciles.

    Attributes:
        faulty: those that can't be built, for a reason of their own.
        powerless: those that are not stalled, and whose connections can't be opened.
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

    def priorities(self) -> list[Priority]:
        """Return the priority of each policy."""
        return [Priority.of(body) for body in self.bodies]

    def move(self, number: int, namespace: str) -> None:
        """Put one into another namespace; all use one connection."""
        body = self.bodies[number]
        body["metadata"]["namespace"] = namespace
        body["spec"]["connectionRef"] = {"namespace": "shop", "name": "main"}

    def admit(self, number: int) -> ContestedError | None:
        """Return the error of a policy whose claim has no priority, if so."""
        requests = [self.requested(body) for body in self.bodies]
        others = sorted(requests[:number] + requests[number + 1 :], key=lambda other: other.age)
        priors = (prior_claim(requests[number], other) for other in others)
        return next((prior for prior in priors if prior is not None), None)

    def _reconcile(self, number: int) -> None:
        self.end(number, self.admit(number))

    def end(self, number: int, prior: ContestedError | None) -> None:
        """Write the status of a reconcile that found *prior* at its begin."""
        faults: dict[int, RedriveError] = dict.fromkeys(self.faulty, FAULT)
        error = prior or (faults | dict.fromkeys(self.powerless, POWERLESS)).get(number)
        body = self.bodies[number]
        if error is None:
            body["status"] = provisioned()
            return
        outcome = Outcome.failed(error)
        kind = "Stalled" if Reason.of(error).stalls else "Reconciling"
        shown = [condition(kind, error.reason)]
        body["status"] = {**body.get("status", {}), **outcome.fields, "conditions": shown}


def provisioned(broker: str = "http://pulsar:8080") -> dict[str, Any]:
    """Return the status of a policy that is Ready."""
    return {
        "retryTopic": "r",
        "connection": "shop/main",
        "internal": {BROKER_DIGEST: digest_of(broker)},
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
def test_rivals_settle_with_one_holder_that_stays(
    policy: MakeBody, requested: MakeRequest, count: int, data: st.DataObject
) -> None:
    rivals = Rivals(policy, requested, count)
    numbers = st.sets(st.integers(0, count - 1))
    holder = None
    for _ in range(4):
        rivals.faulty = data.draw(numbers)
        rivals.settle()
        holding = [n for n, priority in enumerate(rivals.priorities()) if priority is Priority.HELD]
        sound = set(range(count)) - rivals.faulty
        assert len(holding) == (1 if sound else 0)
        assert set(holding) <= sound
        if holder in sound:
            assert holding == [holder]
        holder = holding[0] if holding else None


def test_observing_policy_yields_to_managed_rival(policy: MakeBody, requested: MakeRequest) -> None:
    rivals = Rivals(policy, requested, 2)
    rivals.bodies[0]["spec"]["managementPolicy"] = "Observe"
    rivals._reconcile(1)  # noqa: SLF001
    assert rivals.priorities() == [Priority.INACTIVE, Priority.HELD]
    rivals._reconcile(0)  # noqa: SLF001
    assert rivals.bodies[0]["status"]["blockedBy"] == "shop/p1"
    del rivals.bodies[0]["spec"]["managementPolicy"]
    rivals.settle()
    assert rivals.priorities() == [Priority.OPEN, Priority.HELD]


def test_stalled_holder_yields_only_within_its_namespace(
    policy: MakeBody, requested: MakeRequest
) -> None:
    for namespace, standings in (
        ("shop", [Priority.OPEN, Priority.HELD]),
        ("other", [Priority.HELD, Priority.OPEN]),
    ):
        rivals = Rivals(policy, requested, 2)
        rivals.move(1, namespace)
        rivals.settle()
        assert rivals.priorities() == [Priority.HELD, Priority.OPEN]
        for faulty in ({0}, set[int]()):
            rivals.faulty = faulty
            rivals.settle()
        assert rivals.priorities() == standings


def test_holder_of_topics_does_not_yield_to_another_holder(
    policy: MakeBody, requested: MakeRequest
) -> None:
    named = {"naming": {"deadLetterTopic": "persistent://shop/prod/dead"}}
    older = policy("older", age=0, topic="persistent://shop/prod/other", **named)
    younger = policy("younger", age=1, **named)
    for body in (older, younger):
        body["status"] = {"retryTopic": "r"}
    for mine, theirs in ((older, younger), (younger, older)):
        assert not requested(mine).yields_to(requested(theirs))


@pytest.mark.parametrize(("mine", "theirs"), list(itertools.product(Priority, Priority)))
def test_claims_never_precede_each_other(mine: Priority, theirs: Priority) -> None:
    for is_older in (False, True):
        before = mine.precedes(theirs, is_older=is_older)
        after = theirs.precedes(mine, is_older=not is_older)
        assert not (before and after)


def test_deleted_policy_keeps_claim_until_it_is_gone(policy: MakeBody) -> None:
    body = policy()
    stalled = [condition("Stalled", "PartitionsDiffer")]
    body["status"] = {"retryTopic": "r", "conditions": stalled}
    assert Priority.of(body) is Priority.STALLED
    body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert Priority.of(body) is Priority.HELD


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(count=st.integers(2, 5), data=st.data())
def test_rivals_of_other_namespaces_need_proof_to_block(
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
        priors = {number: rivals.admit(number) for number in at_once}
        blockers = {str(priority.rival) for priority in priors.values() if priority is not None}
        held = rivals.priorities()
        for number, body in enumerate(rivals.bodies):
            if str(Key.of(body)) in blockers:
                assert number in honest
                assert held[number] is Priority.HELD
        for number, prior in priors.items():
            rivals.end(number, prior)
    working = [n for n, priority in enumerate(rivals.priorities()) if priority is Priority.HELD]
    rivals.settle()
    (holder,) = [n for n, priority in enumerate(rivals.priorities()) if priority is Priority.HELD]
    # The oldest of those that were provisioned at once keeps its topics.
    assert holder == min(working, default=holder)
    rivals.powerless = set(range(count))  # their credentials are gone
    rivals.settle()
    assert rivals.priorities()[holder] is Priority.HELD


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
def test_unproven_claim_of_other_namespace_does_not_block(
    policy: MakeBody,
    requested: MakeRequest,
    status: dict[str, Any],
    annotations: dict[str, str],
) -> None:
    """A policy that was never provisioned, or at another broker, or by another connection."""
    victim = policy("victim", age=5)
    retry = str(requested(victim).spec.retry_topic)
    for spec in ({}, {"topic": retry}, {"subscription": "s", "naming": {"retryTopic": retry}}):
        squatter = policy("squatter", age=1, **spec)
        squatter["metadata"] |= {"namespace": "other", "annotations": annotations}
        squatter["spec"]["connectionRef"] = {"namespace": "shop", "name": "main"}
        squatter["status"] = status
        assert prior_claim(requested(victim), requested(squatter)) is None
        squatter["status"] = provisioned()
        assert prior_claim(requested(victim), requested(squatter)) is not None


async def provision(
    made: Shop,
    ctx: Any,  # noqa: ANN401
    read: BrokerConnectionSpec | None = None,
) -> Converged:
    """Reconcile the policy; *read* is its connection as of the begin of the reconcile."""
    conflicts = Conflicts(ctx.policies, ctx.connections, lambda _: None)
    request = resolve(made.stored, ctx)
    if read is not None:
        request = dataclasses.replace(request, connection=read)
    return await converge(request, made.stored, ctx, conflicts)


async def test_converge_proves_the_broker_that_answered(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    """Not the one that the connection named a moment before, or names a moment later."""
    harness = shop(connection, policy())
    elsewhere = changed(connection, adminURL="http://elsewhere:8080")
    read = BrokerConnectionSpec.model_validate(elsewhere)
    converged = await provision(harness, harness.ctx(), read)
    assert converged.broker == broker_at(connection["pulsar"]["adminURL"])


async def test_rival_provisioned_during_reconcile_has_priority(
    connection: dict[str, Any], policy: MakeBody, caplog: pytest.LogCaptureFixture
) -> None:
    """The later of two namespaces that begin at once writes nothing."""
    caplog.set_level("INFO")
    lent = copy.deepcopy(connection)
    lent["allow"][0]["namespaces"] = {"names": ["shop", "other"]}
    rival = policy("rival", connectionRef={"namespace": "shop", "name": "main"})
    rival["metadata"] |= {"namespace": "other", "creationTimestamp": "2025-01-01T00:00:00Z"}
    harness = shop(lent, policy())
    ctx = harness.ctx()
    ctx.policies.put(rival)

    async def meanwhile(_: web.Request, do: Do) -> web.StreamResponse:
        ctx.policies.put(rival | {"status": provisioned()})
        return await do()

    harness.broker.fault = meanwhile
    with raises(Reason.RESOURCE_CONFLICT, match="got 'a RetryPolicy of another n"):
        await provision(harness, ctx)
    assert "RetryPolicy shop/orders waits for RetryPolicy other/rival" in caplog.text
    assert {method for method, _ in harness.broker.calls} == {"GET"}
    assert harness.stored["metadata"].get("finalizers", []) == []


@pytest.fixture
def parses(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The specs of policies that were parsed, in order."""
    specs: list[object] = []
    real = parse_spec

    def parse(model: Any, body: Any) -> Any:  # noqa: ANN401 - as the real one
        if model is RetryPolicySpec:
            specs.append(body["spec"].get("maxRetries"))
        return real(model, body)

    monkeypatch.setattr(connections, "parse_spec", parse)
    return specs


def connection_with(connection: dict[str, Any], generation: int = 1) -> dict[str, Any]:
    metadata = {"namespace": "shop", "name": "main", "uid": "main", "generation": generation}
    return {"metadata": metadata | {"resourceVersion": str(generation)}, "spec": connection}


def test_policy_spec_is_parsed_once_per_generation(
    ctx: Context, connection: dict[str, Any], policy: MakeBody, parses: list[object]
) -> None:
    body = policy(maxRetries=3)
    ctx = dataclasses.replace(
        ctx, policies=Cache([body]), connections=Cache([connection_with(connection)])
    )
    Conflicts(ctx.policies, ctx.connections, lambda _: None)
    first = resolve(body, ctx).policy
    shown = {**body, "status": {"maxRetries": 3}}
    assert resolve(shown, ctx).policy is first
    assert parses == [3]
    edit(body, maxRetries=4)
    assert resolve(body, ctx).policy.max_retries == 4
    assert resolve(body, ctx).policy is resolve(body, ctx).policy
    assert parses == [3, 4]


def test_changed_connection_defaults_change_resolved_policy(
    ctx: Context, connection: dict[str, Any], policy: MakeBody, parses: list[object]
) -> None:
    body = policy()
    ctx = dataclasses.replace(
        ctx, policies=Cache([body]), connections=Cache([connection_with(connection)])
    )
    assert resolve(body, ctx).policy.max_retries == 16
    ctx.connections.put(connection_with(connection | {"policyDefaults": {"maxRetries": 5}}, 2))
    assert resolve(body, ctx).policy.max_retries == 5
    assert len(parses) == 1


def test_outage_breaker_of_policy_overrides_connection(
    ctx: Context, connection: dict[str, Any], policy: MakeBody
) -> None:
    defaults = {"policyDefaults": {"outageBreaker": {"mode": "Pause", "window": 50}}}
    connections = Cache([connection_with(connection | defaults)])
    for breaker, expected in (
        ({}, OutageLimits(window=50)),
        ({"outageBreaker": {"mode": "Pause"}}, OutageLimits()),
        ({"outageBreaker": {"mode": "Never"}}, None),
    ):
        body = policy(**breaker)
        ctx = dataclasses.replace(ctx, policies=Cache([body]), connections=connections)
        assert resolve(body, ctx).policy.outage_breaker == expected


def test_ignore_outages_annotation_reaches_resolved_policy(
    ctx: Context, connection: dict[str, Any], policy: MakeBody
) -> None:
    body = policy(outageBreaker={"mode": "Pause", "window": 50})
    ctx = dataclasses.replace(
        ctx, policies=Cache([body]), connections=Cache([connection_with(connection)])
    )
    assert resolve(body, ctx).policy.outage_breaker == OutageLimits(window=50)
    assert not resolve(body, ctx).policy.ignore_outages
    for minutes, ignored in ((1, True), (-1, False)):
        end = written(ctx.clock() + timedelta(minutes=minutes))
        body["metadata"]["annotations"] = {"redrive.io/ignore-outages-until": end}
        assert resolve(body, ctx).policy.ignore_outages is ignored
    body["metadata"]["annotations"] = {"redrive.io/ignore-outages-until": "true"}
    assert not resolve(body, ctx).policy.ignore_outages


def test_dead_letter_annotation_reaches_resolved_policy(
    ctx: Context, connection: dict[str, Any], policy: MakeBody
) -> None:
    def origins(text: str, **spec: Any) -> frozenset[str]:  # noqa: ANN401
        body = policy(**spec)
        body["metadata"]["annotations"] = {"redrive.io/dead-letter-now": text}
        world = dataclasses.replace(
            ctx, policies=Cache([body]), connections=Cache([connection_with(connection)])
        )
        return resolve(body, world).policy.dead_letter_now

    later, before = (written(ctx.clock() + timedelta(minutes=m)) for m in (1, -1))
    assert origins(f"1:2:0@{later} 1:3:0@{before} 1:4:0@never 1:5:0 a%b@{later}") == {"1:2:0"}
    assert origins(f"1:2:0@{later}", deadLetter={"mode": "Discard"}) == frozenset()
    many = " ".join(f"1:{number}:0@{later}" for number in range(150))
    assert len(origins(many)) == 100


def test_refused_spec_is_parsed_once_with_constant_traceback(
    ctx: Context, connection: dict[str, Any], policy: MakeBody, parses: list[object]
) -> None:
    body = policy(maxRetries=-1)
    ctx = dataclasses.replace(
        ctx, policies=Cache([body]), connections=Cache([connection_with(connection)])
    )
    depths = []
    for _ in range(3):
        with pytest.raises(InvalidSpecError, match="maxRetries") as refused:
            resolve(body, ctx)
        depths.append(len(refused.traceback))
    assert len(set(depths)) == 1
    assert len(parses) == 1


def test_deleted_policy_leaves_no_parsed_spec(
    ctx: Context, connection: dict[str, Any], policy: MakeBody, parses: list[object]
) -> None:
    body = policy()
    ctx = dataclasses.replace(
        ctx, policies=Cache([body]), connections=Cache([connection_with(connection)])
    )
    first = resolve(body, ctx).policy
    ctx.policies.drop(body)
    assert resolve(body, ctx).policy is not first  # as it is being deleted, the last to read it
    ctx.policies.put(policy(maxRetries=9))  # another one of its name, uid and generation
    assert resolve(policy(maxRetries=9), ctx).policy.max_retries == 9
    assert parses == [None, None, None, 9]


def limited(
    ctx: Context, connection: dict[str, Any], bodies: list[dict[str, Any]], most: int
) -> list[str]:
    """Return the names of policies within the limit, in the order of *bodies*."""
    rule = connection["allow"][0] | {"limits": {"policies": most}}
    spec = connection | {"allow": [rule]}
    ctx = dataclasses.replace(
        ctx, policies=Cache(bodies), connections=Cache([connection_with(spec)])
    )
    within = []
    for body in bodies:
        try:
            check_number(resolve(body, ctx), ctx)
        except RedriveError as error:
            if error.reason is not Reason.LIMIT_EXCEEDED:
                raise
        else:
            within.append(body["metadata"]["name"])
    return within


def test_oldest_policies_within_the_limit_are_admitted(
    ctx: Context, connection: dict[str, Any], policy: MakeBody
) -> None:
    bodies = [policy(name, age=age) for age, name in enumerate("cab")]
    assert limited(ctx, connection, bodies, 3) == ["c", "a", "b"]
    assert limited(ctx, connection, bodies, 2) == ["c", "a"]
    assert limited(ctx, connection, [*bodies[1:], policy("z", age=9)], 2) == ["a", "b"]


@pytest.mark.parametrize("most", [20, 50])
def test_number_of_policies_is_checked_without_a_visit_of_others(
    ctx: Context,
    connection: dict[str, Any],
    policy: MakeBody,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
) -> None:
    """A connection may have ten thousand; each would read all others at each poll."""
    visited: list[dict[str, Any]] = []
    turn_of = claims._turn_among_peers  # noqa: SLF001 - what is read of a policy

    def note(body: dict[str, Any]) -> Turn:
        visited.append(body)
        return turn_of(body)

    monkeypatch.setattr(claims, "_turn_among_peers", note)
    bodies = [policy(f"orders-{number}", age=number) for number in range(50)]
    assert len(limited(ctx, connection, bodies, most)) == most
    assert len(visited) == 2 * len(bodies)  # each when it comes, and when it is checked


def test_provisioned_policies_come_before_older_ones(
    ctx: Context, connection: dict[str, Any], policy: MakeBody
) -> None:
    bodies = [policy(name, age=age) for age, name in enumerate("abc")]
    bodies[2]["status"] = {"retryTopic": "persistent://shop/prod/orders-fulfilment-RETRY"}
    assert limited(ctx, connection, bodies, 2) == ["a", "c"]


async def test_policy_beyond_the_limit_changes_nothing(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    connection["allow"][0]["limits"] = {"policies": 1}
    harness = shop(connection, policy("second", age=2))
    ctx = harness.ctx()
    ctx.policies.put(policy("first", age=1, subscription="billing"))
    with raises(Reason.LIMIT_EXCEEDED, match=r"than the 1 that .* shop/main .*; got 2;"):
        await provision(harness, ctx)
    assert harness.broker.calls == []
    assert harness.kubernetes.writes == []


async def test_policy_beyond_a_lowered_limit_is_still_cleaned_up(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    harness = shop(connection, policy(deletionPolicy="Delete"))
    await harness.look()
    assert "orders-fulfilment-RETRY" in harness.topics
    connection["allow"][0]["limits"] = {"partitions": 1}
    harness.kubernetes.add(resources.POLICIES, edit(dict(harness.stored), retry={"partitions": 2}))
    with raises(Reason.LIMIT_EXCEEDED):
        await harness.look()
    harness.kubernetes.add(resources.POLICIES, deleted(harness.stored))
    await harness.finalize()
    assert set(harness.topics) == {"orders", "others"}

"""Periodic checks: rotations, rate limits, and drift by facts of a namespace."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from redrive.admin.errors import BrokerUnreachableError
from redrive.admin.model import NamespaceState
from redrive.api import Body
from redrive.kube.cache import Cache
from redrive.kube.connections import broker_in
from redrive.kube.context import Context, wall_clock
from redrive.kube.resources import IGNORE_OUTAGES_UNTIL, Key
from redrive.policy.naming import TopicName
from redrive.provision import poller
from redrive.provision.claims import Conflicts, resolve
from redrive.provision.desired import Desired, TopicRole, desired
from redrive.provision.diff import config_map_actions
from redrive.provision.poller import (
    CALLS_PER_CHECK,
    CALLS_PER_RECONCILE,
    CALLS_PER_SECOND,
    CALLS_PER_SECOND_IN_ALL,
    FACTS_SECONDS,
    MANY_BEGUN,
    ROTATION_SECONDS,
    DriftPoller,
    NamespaceFacts,
    PollOrder,
    RateLimit,
    RateLimits,
    StallChecks,
    has_drifted,
    pause,
)
from redrive.provision.request import Request
from tests.support.fake_admin import FakeBroker, Namespace, Topic, answering, at_call

MakeBody = Callable[..., dict[str, Any]]
NOTHING = cast("Any", None)
THOUSAND = [Key("shop", f"orders-{number}") for number in range(1_000)]
HUNDRED = THOUSAND[:100]
HOUR = 3600.0
OVERHEAD_SECONDS = 0.03
"""Duration of a poll beside its pause, generously."""


class StubbedFacts(NamespaceFacts):
    """Returns the given drifted policies, and records the policies of each call."""

    asked: asyncio.Queue[tuple[Key, list[str]]]
    drifted_now: list[Key]
    fails: list[Exception]

    async def drifted(self, connection: Key, bodies: Iterable[Body]) -> list[Key]:
        self.asked.put_nowait((connection, [Key.of(body).name for body in bodies]))
        if self.fails:
            raise self.fails.pop()
        return self.drifted_now


@pytest.fixture
def facts(ctx: Context) -> StubbedFacts:
    made = StubbedFacts(ctx, Conflicts(ctx.policies, ctx.connections, lambda _: None))
    for name, value in (("asked", asyncio.Queue()), ("drifted_now", []), ("fails", [])):
        object.__setattr__(made, name, value)
    return made


def ignore(_: Key) -> None:
    """Enqueue nothing."""


def connection_to(name: str, broker: str = "http://pulsar:8080", version: int = 1) -> Body:
    metadata = {"namespace": "shop", "name": name, "uid": f"uid-{name}"}
    metadata["resourceVersion"] = str(version)
    return {"metadata": metadata, "spec": {"pulsar": {"adminURL": broker}}}


def settled_policy(
    body: dict[str, Any], reason: str = "Provisioned", status: str = "True"
) -> dict[str, Any]:
    ready = {
        "type": "Ready",
        "status": status,
        "reason": reason,
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    generation = body["metadata"]["generation"]
    return body | {"status": {"observedGeneration": generation, "conditions": [ready]}}


@pytest.mark.usefixtures("virtual_time")
async def test_settled_policies_are_polled_in_turn(policy: MakeBody, facts: StubbedFacts) -> None:
    woken: asyncio.Queue[str] = asyncio.Queue()
    walk = DriftPoller(facts, NOTHING, lambda key: woken.put_nowait(key.name), ignore)
    facts.ctx.connections.put(connection_to("main"))

    async def only(*names: str) -> None:
        async with asyncio.timeout(HOUR):
            while {await woken.get() for _ in range(3 * len(names))} != {*names}:
                pass

    for name in "abc":
        facts.ctx.policies.put(settled_policy(policy(name)))
    facts.ctx.policies.put(policy("waits"))
    facts.ctx.policies.put(settled_policy(policy("elsewhere", connectionRef={"name": "other"})))
    await only("a", "b", "c")
    facts.ctx.policies.drop(policy("b"))
    await only("a", "c")
    await walk.stop()


@pytest.mark.usefixtures("virtual_time")
async def test_connections_to_one_broker_share_a_rotation(
    policy: MakeBody, facts: StubbedFacts
) -> None:
    woken: asyncio.Queue[str] = asyncio.Queue()
    walk = DriftPoller(facts, NOTHING, lambda key: woken.put_nowait(key.name), ignore)
    names = {f"of-many-{n}" for n in range(38)} | {"of-one", "of-another"}
    for name in names:
        through = "many" if name.startswith("of-many") else name.removeprefix("of-")
        facts.ctx.policies.put(settled_policy(policy(name, connectionRef={"name": through})))
    loop = asyncio.get_running_loop()
    begun = loop.time()
    for through, url in (("many", "http://pulsar:8080"), ("one", "http://pulsar:8080/")):
        facts.ctx.connections.put(connection_to(through, url))
    facts.ctx.connections.put(connection_to("another"))
    async with asyncio.timeout(HOUR):
        laps = [{await woken.get() for _ in names} for _ in range(2)]
    assert laps == [names, names]
    turn = CALLS_PER_RECONCILE / CALLS_PER_SECOND
    assert loop.time() - begun == pytest.approx(2 * len(names) * turn)
    await walk.stop()


@pytest.mark.usefixtures("virtual_time")
async def test_policy_moves_to_rotation_of_its_broker(
    policy: MakeBody, facts: StubbedFacts
) -> None:
    walk = DriftPoller(facts, NOTHING, ignore, ignore)
    facts.ctx.policies.put(settled_policy(policy("a")))

    def rotations() -> set[str]:
        names = (task.get_name() for task in asyncio.all_tasks() if not task.cancelling())
        return {name for name in names if name.startswith("rotation ")}

    facts.ctx.connections.put(connection_to("main", "http://first"))
    facts.ctx.connections.put(connection_to("other", "http://first"))
    assert rotations() == {"rotation at http://first"}
    facts.ctx.connections.put(connection_to("main", "http://second", version=2))
    assert rotations() == {"rotation at http://first", "rotation at http://second"}
    facts.ctx.connections.drop(connection_to("other", "http://first"))
    assert rotations() == {"rotation at http://second"}
    await walk.stop()
    assert rotations() == set()


async def test_changed_connection_costs_no_visit_of_others(
    facts: StubbedFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    visited = list[str]()

    def visit(connection: Body) -> str | None:
        visited.append(Key.of(connection).name)
        return broker_in(connection)

    monkeypatch.setattr(poller, "broker_in", visit)
    walk = DriftPoller(facts, NOTHING, ignore, ignore)
    for name in "abc":
        facts.ctx.connections.put(connection_to(name))
    visited.clear()
    facts.ctx.connections.put(connection_to("b", version=2))
    assert set(visited) == {"b"}
    await walk.stop()


@pytest.mark.usefixtures("virtual_time")
async def test_rotation_pauses_while_many_policies_are_new(
    policy: MakeBody, facts: StubbedFacts
) -> None:
    new = [f"new-{number}" for number in range(MANY_BEGUN)]
    for name in new:
        facts.ctx.policies.put(settled_policy(policy(name), "Progressing", "Unknown"))
    facts.ctx.policies.put(settled_policy(policy("a")))
    elsewhere = policy("elsewhere", connectionRef={"name": "other"})
    facts.ctx.policies.put(settled_policy(elsewhere))
    woken: asyncio.Queue[str] = asyncio.Queue()
    walk = DriftPoller(facts, NOTHING, lambda key: woken.put_nowait(key.name), ignore)
    facts.ctx.connections.put(connection_to("main"))
    facts.ctx.connections.put(connection_to("other", "http://elsewhere"))

    async with asyncio.timeout(HOUR):
        assert {await woken.get() for _ in range(5)} == {"elsewhere"}
        facts.ctx.policies.drop(policy(new[0]))
        while await woken.get() != "a":
            pass
    await walk.stop()


@pytest.mark.usefixtures("virtual_time")
async def test_facts_are_read_until_their_connection_is_deleted(
    policy: MakeBody, facts: StubbedFacts, caplog: pytest.LogCaptureFixture
) -> None:
    facts.ctx.connections.put(connection_to("main"))
    facts.ctx.policies.put(settled_policy(policy("a")))
    facts.ctx.policies.put(policy("waits"))
    facts.fails.extend(
        [KeyError("surprise"), BrokerUnreachableError("no broker", remedy="start it")]
    )
    walk = DriftPoller(facts, NOTHING, ignore, ignore)
    async with asyncio.timeout(HOUR):
        for _ in range(4):
            assert await facts.asked.get() == (Key("shop", "main"), ["a"])
    assert "facts of BrokerConnection shop/main: failed" in caplog.text
    facts.ctx.connections.put(connection_to("other"))
    async with asyncio.timeout(HOUR):
        while await facts.asked.get() != (Key("shop", "other"), []):
            pass
    facts.ctx.connections.drop(connection_to("main"))
    facts.ctx.connections.drop(connection_to("other"))
    await asyncio.sleep(FACTS_SECONDS)
    while not facts.asked.empty():
        facts.asked.get_nowait()
    await asyncio.sleep(2 * FACTS_SECONDS)
    assert facts.asked.empty()
    await walk.stop()


@pytest.mark.usefixtures("virtual_time")
async def test_connection_is_polled_even_if_facts_fail(
    facts: StubbedFacts,
) -> None:
    facts.fails.extend([BrokerUnreachableError("no broker", remedy="start it")] * 2)
    woken: asyncio.Queue[Key] = asyncio.Queue()
    walk = DriftPoller(facts, NOTHING, ignore, woken.put_nowait)
    facts.ctx.connections.put(connection_to("main"))
    async with asyncio.timeout(HOUR):
        for times in range(1, 4):
            assert await woken.get() == Key("shop", "main")
            assert facts.asked.qsize() >= times
    await walk.stop()


@pytest.mark.usefixtures("virtual_time")
async def test_rotation_continues_after_a_failure(
    policy: MakeBody, facts: StubbedFacts, caplog: pytest.LogCaptureFixture
) -> None:
    woken: asyncio.Queue[str] = asyncio.Queue()
    walk = DriftPoller(facts, NOTHING, lambda key: woken.put_nowait(key.name), ignore)
    surprises = dict[str, str]()
    facts.ctx.policies.put(settled_policy(policy("a")))
    facts.ctx.connections.put(connection_to("main"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(poller, "pause", lambda *_, **__: surprises["one"])
        await asyncio.sleep(2.5 * ROTATION_SECONDS)
    assert woken.empty()
    assert "rotation at http://pulsar:8080: failed" in caplog.text
    async with asyncio.timeout(HOUR):
        assert await woken.get() == "a"
    await walk.stop()


@pytest.mark.usefixtures("virtual_time")
async def test_drifted_policy_is_enqueued(policy: MakeBody, facts: StubbedFacts) -> None:
    facts.ctx.policies.put(settled_policy(policy("a")))
    facts.drifted_now.append(Key("shop", "a"))
    woken: asyncio.Queue[Key] = asyncio.Queue()
    walk = DriftPoller(facts, NOTHING, woken.put_nowait, ignore)
    facts.ctx.connections.put(connection_to("main"))
    async with asyncio.timeout(ROTATION_SECONDS / 2):
        assert await woken.get() == Key("shop", "a")
    await walk.stop()


class Questions(StallChecks):
    """Finds everything over once it was asked twice about *surprise*, about which it fails."""

    asked: list[str]
    moments: list[float]

    async def is_over(self, body: Body) -> bool:
        name = Key.of(body).name
        self.asked.append(name)
        self.moments.append(asyncio.get_running_loop().time())
        if name == "surprise":
            raise KeyError(name)
        return self.asked.count("surprise") > 1 and name != "stands"


def asked_nothing_yet(ctx: Context) -> Questions:
    questions = Questions(ctx)
    for name in ("asked", "moments"):
        object.__setattr__(questions, name, [])
    return questions


@pytest.mark.usefixtures("virtual_time")
async def test_stalled_policies_are_checked_and_enqueued_in_turn(
    policy: MakeBody, facts: StubbedFacts, caplog: pytest.LogCaptureFixture
) -> None:
    questions = asked_nothing_yet(facts.ctx)
    for name, reason in (
        ("owned", "OwnerConflict"),
        ("surprise", "PartitionsDiffer"),
        ("stands", "SubscriptionExpiry"),
        ("room", "ConfigMapNotOurs"),
        ("waits", "TopicNotFound"),
        ("collides", "NameCollision"),
    ):
        facts.ctx.policies.put(settled_policy(policy(name), reason, "False"))
    going = settled_policy(policy("going"), "OwnerConflict", "False")
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    elsewhere = policy("elsewhere", connectionRef={"name": "other"})
    for body in (
        going,
        settled_policy(elsewhere, "OwnerConflict", "False"),
        settled_policy(policy("ready")),
    ):
        facts.ctx.policies.put(body)
    woken: asyncio.Queue[str] = asyncio.Queue()
    walk = DriftPoller(facts, questions, lambda key: woken.put_nowait(key.name), ignore)
    facts.ctx.connections.put(connection_to("main"))
    names = set[str]()
    async with asyncio.timeout(HOUR):
        while not {"owned", "room"} <= names:
            names.add(await woken.get())
    await walk.stop()
    assert names == {"owned", "room", "ready"}
    assert set(questions.asked) == {"owned", "surprise", "stands", "room"}
    assert "RetryPolicy shop/surprise: check of a stalled policy failed" in caplog.text


@pytest.mark.usefixtures("virtual_time")
async def test_connections_to_one_broker_share_stall_check_rate(
    policy: MakeBody, facts: StubbedFacts
) -> None:
    questions = asked_nothing_yet(facts.ctx)
    for number in range(10):
        name = f"stands-{number}"
        facts.ctx.connections.put(connection_to(name))
        body = policy(name, connectionRef={"name": name})
        facts.ctx.policies.put(settled_policy(body, "OwnerConflict", "False"))
    walk = DriftPoller(facts, questions, ignore, ignore)
    while len(questions.asked) < 30:  # noqa: ASYNC110 - a queue has no event for its length
        await asyncio.sleep(1)
    await walk.stop()
    assert set(questions.asked) == {f"stands-{number}" for number in range(10)}
    turn = CALLS_PER_CHECK / CALLS_PER_SECOND
    between = [after - before for before, after in itertools.pairwise(questions.moments)]
    assert min(between) == pytest.approx(turn)


@pytest.mark.parametrize("policies", [1, 10, 100, 1_000])
def test_rotation_keeps_to_call_rate_and_15_minutes(
    policies: int,
) -> None:
    between = pause(policies, CALLS_PER_RECONCILE, total=policies)
    assert CALLS_PER_RECONCILE / between <= 20
    assert 15 <= policies * between <= 15 * 60


@pytest.mark.parametrize("policies", [1, 10, 100, 1_000])
def test_stall_checks_keep_to_call_rate_and_150_seconds(
    policies: int,
) -> None:
    between = pause(policies, CALLS_PER_CHECK, total=policies)
    assert CALLS_PER_CHECK / between <= 20
    assert 15 <= policies * between <= 150


def test_rotations_together_keep_to_total_call_rate() -> None:
    hundred = pause(100, CALLS_PER_RECONCILE, total=10_000)
    calls = 100 * CALLS_PER_RECONCILE / hundred
    assert calls <= CALLS_PER_SECOND_IN_ALL + 1e-6
    assert 100 * hundred == 10 * pause(10, CALLS_PER_RECONCILE, total=10_000)  # one period for all
    assert pause(1, CALLS_PER_RECONCILE, total=1) == ROTATION_SECONDS


def longest_gaps(population: Callable[[int], Iterable[Key]], laps: int = 3) -> dict[Key, float]:
    """Return the longest time between polls of each policy, from its first poll or its creation.

    Args:
        population: the existing policies, by the number of the poll.
    """
    order, now, last, longest = PollOrder(), 0.0, dict[Key, float](), dict[Key, float]()
    for turn in range(laps * 1_000):
        keys = list(population(turn))
        for key in keys:
            last.setdefault(key, now)
        for gone in last.keys() - set(keys):
            del last[gone]
        (key,) = filter(None, [order.next(keys)])
        now += pause(len(keys), CALLS_PER_RECONCILE, total=len(keys)) + OVERHEAD_SECONDS
        longest[key] = max(longest.get(key, 0.0), now - last[key])
        last[key] = now
    return longest


def test_thousand_policies_are_each_polled_in_16_minutes() -> None:
    gaps = longest_gaps(lambda _: THOUSAND)
    assert gaps.keys() == set(THOUSAND)
    assert max(gaps.values()) < 16 * 60


def test_changing_policies_do_not_delay_others() -> None:

    def population(turn: int) -> Iterable[Key]:
        """Every tenth turn one goes and another comes; a thousand are there at a time."""
        return THOUSAND[turn // 10 :] + [Key("shop", f"new-{n}") for n in range(turn // 10)]

    gaps = longest_gaps(population)
    assert len(gaps) > 1_100  # but those who came last may have had no turn yet
    assert max(gaps.values()) < 16 * 60


def test_first_turns_are_random_and_later_turns_repeat() -> None:
    orders = []
    for _ in range(5):
        order = PollOrder()
        laps = [[order.next(HUNDRED) for _ in HUNDRED] for _ in range(2)]
        assert laps[0] == laps[1]
        orders.append(tuple(laps[0]))
    assert len(set(orders)) == 5


def test_turns_without_policies_have_no_next() -> None:
    assert PollOrder().next([]) is None


@pytest.mark.usefixtures("virtual_time")
async def test_rate_limit_gives_turns_in_order_and_interval() -> None:
    pace, loop = RateLimit(0.02), asyncio.get_running_loop()
    begun, had = loop.time(), list[tuple[str, float]]()

    async def take(who: str) -> None:
        await pace.acquire()
        had.append((who, loop.time() - begun))

    await asyncio.gather(*(take(who) for who in "abc"))
    assert [who for who, _ in had] == ["a", "b", "c"]
    assert [at for _, at in had] == pytest.approx([0.0, 0.02, 0.04])


@pytest.mark.usefixtures("virtual_time")
async def test_rate_limit_saves_up_no_turns() -> None:
    pace, loop = RateLimit(0.02), asyncio.get_running_loop()
    await pace.acquire()
    await asyncio.sleep(0.06)
    begun = loop.time()
    for _ in range(3):
        await pace.acquire()
    assert loop.time() - begun == pytest.approx(2 * 0.02)


@pytest.mark.usefixtures("virtual_time")
async def test_rate_limit_of_broker_is_shared_while_held() -> None:
    paces = RateLimits(60.0)
    held = paces.of("http://first")
    assert paces.of("http://first") is held
    assert paces.of("http://second") is not held
    await held.acquire()
    del held
    gc.collect()
    async with asyncio.timeout(5):
        await paces.of("http://first").acquire()


MakeRequest = Callable[..., Request]
MAIN = Key("shop", "main")
NEW = {"uid": "c", "resourceVersion": "1", "generation": 1}
NAMES = [f"orders-{number}" for number in range(30)]


@pytest.fixture
async def thirty_policies(
    connection: dict[str, Any], policy: MakeBody
) -> tuple[NamespaceFacts, FakeBroker]:
    """Thirty policies, ten to a Pulsar namespace, with no drift."""
    through = {"metadata": {"namespace": "shop", "name": "main", **NEW}, "spec": connection}
    bodies = [
        policy(name, topic=f"persistent://shop/n{number % 3}/{name}")
        for number, name in enumerate(NAMES)
    ]
    broker = FakeBroker()
    admin = broker.admin()

    async def open_(key: Key) -> SimpleNamespace:
        assert key == MAIN
        return SimpleNamespace(admin=admin)

    ctx: Any = SimpleNamespace(
        policies=Cache(bodies),
        connections=Cache([through]),
        namespaces=None,
        config_maps=Cache(),
        brokers=SimpleNamespace(open=open_),
        settings=SimpleNamespace(cluster_id="here", namespaces=()),
        clock=wall_clock,
    )
    broker.tenants = {"shop": []}
    broker.namespaces = {f"shop/n{number}": Namespace({}, {}) for number in range(3)}
    for body in bodies:
        wanted = desired(resolve(body, ctx), body, "here")
        ctx.config_maps.put(
            {**wanted.config_map, "metadata": {**wanted.config_map["metadata"], **NEW}}
        )
        namespace = broker.namespaces[wanted.policy.topic.namespace_name]
        assert len(wanted.topics) == len({TopicRole.RETRY, TopicRole.DEAD_LETTER, TopicRole.LEDGER})
        for name in (wanted.policy.topic, *(topic.name for topic in wanted.topics)):
            namespace.topics[name.local] = Topic(0, {})
        for grant in wanted.grants:
            roles = namespace.grants.setdefault(str(grant.topic), {})
            roles[grant.role] = sorted(grant.actions)
    return NamespaceFacts(ctx, Conflicts(ctx.policies, ctx.connections, lambda _: None)), broker


async def drifted_of(facts: NamespaceFacts) -> set[str]:
    return {key.name for key in await facts.drifted(MAIN, facts.ctx.policies)}


async def test_facts_cost_three_calls_per_pulsar_namespace(
    thirty_policies: tuple[NamespaceFacts, FakeBroker],
) -> None:
    facts, broker = thirty_policies
    assert await drifted_of(facts) == set()
    assert len(broker.calls) == 9


async def test_unchanged_policy_and_facts_are_compared_once(
    thirty_policies: tuple[NamespaceFacts, FakeBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts, broker = thirty_policies
    compared: list[str] = []

    def note(wanted: Desired, *have: Any) -> bool:  # noqa: ANN401 - passed on
        compared.append(wanted.owner.key.name)
        return has_drifted(wanted, *have)

    async def names_compared() -> list[str]:
        compared.clear()
        await drifted_of(facts)
        return sorted(compared)

    monkeypatch.setattr(poller, "has_drifted", note)
    assert await names_compared() == sorted(NAMES)
    assert await names_compared() == []
    broker.namespaces["shop/n0"].topics["another"] = Topic(0, {})
    assert await names_compared() == sorted(NAMES[::3])
    body = facts.ctx.policies.get(Key("shop", "orders-4"))
    (config_map,) = (
        one for one in facts.ctx.config_maps if one["metadata"]["name"] == "orders-8-redrive"
    )
    assert body is not None
    later = {**body["metadata"], "resourceVersion": "2"}  # only its status has changed
    facts.ctx.policies.put({**body, "metadata": later})
    facts.ctx.config_maps.drop(config_map)
    assert await names_compared() == ["orders-4", "orders-8"]
    assert await names_compared() == ["orders-8"]  # as it has drifted


async def test_missing_topic_grant_or_config_map_is_drift(
    thirty_policies: tuple[NamespaceFacts, FakeBroker],
) -> None:
    facts, broker = thirty_policies
    del broker.namespaces["shop/n0"].topics["orders-0-fulfilment-RETRY"]
    del broker.namespaces["shop/n1"].grants["persistent://shop/n1/orders-1-fulfilment-DLQ"]
    (lost,) = (b for b in facts.ctx.config_maps if b["metadata"]["name"] == "orders-2-redrive")
    facts.ctx.config_maps.drop(lost)
    assert await drifted_of(facts) == {"orders-0", "orders-1", "orders-2"}
    bodies = {body["metadata"]["name"]: body for body in facts.ctx.policies}
    assert facts.lacks_config_map(bodies["orders-2"])
    assert not facts.lacks_config_map(bodies["orders-3"])


async def test_forbidden_policy_drifts_without_broker_call(
    thirty_policies: tuple[NamespaceFacts, FakeBroker], connection: dict[str, Any], policy: MakeBody
) -> None:
    facts, broker = thirty_policies
    changed = {"namespace": "shop", "name": "main", **NEW, "resourceVersion": "2", "generation": 2}
    narrowed = {
        **connection,
        "allow": [{"name": "one", "topics": ["persistent://shop/n2/*"], "roles": ["*"]}],
    }
    for table, body in (
        (facts.ctx.connections, {"metadata": changed, "spec": narrowed}),
        (facts.ctx.policies, policy("broken", maxRetries=-1, generation=8)),
    ):
        table.put(body)
    names = await drifted_of(facts)
    assert names == {"broken"} | {name for i, name in enumerate(NAMES) if i % 3 != 2}
    assert len(broker.calls) == 3


async def test_observing_policy_never_drifts(
    thirty_policies: tuple[NamespaceFacts, FakeBroker], policy: MakeBody
) -> None:
    facts, broker = thirty_policies
    observes = {"topic": "persistent://shop/n0/other", "managementPolicy": "Observe"}
    facts.ctx.policies.put(policy("observes", **observes))
    assert await drifted_of(facts) == set()
    assert len(broker.calls) == 9


async def test_expired_override_is_drift(
    thirty_policies: tuple[NamespaceFacts, FakeBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No watch reports the moment, and the request of an unchanged policy is kept."""
    facts, _ = thirty_policies
    body = facts.ctx.policies.get(Key("shop", "orders-4"))
    assert body is not None
    end = wall_clock() + timedelta(hours=1)
    annotations = {IGNORE_OUTAGES_UNTIL: end.isoformat()}
    ignoring = {**body["metadata"], "annotations": annotations, "resourceVersion": "2"}
    facts.ctx.policies.put({**body, "metadata": ignoring})
    assert await drifted_of(facts) == {"orders-4"}
    ignores = desired(resolve({**body, "metadata": ignoring}, facts.ctx), body, "here").config_map
    facts.ctx.config_maps.put(
        {**ignores, "metadata": {**ignores["metadata"], **NEW, "resourceVersion": "2"}}
    )
    assert await drifted_of(facts) == set()
    monkeypatch.setattr(facts.ctx, "clock", lambda: end)
    assert await drifted_of(facts) == {"orders-4"}


async def test_deleted_namespace_drifts_all_its_policies(
    thirty_policies: tuple[NamespaceFacts, FakeBroker],
) -> None:
    facts, broker = thirty_policies
    del broker.namespaces["shop/n1"]
    assert await drifted_of(facts) == {name for i, name in enumerate(NAMES) if i % 3 == 1}


async def test_single_broker_failure_is_no_drift(
    thirty_policies: tuple[NamespaceFacts, FakeBroker],
) -> None:
    facts, broker = thirty_policies
    broker.fault = at_call(1, answering(500))
    assert await drifted_of(facts) == set()


ORDERS = "persistent://shop/prod/orders"
RETRY, DEAD_LETTER = f"{ORDERS}-fulfilment-RETRY", f"{ORDERS}-fulfilment-DLQ"
LEDGER = f"{DEAD_LETTER}-LEDGER"
BOTH, PRODUCE, CONSUME = frozenset({"produce", "consume"}), frozenset({"produce"}), frozenset[str]()
PERMISSIONS = {
    RETRY: {"fulfilment": BOTH, "replayer": BOTH},
    DEAD_LETTER: {"fulfilment": PRODUCE, "replayer": frozenset({"consume"})},
    LEDGER: {"replayer": BOTH},
}


@pytest.fixture
def wanted(policy: MakeBody, requested: MakeRequest) -> Desired:
    body = policy()
    return desired(requested(body), body, "here")


def namespace_state(source: int = 0, retry: int = 0) -> NamespaceState:
    """A namespace with all that the policy needs; the topics have so many partitions."""
    counts = {ORDERS: source, RETRY: retry, DEAD_LETTER: 0, LEDGER: 0}
    partitions = {f"{t}-partition-{i}" for t, count in counts.items() for i in range(count)}
    return NamespaceState(
        unpartitioned=frozenset({t for t, count in counts.items() if not count} | partitions),
        partitioned=frozenset(t for t, count in counts.items() if count),
        permissions=PERMISSIONS,
        subscription_expiry_minutes=0,
        backlog_quotas={},
        delayed_delivery=None,
    )


def drifted(wanted: Desired, state: NamespaceState) -> bool:
    return has_drifted(wanted, state, wanted.config_map)


def lacks(wanted: Desired, config_map: Body | None) -> bool:
    return any(config_map_actions(wanted.config_map, config_map))


def test_partitions_of_topic_come_from_the_listing() -> None:
    state = namespace_state(source=12)
    assert state.partitions(TopicName("shop", "prod", "orders")) == 12
    assert state.partitions(TopicName("shop", "prod", "orders-fulfilment-RETRY")) == 0
    assert state.partitions(TopicName("shop", "prod", "missing")) == 0


def with_rights(permissions: dict[str, Any]) -> NamespaceState:
    return dataclasses.replace(namespace_state(), permissions=permissions)


def without(topic: str) -> NamespaceState:
    state = namespace_state()
    return dataclasses.replace(state, unpartitioned=state.unpartitioned - {topic})


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        pytest.param(namespace_state(), False, id="complete"),
        pytest.param(namespace_state(3, 3), False, id="partitions of the source"),
        pytest.param(namespace_state(3, 5), False, id="more partitions"),
        pytest.param(namespace_state(4, 3), True, id="source has grown"),
        pytest.param(namespace_state(3, 0), True, id="source has partitions"),
        pytest.param(without(ORDERS), True, id="no source topic"),
        pytest.param(without(RETRY), True, id="no retry topic"),
        pytest.param(without(DEAD_LETTER), True, id="no dead-letter topic"),
        pytest.param(with_rights({}), True, id="no rights"),
        pytest.param(
            with_rights(PERMISSIONS | {RETRY: {"fulfilment": BOTH}}), True, id="no replay role"
        ),
        pytest.param(
            with_rights(PERMISSIONS | {RETRY: {"fulfilment": PRODUCE, "replayer": PRODUCE}}),
            True,
            id="half of the rights",
        ),
        pytest.param(
            with_rights(
                PERMISSIONS | {DEAD_LETTER: dict.fromkeys(("fulfilment", "replayer", "x"), BOTH)}
            ),
            False,
            id="more rights",
        ),
        pytest.param(
            dataclasses.replace(namespace_state(), subscription_expiry_minutes=5),
            True,
            id="subscriptions expire",
        ),
    ],
)
def test_drift_is_detected_in_namespace_state(
    wanted: Desired, state: NamespaceState, *, expected: bool
) -> None:
    assert drifted(wanted, state) is expected


def test_missing_dead_letter_topic_is_no_drift_if_discarding(
    policy: MakeBody, requested: MakeRequest
) -> None:
    body = policy(deadLetter={"mode": "Discard"})
    discards = desired(requested(body), body, "here")
    assert not drifted(discards, without(DEAD_LETTER))


def test_config_map_changes_are_drift(wanted: Desired) -> None:
    ours = wanted.config_map
    assert not lacks(wanted, ours)
    assert not lacks(wanted, {**ours, "data": {**ours["data"], "note": "mine"}})
    assert lacks(wanted, None)
    assert lacks(wanted, {**ours, "data": {"policy.json": "{}"}})
    assert lacks(wanted, {**ours, "metadata": {"name": "orders-redrive"}})

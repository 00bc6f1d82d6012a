from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest

from redrive.admin.errors import BrokerUnreachableError
from redrive.api import Body
from redrive.kube.context import Context
from redrive.kube.resources import Key
from redrive.provision import poller
from redrive.provision.claims import Conflicts
from redrive.provision.poller import (
    CALLS_PER_LOOK,
    CALLS_PER_QUESTION,
    CALLS_PER_SECOND,
    CALLS_PER_SECOND_IN_ALL,
    FACTS_SECONDS,
    MANY_BEGUN,
    ROTATION_SECONDS,
    NamespaceFacts,
    Resync,
    StallChecks,
    Turns,
    pause,
)

MakeBody = Callable[..., dict[str, Any]]
NOTHING = cast("Any", None)
THOUSAND = [Key("shop", f"orders-{number}") for number in range(1_000)]
HOUR = 3600.0
OVERHEAD_SECONDS = 0.03
"""What a turn takes beside its pause, generously."""
pytestmark = pytest.mark.usefixtures("virtual_time")


class StubbedFacts(NamespaceFacts):
    """Finds drifted what it is given, and remembers what it was asked about."""

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


def connection(name: str, broker: str = "http://pulsar:8080", version: int = 1) -> Body:
    metadata = {"namespace": "shop", "name": name, "uid": f"uid-{name}"}
    metadata["resourceVersion"] = str(version)
    return {"metadata": metadata, "spec": {"adminUrl": broker}}


def settled(
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


async def test_every_settled_policy_is_looked_at_in_turn_those_that_come_and_go_too(
    policy: MakeBody, facts: StubbedFacts
) -> None:
    woken: asyncio.Queue[str] = asyncio.Queue()
    walk = Resync(facts, NOTHING, lambda key: woken.put_nowait(key.name), ignore)
    facts.ctx.connections.put(connection("main"))

    async def only(*names: str) -> None:
        async with asyncio.timeout(HOUR):
            while {await woken.get() for _ in range(3 * len(names))} != {*names}:
                pass

    for name in "abc":
        facts.ctx.policies.put(settled(policy(name)))
    facts.ctx.policies.put(policy("waits"))
    facts.ctx.policies.put(settled(policy("elsewhere", connectionRef={"name": "other"})))
    await only("a", "b", "c")
    facts.ctx.policies.drop(policy("b"))
    await only("a", "c")
    await walk.stop()


async def test_connections_to_one_broker_share_a_rotation_in_which_each_policy_has_its_turn(
    policy: MakeBody, facts: StubbedFacts
) -> None:
    woken: asyncio.Queue[str] = asyncio.Queue()
    walk = Resync(facts, NOTHING, lambda key: woken.put_nowait(key.name), ignore)
    names = {f"of-many-{n}" for n in range(38)} | {"of-one", "of-another"}
    for name in names:
        through = "many" if name.startswith("of-many") else name.removeprefix("of-")
        facts.ctx.policies.put(settled(policy(name, connectionRef={"name": through})))
    loop = asyncio.get_running_loop()
    begun = loop.time()
    for through, url in (("many", "http://pulsar:8080"), ("one", "http://pulsar:8080/")):
        facts.ctx.connections.put(connection(through, url))
    facts.ctx.connections.put(connection("another"))
    async with asyncio.timeout(HOUR):
        laps = [{await woken.get() for _ in names} for _ in range(2)]
    assert laps == [names, names]
    turn = CALLS_PER_LOOK / CALLS_PER_SECOND
    assert loop.time() - begun == pytest.approx(2 * len(names) * turn)
    await walk.stop()


async def test_a_policy_is_in_the_rotation_of_the_broker_that_its_connection_has_now(
    policy: MakeBody, facts: StubbedFacts
) -> None:
    walk = Resync(facts, NOTHING, ignore, ignore)
    facts.ctx.policies.put(settled(policy("a")))

    def rotations() -> set[str]:
        names = (task.get_name() for task in asyncio.all_tasks() if not task.cancelling())
        return {name for name in names if name.startswith("rotation ")}

    facts.ctx.connections.put(connection("main", "http://first"))
    facts.ctx.connections.put(connection("other", "http://first"))
    assert rotations() == {"rotation http://first"}
    facts.ctx.connections.put(connection("main", "http://second", version=2))
    assert rotations() == {"rotation http://first", "rotation http://second"}
    facts.ctx.connections.drop(connection("other", "http://first"))
    assert rotations() == {"rotation http://second"}
    await walk.stop()
    assert rotations() == set()


async def test_the_rotation_of_a_broker_rests_while_many_of_its_policies_are_new(
    policy: MakeBody, facts: StubbedFacts
) -> None:
    new = [f"new-{number}" for number in range(MANY_BEGUN)]
    for name in new:
        facts.ctx.policies.put(settled(policy(name), "Progressing", "Unknown"))
    facts.ctx.policies.put(settled(policy("a")))
    elsewhere = policy("elsewhere", connectionRef={"name": "other"})
    facts.ctx.policies.put(settled(elsewhere))
    woken: asyncio.Queue[str] = asyncio.Queue()
    walk = Resync(facts, NOTHING, lambda key: woken.put_nowait(key.name), ignore)
    facts.ctx.connections.put(connection("main"))
    facts.ctx.connections.put(connection("other", "http://elsewhere"))

    async with asyncio.timeout(HOUR):
        assert {await woken.get() for _ in range(5)} == {"elsewhere"}
        facts.ctx.policies.drop(policy(new[0]))
        while await woken.get() != "a":
            pass
    await walk.stop()


async def test_the_facts_of_a_connection_are_read_again_and_again_until_it_goes(
    policy: MakeBody, facts: StubbedFacts, caplog: pytest.LogCaptureFixture
) -> None:
    facts.ctx.connections.put(connection("main"))
    facts.ctx.policies.put(settled(policy("a")))
    facts.ctx.policies.put(policy("waits"))
    facts.fails.extend(
        [KeyError("surprise"), BrokerUnreachableError("no broker", remedy="start it")]
    )
    walk = Resync(facts, NOTHING, ignore, ignore)
    async with asyncio.timeout(HOUR):
        for _ in range(4):
            assert await facts.asked.get() == (Key("shop", "main"), ["a"])
    assert "facts of BrokerConnection shop/main: failed" in caplog.text
    facts.ctx.connections.put(connection("other"))
    async with asyncio.timeout(HOUR):
        while await facts.asked.get() != (Key("shop", "other"), []):
            pass
    facts.ctx.connections.drop(connection("main"))
    facts.ctx.connections.drop(connection("other"))
    await asyncio.sleep(FACTS_SECONDS)
    while not facts.asked.empty():
        facts.asked.get_nowait()
    await asyncio.sleep(2 * FACTS_SECONDS)
    assert facts.asked.empty()
    await walk.stop()


async def test_a_connection_is_looked_at_with_its_facts_also_where_that_fails(
    facts: StubbedFacts,
) -> None:
    facts.fails.extend([BrokerUnreachableError("no broker", remedy="start it")] * 2)
    woken: asyncio.Queue[Key] = asyncio.Queue()
    walk = Resync(facts, NOTHING, ignore, woken.put_nowait)
    facts.ctx.connections.put(connection("main"))
    async with asyncio.timeout(HOUR):
        for times in range(1, 4):
            assert await woken.get() == Key("shop", "main")
            assert facts.asked.qsize() >= times
    await walk.stop()


async def test_a_rotation_goes_on_after_a_failure(
    policy: MakeBody, facts: StubbedFacts, caplog: pytest.LogCaptureFixture
) -> None:
    woken: asyncio.Queue[str] = asyncio.Queue()
    walk = Resync(facts, NOTHING, lambda key: woken.put_nowait(key.name), ignore)
    surprises = dict[str, str]()
    facts.ctx.policies.put(settled(policy("a")))
    facts.ctx.connections.put(connection("main"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(poller, "broker_of", lambda *_: surprises["one"])
        await asyncio.sleep(2.5 * ROTATION_SECONDS)
    assert woken.empty()
    assert "rotation at http://pulsar:8080: failed" in caplog.text
    async with asyncio.timeout(HOUR):
        assert await woken.get() == "a"
    await walk.stop()


async def test_what_the_facts_show_drifted_is_looked_at(
    policy: MakeBody, facts: StubbedFacts
) -> None:
    facts.ctx.policies.put(settled(policy("a")))
    facts.drifted_now.append(Key("shop", "a"))
    woken: asyncio.Queue[Key] = asyncio.Queue()
    walk = Resync(facts, NOTHING, woken.put_nowait, ignore)
    facts.ctx.connections.put(connection("main"))
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


async def test_stalled_policies_are_asked_about_in_turn_and_looked_at_once_it_is_over(
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
        facts.ctx.policies.put(settled(policy(name), reason, "False"))
    going = settled(policy("going"), "OwnerConflict", "False")
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    elsewhere = policy("elsewhere", connectionRef={"name": "other"})
    for body in (going, settled(elsewhere, "OwnerConflict", "False"), settled(policy("ready"))):
        facts.ctx.policies.put(body)
    woken: asyncio.Queue[str] = asyncio.Queue()
    walk = Resync(facts, questions, lambda key: woken.put_nowait(key.name), ignore)
    facts.ctx.connections.put(connection("main"))
    found = set[str]()
    async with asyncio.timeout(HOUR):
        while not {"owned", "room"} <= found:
            found.add(await woken.get())
    await walk.stop()
    assert found == {"owned", "room", "ready"}
    assert set(questions.asked) == {"owned", "surprise", "stands", "room"}
    assert "RetryPolicy shop/surprise: whether it goes on could not be found out" in caplog.text


async def test_connections_to_one_broker_share_the_pace_of_questions(
    policy: MakeBody, facts: StubbedFacts
) -> None:
    questions = asked_nothing_yet(facts.ctx)
    for number in range(10):
        name = f"stands-{number}"
        facts.ctx.connections.put(connection(name))
        body = policy(name, connectionRef={"name": name})
        facts.ctx.policies.put(settled(body, "OwnerConflict", "False"))
    walk = Resync(facts, questions, ignore, ignore)
    while len(questions.asked) < 30:  # noqa: ASYNC110 - a queue has no event for its length
        await asyncio.sleep(1)
    await walk.stop()
    assert set(questions.asked) == {f"stands-{number}" for number in range(10)}
    turn = CALLS_PER_QUESTION / CALLS_PER_SECOND
    between = [after - before for before, after in itertools.pairwise(questions.moments)]
    assert min(between) == pytest.approx(turn)


@pytest.mark.parametrize("policies", [1, 10, 100, 1_000])
def test_a_rotation_costs_at_most_twenty_calls_a_second_and_ends_within_fifteen_minutes(
    policies: int,
) -> None:
    between = pause(policies, CALLS_PER_LOOK, of=policies)
    assert CALLS_PER_LOOK / between <= 20
    assert 15 <= policies * between <= 15 * 60


@pytest.mark.parametrize("policies", [1, 10, 100, 1_000])
def test_to_ask_stalled_policies_costs_at_most_twenty_calls_a_second_and_150_seconds(
    policies: int,
) -> None:
    between = pause(policies, CALLS_PER_QUESTION, of=policies)
    assert CALLS_PER_QUESTION / between <= 20
    assert 15 <= policies * between <= 150


def test_all_rotations_together_have_a_bound_of_calls_and_keep_small_brokers_no_busier() -> None:
    hundred = pause(100, CALLS_PER_LOOK, of=10_000)
    calls = 100 * CALLS_PER_LOOK / hundred
    assert calls <= CALLS_PER_SECOND_IN_ALL + 1e-6
    assert 100 * hundred == 10 * pause(10, CALLS_PER_LOOK, of=10_000)  # one period for all
    assert pause(1, CALLS_PER_LOOK, of=1) == ROTATION_SECONDS


def gaps(population: Callable[[int], Iterable[Key]], laps: int = 3) -> dict[Key, float]:
    """The longest time that each policy went without a look, from its first turn or its coming on.

    Args:
        population: the policies that are there at each turn.
    """
    turns, now, last, longest = Turns(), 0.0, dict[Key, float](), dict[Key, float]()
    for turn in range(laps * 1_000):
        keys = list(population(turn))
        for key in keys:
            last.setdefault(key, now)
        for gone in last.keys() - set(keys):
            del last[gone]
        (key,) = filter(None, [turns.next(keys)])
        now += pause(len(keys), CALLS_PER_LOOK, of=len(keys)) + OVERHEAD_SECONDS
        longest[key] = max(longest.get(key, 0.0), now - last[key])
        last[key] = now
    return longest


def test_each_of_a_thousand_policies_is_polled_in_16_minutes() -> None:
    found = gaps(lambda _: THOUSAND)
    assert found.keys() == set(THOUSAND)
    assert max(found.values()) < 16 * 60


def test_policies_that_come_and_go_keep_nobody_waiting() -> None:

    def population(turn: int) -> Iterable[Key]:
        """Every tenth turn one goes and another comes; a thousand are there at a time."""
        return THOUSAND[turn // 10 :] + [Key("shop", f"new-{n}") for n in range(turn // 10)]

    found = gaps(population)
    assert len(found) > 1_100  # but those who came last may have had no turn yet
    assert max(found.values()) < 16 * 60


def test_the_first_turns_are_in_random_order_and_the_next_in_the_same() -> None:
    orders = []
    for _ in range(5):
        turns = Turns()
        laps = [[turns.next(THOUSAND) for _ in THOUSAND] for _ in range(2)]
        assert laps[0] == laps[1]
        orders.append(tuple(laps[0]))
    assert len(set(orders)) == 5


def test_nobody_has_a_turn_where_nobody_is() -> None:
    assert Turns().next([]) is None

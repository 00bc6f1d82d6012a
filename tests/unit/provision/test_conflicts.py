from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from redrive.kube.cache import Cache
from redrive.kube.resources import Key
from redrive.provision.conflicts import Conflicts

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
    "broken": ("persistent://shop/prod/orders-partition-3", "fulfilment"),
}
MEET = {"a": "ab", "b": "ab", "c": "c", "d": "d", "e": "efg", "f": "efh", "g": "eg", "h": "fh"}
NAMING = {
    "e": {"scheme": "tdmq-2.7.2"},
    "f": {"scheme": "tdmq-2.7.2"},
    "h": {"retryTopic": "persistent://shop/prod/returns"},
}


def make(policy: MakeBody, name: str, pair: str, generation: int = 1) -> dict[str, Any]:
    topic, subscription = TOPICS[pair]
    naming = NAMING.get(pair, {})
    return policy(
        name, topic=topic, subscription=subscription, naming=naming, generation=generation
    )


def rivals(pairs: dict[str, str], name: str) -> set[Key]:
    """What the index must say, found by comparing all with all."""
    together = MEET.get(pairs.get(name, ""), "")
    return {Key("shop", n) for n, pair in pairs.items() if pair in together and n != name}


changes = st.lists(
    st.tuples(st.sampled_from("uvwxyz"), st.sampled_from([*TOPICS, "going", "gone"])), max_size=20
)


@given(changes, changes)
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_index_finds_the_rivals_and_wakes_all_whose_rivals_change(
    policy: MakeBody, at_first: list[tuple[str, str]], later: list[tuple[str, str]]
) -> None:
    pairs = {name: pair for name, pair in at_first if pair in TOPICS}
    table = Cache(make(policy, name, pair) for name, pair in pairs.items())
    woken: set[Key] = set()
    conflicts = Conflicts(table, woken.add)
    for generation, (name, pair) in enumerate(later, start=2):
        before = {other: rivals(pairs, other) for other in pairs}
        woken.clear()
        pairs.pop(name, None)
        if pair == "gone":
            table.drop(policy(name))
        elif pair == "going":
            body = make(policy, name, "a", generation)
            body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            table.put(body)
            pairs[name] = "a"  # until it is gone, its topics are not free
        else:
            pairs[name] = pair
            table.put(make(policy, name, pair, generation))
        for other in pairs:
            assert conflicts.rivals(Key("shop", other)) == rivals(pairs, other)
            if other != name and before[other] != rivals(pairs, other):
                assert Key("shop", other) in woken


def test_a_policy_that_is_asked_anew_under_the_same_names_wakes_its_rivals(
    policy: MakeBody,
) -> None:
    refused = policy("older", consumerRoles=["root"])
    table = Cache([refused, policy("younger"), policy("other", subscription="another")])
    woken: list[Key] = []
    Conflicts(table, woken.append)
    table.put(policy("older", generation=8, consumerRoles=["fulfilment"]))
    table.put(policy("older", generation=9, connectionRef={"name": "elsewhere"}))
    assert woken == [Key("shop", "younger")] * 2


def test_a_changed_status_wakes_rivals_only_where_the_claim_stands_otherwise(
    policy: MakeBody,
) -> None:
    table = Cache([policy("a"), policy("b"), policy("c", subscription="another")])
    woken: list[Key] = []
    Conflicts(table, woken.append)
    table.put(policy("a") | {"status": {"maxRetries": 3}})
    assert woken == []
    table.put(policy("a") | {"status": {"retryTopic": "x"}})
    assert woken == [Key("shop", "b")]
    table.put(policy("a") | {"status": {"retryTopic": "x", "maxRetries": 4}})
    assert woken == [Key("shop", "b")]
    table.put(policy("a") | {"status": {"retryTopic": "x", "blockedBy": "shop/b"}})
    assert woken == [Key("shop", "b")] * 2

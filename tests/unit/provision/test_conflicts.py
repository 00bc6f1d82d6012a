from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from redrive.kube.cache import Cache
from redrive.kube.resources import Key
from redrive.provision.claims import Conflicts

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
    "e": {"scheme": "tdmq-2.7.2"},
    "f": {"scheme": "tdmq-2.7.2"},
    "h": {"retryTopic": "persistent://shop/prod/returns"},
    "i": {"deadLetterTopic": "persistent://shop/prod/orders-fulfilment-DLQ-LEDGER"},
    "j": {"deadLetterTopic": "persistent://shop/prod/rest"},
}


BROKERS = {"main": "http://Pulsar:8080/", "twin": "http://pulsar:8080", "stage": "http://stage"}


def connection(name: str, url: str, generation: int = 1) -> dict[str, Any]:
    metadata = {"namespace": "shop", "name": name, "uid": name, "generation": generation}
    metadata["resourceVersion"] = str(generation)
    return {"metadata": metadata, "spec": {"adminUrl": url}}


def make(
    policy: MakeBody, name: str, pair: str, generation: int = 1, through: str = "main"
) -> dict[str, Any]:
    topic, subscription = TOPICS[pair]
    naming = NAMING.get(pair, {})
    spec = {"topic": topic, "subscription": subscription, "naming": naming}
    return policy(name, generation=generation, connectionRef={"name": through}, **spec)


def broker(through: str) -> str:
    return "one" if through in {"main", "twin"} else through


def rivals(pairs: dict[str, tuple[str, str]], name: str) -> set[Key]:
    """What the index must say, found by comparing all with all."""
    pair, through = pairs.get(name, ("", ""))
    together = MEET.get(pair, "")
    return {
        Key("shop", n)
        for n, (other, by) in pairs.items()
        if other in together and broker(by) == broker(through) and n != name
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
def test_the_index_finds_the_rivals_and_wakes_all_whose_rivals_change(
    policy: MakeBody, at_first: list[tuple[str, str, str]], later: list[tuple[str, str, str]]
) -> None:
    pairs = {name: (pair, through) for name, pair, through in at_first if pair in TOPICS}
    table = Cache(make(policy, name, pair, 1, by) for name, (pair, by) in pairs.items())
    connections = Cache(connection(*each) for each in BROKERS.items())
    woken: set[Key] = set()
    conflicts = Conflicts(table, connections, woken.add)
    for generation, (name, pair, through) in enumerate(later, start=2):
        before = {other: rivals(pairs, other) for other in pairs}
        woken.clear()
        pairs.pop(name, None)
        if pair == "gone":
            table.drop(policy(name))
        elif pair == "going":
            body = make(policy, name, "a", generation, through)
            body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            table.put(body)
            pairs[name] = "a", through  # until it is gone, its topics are not free
        else:
            pairs[name] = pair, through
            table.put(make(policy, name, pair, generation, through))
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
    Conflicts(table, Cache(connection(*each) for each in BROKERS.items()), woken.append)
    table.put(policy("older", generation=8, consumerRoles=["fulfilment"]))
    table.put(policy("older", generation=9, connectionRef={"name": "stage"}))
    assert woken == [Key("shop", "younger")] * 2


def test_a_changed_status_wakes_rivals_only_where_the_claim_stands_otherwise(
    policy: MakeBody,
) -> None:
    table = Cache([policy("a"), policy("b"), policy("c", subscription="another")])
    woken: list[Key] = []
    Conflicts(table, Cache([connection("main", "http://pulsar")]), woken.append)
    table.put(policy("a") | {"status": {"maxRetries": 3}})
    assert woken == []
    table.put(policy("a") | {"status": {"retryTopic": "x"}})
    assert woken == [Key("shop", "b")]
    table.put(policy("a") | {"status": {"retryTopic": "x", "maxRetries": 4}})
    assert woken == [Key("shop", "b")]
    table.put(policy("a") | {"status": {"retryTopic": "x", "blockedBy": "shop/b"}})
    assert woken == [Key("shop", "b")] * 2
    for count, broker in enumerate(("one", "two"), start=3):
        proven = {"retryTopic": "x", "connection": "shop/main", "brokerDigest": broker}
        table.put(policy("a") | {"status": proven})
        assert woken == [Key("shop", "b")] * count


def test_names_shared_by_a_hundred_brokers_neither_meet_nor_wake_each_other(
    policy: MakeBody,
) -> None:
    numbers = [str(number) for number in range(100)]
    connections = Cache(connection(n, f"http://broker-{n}:8080") for n in numbers)
    table = Cache(policy(n, connectionRef={"name": n}) for n in numbers)
    woken: list[Key] = []
    conflicts = Conflicts(table, connections, woken.append)
    assert not any(conflicts.rivals(Key("shop", n)) for n in numbers)
    table.put(policy("7", connectionRef={"name": "7"}, generation=8, maxRetries=3))
    assert woken == []


def test_policies_meet_and_part_as_their_connections_change_the_broker(policy: MakeBody) -> None:
    connections = Cache([connection("main", "http://one")])
    table = Cache([policy("a"), policy("b", connectionRef={"name": "late"})])
    woken: set[str] = set()
    conflicts = Conflicts(table, connections, lambda key: woken.add(key.name))
    steps = [("http://two", set()), ("http://one", {"b"}), ("http://three", set())]
    for generation, (url, met) in enumerate(steps, start=1):
        woken.clear()
        before = {key.name for key in conflicts.rivals(Key("shop", "a"))}
        connections.put(connection("late", url, generation))
        assert {key.name for key in conflicts.rivals(Key("shop", "a"))} == met
        assert ("a" in woken) == (before != met)


def test_a_policy_that_lost_its_connection_still_claims_what_it_has_at_that_broker(
    policy: MakeBody,
) -> None:
    main = connection("main", "http://one")
    connections = Cache([main, connection("twin", "http://one")])
    table = Cache([policy("a"), policy("b", connectionRef={"name": "twin"})])
    conflicts = Conflicts(table, connections, lambda _: None)
    connections.drop(main)
    assert conflicts.rivals(Key("shop", "b")) == {Key("shop", "a")}
    table.drop(policy("a"))
    assert not conflicts.rivals(Key("shop", "b"))

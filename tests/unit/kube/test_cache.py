"""Caches of watched objects, and the fields of objects that they retain."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import sys
import threading
from types import FunctionType, ModuleType
from typing import Any

import pytest

from redrive.api import Body
from redrive.errors import InvalidSpecError
from redrive.kube.cache import Cache, Turn, needs_reconcile
from redrive.kube.resources import (
    APACHE_SPARK_APPLICATIONS,
    CONFIG_MAPS,
    CONNECTIONS,
    INSPECTIONS,
    POLICIES,
    REPLAYS,
    SPARK_APPLICATIONS,
    Key,
    Resource,
    keep_of,
    retained_config_map,
)
from redrive.replay.controller.spark_operators import apache_run, kubeflow_run


def body(**metadata: object) -> Body:
    defaults = {"namespace": "n", "name": "a", "uid": "1", "generation": 1, "resourceVersion": "9"}
    return {"metadata": {**defaults, **metadata}}


def test_listeners_get_creation_change_and_deletion() -> None:
    cache = Cache()
    calls: list[tuple[Key, Body | None, Body | None]] = []
    cache.listen(lambda *change: calls.append(change))
    first, second, key = body(), body(generation=2), Key("n", "a")
    cache.put(first)
    cache.put(second)
    cache.drop(second)
    cache.drop(second)
    assert calls == [(key, None, first), (key, first, second), (key, second, None)]


def test_malformed_event_is_ignored() -> None:
    """Each would fail in listeners, and its version at each relist."""
    cache = Cache([body()])
    calls: list[tuple[object, ...]] = []
    cache.listen(lambda *change: calls.append(change))
    wrong: list[Any] = [None, [], "x", {}, {"metadata": None}, {**body(), "spec": []}]
    fields = ("uid", "name", "namespace", "resourceVersion", "generation", "labels", "annotations")
    times = ("creationTimestamp", "deletionTimestamp")
    wrong += [body(**{field: []}) for field in (*fields, *times)]
    wrong += [body(finalizers="x"), body(resourceVersion="9" * 5_000), body(ownerReferences=[1])]
    wrong += [body(annotations={"a": 1}), body(labels={"a": 1})]
    conditions: list[Any] = [7, {"type": "Ready"}, [7], [{}], [{"type": 1, "status": "True"}]]
    wrong += [{**body(), "status": {"conditions": written}} for written in conditions]
    for kind, object_ in itertools.product(("ADDED", "MODIFIED", "DELETED"), wrong):
        cache.on_event({"type": kind, "object": object_})
    assert calls == []
    assert list(cache) == [body()]


def test_object_that_lacks_an_indexed_field_changes_nothing() -> None:
    first = {**body(), "spec": {"to": "x"}}
    cache = Cache([first])
    names = cache.index(lambda object_: str(object_["metadata"]["name"]))
    targets = cache.index(lambda object_: str(object_["spec"]["to"]))
    turns = cache.turns(lambda object_: Turn("all", (object_["metadata"]["generation"],)))
    lacks_generation = {"metadata": {"namespace": "n", "name": "c"}, "spec": {"to": "x"}}
    for wrong in (body(generation=2), body(name="b"), lacks_generation):
        with pytest.raises(KeyError):
            cache.put(wrong)
    assert list(cache) == [first]
    assert names.get("a") == targets.get("x") == (first,)
    assert names.get("b") == ()
    assert turns.count("all") == 1
    cache.put({**body(generation=2), "spec": {"to": "y"}})
    assert (targets.count("x"), targets.count("y"), names.count("a")) == (0, 1, 1)


async def test_derived_aside_is_computed_once_beside_the_loop() -> None:
    released, computed = threading.Event(), 0

    def slow(object_: Body) -> int:
        nonlocal computed
        computed += 1
        assert released.wait(30)
        if object_["metadata"]["name"] == "b":
            raise InvalidSpecError("a thing is wrong", remedy="fix it")
        return computed

    cache = Cache([body(), body(name="b")])
    tasks = [asyncio.create_task(cache.derive_aside(slow, body())) for _ in range(3)]
    await asyncio.sleep(0.01)
    released.set()
    assert await asyncio.gather(*tasks) == [1, 1, 1]
    assert cache.derive(slow, body()) == 1
    for _ in range(2):
        with pytest.raises(InvalidSpecError):
            await cache.derive_aside(slow, body(name="b"))
    assert computed == 2
    assert await cache.derive_aside(slow, body(generation=2)) == 3


def test_cache_may_change_during_iteration() -> None:
    cache = Cache([body(), body(name="b")])
    for object_ in cache:
        cache.drop(object_)
    assert list(cache) == []


def test_older_state_does_not_replace_newer_one() -> None:
    newer, cache = body(resourceVersion="10"), Cache([body()])
    cache.put(newer)
    cache.put(body())
    assert list(cache) == [newer]


def test_write_to_recreated_object_is_left_to_the_watch() -> None:
    old, cache = body(), Cache([body()])
    cache.renew(body(uid="2", resourceVersion="10"))
    assert list(cache) == [old]


def test_late_deletion_event_keeps_new_object_of_same_name() -> None:
    cache, old, new = Cache(), body(), body(uid="2")
    cache.on_event({"type": "ADDED", "object": old})
    cache.put(new)
    cache.on_event({"type": "DELETED", "object": old})
    assert list(cache) == [new]
    cache.on_event({"type": "DELETED", "object": new})
    assert list(cache) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, body()),
        (body(), None),
        (body(), body(generation=2)),
        (body(), body(uid="2")),
        (body(), body(deletionTimestamp="2026-01-01T00:00:00Z")),
    ],
)
def test_new_spec_object_or_deletion_needs_reconcile(
    before: Body | None, after: Body | None
) -> None:
    assert needs_reconcile(before, after)


def test_changed_status_or_label_needs_no_reconcile() -> None:
    assert not needs_reconcile(body(), {**body(labels={"a": "b"}), "status": {"x": 1}})


def test_index_follows_changes_before_listeners_run() -> None:
    def color(object_: Body) -> str:
        return str(object_["metadata"]["color"])

    def made(name: str, color: str, version: str = "9") -> Body:
        return body(name=name, color=color, resourceVersion=version)

    table = Cache([made("a", "red"), made("b", "blue")])
    index = table.index(color)
    assert table.index(color) is index
    seen: list[tuple[Key, ...]] = []
    table.listen(lambda *_: seen.append(index.keys("red")))
    table.put(made("b", "red", "10"))
    table.put(made("c", "red"))
    table.drop(made("a", "red"))
    a, b, c = (Key("n", name) for name in "abc")
    assert seen == [(a, b), (a, b, c), (b, c)]
    assert [object_["metadata"]["resourceVersion"] for object_ in index.get("red")] == ["10", "9"]
    assert (index.count("red"), index.count("blue"), len(table)) == (2, 0, 2)
    assert [index.first("red", count) for count in (0, 1, 9)] == [(), (b,), (b, c)]


def test_turns_follow_changes_before_listeners_run() -> None:
    def turn_of(object_: Body) -> Turn | None:
        metadata = object_["metadata"]
        return Turn(metadata["color"], (metadata["age"],)) if "age" in metadata else None

    def made(name: str, color: str, **metadata: object) -> Body:
        return body(name=name, color=color, **{"resourceVersion": "9", **metadata})

    table = Cache([made("a", "red", age=3), made("b", "red", age=2), made("c", "red")])
    turns = table.turns(turn_of)
    assert table.turns(turn_of) is turns
    seen: list[str] = []
    table.listen(lambda *_: seen.append("".join(key.name for _, key in turns.first("red", 9))))
    table.put(made("c", "red", age=1))
    table.put(made("b", "red", age=4, resourceVersion="10"))
    table.put(made("a", "blue", age=3, resourceVersion="10"))
    table.put(made("d", "red", age=4))
    table.put(made("c", "red", resourceVersion="10"))
    table.drop(made("b", "red"))
    assert seen == ["cba", "cab", "cb", "cbd", "bd", "d"]
    assert turns.first("red", 0) == ()
    assert turns.first("blue", 1) == (((3,), Key("n", "a")),)
    assert [turns.count(color) for color in ("red", "blue", "green")] == [1, 1, 0]
    assert [turns.before(Turn("red", (age,))) for age in (3, 4, 5)] == [0, 0, 1]


def test_managed_fields_are_not_retained() -> None:
    written = body(managedFields=[{"manager": "kubectl"}])
    cache = Cache([written])
    cache.put(body(name="b", managedFields=[{"manager": "redrive"}]))
    assert list(cache) == [body(), body(name="b")]
    assert "managedFields" in written["metadata"]


MEBIBYTE = 2**20
METADATA = {
    "namespace": "n",
    "name": "a",
    "uid": "1",
    "resourceVersion": "9",
    "creationTimestamp": "2026-01-01T00:00:00Z",
}
OWNER = {"apiVersion": "redrive.io/v1beta1", "kind": "RetryPolicy", "name": "a", "uid": "2"}


def config_map(data: dict[str, str], **metadata: object) -> Body:
    return {"metadata": {**METADATA, "ownerReferences": [OWNER], **metadata}, "data": data}


def long_objects(length: int) -> list[tuple[Resource, Body]]:
    """Return objects with *length* characters, or more, in each of the places for them."""
    text, names = "x" * length, {f"name-{number}": "x" for number in range(length // 10)}
    bogus = [{**OWNER, "uid": str(number)} for number in range(length // 100)]
    common: dict[str, Any] = {
        **METADATA,
        "labels": names,
        "annotations": {"note": text},
        "finalizers": list(names),
        "managedFields": [names],
        "ownerReferences": [{**OWNER, "name": text}, *bogus],
    }
    state = {"state": text, "errorMessage": text, "currentStateSummary": text, "message": text}
    count = length // 100
    states = {str(n): state if n > count - 5 else {"message": "x"} for n in range(count)}
    status = {
        "applicationState": state,
        "currentState": state,
        "lastSubmissionAttemptTime": text,
        "stateTransitionHistory": states,
        "executorState": names,
    }
    application = {"metadata": common, "spec": names, "status": status}
    return [
        (CONFIG_MAPS, {"metadata": common, "data": {"policy.json": text, **names}}),
        (SPARK_APPLICATIONS, application),
        (APACHE_SPARK_APPLICATIONS, application),
    ]


def size_of(holder: object) -> int:
    """The bytes of all that *holder* keeps alive, code apart."""
    sizes, holders = dict[int, int](), [holder]
    while holders:
        referent = holders.pop()
        if id(referent) not in sizes and not isinstance(referent, type | ModuleType | FunctionType):
            sizes[id(referent)] = sys.getsizeof(referent)
            holders += gc.get_referents(referent)
    return sum(sizes.values())


@pytest.mark.parametrize("kind", range(3), ids=["ConfigMap", "Kubeflow", "Apache"])
def test_retained_fields_of_foreign_objects_are_bounded(kind: int) -> None:
    def held(length: int) -> int:
        resource, body = long_objects(length)[kind]
        read = json.loads(json.dumps(body))  # an object from JSON shares nothing with other objects
        cache = Cache([read], keep_of(resource))
        assert len(cache) == 1
        return size_of(cache)

    of_some = held(100_000)
    assert of_some < 200_000
    assert held(MEBIBYTE) == of_some


@pytest.mark.parametrize("kind", range(3), ids=["ConfigMap", "Kubeflow", "Apache"])
def test_retaining_fields_twice_changes_nothing(kind: int) -> None:
    resource, body = long_objects(20_000)[kind]
    once = keep_of(resource)(body)
    assert keep_of(resource)(once) == once


def test_retained_config_map_has_owners_label_and_digest() -> None:
    label = {"app.kubernetes.io/managed-by": "redrive"}
    ours = retained_config_map(config_map({"policy.json": "{}"}, labels=label))
    assert ours["metadata"] == {**METADATA, "ownerReferences": [OWNER], "labels": label}
    assert list(ours["data"]) == ["policy.json"]
    assert ours == retained_config_map(config_map({"policy.json": "{}", "b": "c"}, labels=label))
    assert ours["data"] != retained_config_map(config_map({"policy.json": "{ }"}))["data"]
    assert "data" not in retained_config_map(config_map({}))


def test_config_map_with_text_of_digest_does_not_match() -> None:
    digest = retained_config_map(config_map({"policy.json": "{}"}))["data"]["policy.json"]
    forged = retained_config_map(config_map({"policy.json": str(digest)}))
    assert forged["data"]["policy.json"] != digest


@pytest.mark.parametrize(
    "status",
    [
        None,
        "x",
        [],
        {"applicationState": 3, "currentState": ["x"]},
        {"stateTransitionHistory": {"1" * 5_000: {"message": "x"}}},
    ],
)
def test_invalid_spark_status_is_not_retained(status: object) -> None:
    body = {"metadata": METADATA, "status": status}
    assert keep_of(SPARK_APPLICATIONS)(body) == {"metadata": METADATA, "status": {}}


def test_kubeflow_failure_reads_as_of_the_whole_object() -> None:
    stack = "Exception in thread main a.B: it broke\n\tat c.D\n" + "Caused by: e.F: the disk\n"
    state = {"state": "FAILED", "errorMessage": "\tat g.H\n" * 9_000 + stack}
    body = {"metadata": METADATA, "spec": {"type": "Python"}, "status": {"applicationState": state}}
    reduced = keep_of(SPARK_APPLICATIONS)(body)
    assert kubeflow_run(reduced) == kubeflow_run(body)
    assert "the disk" in kubeflow_run(reduced).error


def test_apache_failure_reads_as_of_the_whole_object() -> None:
    ended = {"currentStateSummary": "ResourceReleased", "message": "", "lastTransitionTime": "t"}
    history = {str(n): {"currentStateSummary": "Submitted", "message": "x"} for n in range(12)}
    history |= {"12": {"currentStateSummary": "Failed", "message": "e.F: the disk"}, "13": ended}
    status = {"currentState": ended, "stateTransitionHistory": history}
    body = {"metadata": METADATA, "status": status}
    reduced = keep_of(APACHE_SPARK_APPLICATIONS)(body)
    assert apache_run(reduced) == apache_run(body)
    assert "the disk" in apache_run(reduced).error


@pytest.mark.parametrize("resource", [POLICIES, REPLAYS, INSPECTIONS, CONNECTIONS])
def test_retained_metadata_of_own_objects_are_bounded(resource: Resource) -> None:
    """Each of their authors may annotate an object with 256 KiB, and add any finalizers."""
    numbers = range(4_000)
    names = [f"redrive.io/{number}" for number in numbers]
    annotations = dict.fromkeys(names, "x") | {
        "redrive.io/reconcile-requested-at": "\U0001f600" * 60_000
    }
    metadata = {
        **METADATA,
        "annotations": annotations | {"redrive.io/paused": "true"},
        "finalizers": [*(f"a.b/{number}" for number in numbers), "redrive.io/cleanup"],
        "ownerReferences": [{**OWNER, "uid": str(number)} for number in numbers],
    }
    kept = keep_of(resource)({"metadata": metadata, "spec": {}})
    assert keep_of(resource)(kept) == kept
    assert size_of(json.loads(json.dumps(kept))) < 150_000
    if resource != INSPECTIONS:  # the operator has no finalizer on them
        assert kept["metadata"]["finalizers"][0] == "redrive.io/cleanup"


def test_retained_inspection_has_no_selection_and_no_summary() -> None:
    spec = {"policyRef": {"name": "orders"}, "from": "Retry", "ttlAfterFinished": "1h"}
    status = {"phase": "Running", "job": "inspection-a", "conditions": []}
    body = {
        "metadata": METADATA,
        "spec": {**spec, "select": {"ids": ["1:2"] * 500}, "reason": "r", "ticket": "t"},
        "status": {**status, "run": {"causes": [{"cause": "x" * 256}] * 50}},
    }
    assert keep_of(INSPECTIONS)(body) == {"metadata": METADATA, "spec": spec, "status": status}


def test_own_objects_lose_only_foreign_metadata() -> None:
    metadata = {**METADATA, "generation": 2, "finalizers": ["redrive.io/cleanup"]}
    noted = {"kubectl.kubernetes.io/last-applied-configuration": "{}", "redrive.io/paused": "true"}
    body = {
        "metadata": {**metadata, "annotations": noted, "labels": {"a": "b"}, "managedFields": [{}]},
        "spec": {"topic": "t"},
        "status": {"conditions": []},
    }
    assert keep_of(POLICIES)(body) == {
        **body,
        "metadata": {**metadata, "annotations": {"redrive.io/paused": "true"}, "labels": {}},
    }

from __future__ import annotations

import pytest

from redrive.api import Body
from redrive.kube.cache import Cache, needs_reconcile
from redrive.kube.resources import Key


def body(**metadata: object) -> Body:
    defaults = {"namespace": "n", "name": "a", "uid": "1", "generation": 1, "resourceVersion": "9"}
    return {"metadata": {**defaults, **metadata}}


def test_listeners_get_each_creation_change_and_deletion() -> None:
    cache = Cache()
    calls: list[tuple[Key, Body | None, Body | None]] = []
    cache.listen(lambda *change: calls.append(change))
    first, second, key = body(), body(generation=2), Key("n", "a")
    cache.put(first)
    cache.put(second)
    cache.drop(second)
    cache.drop(second)
    assert calls == [(key, None, first), (key, first, second), (key, second, None)]


def test_a_table_may_change_while_it_is_gone_through() -> None:
    cache = Cache([body(), body(name="b")])
    for found in cache:
        cache.drop(found)
    assert list(cache) == []


def test_an_older_state_does_not_replace_a_newer_one() -> None:
    newer, cache = body(resourceVersion="10"), Cache([body()])
    cache.put(newer)
    cache.put(body())
    assert list(cache) == [newer]


def test_a_write_to_what_was_recreated_meanwhile_is_left_to_the_watch() -> None:
    old, cache = body(), Cache([body()])
    cache.renew(body(uid="2", resourceVersion="10"))
    assert list(cache) == [old]


def test_a_late_deletion_event_leaves_a_new_object_of_the_same_name() -> None:
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
def test_a_new_spec_a_new_object_and_a_deletion_need_a_reconcile(
    before: Body | None, after: Body | None
) -> None:
    assert needs_reconcile(before, after)


def test_a_changed_status_or_label_needs_no_reconcile() -> None:
    assert not needs_reconcile(body(), {**body(labels={"a": "b"}), "status": {"x": 1}})


def test_an_index_follows_what_comes_changes_and_goes_and_listeners_find_it_current() -> None:
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
    assert [each["metadata"]["resourceVersion"] for each in index.get("red")] == ["10", "9"]
    assert (index.count("red"), index.count("blue"), len(table)) == (2, 0, 2)


def test_who_wrote_which_field_is_not_kept() -> None:
    written = body(managedFields=[{"manager": "kubectl"}])
    cache = Cache([written])
    cache.put(body(name="b", managedFields=[{"manager": "redrive"}]))
    assert list(cache) == [body(), body(name="b")]
    assert "managedFields" in written["metadata"]

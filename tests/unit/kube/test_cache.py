from __future__ import annotations

import pytest

from redrive.kube.cache import Cache, needs_reconcile
from redrive.kube.resources import Body, Key


def body(**metadata: object) -> Body:
    defaults = {"namespace": "n", "name": "a", "uid": "1", "generation": 1, "resourceVersion": "9"}
    return {"metadata": {**defaults, **metadata}}


def test_listeners_hear_of_what_comes_changes_and_goes() -> None:
    table = Cache()
    heard: list[tuple[Key, Body | None, Body | None]] = []
    table.listen(lambda *change: heard.append(change))
    first, second, key = body(), body(generation=2), Key("n", "a")
    table.put(first)
    table.put(second)
    table.drop(second)
    table.drop(second)
    assert heard == [(key, None, first), (key, first, second), (key, second, None)]


def test_a_table_may_change_while_it_is_gone_through() -> None:
    table = Cache([body(), body(name="b")])
    for found in table:
        table.drop(found)
    assert list(table) == []


def test_an_older_state_does_not_replace_a_newer_one() -> None:
    newer, table = body(resourceVersion="10"), Cache([body()])
    table.put(newer)
    table.put(body())
    assert list(table) == [newer]


def test_a_write_to_what_was_made_anew_meanwhile_is_left_to_the_watch() -> None:
    old, table = body(), Cache([body()])
    table.renew(body(uid="2", resourceVersion="10"))
    assert list(table) == [old]


def test_a_late_word_of_a_deletion_leaves_what_was_made_anew_under_the_name() -> None:
    table, old, new = Cache(), body(), body(uid="2")
    table.on_event({"type": "ADDED", "object": old})
    table.put(new)
    table.on_event({"type": "DELETED", "object": old})
    assert list(table) == [new]
    table.on_event({"type": "DELETED", "object": new})
    assert list(table) == []


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
def test_a_new_spec_a_new_object_and_a_deletion_are_new_wishes(
    before: Body | None, after: Body | None
) -> None:
    assert needs_reconcile(before, after)


def test_a_changed_status_or_label_is_no_new_wish() -> None:
    assert not needs_reconcile(body(), {**body(labels={"a": "b"}), "status": {"x": 1}})

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from redrive.admin.errors import error_for
from redrive.api import Body
from redrive.api import conditions as api_conditions
from redrive.api.conditions import (
    ObjectEvent,
    StatusWarning,
    failed,
    find,
    is_new,
    is_settled,
    progressing,
    ready,
    waiting,
)
from redrive.errors import InvalidSpecError
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.client import EVENT_SECONDS, EVENTS_AT_ONCE, EventBudget
from redrive.kube.resources import MAX_FINALIZERS, Key, of_redrive
from redrive.kube.status import Publisher, add_finalizer, remove_finalizer
from tests.support.fake_kubernetes import FakeKubernetes

ERROR = InvalidSpecError("a field is wrong", got=3, remedy="fix it")
KEY = Key("n", "a")


@pytest.fixture
def api() -> FakeKubernetes:
    """An API server with one policy."""
    metadata = {**KEY._asdict(), "uid": "1", "generation": 4, "resourceVersion": "98"}
    policy = {"apiVersion": resources.POLICIES.api_version, "kind": resources.POLICIES.kind}
    api = FakeKubernetes()
    api.add(resources.POLICIES, {**policy, "metadata": metadata})
    return api


def stored(api: FakeKubernetes) -> dict[str, Any]:
    """Return the policy as it is now."""
    return api.objects[resources.POLICIES][KEY]


@pytest.fixture
def out(api: FakeKubernetes) -> Publisher:
    ticks = iter(range(60))
    clock = lambda: datetime(2026, 1, 1, 0, 0, next(ticks), tzinfo=UTC)  # noqa: E731
    return Publisher(api, resources.POLICIES, Cache([stored(api)]), clock)


def conditions(body: Body) -> dict[str, dict[str, Any]]:
    return {condition["type"]: condition for condition in body["status"]["conditions"]}


async def test_first_publish_is_progress_without_event(api: FakeKubernetes, out: Publisher) -> None:
    assert is_new(stored(api))
    after = await out.publish(stored(api), progressing("looking"))
    assert not is_new(after)
    assert conditions(after)["Ready"]["status"] == "Unknown"
    assert conditions(after)["Reconciling"]["status"] == "True"
    assert {c["observedGeneration"] for c in after["status"]["conditions"]} == {4}
    assert api.announced() == []


async def test_unchanged_status_is_not_written_again(api: FakeKubernetes, out: Publisher) -> None:
    for _ in range(3):
        await out.publish(stored(api), failed(ERROR))
    assert len(api.writes) == 1
    assert api.announced() == [
        ("Warning", "InvalidSpec", "a field is wrong; got 3; fix it"),
    ]


async def test_stalled_and_reconciling_exist_only_while_true(
    api: FakeKubernetes, out: Publisher
) -> None:
    await out.publish(stored(api), failed(ERROR))
    assert conditions(stored(api)).keys() == {"Ready", "Stalled"}
    await out.publish(stored(api), waiting(ERROR))
    assert conditions(stored(api)).keys() == {"Ready", "Reconciling"}
    await out.publish(stored(api), ready("Provisioned", "all is there"))
    assert conditions(stored(api)).keys() == {"Ready"}
    assert api.announced()[-1] == ("Normal", "Provisioned", "all is there")


async def test_warning_is_a_condition_and_event_when_it_changes(
    api: FakeKubernetes, out: Publisher
) -> None:
    for message in ("beware", "beware", "beware of more"):
        caution = StatusWarning("NameCollision", message)
        await out.publish(stored(api), ready("Provisioned", "all is there", [caution]))
    assert conditions(stored(api)).keys() == {"Ready", "NameCollision"}
    assert stored(api)["status"]["warnings"] == ["NameCollision"]
    await out.publish(stored(api), ready("Provisioned", "all is there"))
    assert conditions(stored(api)).keys() == {"Ready"}
    assert "warnings" not in stored(api)["status"]
    assert api.announced() == [
        ("Normal", "Provisioned", "all is there"),
        ("Warning", "NameCollision", "beware"),
        ("Warning", "NameCollision", "beware of more"),
    ]


async def test_transition_time_is_that_of_last_change(api: FakeKubernetes, out: Publisher) -> None:
    await out.publish(stored(api), failed(ERROR))
    since = conditions(stored(api))["Ready"]["lastTransitionTime"]
    await out.publish(
        stored(api), failed(InvalidSpecError("another field is wrong", remedy="fix it"))
    )
    assert conditions(stored(api))["Ready"]["lastTransitionTime"] == since
    await out.publish(stored(api), ready("Provisioned", "all is there"))
    assert conditions(stored(api))["Ready"]["lastTransitionTime"] > since


async def test_other_fields_are_written_when_they_differ(
    api: FakeKubernetes, out: Publisher
) -> None:
    ready = api_conditions.ready("Provisioned", "all is there")
    await out.publish(stored(api), ready, {"retryTopic": "a"})
    await out.publish(stored(api), ready, {"retryTopic": "a"})
    await out.publish(stored(api), ready, {"retryTopic": "b"})
    assert len(api.writes) == 2
    assert stored(api)["status"]["retryTopic"] == "b"


async def test_removed_field_of_an_object_is_written_once(
    api: FakeKubernetes, out: Publisher
) -> None:
    named = progressing("looking")
    await out.publish(stored(api), named, {"internal": {"a": 1, "b": 2}})
    writes = len(api.writes)
    for _ in range(2):
        await out.publish(stored(api), named, {"internal": {"a": 1, "b": None}})
    assert stored(api)["status"]["internal"] == {"a": 1}
    assert len(api.writes) == writes + 1


async def test_publish_before_watch_event_builds_on_last_write(
    api: FakeKubernetes, out: Publisher
) -> None:
    def cached() -> Body:
        body = out.table.get(KEY)
        assert body is not None
        return body

    ready, unseen = api_conditions.ready("Provisioned", "all is there"), []
    for outcome in (ready, waiting(ERROR), ready):
        await out.publish(cached(), outcome)
        unseen.append(stored(api))
    assert conditions(stored(api))["Ready"]["status"] == "True"
    for body in unseen:
        out.table.on_event({"type": "MODIFIED", "object": body})
        assert cached() == stored(api)


async def test_long_message_is_cut_and_not_written_again(
    api: FakeKubernetes, out: Publisher
) -> None:
    error = InvalidSpecError("a field is wrong", got="x" * 40_000, remedy="fix it")
    caution = StatusWarning("NameCollision", "ü" * 32_769)
    for _ in range(2):
        await out.publish(stored(api), waiting(error))
    assert len(api.writes) == 1
    await out.publish(stored(api), ready("Provisioned", "all is there", [caution]))
    assert conditions(stored(api))["NameCollision"]["message"] == "ü" * 32_766 + " …"
    await out.publish(stored(api), failed(error))
    message = conditions(stored(api))["Stalled"]["message"]
    assert message.startswith("a field is wrong; got 'xxx")
    assert message.endswith("xxx …")
    assert len(message) == 32_768


@pytest.mark.parametrize(
    "since",
    [
        "0000-01-01T00:00:00Z",
        "0001-01-01T00:00:00+14:00",
        "9999-12-31T23:59:59-14:00",
        "2026-01-01T00:00:00+99:00",
    ],
)
async def test_condition_with_invalid_time_is_written_again(
    api: FakeKubernetes, out: Publisher, since: str
) -> None:
    await out.publish(
        stored(api),
        ready("Provisioned", "all is there", [StatusWarning("AckHoles", "some")]),
    )
    for condition in stored(api)["status"]["conditions"]:
        condition["lastTransitionTime"] = since
    assert find(stored(api), "Ready") is None
    assert not is_settled(stored(api))
    await out.publish(stored(api), ready("Provisioned", "all is there"))
    assert is_settled(stored(api))
    assert conditions(stored(api))["Ready"]["lastTransitionTime"] == "2026-01-01T00:00:03Z"


async def test_object_deleted_during_write_stays_deleted(
    api: FakeKubernetes, out: Publisher
) -> None:
    body = stored(api)
    out.table.drop(body)
    await out.publish(body, ready("Provisioned", "all is there"))
    assert list(out.table) == []


async def test_finalizers_that_the_cache_does_not_retain_stay(
    api: FakeKubernetes, out: Publisher
) -> None:
    foreign = [f"a.b/{number}" for number in range(MAX_FINALIZERS + 9)]
    api.objects[resources.POLICIES][KEY]["metadata"]["finalizers"] = foreign
    await add_finalizer(of_redrive(stored(api)), "redrive.io/cleanup", out)
    assert stored(api)["metadata"]["finalizers"] == [*foreign, "redrive.io/cleanup"]
    await remove_finalizer(of_redrive(stored(api)), "redrive.io/cleanup", out)
    assert stored(api)["metadata"]["finalizers"] == foreign


async def test_event_has_its_object_and_bounded_length() -> None:
    identity = {"namespace": "n", "name": "a" * 60, "uid": "1"}
    about = {"apiVersion": "redrive.io/v1beta1", "kind": "Replay", "metadata": identity}
    api = FakeKubernetes()
    noon = lambda: datetime(2026, 1, 1, 12, tzinfo=UTC)  # noqa: E731
    out = Publisher(api, resources.REPLAYS, Cache(), noon)
    await out.emit(about, ObjectEvent("Launched", "m" * 2000))
    (event,) = api.events
    assert event["metadata"] == {"generateName": "a" * 50 + "-", "namespace": "n"}
    assert event["involvedObject"] == {
        "apiVersion": "redrive.io/v1beta1",
        "kind": "Replay",
        **identity,
    }
    assert (event["type"], event["reason"], event["message"]) == ("Normal", "Launched", "m" * 1024)
    assert {event["firstTimestamp"], event["lastTimestamp"]} == {"2026-01-01T12:00:00Z"}


@pytest.mark.parametrize("end", [".", "-", "--"])
async def test_event_of_a_cut_name_has_a_valid_name(
    end: str, api: FakeKubernetes, out: Publisher
) -> None:
    letters = "a" * (50 - len(end))
    policy = stored(api)
    about = {**policy, "metadata": {**policy["metadata"], "name": f"{letters}{end}b"}}
    await out.emit(about, ObjectEvent("Launched", "m"))
    (event,) = api.events
    assert event["metadata"]["generateName"] == f"{letters}-"


async def test_events_of_an_object_are_limited(api: FakeKubernetes, out: Publisher) -> None:
    for number in range(40):
        await out.emit(stored(api), ObjectEvent("Launched", f"{number}"))
    assert len(api.events) == EVENTS_AT_ONCE


def test_event_budget_fills_again_for_each_object() -> None:
    now = 0.0
    budget = EventBudget(lambda: now)
    burst = [budget.take("a") for _ in range(EVENTS_AT_ONCE + 1)]
    assert burst == [True] * EVENTS_AT_ONCE + [False]
    assert budget.take("b")
    now = EVENT_SECONDS
    assert [budget.take("a") for _ in range(2)] == [True, False]
    now += EVENTS_AT_ONCE * EVENT_SECONDS
    assert [budget.take("a") for _ in range(EVENTS_AT_ONCE + 1)] == burst


@pytest.mark.parametrize("words", ['{"reason": "try %d"}', '{"reason": "it\'s \\"%d\\""}', "x%0*d"])
async def test_answers_of_a_broker_cause_no_writes(
    words: str, api: FakeKubernetes, out: Publisher
) -> None:
    for number in range(1, 20):
        answer = words % ((number, number) if "*" in words else number)
        await out.publish(stored(api), failed(error_for("read namespace x/y", 500, answer)))
    assert (len(api.writes), len(api.events)) == (1, 1)
    await out.publish(stored(api), failed(error_for("read namespace x/z", 500, "x")))
    await out.publish(stored(api), failed(error_for("read namespace x/z", 403, "x")))
    assert (len(api.writes), len(api.events)) == (3, 3)


async def test_answer_to_a_new_spec_is_shown(api: FakeKubernetes, out: Publisher) -> None:
    await out.publish(stored(api), failed(error_for("read x/y", 500, '{"reason": "one"}')))
    stored(api)["metadata"]["generation"] += 1
    after = await out.publish(stored(api), failed(error_for("read x/y", 500, '{"reason": "two"}')))
    assert "500 two" in conditions(after)["Ready"]["message"]

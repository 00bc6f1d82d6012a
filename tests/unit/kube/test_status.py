from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from redrive.errors import InvalidSpecError
from redrive.kube import resources, status
from redrive.kube.cache import Cache
from redrive.kube.client import Kubernetes
from redrive.kube.resources import Body, Key, Resource
from redrive.kube.status import Publisher

ERROR = InvalidSpecError("a field is wrong", got=3, remedy="fix it")


class Recorder(Kubernetes):
    """An API server's part in it: it merges a status and keeps Events."""

    def __init__(self, body: Body) -> None:
        self.body = dict(body)
        self.patches = 0
        self.events: list[tuple[str, str, str]] = []

    async def patch_status(self, resource: Resource, key: Key, status: Body) -> Body:
        """Merge *status*, key by key."""
        assert (resource, key) == (resources.POLICIES, Key.of(self.body))
        self.patches += 1
        version = {"resourceVersion": str(int(self.body["metadata"]["resourceVersion"]) + 1)}
        self.body = {
            **self.body,
            "metadata": self.body["metadata"] | version,
            "status": {**self.body.get("status", {}), **status},
        }
        return self.body

    async def emit(
        self, about: Body, *, kind: str, reason: str, message: str, now: datetime
    ) -> None:
        """Keep the Event."""
        del about, now
        self.events.append((kind, reason, message))


@pytest.fixture
def api() -> Recorder:
    identity = {"namespace": "n", "name": "a", "uid": "1"}
    return Recorder({"metadata": {**identity, "generation": 4, "resourceVersion": "98"}})


@pytest.fixture
def out(api: Recorder) -> Publisher:
    ticks = iter(range(60))
    clock = lambda: datetime(2026, 1, 1, 0, 0, next(ticks), tzinfo=UTC)  # noqa: E731
    return Publisher(api, resources.POLICIES, Cache([api.body]), clock)


def conditions(body: Body) -> dict[str, dict[str, Any]]:
    return {condition["type"]: condition for condition in body["status"]["conditions"]}


async def test_a_first_look_is_progress_and_no_event(api: Recorder, out: Publisher) -> None:
    assert status.is_new(api.body)
    after = await out.publish(api.body, status.progressing("looking"))
    assert not status.is_new(after)
    assert conditions(after)["Ready"]["status"] == "Unknown"
    assert conditions(after)["Reconciling"]["status"] == "True"
    assert {c["observedGeneration"] for c in after["status"]["conditions"]} == {4}
    assert api.events == []


async def test_what_has_been_said_is_neither_written_nor_an_event_again(
    api: Recorder, out: Publisher
) -> None:
    for _ in range(3):
        await out.publish(api.body, status.failed(ERROR))
    assert api.patches == 1
    assert api.events == [
        ("Warning", "InvalidSpec", "a field is wrong; got 3; fix it"),
    ]


async def test_stalled_and_reconciling_are_there_only_while_true(
    api: Recorder, out: Publisher
) -> None:
    await out.publish(api.body, status.failed(ERROR))
    assert conditions(api.body).keys() == {"Ready", "Stalled"}
    await out.publish(api.body, status.waiting(ERROR))
    assert conditions(api.body).keys() == {"Ready", "Reconciling"}
    await out.publish(api.body, status.ready("Provisioned", "all is there"))
    assert conditions(api.body).keys() == {"Ready"}
    assert api.events[-1] == ("Normal", "Provisioned", "all is there")


async def test_a_caution_is_a_condition_of_its_own_and_an_event_when_it_says_something_new(
    api: Recorder, out: Publisher
) -> None:
    for message in ("beware", "beware", "beware of more"):
        caution = status.StatusWarning("NameCollision", message)
        await out.publish(api.body, status.ready("Provisioned", "all is there", [caution]))
    assert conditions(api.body).keys() == {"Ready", "NameCollision"}
    await out.publish(api.body, status.ready("Provisioned", "all is there"))
    assert conditions(api.body).keys() == {"Ready"}
    assert api.events == [
        ("Normal", "Provisioned", "all is there"),
        ("Warning", "NameCollision", "beware"),
        ("Warning", "NameCollision", "beware of more"),
    ]


async def test_the_time_of_a_condition_is_that_of_its_last_change(
    api: Recorder, out: Publisher
) -> None:
    await out.publish(api.body, status.failed(ERROR))
    since = conditions(api.body)["Ready"]["lastTransitionTime"]
    await out.publish(
        api.body, status.failed(InvalidSpecError("another field is wrong", remedy="fix it"))
    )
    assert conditions(api.body)["Ready"]["lastTransitionTime"] == since
    await out.publish(api.body, status.ready("Provisioned", "all is there"))
    assert conditions(api.body)["Ready"]["lastTransitionTime"] > since


async def test_fields_beside_the_conditions_are_written_when_they_differ(
    api: Recorder, out: Publisher
) -> None:
    ready = status.ready("Provisioned", "all is there")
    await out.publish(api.body, ready, {"retryTopic": "a"})
    await out.publish(api.body, ready, {"retryTopic": "a"})
    await out.publish(api.body, ready, {"retryTopic": "b"})
    assert api.patches == 2
    assert api.body["status"]["retryTopic"] == "b"


async def test_a_look_before_the_watch_tells_of_the_last_one_starts_from_what_that_wrote(
    api: Recorder, out: Publisher
) -> None:
    def known() -> Body:
        body = out.table.get(Key.of(api.body))
        assert body is not None
        return body

    ready, unseen = status.ready("Provisioned", "all is there"), []
    for said in (ready, status.waiting(ERROR), ready):
        await out.publish(known(), said)
        unseen.append(api.body)
    assert conditions(api.body)["Ready"]["status"] == "True"
    for body in unseen:
        out.table.on_event({"type": "MODIFIED", "object": body})
        assert known() == api.body


async def test_a_message_without_room_in_a_condition_is_cut_and_what_is_cut_is_not_written_again(
    api: Recorder, out: Publisher
) -> None:
    error = InvalidSpecError("a field is wrong", got="x" * 40_000, remedy="fix it")
    caution = status.StatusWarning("NameCollision", "ü" * 32_769)
    for _ in range(2):
        await out.publish(api.body, status.waiting(error))
    assert api.patches == 1
    await out.publish(api.body, status.ready("Provisioned", "all is there", [caution]))
    assert conditions(api.body)["NameCollision"]["message"] == "ü" * 32_766 + " …"
    await out.publish(api.body, status.failed(error))
    told = conditions(api.body)["Stalled"]["message"]
    assert told.startswith("a field is wrong; got 'xxx")
    assert told.endswith("xxx …")
    assert len(told) == 32_768


@pytest.mark.parametrize(
    "since",
    [
        "0000-01-01T00:00:00Z",
        "0001-01-01T00:00:00+14:00",
        "9999-12-31T23:59:59-14:00",
        "2026-01-01T00:00:00+99:00",
    ],
)
async def test_a_condition_whose_time_is_none_is_left_out_and_written_anew(
    api: Recorder, out: Publisher, since: str
) -> None:
    await out.publish(
        api.body,
        status.ready("Provisioned", "all is there", [status.StatusWarning("AckHoles", "some")]),
    )
    for condition in api.body["status"]["conditions"]:
        condition["lastTransitionTime"] = since
    assert status.find(api.body, "Ready") is None
    assert not status.is_settled(api.body)
    await out.publish(api.body, status.ready("Provisioned", "all is there"))
    assert status.is_settled(api.body)
    assert conditions(api.body)["Ready"]["lastTransitionTime"] == "2026-01-01T00:00:03Z"


async def test_an_object_that_went_during_a_write_stays_gone(api: Recorder, out: Publisher) -> None:
    body = api.body
    out.table.drop(body)
    await out.publish(body, status.ready("Provisioned", "all is there"))
    assert list(out.table) == []

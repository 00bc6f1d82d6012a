from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from redrive.kube import follow, reading, resources
from redrive.kube.client import TIMEOUT_SECONDS, WATCH_CONNECT_SECONDS, Kubernetes
from redrive.kube.errors import ForbiddenError, KubernetesError, UnavailableError
from redrive.kube.follow import FORBIDDEN_SECONDS, following
from redrive.kube.liveness import STALL_SECONDS, Liveness
from redrive.kube.resources import Body, Label, Resource
from redrive.kube.watching import SILENCE_SECONDS

EXPIRED = {"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}
BOOKMARK = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}}


class Watched(Kubernetes):
    """An API server's part in it: what lists show in turn, and what watches then tell."""

    def __init__(self, *lists: list[Body] | Exception) -> None:
        self.lists = list(lists)
        self.events: asyncio.Queue[dict[str, Any] | Exception | None] = asyncio.Queue()
        self.since: list[str] = []
        self.begun: asyncio.Queue[str] = asyncio.Queue()

    async def list_labelled(
        self, resource: Resource, namespace: str | None, label: Label
    ) -> tuple[Sequence[Body], str]:
        assert (resource, namespace, label) == (resources.CONFIG_MAPS, None, resources.MANAGED)
        answer = self.lists.pop(0) if len(self.lists) > 1 else self.lists[0]
        if isinstance(answer, Exception):
            raise answer
        return answer, str(len(self.lists))

    async def watch(
        self, _resource: Resource, _namespace: str | None, _label: Label, since: str
    ) -> AsyncIterator[dict[str, Any]]:
        self.since.append(since)
        self.begun.put_nowait(since)
        while (event := await self.events.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "RETRY_SECONDS", 0.001)
    monkeypatch.setattr(follow, "FORBIDDEN_SECONDS", 0.001)
    monkeypatch.setattr(reading, "RETRY_SECONDS", 0.001)


@pytest.fixture
def health() -> Liveness:
    return Liveness()


def named(name: str, version: int = 1, uid: str = "") -> Body:
    metadata = {"namespace": "n", "name": name, "uid": uid or name}
    return {"metadata": {**metadata, "resourceVersion": str(version)}}


def event(kind: str, body: Body) -> dict[str, Any]:
    return {"type": kind, "object": body}


@pytest.mark.parametrize("end", [EXPIRED, UnavailableError("it is away", remedy="wait")])
async def test_the_table_is_complete_at_first_then_follows_and_begins_anew_after_a_failure(
    end: dict[str, Any] | Exception, health: Liveness
) -> None:
    api = Watched([named("a"), named("b")], [named("b"), named("d", 7)])
    told: asyncio.Queue[tuple[str, bool]] = asyncio.Queue()
    async with (
        asyncio.timeout(5),
        following(api, resources.CONFIG_MAPS, (), resources.MANAGED, health) as table,
    ):
        assert [*table] == [named("a"), named("b")]
        table.listen(lambda key, _, after: told.put_nowait((key.name, after is not None)))
        for happened in (
            event("ADDED", named("c", 5)),
            BOOKMARK,
            event("MODIFIED", named("a", 6)),
            event("DELETED", named("c", 7)),
        ):
            api.events.put_nowait(happened)
        assert [await told.get() for _ in range(3)] == [("c", True), ("a", True), ("c", False)]
        api.events.put_nowait(end)
        assert {await told.get() for _ in range(3)} == {("a", False), ("b", True), ("d", True)}
        assert [*table] == [named("b"), named("d", 7)]
        api.events.put_nowait(event("ADDED", named("e", 8)))
        assert await told.get() == ("e", True)


@pytest.mark.parametrize(
    ("last", "version"), [(BOOKMARK, "9"), (event("MODIFIED", named("a", 7)), "7")]
)
async def test_after_its_end_a_watch_goes_on_where_it_was_without_a_list(
    last: dict[str, Any], version: str, health: Liveness
) -> None:
    api = Watched([named("a")])
    told = asyncio.Event()
    async with (
        asyncio.timeout(5),
        following(api, resources.CONFIG_MAPS, (), resources.MANAGED, health) as table,
    ):
        api.lists = [AssertionError("listed again")]
        for happened in (last, None, None, event("ADDED", named("b", 10))):
            api.events.put_nowait(happened)
        table.listen(lambda key, *_: told.set() if key.name == "b" else None)
        await told.wait()
    assert api.since == ["1", version, version]


def test_a_watch_that_hangs_is_given_up_before_it_counts_as_stalled() -> None:
    longest = WATCH_CONNECT_SECONDS + SILENCE_SECONDS + 1
    assert longest < STALL_SECONDS
    assert TIMEOUT_SECONDS + FORBIDDEN_SECONDS < STALL_SECONDS


async def test_an_api_server_that_is_just_starting_is_waited_for(health: Liveness) -> None:
    api = Watched(UnavailableError("it is away", remedy="wait"), [named("a")])
    async with (
        asyncio.timeout(5),
        following(api, resources.CONFIG_MAPS, (), resources.MANAGED, health) as table,
    ):
        assert [*table] == [named("a")]


async def test_a_missing_right_is_told_at_the_start(health: Liveness) -> None:
    api = Watched(ForbiddenError("may not list", remedy="grant it"))
    with pytest.raises(ForbiddenError, match="may not list"):
        async with following(api, resources.CONFIG_MAPS, (), resources.MANAGED, health):
            pass


async def test_after_a_failure_it_begins_with_a_list_and_each_attempt_is_a_sign_of_life() -> None:
    seconds = iter(range(1000))
    health = Liveness(lambda: next(seconds))
    expired = KubernetesError("too old resource version", remedy="begin anew")
    api = Watched([named("a")], [named("b")])
    for _ in range(2):
        api.events.put_nowait(expired)
    async with (
        asyncio.timeout(5),
        following(api, resources.CONFIG_MAPS, (), resources.MANAGED, health) as table,
    ):
        for _ in range(3):
            await api.begun.get()
        assert [*table] == [named("b")]
        assert api.since == ["1", "1", "1"]
        # Signs at 0 and 1, before and with the first watch, and so with each after a failure.
        assert health.silent_for() == {"watch of /api/v1/configmaps": 1}
        assert next(seconds) == 7


class Shared(Kubernetes):
    """An API server with several namespaces, of which some may not be read."""

    def __init__(self, *forbidden: str) -> None:
        self.forbidden = set(forbidden)

    async def list_labelled(
        self, _resource: Resource, namespace: str | None, _label: Label
    ) -> tuple[Sequence[Body], str]:
        assert namespace is not None
        if namespace in self.forbidden:
            raise ForbiddenError(f"may not list in {namespace}", remedy="grant it")
        body = named("a", uid=namespace)
        return [{"metadata": body["metadata"] | {"namespace": namespace}}], "1"

    async def watch(self, *_: object) -> AsyncIterator[dict[str, Any]]:
        await asyncio.Event().wait()
        yield {}


async def test_one_of_several_namespaces_that_is_forbidden_is_told_of_and_tried_again(
    health: Liveness, caplog: pytest.LogCaptureFixture
) -> None:
    api = Shared("gone")
    appeared = asyncio.Event()
    async with (
        asyncio.timeout(5),
        following(api, resources.CONFIG_MAPS, ("gone", "shop"), resources.MANAGED, health) as table,
    ):
        assert [body["metadata"]["namespace"] for body in table] == ["shop"]
        assert "left out for now: may not list in gone" in caplog.text
        table.listen(lambda *_: appeared.set())
        api.forbidden.clear()
        await appeared.wait()
        assert {body["metadata"]["namespace"] for body in table} == {"gone", "shop"}


async def test_that_none_of_several_namespaces_may_be_read_is_told_at_the_start(
    health: Liveness,
) -> None:
    namespaces = ("gone", "shop")
    with pytest.raises(ForbiddenError, match="may not list in gone"):
        async with following(
            Shared(*namespaces), resources.CONFIG_MAPS, namespaces, resources.MANAGED, health
        ):
            pass

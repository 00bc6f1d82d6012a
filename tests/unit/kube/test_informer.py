from __future__ import annotations

import asyncio
import itertools
import logging
import ssl

import aiohttp
import pytest

from redrive.api import Body
from redrive.kube import informer, resources
from redrive.kube.cache import Cache
from redrive.kube.client import TIMEOUT_SECONDS, ForbiddenError, UnavailableError
from redrive.kube.informer import (
    INACTIVITY_SECONDS,
    RELIST_SECONDS,
    RETRY_SECONDS,
    WATCH_SECONDS,
    load,
    relist,
    relisting,
)
from redrive.kube.observability import STALL_SECONDS, Liveness
from redrive.kube.resources import Key, Resource
from tests.support.fake_kubernetes import FakeKubernetes
from tests.unit.kube.test_client import api_server

KINDS = (resources.REPLAYS, resources.SPARK_APPLICATIONS, resources.CONFIG_MAPS)
GONE = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


class Interference:
    """Faults and changes between a list and the API server.

    Attributes:
        asked: kind and namespace of each list; of all namespaces it is empty.
        meanwhile: what the caches learn while a list is made.
        down: whether the API server is unavailable; `refused` is set when that was found.
        forbidden: namespaces that may not be listed.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[Resource, str]] = []
        self.meanwhile: list[tuple[Cache, Body]] = []
        self.down = False
        self.forbidden: set[str] = set()
        self.refused = asyncio.Event()

    def __call__(self, verb: str, resource: Resource, key: Key) -> None:
        """Refuse the list, or have something happen during it."""
        assert verb == "list"
        self.asked.append((resource, key.namespace))
        if self.down:
            self.refused.set()
            raise UnavailableError("the Kubernetes API does not answer", remedy="wait")
        if key.namespace in self.forbidden:
            raise ForbiddenError(f"may not list in {key.namespace or 'all'}", remedy="grant it")
        for cache, body in self.meanwhile:
            cache.put(body)


@pytest.fixture
def lists() -> Interference:
    return Interference()


@pytest.fixture
def api(lists: Interference) -> FakeKubernetes:
    api = FakeKubernetes()
    api.before = lists
    return api


@pytest.fixture
def caches() -> dict[Resource, Cache]:
    """Caches of three kinds, with an object `gone` each."""
    return {kind: Cache([named("gone")]) for kind in KINDS}


def named(name: str, uid: str = "1", version: int = 1, namespace: str = "n") -> Body:
    metadata = {"namespace": namespace, "name": name, "uid": uid, "resourceVersion": str(version)}
    return {"metadata": metadata}


async def test_first_list_is_of_all_or_named_namespaces(
    api: FakeKubernetes,
) -> None:
    ours, theirs = named("a"), named("b", namespace="elsewhere")
    api.add(resources.POLICIES, ours, theirs)
    assert list(await load(api, resources.POLICIES)) == [ours, theirs]
    assert list(await load(api, resources.POLICIES, ("n",))) == [ours]


@pytest.mark.usefixtures("virtual_time")
async def test_starting_api_server_is_waited_for(api: FakeKubernetes, lists: Interference) -> None:
    api.add(resources.CONFIG_MAPS, named("a"))
    lists.down = True
    async with asyncio.timeout(2 * RETRY_SECONDS):
        loading = asyncio.create_task(load(api, resources.CONFIG_MAPS))
        await lists.refused.wait()
        lists.down = False
        assert list(await loading) == [named("a")]


@pytest.mark.parametrize("namespaces", [(), ("gone", "shop")])
async def test_forbidden_list_of_all_fails_at_start(
    api: FakeKubernetes, lists: Interference, namespaces: tuple[str, ...]
) -> None:
    lists.forbidden = {"", "gone", "shop"}
    with pytest.raises(ForbiddenError, match=f"may not list in {(*namespaces, 'all')[0]}"):
        await load(api, resources.CONFIG_MAPS, namespaces)


async def test_deleted_objects_are_dropped_by_relist(
    api: FakeKubernetes, lists: Interference, caches: dict[Resource, Cache]
) -> None:
    dropped: list[Key] = []
    replays = caches[resources.REPLAYS]
    replays.listen(lambda key, _before, after: dropped.extend([key] if after is None else []))
    stays = named("stays", uid="3")
    replays.put(stays)
    api.add(resources.REPLAYS, stays)
    await relist(api, caches, ("n",))
    assert list(replays) == [stays]
    assert list(caches[resources.SPARK_APPLICATIONS]) == []
    assert list(caches[resources.CONFIG_MAPS]) == []
    assert dropped == [Key("n", "gone")]
    assert lists.asked == [(kind, "n") for kind in KINDS]


async def test_forbidden_namespace_loses_nothing_in_relist(
    api: FakeKubernetes,
    lists: Interference,
    caches: dict[Resource, Cache],
    caplog: pytest.LogCaptureFixture,
) -> None:
    lists.forbidden = {"deleted"}
    kept = named("kept", uid="4", namespace="deleted")
    caches[resources.REPLAYS].put(kept)
    await relist(api, caches, ("deleted", "n"))
    assert list(caches[resources.REPLAYS]) == [kept]
    assert list(caches[resources.SPARK_APPLICATIONS]) == []
    assert "relist: may not list" in caplog.text


async def test_objects_created_during_list_stay(
    api: FakeKubernetes, lists: Interference, caches: dict[Resource, Cache]
) -> None:
    replays = caches[resources.REPLAYS]
    fresh, reborn = named("fresh", version=5), named("gone", uid="2", version=5)
    lists.meanwhile = [(replays, fresh), (replays, reborn)]
    await relist(api, caches, ("n",))
    assert list(replays) == [reborn, fresh]


@pytest.mark.usefixtures("virtual_time")
async def test_failed_list_drops_nothing_and_is_repeated(
    api: FakeKubernetes,
    lists: Interference,
    caches: dict[Resource, Cache],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    dropped = asyncio.Event()
    caches[resources.CONFIG_MAPS].listen(lambda *_: dropped.set())
    lists.down = True
    async with asyncio.timeout(3 * RELIST_SECONDS), relisting(api, caches, ("n",)):
        await lists.refused.wait()
        assert list(caches[resources.REPLAYS]) == [named("gone")]
        lists.down = False
        await dropped.wait()
    assert "relist: the Kubernetes API does not answer" in caplog.text
    caches[resources.REPLAYS].put(named("later"))  # of an empty cache no list is made
    asked = len(lists.asked)
    await asyncio.sleep(2 * RELIST_SECONDS)
    assert len(lists.asked) == asked


@pytest.mark.parametrize("is_there", [True, False])
async def test_restored_store_is_detected_and_nothing_dropped(
    api: FakeKubernetes, *, is_there: bool
) -> None:
    later = named("a", version=900)
    caches = {resources.POLICIES: Cache([later, named("b", uid="2", version=3)])}
    api.version = 800  # of the backup
    if is_there:
        api.add(resources.POLICIES, named("a", version=700))
    assert not await relist(api, caches, ())
    assert len(caches[resources.POLICIES]) == 2


async def test_writes_during_list_belong_to_the_store(
    api: FakeKubernetes, lists: Interference
) -> None:
    before, after = named("a", version=5), named("a", version=7)
    cache = Cache([before])
    api.add(resources.POLICIES, before)
    lists.meanwhile = [(cache, after)]
    assert await relist(api, {resources.POLICIES: cache}, ())
    assert list(cache) == [after]


@pytest.mark.usefixtures("virtual_time")
async def test_restored_store_outdates_the_caches(api: FakeKubernetes) -> None:
    caches = {resources.POLICIES: Cache([named("a", version=900)])}
    api.add(resources.POLICIES, named("a", version=900))
    async with asyncio.timeout(12 * RELIST_SECONDS), relisting(api, caches, ()) as outdated:
        await asyncio.sleep(10.5 * RELIST_SECONDS)
        assert not outdated.is_set()
        api.add(resources.POLICIES, named("a", version=700))
        await outdated.wait()


async def test_watch_start_is_a_sign_of_life() -> None:
    health = Liveness()
    tls = ssl.create_default_context()
    async with (
        informer.session(health, asyncio.Event(), tls=tls, headers={}, proxy=None) as session,
        api_server(EMPTY) as port,
    ):
        await session.get(f"http://127.0.0.1:{port}/apis/replays")
        assert health.silent_for() == {}
        await session.get(f"http://127.0.0.1:{port}/apis/replays?watch=true&timeoutSeconds=30")
        assert list(health.silent_for()) == ["watch of /apis/replays"]


async def test_failed_watch_attempt_is_a_sign_of_life() -> None:
    health = Liveness()
    tls = ssl.create_default_context()
    async with informer.session(
        health, asyncio.Event(), tls=tls, headers={}, proxy=None
    ) as session:
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.get("http://127.0.0.1:1/apis/replays?watch=true")
    assert list(health.silent_for()) == ["watch of /apis/replays"]


async def test_removed_kind_outdates_caches_and_ends_liveness() -> None:
    health, outdated = Liveness(), asyncio.Event()
    tls = ssl.create_default_context()
    async with (
        informer.session(health, outdated, tls=tls, headers={}, proxy=None) as session,
        api_server(GONE) as port,
    ):
        await session.get(f"http://127.0.0.1:{port}/apis/replays/a")
        assert not outdated.is_set()
        await session.get(f"http://127.0.0.1:{port}/apis/replays?watch=true")
        assert outdated.is_set()
    assert health.silent_for() == {}


def test_watch_retries_never_end_and_stay_short() -> None:
    waits = list(itertools.islice(informer.BackOffs(), 1000))
    assert max(waits) <= 5
    assert waits[-1] > 0


def test_hanging_watch_is_closed_before_it_counts_as_stalled() -> None:
    slowest = max(itertools.islice(informer.BackOffs(), 1000))
    assert WATCH_SECONDS < INACTIVITY_SECONDS
    assert INACTIVITY_SECONDS + slowest + 1 < STALL_SECONDS
    assert TIMEOUT_SECONDS < STALL_SECONDS

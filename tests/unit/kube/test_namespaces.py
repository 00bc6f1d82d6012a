"""Labels of namespaces, as connections with selectors need them."""

from __future__ import annotations

import asyncio

import pytest

from redrive.errors import RedriveError
from redrive.kube import resources
from redrive.kube.client import ForbiddenError, NamespaceUnreadError, UnavailableError
from redrive.kube.connections import READ_SECONDS, NamespaceLabels, following
from redrive.kube.resources import Key, Resource
from tests.support.fake_kubernetes import FakeKubernetes


def label(api: FakeKubernetes, **labels: str) -> None:
    """Have the namespace `shop` with these labels."""
    metadata = {"name": "shop", "labels": labels}
    api.objects[resources.NAMESPACES][Key("", "shop")] = {"metadata": metadata}


async def changed(labels: NamespaceLabels) -> str:
    """Wait for a namespace whose labels have changed."""
    seen = asyncio.Queue[str]()
    labels.listen(seen.put_nowait)
    async with asyncio.timeout(READ_SECONDS + 1):
        return await seen.get()


@pytest.mark.usefixtures("virtual_time")
async def test_labels_are_read_once_they_are_asked_for_and_again_from_then_on() -> None:
    api = FakeKubernetes()
    label(api, team="shop")
    loop = asyncio.get_running_loop()
    async with following(api) as labels:
        await asyncio.sleep(READ_SECONDS / 2)
        begun = loop.time()
        with pytest.raises(NamespaceUnreadError, match="got 'shop'"):
            labels.of("shop")
        assert await changed(labels) == "shop"
        assert loop.time() == begun
        assert labels.of("shop") == {"team": "shop"}
        label(api, team="other")
        assert await changed(labels) == "shop"
        assert labels.of("shop") == {"team": "other"}
        label(api)
        assert await changed(labels) == "shop"
        assert labels.of("shop") == {}


async def test_no_namespace_is_read_that_was_not_asked_for() -> None:
    read = list[Key]()
    api = FakeKubernetes()
    label(api, team="shop")
    api.before = lambda _verb, _resource, key: read.append(key)
    labels = NamespaceLabels(api)
    await labels.read([])
    assert read == []
    await labels.read(["shop"])
    assert read == [Key("", "shop")]


async def test_labels_stay_in_use_while_the_api_server_is_away_and_no_longer() -> None:
    api, failures = FakeKubernetes(), list[RedriveError]()

    def fail(*_: object) -> None:
        for failure in failures:
            raise failure

    label(api, team="shop")
    labels = NamespaceLabels(api)
    await labels.read(["shop"])
    api.before = fail
    failures.append(UnavailableError("away", remedy="wait"))
    await labels.read(["shop"])
    assert labels.of("shop") == {"team": "shop"}
    failures[:] = [ForbiddenError("may not read it", remedy="grant it")]
    await labels.read(["shop"])
    with pytest.raises(ForbiddenError, match="grant it"):
        labels.of("shop")
    failures.clear()
    del api.objects[resources.NAMESPACES][Key("", "shop")]
    await labels.read(["shop"])
    with pytest.raises(NamespaceUnreadError):
        labels.of("shop")


def test_a_namespace_is_read_by_its_name() -> None:
    kind: Resource = resources.NAMESPACES
    assert kind.path(*Key("", "shop")) == "/api/v1/namespaces/shop"

"""Opened and remembered connections, their breakers, and labels of namespaces."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from prometheus_client import REGISTRY

from redrive.admin.client import Admin
from redrive.admin.errors import AdminError, BrokerUnreachableError
from redrive.admin.guards import FAILURES
from redrive.admin.http import Endpoint
from redrive.api.retrypolicy import ConnectionRef
from redrive.errors import RedriveError
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.client import (
    ForbiddenError,
    ReferenceNotFoundError,
    UnavailableError,
)
from redrive.kube.connections import (
    READ_SECONDS,
    REMEMBERED,
    Connections,
    NamespaceLabels,
    following,
    shown_to,
)
from redrive.kube.credentials import Material
from redrive.kube.resources import Key, Resource
from redrive.reasons import Reason, requeue_of
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.manifests import changed
from tests.support.reasons import raises

REF = ConnectionRef(name="main", namespace=None)
KEY = Key("shop", "main")
BODY: dict[str, Any] = {
    "metadata": {"namespace": "shop", "name": "main", "uid": "1", "resourceVersion": "1"},
    "spec": {
        "pulsar": {
            "serviceURL": "pulsar://pulsar:6650",
            "adminURL": "http://pulsar:8080",
            "authentication": {"type": "Token", "token": {"secretRef": {"name": "s", "key": "k"}}},
        },
        "allow": [{"name": "one", "topics": []}],
    },
}


class Clock:
    """Moments that pass when the test says so."""

    now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


class Reader:
    """Reads a token; the connection may be deleted meanwhile."""

    def __init__(self, table: Cache) -> None:
        self.table = table
        self.deletes = False
        self.reads = 0

    async def read(self, *_: object) -> Material:
        self.reads += 1
        if self.deletes:
            self.table.drop(BODY)
        return Material(token="one")  # noqa: S106


class Brokers:
    """Makes the calls, of which those to some are never answered."""

    silent: frozenset[str] = frozenset()

    async def send(self, _call: object, way: Endpoint) -> list[str]:
        if way.url in self.silent:
            raise BrokerUnreachableError("no answer", remedy="wait")
        return []


@pytest.fixture
def brokers() -> Brokers:
    return Brokers()


@pytest.fixture
def table() -> Cache:
    return Cache([BODY])


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reader(table: Cache) -> Reader:
    return Reader(table)


@pytest.fixture
def connections(
    table: Cache,
    brokers: Any,  # noqa: ANN401 - a double
    reader: Any,  # noqa: ANN401 - a double
    clock: Clock,
) -> Connections:
    return Connections(table, brokers, reader, clock, cast("Any", None))


def connection_at(admin_url: str, version: int) -> dict[str, Any]:
    """The connection with another broker."""
    metadata = BODY["metadata"] | {"resourceVersion": str(version), "generation": version}
    return {"metadata": metadata, "spec": changed(BODY["spec"], adminURL=admin_url)}


def breaker_metric() -> float | None:
    """Return the metric of the connection's breaker; None without one."""
    labels = {"connection_namespace": "shop", "connection": "main"}
    return REGISTRY.get_sample_value("redrive_breaker_open", labels)


async def open_breaker(admin: Admin) -> None:
    """Have a breaker open."""
    for _ in range(FAILURES):
        with pytest.raises(BrokerUnreachableError):
            await admin.clusters()


async def test_deleted_connection_is_remembered_for_a_while(
    connections: Connections, table: Cache, clock: Clock
) -> None:
    opened = await connections.resolve(REF, "shop")
    table.drop(BODY)
    with pytest.raises(ReferenceNotFoundError):
        await connections.resolve(REF, "shop")
    clock.now += REMEMBERED - timedelta(seconds=1)
    assert connections.remembered(REF, "shop") is opened
    clock.now += timedelta(seconds=1)
    assert connections.remembered(REF, "shop") is None


async def test_policies_of_one_connection_share_its_credentials(
    connections: Connections, reader: Reader
) -> None:
    opened = await asyncio.gather(*(connections.resolve(REF, "shop") for _ in range(40)))
    assert len({id(connection.admin) for connection in opened}) == reader.reads == 1


async def test_connection_deleted_while_opened_is_forgotten(
    connections: Connections, reader: Reader, clock: Clock
) -> None:
    reader.deletes = True
    opened = await connections.resolve(REF, "shop")
    assert connections.remembered(REF, "shop") is opened
    clock.now += REMEMBERED
    assert connections.remembered(REF, "shop") is None


async def test_recreated_connection_is_not_forgotten(
    connections: Connections, table: Cache, clock: Clock
) -> None:
    await connections.resolve(REF, "shop")
    table.drop(BODY)
    table.put(BODY)
    opened = await connections.open(KEY)
    clock.now += 2 * REMEMBERED
    assert connections.remembered(REF, "shop") is opened


async def test_breaker_metric_is_that_of_current_broker(
    connections: Connections, table: Cache, brokers: Brokers
) -> None:
    first, second = "http://first:8080", "http://second:8080"
    brokers.silent = frozenset({first})
    table.put(connection_at(first, 2))
    before = await connections.open(KEY)
    assert breaker_metric() == 0
    await open_breaker(before.admin)
    assert breaker_metric() == 1
    table.put(connection_at(second, 3))
    await connections.open(KEY)
    assert breaker_metric() == 0
    table.put(connection_at(first, 4))
    again = await connections.open(KEY)
    assert breaker_metric() == 0  # nothing was asked there since
    await open_breaker(again.admin)
    assert breaker_metric() == 1
    brokers.silent = frozenset()
    await before.admin.clusters()
    assert breaker_metric() == 1  # a call through another breaker changes nothing
    await again.admin.clusters()
    assert breaker_metric() == 0


async def test_breaker_metric_ends_with_its_connection(
    connections: Connections, table: Cache, reader: Reader, brokers: Brokers
) -> None:
    opened = await connections.open(KEY)
    assert breaker_metric() == 0
    table.drop(BODY)
    assert breaker_metric() is None
    brokers.silent = frozenset({"http://pulsar:8080"})
    await open_breaker(opened.admin)  # through the breaker that is deleted with it
    assert breaker_metric() is None
    table.put(BODY)
    reader.deletes = True
    while_it_went = await connections.open(KEY)
    await open_breaker(while_it_went.admin)
    assert breaker_metric() is None


@pytest.mark.parametrize(
    "error",
    [
        ReferenceNotFoundError(
            "no Secret pulsar-admin", got="shop/pulsar-admin", remedy="create it"
        ),
        Reason.CONNECTION_INVALID.error(
            "spec.pulsar.adminURL: got 'pulsar-admin'", remedy="correct it"
        ),
        AdminError(
            "can't be called",
            got="http://pulsar-admin:99999",
            remedy="correct",
            reason=Reason.ADMIN_URL_INVALID,
        ),
    ],
)
def test_private_errors_are_shown_in_own_namespace_only(
    error: RedriveError,
) -> None:
    assert shown_to(policy_in("shop"), error) is error
    shown = shown_to(policy_in("other"), error)
    assert type(shown) is type(error)
    assert (shown.reason, requeue_of(shown)) == (error.reason, requeue_of(error))
    assert str(shown) == (
        "the BrokerConnection shop/main of another namespace cannot be used; "
        f"got '{error.reason}'; its conditions show the cause; this resumes automatically once it "
        "is fixed"
    )
    harmless = Reason.NAMESPACE_NOT_ALLOWED.error("no", remedy="ask")
    assert shown_to(policy_in("other"), harmless) is harmless


async def test_refused_read_of_secret_is_private() -> None:
    api = FakeKubernetes()

    def refuse(*_: object) -> None:
        raise ForbiddenError("may not GET secrets/pulsar-admin", remedy="grant it")

    api.before = refuse
    with pytest.raises(ForbiddenError) as refused:
        await api.read_secret_key(Key("shop", "pulsar-admin"), "token")
    body, harmless = policy_in("other"), ForbiddenError("may not", remedy="grant it")
    assert shown_to(body, refused.value) is not refused.value
    assert shown_to(body, harmless) is harmless


def policy_in(namespace: str) -> dict[str, Any]:
    """Return a policy of the connection shop/main."""
    reference = {"name": "main", "namespace": "shop"}
    metadata = {"namespace": namespace, "name": "orders"}
    return {"metadata": metadata, "spec": {"connectionRef": reference}}


def set_labels(api: FakeKubernetes, **labels: str) -> None:
    """Have the namespace `shop` with these labels."""
    metadata = {"name": "shop", "labels": labels}
    api.objects[resources.NAMESPACES][Key("", "shop")] = {"metadata": metadata}


async def next_change(labels: NamespaceLabels) -> str:
    """Wait for a namespace whose labels have changed."""
    seen = asyncio.Queue[str]()
    labels.listen(seen.put_nowait)
    async with asyncio.timeout(READ_SECONDS + 1):
        return await seen.get()


@pytest.mark.usefixtures("virtual_time")
async def test_requested_labels_are_read_at_once_and_periodically() -> None:
    api = FakeKubernetes()
    set_labels(api, team="shop")
    loop = asyncio.get_running_loop()
    async with following(api) as labels:
        await asyncio.sleep(READ_SECONDS / 2)
        begun = loop.time()
        with raises(Reason.NAMESPACE_UNREAD, match="got 'shop'"):
            labels.of("shop")
        assert await next_change(labels) == "shop"
        assert loop.time() == begun
        assert labels.of("shop") == {"team": "shop"}
        set_labels(api, team="other")
        assert await next_change(labels) == "shop"
        assert labels.of("shop") == {"team": "other"}
        set_labels(api)
        assert await next_change(labels) == "shop"
        assert labels.of("shop") == {}


async def test_unrequested_namespace_is_not_read() -> None:
    read = list[Key]()
    api = FakeKubernetes()
    set_labels(api, team="shop")
    api.before = lambda _verb, _resource, key: read.append(key)
    labels = NamespaceLabels(api)
    await labels.read([])
    assert read == []
    await labels.read(["shop"])
    assert read == [Key("", "shop")]


async def test_labels_stay_in_use_while_api_server_is_unavailable() -> None:
    api, failures = FakeKubernetes(), list[RedriveError]()

    def fail(*_: object) -> None:
        for failure in failures:
            raise failure

    set_labels(api, team="shop")
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
    with raises(Reason.NAMESPACE_UNREAD):
        labels.of("shop")


def test_namespace_is_read_by_its_name() -> None:
    kind: Resource = resources.NAMESPACES
    assert kind.path(*Key("", "shop")) == "/api/v1/namespaces/shop"

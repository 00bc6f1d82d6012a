"""How long deleted connections are remembered, and what listeners get to know of brokers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from prometheus_client import REGISTRY

from redrive.admin.client import Admin
from redrive.admin.errors import AdminUrlInvalidError, BrokerUnreachableError
from redrive.admin.guards import FAILURES
from redrive.admin.http import Way
from redrive.api.retrypolicy import ConnectionRef
from redrive.errors import RedriveError
from redrive.kube.cache import Cache
from redrive.kube.client import (
    ConnectionInvalidError,
    ConnectionNotFoundError,
    ForbiddenError,
    NamespaceNotAllowedError,
    SecretNotFoundError,
)
from redrive.kube.connections import REMEMBERED, Connections, shown_to
from redrive.kube.credentials import Material
from redrive.kube.resources import Key
from tests.support.fake_kubernetes import FakeKubernetes

REF = ConnectionRef(name="main", namespace=None)
KEY = Key("shop", "main")
BODY: dict[str, Any] = {
    "metadata": {"namespace": "shop", "name": "main", "uid": "1", "resourceVersion": "1"},
    "spec": {
        "serviceUrl": "pulsar://pulsar:6650",
        "adminUrl": "http://pulsar:8080",
        "authentication": {"token": {"secretRef": {"name": "s", "key": "k"}}},
        "allow": [{"topics": []}],
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

    async def read(self, *_: object) -> Material:
        if self.deletes:
            self.table.drop(BODY)
        return Material(token="one")  # noqa: S106


class Brokers:
    """Makes the calls, of which those to some are never answered."""

    silent: frozenset[str] = frozenset()

    async def send(self, _call: object, way: Way) -> list[str]:
        if way.admin_url in self.silent:
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


def at(admin_url: str, version: int) -> dict[str, Any]:
    """The connection with another broker."""
    metadata = BODY["metadata"] | {"resourceVersion": str(version), "generation": version}
    return {"metadata": metadata, "spec": BODY["spec"] | {"adminUrl": admin_url}}


def shown() -> float | None:
    """What the metrics show of the connection's breaker; None where nothing."""
    labels = {"connection_namespace": "shop", "connection": "main"}
    return REGISTRY.get_sample_value("redrive_breaker_open", labels)


async def fail(admin: Admin) -> None:
    """Have a breaker open."""
    for _ in range(FAILURES):
        with pytest.raises(BrokerUnreachableError):
            await admin.clusters()


async def test_a_connection_that_is_gone_is_remembered_for_a_while_and_then_forgotten(
    connections: Connections, table: Cache, clock: Clock
) -> None:
    opened = await connections.resolve(REF, "shop")
    table.drop(BODY)
    with pytest.raises(ConnectionNotFoundError):
        await connections.resolve(REF, "shop")
    clock.now += REMEMBERED - timedelta(seconds=1)
    assert connections.remembered(REF, "shop") is opened
    clock.now += timedelta(seconds=1)
    assert connections.remembered(REF, "shop") is None


async def test_one_that_goes_while_it_is_opened_is_forgotten_too(
    connections: Connections, reader: Reader, clock: Clock
) -> None:
    reader.deletes = True
    opened = await connections.resolve(REF, "shop")
    assert connections.remembered(REF, "shop") is opened
    clock.now += REMEMBERED
    assert connections.remembered(REF, "shop") is None


async def test_one_that_is_made_anew_is_no_longer_gone(
    connections: Connections, table: Cache, clock: Clock
) -> None:
    await connections.resolve(REF, "shop")
    table.drop(BODY)
    table.put(BODY)
    opened = await connections.open(KEY)
    clock.now += 2 * REMEMBERED
    assert connections.remembered(REF, "shop") is opened


async def test_the_breaker_that_is_shown_is_that_of_the_broker_in_use(
    connections: Connections, table: Cache, brokers: Brokers
) -> None:
    first, second = "http://first:8080", "http://second:8080"
    brokers.silent = frozenset({first})
    table.put(at(first, 2))
    before = await connections.open(KEY)
    assert shown() == 0
    await fail(before.admin)
    assert shown() == 1
    table.put(at(second, 3))
    await connections.open(KEY)
    assert shown() == 0
    table.put(at(first, 4))
    again = await connections.open(KEY)
    assert shown() == 0  # nothing was asked there since
    await fail(again.admin)
    assert shown() == 1
    brokers.silent = frozenset()
    await before.admin.clusters()
    assert shown() == 1  # what another breaker lets through says nothing
    await again.admin.clusters()
    assert shown() == 0


async def test_nothing_is_shown_of_a_connection_that_is_gone(
    connections: Connections, table: Cache, reader: Reader, brokers: Brokers
) -> None:
    opened = await connections.open(KEY)
    assert shown() == 0
    table.drop(BODY)
    assert shown() is None
    brokers.silent = frozenset({"http://pulsar:8080"})
    await fail(opened.admin)  # by what is deleted with it
    assert shown() is None
    table.put(BODY)
    reader.deletes = True
    while_it_went = await connections.open(KEY)
    await fail(while_it_went.admin)
    assert shown() is None


@pytest.mark.parametrize(
    "error",
    [
        SecretNotFoundError("no Secret pulsar-admin", got="shop/pulsar-admin", remedy="create it"),
        ConnectionInvalidError("spec.adminUrl: got 'pulsar-admin'", remedy="correct it"),
        AdminUrlInvalidError("can't be called", got="http://pulsar-admin:99999", remedy="correct"),
    ],
)
def test_secrets_and_fields_of_a_connection_are_shown_in_its_own_namespace_only(
    error: RedriveError,
) -> None:
    def policy(namespace: str) -> dict[str, Any]:
        reference = {"name": "main", "namespace": "shop"}
        metadata = {"namespace": namespace, "name": "orders"}
        return {"metadata": metadata, "spec": {"connectionRef": reference}}

    assert shown_to(policy("shop"), error) is error
    shown = shown_to(policy("other"), error)
    assert type(shown) is type(error)
    assert str(shown) == (
        "the BrokerConnection shop/main, of another namespace, can't be used; "
        f"got '{error.reason}'; its own conditions say why; this goes on by itself once that is "
        "fixed"
    )
    harmless = NamespaceNotAllowedError("no", remedy="ask")
    assert shown_to(policy("other"), harmless) is harmless


async def test_a_refused_read_of_a_secret_is_private() -> None:
    api = FakeKubernetes()

    def refuse(*_: object) -> None:
        raise ForbiddenError("may not GET secrets/pulsar-admin", remedy="grant it")

    api.before = refuse
    with pytest.raises(ForbiddenError) as refused:
        await api.read_secret_key(Key("shop", "pulsar-admin"), "token")
    assert refused.value.private
    assert not ForbiddenError("may not", remedy="grant it").private

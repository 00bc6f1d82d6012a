"""How long connections are remembered that are gone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from redrive.cluster.connections import REMEMBERED, Connections
from redrive.cluster.credentials import Material
from redrive.cluster.errors import ConnectionNotFoundError
from redrive.cluster.resources import Key
from redrive.cluster.table import Table

REF = SimpleNamespace(name="main", namespace=None)
KEY = Key("shop", "main")
BODY: dict[str, Any] = {
    "metadata": {"namespace": "shop", "name": "main", "uid": "1", "resourceVersion": "1"},
    "spec": {
        "serviceUrl": "pulsar://pulsar:6650",
        "adminUrl": "http://pulsar:8080",
        "authentication": {"token": {"secretRef": {"name": "s", "key": "k"}}},
        "allowedTopics": [],
        "allowedRoles": [],
    },
}


class Clock:
    """Moments that pass when told to."""

    now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


class Reader:
    """Reads a token; the connection may be deleted meanwhile."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.deletes = False

    async def read(self, *_: object) -> Material:
        if self.deletes:
            self.table.drop(BODY)
        return Material(token="one")  # noqa: S106


@pytest.fixture
def table() -> Table:
    return Table([BODY])


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reader(table: Table) -> Reader:
    return Reader(table)


@pytest.fixture
def connections(table: Table, reader: Any, clock: Clock) -> Connections:  # noqa: ANN401 - a double
    unused: Any = None  # no broker is asked
    return Connections(table, unused, reader, clock)


async def test_a_connection_that_is_gone_is_remembered_for_a_while_and_then_forgotten(
    connections: Connections, table: Table, clock: Clock
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
    connections: Connections, table: Table, clock: Clock
) -> None:
    await connections.resolve(REF, "shop")
    table.drop(BODY)
    table.put(BODY)
    opened = await connections.open(KEY)
    clock.now += 2 * REMEMBERED
    assert connections.remembered(REF, "shop") is opened

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from redrive.cluster import resources, sweep
from redrive.cluster.client import Kubernetes
from redrive.cluster.errors import ForbiddenError, UnavailableError
from redrive.cluster.resources import Body, Key, Resource
from redrive.cluster.table import Table
from redrive.cluster.world import Settings, World, wall_clock


class Lists(Kubernetes):
    """An API server's part in it: what there is of each kind, and what happens during a list."""

    def __init__(self) -> None:
        self.there: dict[Resource, list[Body]] = {}
        self.asked: list[tuple[Resource, Sequence[str]]] = []
        self.meanwhile: list[tuple[Table, Body]] = []
        self.down = False
        self.forbidden = ""
        self.refused = asyncio.Event()

    async def list(self, resource: Resource, namespaces: Sequence[str] = ()) -> list[Body]:
        """Answer with what there was when the list began."""
        self.asked.append((resource, namespaces))
        if self.down:
            self.refused.set()
            raise UnavailableError("the Kubernetes API does not answer", remedy="wait")
        if self.forbidden in namespaces:
            raise ForbiddenError("may not list", remedy="grant it")
        there = list(self.there.get(resource, ()))
        for table, body in self.meanwhile:
            table.put(body)
        return there


@pytest.fixture
def api() -> Lists:
    return Lists()


@pytest.fixture
def world(api: Lists) -> World:
    """An operator for namespace `n` that knows a Replay `gone` and its application."""
    settings = Settings("here", ("n",), "image", "local:///job.py", "account")
    brokers: Any = None  # nobody asks a broker
    return World(
        settings=settings,
        kubernetes=api,
        connections=Table(),
        policies=Table(),
        replays=Table([named("gone")]),
        applications=Table([named("gone")]),
        config_maps=Table(),
        brokers=brokers,
        clock=wall_clock,
    )


def named(name: str, uid: str = "1", version: int = 1) -> Body:
    metadata = {"namespace": "n", "name": name, "uid": uid, "resourceVersion": str(version)}
    return {"metadata": metadata}


async def test_what_is_there_no_more_is_dropped_and_its_listeners_are_told(
    api: Lists, world: World
) -> None:
    told: list[Key] = []
    world.replays.listen(lambda key, _before, after: told.extend([key] if after is None else []))
    stays = named("stays", uid="3")
    world.replays.put(stays)
    api.there = {resources.REPLAYS: [stays]}
    await sweep.sweep(world)
    assert list(world.replays) == [stays]
    assert list(world.applications) == []
    assert told == [Key("n", "gone")]
    assert api.asked == [(resources.REPLAYS, ("n",)), (resources.SPARK_APPLICATIONS, ("n",))]


async def test_a_namespace_that_may_not_be_read_ends_no_sweep_and_loses_nothing(
    api: Lists, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    api.forbidden = "deleted"
    world = replace(world, settings=replace(world.settings, namespaces=("deleted", "n")))
    kept = {"metadata": named("kept", uid="4")["metadata"] | {"namespace": "deleted"}}
    world.replays.put(kept)
    await sweep.sweep(world)
    assert list(world.replays) == [kept]
    assert list(world.applications) == []
    assert "sweep: may not list" in caplog.text


async def test_what_is_made_while_a_list_is_made_stays(api: Lists, world: World) -> None:
    fresh, reborn = named("fresh", version=5), named("gone", uid="2", version=5)
    api.meanwhile = [(world.replays, fresh), (world.replays, reborn)]
    await sweep.sweep(world)
    assert list(world.replays) == [reborn, fresh]


async def test_a_list_that_fails_drops_nothing_and_is_made_again(
    api: Lists, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(sweep, "SWEEP_SECONDS", 0.001)
    dropped = asyncio.Event()
    world.applications.listen(lambda *_: dropped.set())
    api.down = True
    async with asyncio.timeout(5), sweep.sweeping(world):
        await api.refused.wait()
        assert list(world.replays) == [named("gone")]
        api.down = False
        await dropped.wait()
    assert "sweep: the Kubernetes API does not answer" in caplog.text
    asked = len(api.asked)
    await asyncio.sleep(0.01)
    assert len(api.asked) == asked

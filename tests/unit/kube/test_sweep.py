from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from redrive.kube import resources, sweep
from redrive.kube.cache import Cache
from redrive.kube.client import Kubernetes
from redrive.kube.context import Context, Settings, wall_clock
from redrive.kube.errors import ForbiddenError, UnavailableError
from redrive.kube.resources import Body, Key, Resource


class Lists(Kubernetes):
    """An API server's part in it: what there is of each kind, and what happens during a list."""

    def __init__(self) -> None:
        self.there: dict[Resource, list[Body]] = {}
        self.asked: list[tuple[Resource, Sequence[str]]] = []
        self.meanwhile: list[tuple[Cache, Body]] = []
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
def ctx(api: Lists) -> Context:
    """An operator for namespace `n` that knows a Replay `gone` and its application."""
    settings = Settings("here", ("n",), "image", "local:///job.py", "account")
    brokers: Any = None  # nobody asks a broker
    return Context(
        settings=settings,
        kubernetes=api,
        connections=Cache(),
        policies=Cache(),
        replays=Cache([named("gone")]),
        applications=Cache([named("gone")]),
        config_maps=Cache(),
        brokers=brokers,
        clock=wall_clock,
    )


def named(name: str, uid: str = "1", version: int = 1) -> Body:
    metadata = {"namespace": "n", "name": name, "uid": uid, "resourceVersion": str(version)}
    return {"metadata": metadata}


async def test_what_is_there_no_more_is_dropped_and_its_listeners_are_told(
    api: Lists, ctx: Context
) -> None:
    told: list[Key] = []
    ctx.replays.listen(lambda key, _before, after: told.extend([key] if after is None else []))
    stays = named("stays", uid="3")
    ctx.replays.put(stays)
    api.there = {resources.REPLAYS: [stays]}
    await sweep.sweep(ctx)
    assert list(ctx.replays) == [stays]
    assert list(ctx.applications) == []
    assert told == [Key("n", "gone")]
    assert api.asked == [(resources.REPLAYS, ("n",)), (resources.SPARK_APPLICATIONS, ("n",))]


async def test_a_namespace_that_may_not_be_read_ends_no_sweep_and_loses_nothing(
    api: Lists, ctx: Context, caplog: pytest.LogCaptureFixture
) -> None:
    api.forbidden = "deleted"
    ctx = replace(ctx, settings=replace(ctx.settings, namespaces=("deleted", "n")))
    kept = {"metadata": named("kept", uid="4")["metadata"] | {"namespace": "deleted"}}
    ctx.replays.put(kept)
    await sweep.sweep(ctx)
    assert list(ctx.replays) == [kept]
    assert list(ctx.applications) == []
    assert "sweep: may not list" in caplog.text


async def test_what_is_made_while_a_list_is_made_stays(api: Lists, ctx: Context) -> None:
    fresh, reborn = named("fresh", version=5), named("gone", uid="2", version=5)
    api.meanwhile = [(ctx.replays, fresh), (ctx.replays, reborn)]
    await sweep.sweep(ctx)
    assert list(ctx.replays) == [reborn, fresh]


async def test_a_list_that_fails_drops_nothing_and_is_made_again(
    api: Lists, ctx: Context, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(sweep, "SWEEP_SECONDS", 0.001)
    dropped = asyncio.Event()
    ctx.applications.listen(lambda *_: dropped.set())
    api.down = True
    async with asyncio.timeout(5), sweep.sweeping(ctx):
        await api.refused.wait()
        assert list(ctx.replays) == [named("gone")]
        api.down = False
        await dropped.wait()
    assert "sweep: the Kubernetes API does not answer" in caplog.text
    asked = len(api.asked)
    await asyncio.sleep(0.01)
    assert len(api.asked) == asked

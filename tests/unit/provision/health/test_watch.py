"""Whose calls go at one pace; what is found at the topics is tried at a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from redrive.kube.context import Context
from redrive.provision.health import watch
from redrive.provision.health.reader import Reader
from redrive.provision.health.watch import Health
from redrive.provision.rate_limit import RateLimit

MakeBody = Callable[..., dict[str, Any]]
READY = {"type": "Ready", "status": "True", "reason": "Provisioned", "message": ""}


async def test_connections_to_one_broker_share_the_pace_of_its_statistics(
    ctx: Context,
    policy: MakeBody,
    connection: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paces: list[RateLimit] = []
    all_begun = asyncio.Event()

    class Noting(Reader):
        """A reader that tells its pace."""

        def __init__(self, interval: float, pace: RateLimit) -> None:
            super().__init__(interval, pace)
            paces.append(pace)
            if len(paces) == 3:
                all_begun.set()

    monkeypatch.setattr(watch, "Reader", Noting)
    for name, url in (("a", "http://b:80"), ("b", "http://b:80/"), ("c", "http://other:80")):
        metadata = {"namespace": "shop", "name": name, "uid": name, "resourceVersion": "1"}
        ctx.connections.put({"metadata": metadata, "spec": connection | {"adminUrl": url}})
        body = policy(name, connectionRef={"name": name})
        ctx.policies.put(body | {"status": {"conditions": [READY]}})
    health = Health(ctx, lambda _: None)
    async with asyncio.timeout(5):
        await all_begun.wait()
    await health.stop()
    first, second, other = paces
    assert first is second
    assert other is not first

"""A RocketMQ of two masters, of which one is frozen, and a name server that is killed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from redrive.admin.rocketmq import RocketMQSession
from redrive.api.conditions import reason
from redrive.errors import Requeue
from sandbox import rocketmq
from sandbox.process import Processes
from tests.support.fake_rocketmq import RocketMQPolicy

MASTERS = ("broker-a", "broker-b")


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.kill_all()


async def groups(session: RocketMQSession) -> list[int | None]:
    """Return the number of retries of the group at each listed master."""
    stored = [await session.group(master, "fulfilment") for master in await session.masters()]
    return [None if settings is None else settings["retryMaxTimes"] for settings in stored]


async def test_masters_and_name_server_that_fail_are_provisioned_later(
    tmp_path: Path, processes: Processes
) -> None:
    cluster = rocketmq.start(tmp_path, processes, MASTERS)
    admin = cluster.admin
    policy = RocketMQPolicy(admin, maxRetries=3)
    async with admin.session() as session:
        first, second = await session.masters()
        await session.put_topic(first, "orders", 1)
        assert await policy.reconcile() is Requeue.ON_CHANGE
        assert policy.body["status"]["masters"] == [*MASTERS]
        assert await groups(session) == [3, 3]
        settings = await session.group(first, "fulfilment") or {}
        await session.put_group(first, {**settings, "retryMaxTimes": 1})

    frozen = psutil.Process(processes.pid(second.name))
    frozen.suspend()
    try:
        assert await policy.reconcile(failures=1) is Requeue.BACKOFF
    finally:
        frozen.resume()
    assert reason(policy.body) == "BrokerUnreachable"
    assert second.name in policy.body["status"]["conditions"][0]["message"]
    async with admin.session() as session:
        assert await groups(session) == [3, 3]
    assert await policy.reconcile() is Requeue.ON_CHANGE

    processes.kill(rocketmq.NAME_SERVER)
    assert await policy.reconcile() is Requeue.BACKOFF
    processes.again(rocketmq.NAME_SERVER)
    async with asyncio.timeout(120):  # masters register every 30 s
        while (
            policy.body["status"]["masters"] != [*MASTERS] or reason(policy.body) != "Provisioned"
        ):
            await asyncio.sleep(1)
            await policy.reconcile()

"""The client of RocketMQ at a real cluster with ACL 2.0."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from redrive.admin.access import Access
from redrive.admin.errors import (
    AdminForbiddenError,
    AdminNotFoundError,
    AuthenticationFailedError,
    BrokerRefusedError,
)
from redrive.admin.rocketmq import Master, QueueCounts, RocketMQAdmin, RocketMQSession
from redrive.api.rocketmq import RocketMQMessages
from redrive.inspection.payloads import MessageRecord
from redrive.inspection.record import Recorder
from redrive.inspection.rocketmq import DeadLetterQueues
from redrive.reading.queues import parse_stored
from redrive.replay.spec import Choice
from sandbox import versions
from sandbox.rocketmq import ADMIN, RocketMQ, allow, create_user
from tests.support.rocketmq import consume, pull, send, send_back, wait_until_shown

pytestmark = pytest.mark.xdist_group("rocketmq")

GROUP = {
    "consumeMessageOrderly": True,
    "retryMaxTimes": 3,
    "retryQueueNums": 2,
    "groupRetryPolicy": {"type": "CUSTOMIZED", "customizedRetryPolicy": {"next": [1000, 60000]}},
}
Call = Callable[[RocketMQSession, Master, str], Awaitable[object]]


def client(cluster: RocketMQ, user: str, secret: str) -> RocketMQAdmin:
    return RocketMQAdmin([cluster.name_server], Access(signing_key=(user, secret)))


@pytest.fixture
async def session(rocketmq: RocketMQ) -> AsyncIterator[RocketMQSession]:
    async with client(rocketmq, ADMIN, rocketmq.secret).session() as opened:
        yield opened


@pytest.fixture
async def master(session: RocketMQSession) -> Master:
    """The only master, once it shows its state: the first statistics come after its start."""
    (only,) = await session.masters()
    async with asyncio.timeout(60):
        while True:
            with suppress(BrokerRefusedError):
                await session.version(only)
                return only
            await asyncio.sleep(0.1)


@pytest.fixture
def name() -> str:
    """Name of a group or topic of one test."""
    return f"t-{secrets.token_hex(4)}"


async def test_master_shows_its_release_and_retention(
    session: RocketMQSession, master: Master
) -> None:
    assert await session.version(master) == tuple(map(int, versions.ROCKETMQ.split(".")))
    assert await session.retention(master) == timedelta(hours=72)


async def test_group_settings_are_stored_until_its_deletion(
    session: RocketMQSession, master: Master, name: str
) -> None:
    assert await session.group(master, name) is None
    await session.put_group(master, {"groupName": name, **GROUP})
    stored = await session.group(master, name)
    assert stored is not None
    assert stored.items() >= GROUP.items()
    await session.put_group(master, {**stored, "retryMaxTimes": 5})
    assert await session.group(master, name) == {**stored, "retryMaxTimes": 5}
    assert not await session.has_consumers(master, name)
    await consume(session, master, name)
    assert await session.has_consumers(master, name)
    await session.delete_group(master, name)
    assert await session.group(master, name) is None


@pytest.mark.parametrize("prefix", ["", "%DLQ%"])
async def test_messages_of_a_topic_are_counted(
    session: RocketMQSession, master: Master, name: str, prefix: str
) -> None:
    topic = prefix + name
    assert await session.topic(master, topic) is None
    assert await session.messages(master, topic) == 0
    await session.put_topic(master, topic, 2)
    assert await session.topic(master, topic) == QueueCounts(2, 2, 6)
    assert await session.count(master, topic, 2) == 0
    for queue in (0, 1, 1):
        await send(session, master, topic, queue)
    assert await session.count(master, topic, 2) == 3
    await session.put_topic(master, topic, 3)
    assert await session.messages(master, topic) == 3
    await session.delete_topic(master, topic)
    assert await session.topic(master, topic) is None


@pytest.mark.parametrize("user", [ADMIN, "ghost"])
async def test_unknown_access_key_is_refused(rocketmq: RocketMQ, user: str) -> None:
    async with client(rocketmq, user, "wrong").session() as opened:
        (master,) = await opened.masters()
        with pytest.raises(AuthenticationFailedError):
            await opened.group(master, "any")


GUARDED: dict[str, Call] = {
    "group": lambda s, m, n: s.group(m, n),
    "delete_group": lambda s, m, n: s.delete_group(m, n),
    "has_consumers": lambda s, m, n: s.has_consumers(m, n),
    "topic": lambda s, m, n: s.topic(m, n),
    "put_topic": lambda s, m, n: s.put_topic(m, n, 9),
    "delete_topic": lambda s, m, n: s.delete_topic(m, n),
    "count": lambda s, m, n: s.count(m, n, 1),
}


async def test_calls_that_need_rights_are_the_documented(
    rocketmq: RocketMQ, session: RocketMQSession, master: Master, name: str
) -> None:
    """The page RocketMQ names the calls that ACL 2.0 does not check."""
    await session.put_topic(master, name, 1)
    secret = await create_user(session, master, f"stranger-{name}")
    async with client(rocketmq, f"stranger-{name}", secret).session() as stranger:
        for call in GUARDED.values():
            with pytest.raises(AdminForbiddenError):
                await call(stranger, master, name)
        await stranger.version(master)
        await stranger.retention(master)
        await stranger.put_group(master, {"groupName": name, **GROUP})
    assert await session.group(master, name) is not None


async def test_user_of_jobs_reads_dead_letters_only(
    rocketmq: RocketMQ, session: RocketMQSession, master: Master, name: str
) -> None:
    """An Inspection needs no other rights, and no offset of the group changes."""
    topic, user = f"%DLQ%{name}", f"jobs-{name}"
    await session.put_topic(master, topic, 2)
    await session.put_group(master, {"groupName": name, **GROUP})
    for queue in (0, 1, 1):
        await send(session, master, topic, queue, retries=3)
    secret = await create_user(session, master, user)
    await allow(session, master, user, {f"Topic:{topic}": ["Get", "Sub"], f"Group:{name}": ["Sub"]})
    messages = RocketMQMessages(topic, name, [rocketmq.name_server], None, [])
    access = Access(signing_key=(user, secret))
    source = DeadLetterQueues(messages, cast("Any", SimpleNamespace(access=lambda: access)))

    def read() -> list[MessageRecord]:
        reading = source.plan(Choice(), 2, None)
        assert (reading.total, reading.planned) == (3, 2)
        return list(map(Recorder(reading.schema, reveals=True), reading.selected(lambda: None)))

    records = await asyncio.to_thread(read)
    assert [record["id"] for record in records] == ["broker-a:0:0", "broker-a:1:1"]
    assert {(r["attempts"], r["payload"]) for r in records} == {(3, "message")}
    async with client(rocketmq, user, secret).session() as jobs:
        with pytest.raises(AdminForbiddenError):
            await send(jobs, master, topic)


async def test_copies_are_accepted_except_for_grpc_clients(
    rocketmq: RocketMQ, session: RocketMQSession, master: Master, name: str
) -> None:
    """A user with the documented rights of Replays stores and reads copies."""
    retries, of_grpc = f"%RETRY%{name}", f"%RETRY%{name}_orders"
    for topic in (name, retries, of_grpc):
        await session.put_topic(master, topic, 1)
    await session.put_group(master, {"groupName": name, **GROUP})
    secret = await create_user(session, master, f"jobs-{name}")
    rights = {f"Topic:{name}": ["Get", "Sub", "Pub"], f"Group:{name}": ["Get", "Sub"]}
    await allow(session, master, f"jobs-{name}", rights)
    async with client(rocketmq, f"jobs-{name}", secret).session() as jobs:
        for topic in (name, retries):
            await jobs.send(master, topic, 0, b"copy", "UNIQ_KEY\x01id\x02", born=1_000)
            await wait_until_shown(session, master, topic, 1)
            assert await jobs.topic(master, topic) == QueueCounts(1, 1, 6)
            assert await jobs.offsets(master, topic, 0) == range(1)
            (message,) = parse_stored((await jobs.pull(master, topic, 0, 0, name))[0])
            assert (message.content, message.born, message.retries) == (b"copy", 1_000, 0)
            assert message.properties is not None
            assert message.properties["UNIQ_KEY"] == "id"
    with pytest.raises(AdminNotFoundError, match=f"subscription group not exist, {name}_orders"):
        await session.send(master, of_grpc, 0, b"copy")


async def test_remoting_clients_retry_by_levels_of_the_broker(
    session: RocketMQSession, master: Master, name: str
) -> None:
    """Retry n has level 3 + n of 18; after 16 retries, or with a level below 0, it is dead."""
    await session.put_topic(master, name, 1)
    await session.put_group(master, {"groupName": name, "retryMaxTimes": 3, "retryQueueNums": 1})
    await session.put_topic(master, f"%DLQ%{name}", 1)
    for retries in range(17):
        await send(session, master, name, retries=retries)
    messages = await pull(session, master, name, name)
    assert [message.retries for message in messages] == list(range(17))

    async def delayed() -> list[int]:
        """Return the number of messages that were ever delayed by each level."""
        return [
            (await session.offsets(master, "SCHEDULE_TOPIC_XXXX", level)).stop
            for level in range(18)
        ]

    before = await delayed()
    for message in messages:
        await send_back(session, master, name, message, level=0)
    await send_back(session, master, name, messages[0], level=-1)
    await wait_until_shown(session, master, f"%DLQ%{name}", 2)  # so those before it are, too
    assert [b - a for a, b in zip(before, await delayed(), strict=True)] == [0, 0, *[1] * 16]
    dead = await pull(session, master, f"%DLQ%{name}", name)
    assert [m.properties["UNIQ_KEY"] for m in dead] == ["id-16", "id-0"]
    assert [m.properties["RETRY_TOPIC"] for m in dead] == [name, name]
    assert all(m.properties["ORIGIN_MESSAGE_ID"] for m in dead)

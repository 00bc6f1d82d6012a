"""What a broker tells of partitions, and leaves out. Over real HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from aiohttp import web

from redrive.admin.client import Admin
from redrive.admin.errors import BrokerFailedError, UnexpectedAnswerError
from redrive.admin.http import Access, Http
from redrive.admin.model import TopicSubscriptions
from redrive.policy.naming import TopicName
from tests.unit.admin.test_client import broker

TOPIC = TopicName("t", "n", "a")
WHOLE = "partitioned-stats"
S = frozenset({"s"})


def part(*, stored: int = 0, **backlogs: int) -> dict[str, Any]:
    """What a broker tells of a partition."""
    common = {"msgOutCounter": 0, "consumers": []}
    found = {name: {"msgBacklog": count, **common} for name, count in backlogs.items()}
    return {"subscriptions": found, "publishers": [], "storageSize": stored}


class Partitions:
    """A broker with one topic: what it tells of each partition, and the status it tells else."""

    def __init__(self, told: Mapping[int, Any], apart: Mapping[int, Any], count: int = 3) -> None:
        self.told = {str(TOPIC.partition(number)): said for number, said in told.items()}
        self.apart = {TOPIC.partition(number).local: said for number, said in apart.items()}
        self.count = count
        self.calls: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        local, call = request.path.split("/")[-2:]
        self.calls.append(f"{local} {call}")
        assert ("getPreciseBacklog" in request.query) != ("excludeConsumers" in request.query)
        if call == WHOLE:
            metadata = {"partitions": self.count}
            return web.json_response({"metadata": metadata, "partitions": self.told})
        said = self.apart.get(local, 404)
        if isinstance(said, int):
            return web.json_response({"reason": "no"}, status=said)
        return web.json_response(said)

    async def subscriptions(self) -> TopicSubscriptions:
        async with broker(self.answer) as url, Http.open() as http:
            admin = Admin(http, url, Access.bearer("x"))
            return await admin.subscriptions(TOPIC, partitioned=True)

    async def use(self) -> tuple[dict[str, int], int]:
        """Return backlogs, and what is uncounted for `s`."""
        async with broker(self.answer) as url, Http.open() as http:
            admin = Admin(http, url, Access.bearer("x"))
            usage = await admin.usage(TOPIC, partitioned=True, subscription="s")
        backlogs = {name: stands.backlog for name, stands in usage.subscriptions.items()}
        return backlogs, usage.uncounted


async def test_all_partitions_are_told_of_in_one_call() -> None:
    topic = Partitions({0: part(s=0), 1: part(), 2: part(s=0, t=0)}, {})
    found = await topic.subscriptions()
    assert found.parts == (S, frozenset(), S | {"t"})
    assert topic.calls == [f"a {WHOLE}"]


async def test_a_partition_that_was_left_out_is_asked_itself() -> None:
    topic = Partitions({0: part(s=0)}, {2: part(s=0)})
    assert (await topic.subscriptions()).parts == (S, None, S)
    assert topic.calls == [f"a {WHOLE}", "a-partition-1 stats", "a-partition-2 stats"]


async def test_a_partition_that_can_not_be_asked_is_not_taken_for_one_that_is_gone() -> None:
    with pytest.raises(BrokerFailedError, match="503 no"):
        await Partitions({0: part(s=0), 1: part(s=0)}, {2: 503}).subscriptions()
    with pytest.raises(BrokerFailedError, match="503 no"):
        await Partitions({0: part(s=0), 1: part(s=0)}, {2: 503}).use()


async def test_the_use_of_a_partition_that_was_left_out_counts() -> None:
    topic = Partitions({0: part(s=1), 1: part(s=0)}, {2: part(s=2)})
    assert await topic.use() == ({"s": 3}, 0)


async def test_what_is_stored_where_the_subscription_is_not_is_uncounted() -> None:
    topic = Partitions({0: part(s=1, stored=5), 1: part(t=0, stored=7), 2: part(stored=9)}, {})
    assert await topic.use() == ({"s": 1, "t": 0}, 16)


async def test_the_backlog_of_a_topic_that_may_be_deleted_is_counted_precisely() -> None:
    async def answer(request: web.Request) -> web.Response:
        precise = request.query.get("getPreciseBacklog") == "true"
        return web.json_response(part(s=1 if precise else 0))

    async with broker(answer) as url, Http.open() as http:
        admin = Admin(http, url, Access.bearer("x"))
        usage = await admin.usage(TOPIC, partitioned=False, subscription="s")
    assert usage.subscriptions["s"].backlog == 1


@pytest.mark.parametrize("said", [{}, {"subscriptions": 3}, []])
async def test_what_no_broker_tells_of_a_partition_is_an_error(said: object) -> None:
    with pytest.raises(UnexpectedAnswerError):
        await Partitions({0: said}, {}, count=1).subscriptions()
    with pytest.raises(UnexpectedAnswerError):
        await Partitions({}, {0: said}, count=1).use()


def test_a_subscription_that_one_partition_lacks_is_not_had() -> None:
    found = TopicSubscriptions((frozenset({"s", "t"}), None, frozenset({"s"})))
    assert not found.has("s")
    assert found.has_some_of("t")
    assert not found.has_some_of("u")
    assert found.missing == (1,)
    assert TopicSubscriptions((frozenset({"s"}), frozenset({"s", "t"}))).has("s")
    assert not TopicSubscriptions((frozenset({"s"}), frozenset({"s", "t"}))).has("t")

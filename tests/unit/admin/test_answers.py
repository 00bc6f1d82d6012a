"""Answers of a hostile or faulty broker to each call that reads.

A generator replaces each value of a valid answer by others. Every result is an error of the admin
API, or a value with bounded numbers that the rest of the operator can use.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime
from inspect import iscoroutinefunction, signature
from types import FunctionType
from typing import Any, NamedTuple

import pytest
from aiohttp import web

from redrive.admin.access import Access
from redrive.admin.client import Admin
from redrive.admin.errors import AdminNotFoundError
from redrive.admin.http import MOST_NESTED, Http, parse_answer
from redrive.admin.internal_stats import RANGES
from redrive.admin.model import NamespaceState
from redrive.admin.policies import DelaysWithin, KeepsBacklog, LimitsBacklog, Ttl, evicting
from redrive.errors import RedriveError
from redrive.policy.naming import TopicName
from redrive.provision.desired import DELAYS, delay_limit, earliness, inherited_policies
from redrive.reading.ranges import Partition, all_pieces
from tests.support.http_servers import serving

TOPIC = TopicName("t", "n", "a")
HOSTILE = (
    "null", "true", "-1", "1e308", "1e999", "18446744073709551616", "1000000000000000000", "7.5",
    '"9"', '"' + "9" * 4_000 + '"', '"x"', '"9:9:9"', "[]", "[1]", "{}", '{"x": 1}', '{"x": []}',
    '"\\ud800"', '{"\\udfff": ["\\ud800"]}',
    *(f'{{"x": {"[" * depth}{"]" * depth}}}' for depth in (9, 70, 900)),
)  # fmt: skip
HIGHEST = 2**63
SUBSCRIPTION = {
    "msgBacklog": 3, "msgOutCounter": 4, "consumers": [{"unackedMessages": 2}], "isDurable": True,
    "unackedMessages": 2, "nonContiguousDeletedMessagesRanges": 1, "backlogSize": 9,
    "earliestMsgPublishTimeInBacklog": 1_500, "msgDelayed": 1, "type": "Shared",
}  # fmt: skip
PART = {
    "subscriptions": {"s": SUBSCRIPTION}, "msgInCounter": 7, "storageSize": 9,
    "publishers": [{"metadata": {"a": "b"}}],
}  # fmt: skip
PARTS = {
    "metadata": {"partitions": 1, "properties": {}},
    "partitions": {f"{TOPIC}-partition-0": PART},
}
INTERNAL = {
    "entriesAddedCounter": 25, "lastConfirmedEntry": "7:4", "totalSize": 90, "numberOfEntries": 9,
    "pendingAddEntriesCount": 0,
    "ledgers": [{"ledgerId": 3, "entries": 10}, {"ledgerId": 7, "entries": 0}],
    "cursors": {
        "s": {"markDeletePosition": "3:0", "messagesConsumedCounter": 1, "readPosition": "3:1",
              "individuallyDeletedMessages": "[(3:1..3:2]]"},
    },
}  # fmt: skip
QUOTAS = {
    "destination_storage": {"limit": 9, "limitSize": 9, "policy": "consumer_backlog_eviction"},
    "message_age": {"limitTime": 9, "policy": "consumer_backlog_eviction"},
}
DELAYED = {"active": True, "tickTime": 1000, "maxDeliveryDelayInMillis": 9}
POLICIES = {
    "auth_policies": {"destination_auth": {str(TOPIC): {"role": ["consume"]}}},
    "backlog_quota_map": QUOTAS, "delayed_delivery_policies": DELAYED,
    "subscription_expiration_time_minutes": 9, "replication_clusters": ["a"],
    "subscription_types_enabled": ["Shared"], "max_producers_per_topic": 9,
    "max_subscriptions_per_topic": 9,
}  # fmt: skip
SETTINGS = {
    RANGES: "9", "backlogQuotaDefaultLimitGB": "1", "backlogQuotaDefaultLimitSecond": "9",
    "backlogQuotaDefaultLimitBytes": "9", "maxProducersPerTopic": "7",
    "subscriptionTypesEnabled": "[Exclusive, Shared]", "encryptionRequireOnProducer": "true",
}  # fmt: skip
SCHEMA = {"version": 1, "type": "JSON", "data": "{}", "properties": {"a": "b"}}
LISTED: Mapping[str, Any] = {
    "/persistent/t/n": [f"{TOPIC}-partition-0"], "/partitioned": [f"{TOPIC}-partition-0"],
    "/version": "4.0.8",
}  # fmt: skip


class Read(NamedTuple):
    """A call, a valid answer to it, and how the operator uses the result.

    Attributes:
        others: fixed answers to other requests of the call, by the end of their path.
    """

    call: Callable[[Admin], Awaitable[Any]]
    answer: Any
    use: Callable[[Any], object] = lambda result: result
    others: Mapping[str, Any] = LISTED


def _use_namespace(state: NamespaceState) -> object:
    topics = [state.exists(TOPIC), state.partitions(TOPIC)]
    granted = list(state.permissions.values())
    policies = inherited_policies(state)
    return (
        state.subscription_expiry_minutes,
        list(state.limits.values()),
        topics,
        granted,
        delay_limit(policies),
        earliness({DELAYS.read: None, **policies}),
        evicting(state.backlog_quotas),
    )


def _use_delays(answer: Any) -> object:  # noqa: ANN401
    policies = {DELAYS.read: answer}
    return delay_limit(policies), earliness(policies), list(DELAYS.writes(answer))


def _use_stats(stats: Any) -> object:  # noqa: ANN401
    return [(float(one.backlog + one.delivered), one.due) for one in stats.values()]


def _use_partition(stats: Mapping[str, Any]) -> object:
    return len(all_pieces([Partition.from_stats(0, stats, "s")]))


READS: dict[str, Read] = {
    "partitions": Read(lambda a: a.partitions(TOPIC), {"partitions": 1}),
    "metadata": Read(lambda a: a.metadata(TOPIC, partitioned=True), PARTS["metadata"]),
    "subscriptions": Read(lambda a: a.subscriptions(TOPIC, partitioned=True), PARTS),
    "usage": Read(lambda a: a.usage(TOPIC, partitioned=True, subscription="o"), PARTS),
    "usage of one": Read(lambda a: a.usage(TOPIC, partitioned=False, subscription="o"), PART),
    "stats": Read(lambda a: a.stats(TOPIC, partitioned=True), PARTS, _use_stats),
    "producers": Read(lambda a: a.stats(TOPIC, partitioned=False, producers=True), PART),
    "namespace": Read(lambda a: a.namespace("t/n"), POLICIES, _use_namespace),
    "ttl": Read(lambda a: a.ttl_in_force(TOPIC), 9),
    "own ttl": Read(lambda a: a.topic_policy(TOPIC, Ttl(9)), 9, lambda t: list(Ttl(9).writes(t))),
    "quotas": Read(lambda a: a.topic_policy(TOPIC, KeepsBacklog()), QUOTAS,
                   lambda q: (evicting(q or {}), list(LimitsBacklog(9).writes(q)))),
    "delays": Read(lambda a: a.topic_policy(TOPIC, DELAYS), DELAYED, _use_delays),
    "tick": Read(lambda a: a.topic_policy(TOPIC, DelaysWithin(9)), DELAYED, _use_delays),
    "new": Read(lambda a: a.policy_of_new_topic(TOPIC, DelaysWithin(9)), DELAYED, _use_delays),
    "acknowledged": Read(
        lambda a: a.acknowledged(TOPIC, partitioned=False, subscription="s"), INTERNAL
    ),
    "terminated": Read(
        lambda a: a.is_terminated(TOPIC, partitioned=True),
        {"partitions": {"p": INTERNAL | {"state": "Terminated"}}},
    ),
    "transactions": Read(
        lambda a: a.has_open_transaction(TOPIC), PART | {"ongoingTxnCount": 1}
    ),
    "internal stats": Read(lambda a: a.internal_stats(TOPIC), INTERNAL, _use_partition),
    "settings": Read(lambda a: a.read_settings(), SETTINGS),
    "clusters": Read(lambda a: a.clusters(), ["a"]),
    "tenant": Read(lambda a: a.tenant_exists("t"), ["t/n"]),
    "topics": Read(lambda a: a.topics("t/n"), [f"{TOPIC}"], others={}),
    "version": Read(lambda a: a.version(), "4.0.8", others={}),
    "schema": Read(lambda a: a.schema(TOPIC), SCHEMA, lambda s: s.fingerprint if s else ""),
    "schemas": Read(lambda a: a.schemas(TOPIC), {"getSchemaResponses": [SCHEMA]},
                    lambda read: [schema.fingerprint for schema in read]),
    "clusters of a topic": Read(lambda a: a.replicated_to(TOPIC), ["a"]),
    "deduplication": Read(lambda a: a.deduplicates(TOPIC), answer=True),
    "subscriptions of one": Read(lambda a: a.subscriptions(TOPIC, partitioned=False), ["s"],
                                 lambda read: sorted(read.names)),
    "receivers": Read(lambda a: a.receivers(TOPIC, partitioned=True), PARTS,
                      lambda read: sorted(read.names)),
    "receivers of one": Read(lambda a: a.receivers(TOPIC, partitioned=False), PART,
                             lambda read: sorted(read.names)),
    "limit": Read(lambda a: a.limit(TOPIC, "maxProducersPerTopic"), 9,
                  others={**LISTED, "/namespaces/t/n": POLICIES, "/runtime": SETTINGS}),
    "types": Read(lambda a: a.subscription_types(TOPIC), ["Shared"], sorted),
    "limit of a broker": Read(
        lambda a: a.limit(TOPIC, "maxConsumersPerTopic"), SETTINGS,
        others={**LISTED, "/namespaces/t/n": POLICIES, "/maxConsumers": None},
    ),
    "quotas in force": Read(lambda a: a.quotas_in_force(TOPIC), QUOTAS, evicting,
                            {**LISTED, "/namespaces/t/n": POLICIES, "/runtime": SETTINGS}),
}  # fmt: skip
ANY_TEXT = {"version"}
"""Calls that refuse no text: a version that cannot be parsed is unknown."""


def written(answer: Any) -> bytes:  # noqa: ANN401
    """Return an answer as a broker writes it: a text alone is no JSON."""
    return (answer if isinstance(answer, str) else json.dumps(answer)).encode()


def variants(answer: Any) -> Iterator[bytes]:  # noqa: ANN401
    """Yield copies of an answer with one value, or all of it, replaced."""
    mark = "replaced here"
    marked = [mark]
    for owner, name in places(whole := copy.deepcopy(answer)):
        before, owner[name] = owner[name], mark
        marked.append(copy.deepcopy(whole))
        owner[name] = before
    for document in marked:
        text = json.dumps(document)
        for value in HOSTILE:
            yield text.replace(f'"{mark}"', value).encode()


def places(value: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401
    """Yield the container and key of each value within a document."""
    inner = value.items() if isinstance(value, dict) else ()
    for key, held in enumerate(value) if isinstance(value, list) else list(inner):
        yield value, key
        yield from places(held)


def numbers(value: object) -> Iterator[float]:
    """Yield the numbers within a result."""
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, datetime):
        yield value.timestamp()
    elif is_dataclass(value):
        for field in fields(value):
            yield from numbers(getattr(value, field.name))
    elif isinstance(value, Mapping):
        yield from numbers(list(value.values()))
    elif isinstance(value, list | tuple | frozenset):
        for held in value:
            yield from numbers(held)


@pytest.mark.parametrize("name", READS)
async def test_hostile_answer_is_refused_or_bounded(name: str) -> None:
    read, body = READS[name], b""

    async def answer(request: web.Request) -> web.Response:
        ends = (end for end in read.others if request.path.endswith(end))
        if (end := next(ends, None)) is not None:
            return web.Response(body=written(read.others[end]))
        return web.Response(body=body)

    refused = 0
    async with serving(answer) as url, Http.open() as http:
        body = written(read.answer)
        assert read.use(await read.call(Admin(http, url, Access.bearer("x")))) is not None
        for body in variants(read.answer):
            try:
                result = await read.call(Admin(http, url, Access.bearer("x")))
                used = read.use(result)
            except RedriveError:  # of `use`, if a subscription does not exist
                refused += 1
                continue
            assert all(abs(number) < HIGHEST for number in numbers(used)), body
            assert "\\ud" not in repr((result, used)), body
    assert refused > len(HOSTILE) // 3 or name in ANY_TEXT


@pytest.mark.parametrize(
    ("of_topic", "of_namespace", "expected"),
    [(None, None, 7), (None, 0, 0), (None, 2, 2), (3, 2, 3), (0, 2, 0), (-1, 2, 0)],
)
async def test_limit_of_a_topic_precedes_namespace_and_broker(
    of_topic: int | None, of_namespace: int | None, expected: int
) -> None:
    setting, settings = "maxSubscriptionsPerTopic", {"maxSubscriptionsPerTopic": "7"}
    policies = POLICIES | {"max_subscriptions_per_topic": of_namespace}
    answers = {**LISTED, "/runtime": settings, "/namespaces/t/n": policies, f"/{setting}": of_topic}

    async def answer(request: web.Request) -> web.Response:
        ends = [end for end in answers if request.path.endswith(end)]
        return web.Response(body=written(answers[ends[0]] if ends else "4.0.8"))

    async with serving(answer) as url, Http.open() as http:
        admin = Admin(http, url, Access.bearer("x"))
        assert await admin.limit(TOPIC, setting) == expected


@pytest.mark.parametrize(("tick", "read"), [(1_000, 1), (9, 10)], ids=["needed", "sufficient"])
async def test_new_topics_share_the_read_of_a_policy(tick: int, read: int) -> None:
    """A topic whose policy stays as it is was read itself."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(body=written({"active": True, "tickTime": tick}))

    topics = [TopicName("t", "n", f"a-{number}") for number in range(10)]
    async with serving(answer) as url, Http.open() as http:
        admin = Admin(http, url, Access.bearer("x"))
        values = [admin.policy_of_new_topic(topic, DelaysWithin(9)) for topic in topics]
        assert [value["tickTime"] for value in await asyncio.gather(*values)] == [tick] * 10
    assert len(asked) == read
    assert len(set(asked)) == min(read, 10)


async def test_new_topic_is_read_itself_if_another_is_gone() -> None:
    async def answer(request: web.Request) -> web.Response:
        if "gone" in request.path:
            return web.Response(status=404)
        return web.Response(body=written({"active": True, "tickTime": 1_000}))

    topics = [TopicName("t", "n", name) for name in ("a", "b", "gone")]  # the last one is read
    async with serving(answer) as url, Http.open() as http:
        admin = Admin(http, url, Access.bearer("x"))
        values = [admin.policy_of_new_topic(topic, DelaysWithin(9)) for topic in topics]
        first, second, gone = await asyncio.gather(*values, return_exceptions=True)
    assert first == second == {"active": True, "tickTime": 1_000}
    assert isinstance(gone, AdminNotFoundError)


@pytest.mark.parametrize("depth", [MOST_NESTED, MOST_NESTED + 1, 900, 100_000])
def test_deeply_nested_answer_is_refused(depth: int) -> None:
    """The operator writes unknown fields of a policy again, which fails deeper in its stack."""
    answer = ("[" * depth + "]" * depth).encode()
    if depth <= MOST_NESTED:
        assert parse_answer(answer)
    else:
        with pytest.raises(ValueError, match="nested"):
            parse_answer(answer)


def test_every_reading_call_gets_hostile_answers() -> None:
    calls = [read.call for read in READS.values()]
    tried = {name for call in calls if isinstance(call, FunctionType)
             for name in call.__code__.co_names}  # fmt: skip
    reading = {
        name
        for name, method in vars(Admin).items()
        if iscoroutinefunction(method) and signature(method).return_annotation != "None"
    }
    assert {name for name in reading if not name.startswith("_")} <= tried

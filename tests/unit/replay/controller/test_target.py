"""What a broker says of a target, before anything is moved there: owner, deduplication, rights."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest

from redrive.admin.client import Admin
from redrive.admin.http import Access, Http
from redrive.admin.policies import Quotas
from redrive.api.conditions import ObjectEvent
from redrive.errors import (
    Requeue,
    TargetDeduplicationError,
    TargetEvictsError,
    TargetExpiresError,
    TargetNotAllowedError,
    TargetNotFoundError,
    TargetNotSubscribedError,
)
from redrive.kube import resources
from redrive.kube.resources import Key
from redrive.replay.controller import launch
from redrive.replay.controller.prerequisites import prepare_target
from tests.support.fake_admin import SUPERUSER, FakeBroker, Namespace, Topic
from tests.support.fake_kubernetes import FakeKubernetes
from tests.unit.replay.controller.test_admission import connection, ctx, replay

NAMESPACE = "persistent://shop/prod"
RETRY = f"{NAMESPACE}/orders-fulfilment-RETRY"


@pytest.fixture
async def broker() -> AsyncIterator[FakeBroker]:
    """A broker that has the source topic, and topics of a RetryPolicy beside it."""
    async with FakeBroker.serving() as broker:
        broker.tenants = {"shop": []}
        owned = {"redrive.io/owner": "here/billing/invoices"}
        topics = {
            "orders": Topic(2, {}),
            "checked": Topic(0, {"team": "shop", "redrive.io/owner": ""}),
            "theirs": Topic(0, owned),
            "theirs-in-parts": Topic(3, owned),
        }
        for topic in topics.values():
            topic.parts = {end: ["s"] for end in topic.parts}
        broker.namespaces = {"shop/prod": Namespace(topics)}
        yield broker


async def prepare(
    broker: FakeBroker,
    roles: str = "*",
    status: dict[str, str] | None = None,
    **spec: Any,  # noqa: ANN401
) -> tuple[ObjectEvent, ...]:
    """Prepare the target of a Replay, and return what is told of it."""
    allow = [{"topics": [f"{NAMESPACE}/*"], "roles": [roles]}]
    body = replay(spec=spec, status=status or {})
    context = ctx(connections=[connection(allow=allow)], replays=[body])
    kubernetes = FakeKubernetes()
    kubernetes.add(resources.REPLAYS, body)
    async with aiohttp.ClientSession() as session:
        admin = Admin(Http(session), broker.url, Access.bearer(FakeBroker.token(SUPERUSER)))

        async def resolve(*_: object) -> Any:  # noqa: ANN401
            return SimpleNamespace(admin=admin, key=Key("shop", "main"))

        brokers = cast("Any", SimpleNamespace(resolve=resolve))
        context = dataclasses.replace(context, brokers=brokers, kubernetes=kubernetes)
        return await prepare_target(body, context)


def rights(broker: FakeBroker, topic: str) -> dict[str, list[str]]:
    """Return what each role may do on a topic."""
    granted = broker.namespaces["shop/prod"].grants.get(f"{NAMESPACE}/{topic}", {})
    return {role: sorted(actions) for role, actions in granted.items()}


def deduplicate(broker: FakeBroker, topic: str) -> None:
    broker.namespaces["shop/prod"].topics[topic].policies["deduplicationEnabled"] = True


async def test_the_retry_topic_is_as_the_operator_made_it(broker: FakeBroker) -> None:
    named = {"target": "Topic", "targetTopic": RETRY}
    same: tuple[dict[str, Any], ...] = ({}, {"target": "Retry"}, named)
    for spec in same:
        await prepare(broker, **spec)
    assert broker.calls == []


async def test_a_run_that_was_launched_is_not_held_up(broker: FakeBroker) -> None:
    """Its job finds by itself what has changed at the broker."""
    await prepare(broker, target="Source", status={"sparkApplication": launch.name_of(replay())})
    assert broker.calls == []


async def test_the_application_of_another_replay_of_this_name_lets_no_target_pass(
    broker: FakeBroker,
) -> None:
    """A status is written by name: it may have been meant for one that is gone."""
    status = {"sparkApplication": "replay-now-of-before"}
    with pytest.raises(TargetNotAllowedError):
        await prepare(broker, target="Topic", targetTopic=f"{NAMESPACE}/theirs", status=status)


@pytest.mark.parametrize("topic", ["orders", "checked"])
async def test_a_target_that_deduplicates_gets_the_replay_role(
    broker: FakeBroker, topic: str
) -> None:
    deduplicate(broker, topic)
    grants = broker.namespaces["shop/prod"].grants
    grants[f"{NAMESPACE}/{topic}"] = {"replayer": ["functions"], "fulfilment": ["consume"]}
    asked: dict[str, Any] = {"target": "Topic", "targetTopic": f"{NAMESPACE}/{topic}"}
    for spec in (asked, {"target": "Source"} if topic == "orders" else asked):
        await prepare(broker, **spec)
        assert rights(broker, topic) == {
            "replayer": ["consume", "functions", "produce"],
            "fulfilment": ["consume"],
        }


@pytest.mark.parametrize("topic", ["theirs", "theirs-in-parts"])
@pytest.mark.parametrize("dry_run", [False, True])
async def test_a_topic_that_redrive_keeps_for_a_policy_is_no_target(
    broker: FakeBroker, topic: str, *, dry_run: bool
) -> None:
    deduplicate(broker, topic)
    asked: dict[str, Any] = {"target": "Topic", "targetTopic": f"{NAMESPACE}/{topic}"}
    for guarantee in ("ExactlyOnce", "AtLeastOnce"):
        with pytest.raises(TargetNotAllowedError, match="keeps for a RetryPolicy"):
            await prepare(broker, guarantee=guarantee, dryRun=dry_run, **asked)
    assert rights(broker, topic) == {}


async def test_a_source_topic_that_is_the_retry_topic_of_another_policy_is_no_target(
    broker: FakeBroker,
) -> None:
    source = broker.namespaces["shop/prod"].topics["orders"]
    source.properties["redrive.io/owner"] = "here/shop/first"
    with pytest.raises(TargetNotAllowedError):
        await prepare(broker, target="Source")


async def test_what_can_not_be_kept_is_refused_with_both_edits(broker: FakeBroker) -> None:
    with pytest.raises(TargetDeduplicationError) as refused:
        await prepare(broker, target="Source")
    assert f"set-deduplication-status --enable {NAMESPACE}/orders" in str(refused.value)
    assert "guarantee: AtLeastOnce" in str(refused.value)
    assert refused.value.requeue is Requeue.SLOW_BACKOFF
    assert rights(broker, "orders") == {}
    await prepare(broker, target="Source", guarantee="AtLeastOnce")
    assert rights(broker, "orders") == {"replayer": ["consume", "produce"]}


@pytest.mark.parametrize(
    "parts", [{"-partition-0": ["s"], "-partition-1": []}, {"-partition-0": ["s"]}]
)
async def test_a_topic_that_would_keep_nothing_is_no_target(
    broker: FakeBroker, parts: dict[str, list[str]]
) -> None:
    broker.namespaces["shop/prod"].topics["orders"].parts = parts
    deduplicate(broker, "orders")
    with pytest.raises(TargetNotSubscribedError, match="create-subscription"):
        await prepare(broker, target="Source")
    assert rights(broker, "orders") == {}


async def test_a_topic_that_is_not_there_is_not_made(broker: FakeBroker) -> None:
    with pytest.raises(TargetNotFoundError, match="create it"):
        await prepare(broker, target="Topic", targetTopic=f"{NAMESPACE}/absent")
    assert "absent" not in broker.namespaces["shop/prod"].topics


@pytest.mark.parametrize("spec", [{"dryRun": True}, {"roles": "fulfilment"}])
async def test_nothing_is_granted_for_a_dry_run_or_without_a_rule(
    broker: FakeBroker, spec: dict[str, Any]
) -> None:
    deduplicate(broker, "orders")
    await prepare(broker, target="Source", **spec)
    assert rights(broker, "orders") == {}


@pytest.mark.parametrize("only", ["reader-1a2b", "__compaction"])
async def test_target_with_no_subscription_of_application_is_refused(
    broker: FakeBroker, only: str
) -> None:
    deduplicate(broker, "orders")
    topic = broker.namespaces["shop/prod"].topics["orders"]
    topic.parts = {"-partition-0": ["s", only], "-partition-1": [only]}
    with pytest.raises(TargetNotSubscribedError, match="those of readers"):
        await prepare(broker, target="Source")
    assert rights(broker, "orders") == {}
    topic.parts["-partition-1"].append("s")
    await prepare(broker, target="Source")


EVICTS = {"policy": "consumer_backlog_eviction"}
REFUSES = {"policy": "producer_request_hold"}
SIZE, AGE = "destination_storage", "message_age"


@pytest.mark.parametrize(
    ("own", "inherited", "evicts"),
    [
        ({SIZE: {"limitSize": 10, **EVICTS}}, {}, True),
        ({AGE: {"limitTime": 10, **EVICTS}}, {}, True),
        ({}, {SIZE: {"limitSize": 10, **EVICTS}}, True),
        ({}, {AGE: {"limitTime": 10, **EVICTS}}, True),
        ({SIZE: {"limitSize": 10, **REFUSES}}, {AGE: {"limitTime": 10, **EVICTS}}, True),
        ({SIZE: {"limitSize": 10, **REFUSES}}, {SIZE: {"limitSize": 10, **EVICTS}}, False),
        ({SIZE: {"limitSize": -1, **EVICTS}}, {}, False),
    ],
)
@pytest.mark.parametrize("guarantee", ["ExactlyOnce", "AtLeastOnce"])
async def test_target_with_evicting_quota_in_force_is_refused(
    broker: FakeBroker, own: Quotas, inherited: Quotas, guarantee: str, *, evicts: bool
) -> None:
    deduplicate(broker, "orders")
    namespace = broker.namespaces["shop/prod"]
    namespace.topics["orders"].quotas = dict(own)
    namespace.policies["backlog_quota_map"] = inherited
    if not evicts:
        await prepare(broker, target="Source", guarantee=guarantee)
        return
    with pytest.raises(TargetEvictsError, match="set-backlog-quota --type"):
        await prepare(broker, target="Source", guarantee=guarantee)
    assert rights(broker, "orders") == {}


@pytest.mark.parametrize(
    ("seconds", "rate", "outcome"),
    [
        (0, None, "passes"),
        (10 * 86_400, None, "passes"),
        (10 * 86_400 - 1, None, "warns"),
        (3_600, None, "warns"),
        (3_599, None, "refused"),
        (1, None, "refused"),
        (7_200, 0.5, "warns"),  # of no dead letters
    ],
)
async def test_target_with_short_ttl_in_force_is_refused(
    broker: FakeBroker, seconds: int, rate: float | None, outcome: str
) -> None:
    deduplicate(broker, "orders")
    broker.in_force["messageTTL"] = seconds
    dead_letters = Topic(0, {}, {"": ["redrive"]})
    broker.namespaces["shop/prod"].topics["orders-fulfilment-DLQ"] = dead_letters
    limit: dict[str, Any] = {} if rate is None else {"rateLimit": {"messagesPerSecond": rate}}
    if outcome == "refused":
        with pytest.raises(TargetExpiresError, match=f"got 'messageTTL of {seconds} s'"):
            await prepare(broker, target="Source", **limit)
        assert rights(broker, "orders") == {}
        return
    events = await prepare(broker, target="Source", **limit)
    assert [event.reason for event in events] == ["TargetExpires"] * (outcome == "warns")


async def test_target_whose_ttl_is_below_time_of_run_is_refused(
    broker: FakeBroker,
) -> None:
    deduplicate(broker, "orders")
    broker.in_force["messageTTL"] = 7_200
    broker.namespaces["shop/prod"].topics["orders-fulfilment-DLQ"] = Topic(
        0, {}, {"": ["redrive"]}, backlog=3_601
    )
    limit: dict[str, Any] = {"rateLimit": {"messagesPerSecond": 0.5}}
    with pytest.raises(TargetExpiresError, match="which takes about 2h2s"):
        await prepare(broker, target="Source", **limit)
    few: dict[str, Any] = {"select": {"limit": 3_600}}
    await prepare(broker, target="Source", **limit, **few)

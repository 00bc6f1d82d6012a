"""Deletion of a policy: waiting, abandoned cleanup, removal, and refused specs."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.admin.errors import BrokerUnreachableError
from redrive.admin.guards import FAILURES, Breaker
from redrive.admin.model import RightsChange, SubscriptionStats, TopicUsage
from redrive.api import Body
from redrive.api.connection import BrokerConnectionSpec
from redrive.api.policy_defaults import DeletionPolicy
from redrive.errors import InvalidSpecError, RedriveError, Requeue
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.client import ConflictError, NotFoundError, ReferenceNotFoundError
from redrive.kube.connections import Connection
from redrive.kube.resources import SKIP_CLEANUP, TOPIC_OWNER, Key, Resource
from redrive.kube.status import Publisher
from redrive.policy.naming import TopicName
from redrive.provision import actions
from redrive.provision.claims import Conflicts
from redrive.provision.finalize import (
    LATE_WRITES,
    RemainingTopic,
    Removal,
    finalize,
    removal,
)
from redrive.provision.handlers import DeletionEvents
from redrive.provision.outcome import (
    FINALIZER,
    ensure_cleanup_finalizer,
    has_cleanup_finalizer,
    publish,
)
from redrive.provision.ownership import GRANTED, OWNER_UID, Owner, OwnershipRecord
from redrive.reasons import Reason
from tests.support.fake_admin import FakeBroker, Namespace, Topic
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.operator_in_process import KEY, ReconcileHarness, reconcile_harness
from tests.support.reasons import raises

MakeBody = Callable[..., dict[str, Any]]
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def storing(body: Body) -> FakeKubernetes:
    """An API server that has the policy."""
    api = FakeKubernetes()
    api.add(resources.POLICIES, body)
    return api


def stored(api: FakeKubernetes) -> dict[str, Any]:
    """Return the only policy as it is now."""
    (body,) = api.objects[resources.POLICIES].values()
    return body


def ready_condition(api: FakeKubernetes) -> dict[str, Any]:
    """Return the Ready condition of the only policy."""
    return next(dict(c) for c in stored(api)["status"]["conditions"] if c["type"] == "Ready")


class Gone:
    """Connections, none of which is there or was ever used; or a *fault* in looking for them."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.fault = fault

    async def resolve(self, ref: object, namespace: str) -> None:
        """Find none."""
        if self.fault is not None:
            raise self.fault
        raise ReferenceNotFoundError(
            "no connection",
            got=f"{namespace}/{ref}",
            remedy="make it",
            reason=Reason.CONNECTION_NOT_FOUND,
        )

    def remembered(self, ref: object, namespace: str) -> Connection | None:
        """Remember none."""
        del ref, namespace
        return None


def deleted(body: dict[str, Any], **annotations: str) -> dict[str, Any]:
    """The policy, with topics, while it is being deleted."""
    body["status"] = {"retryTopic": "r", "deadLetterTopic": "d"}
    body["metadata"] |= {
        "finalizers": ["others", FINALIZER],
        "deletionTimestamp": "2026-01-01T00:00:00Z",
        "annotations": {f"redrive.io/{name}": value for name, value in annotations.items()},
    }
    return body


def out_of(api: FakeKubernetes, table: Cache) -> Publisher:
    return Publisher(api, resources.POLICIES, table, lambda: BEGAN)


class Remembered(Gone):
    """Connections, none of which is there any more; one is remembered."""

    def __init__(self, last: Connection) -> None:
        super().__init__()
        self.last = last

    def remembered(self, ref: object, namespace: str) -> Connection:
        """Remember it."""
        del ref, namespace
        return self.last


async def look(
    api: FakeKubernetes,
    table: Cache,
    after: timedelta = timedelta(0),
    brokers: Gone = Gone(),  # noqa: B008  it never changes
    began: timedelta = timedelta(0),
) -> Requeue:
    """Finalize the only policy, so long after its deletion, without its connection.

    The operator *began* so long after the deletion.
    """
    (body,) = table
    settings = SimpleNamespace(cluster_id="here", namespaces=())
    ctx: Any = SimpleNamespace(
        brokers=brokers,
        clock=lambda: BEGAN + after,
        began=BEGAN + began,
        policies=table,
        connections=Cache(),
        namespaces=None,
        settings=settings,
        kubernetes=api,
    )
    outcome = await finalize(body, ctx, Conflicts(table, ctx.connections, lambda _: None))
    await publish(body, outcome, out_of(api, table))
    return outcome.requeue


async def test_deletion_without_connection_waits_with_deadline(
    policy: MakeBody,
) -> None:
    body = deleted(policy(deletionPolicy="Delete"))
    api, table = storing(body), Cache([body])
    assert await look(api, table, timedelta(minutes=9, seconds=59)) is Requeue.BACKOFF
    ready = ready_condition(api)
    assert ready["reason"] == "ConnectionNotFound"
    message = ready["message"]
    assert message.startswith("being deleted since 2026-01-01T00:00:00Z: no connection; got")
    assert "at 2026-01-01T00:10:00Z the policy is deleted anyway" in message
    assert "set the annotation redrive.io/skip-cleanup=true" in message
    assert FINALIZER in stored(api)["metadata"]["finalizers"]


async def test_deletion_past_deadline_is_abandoned_with_event(policy: MakeBody) -> None:
    body = deleted(policy(deletionPolicy="Delete"))
    api, table = storing(body), Cache([body])
    assert await look(api, table, timedelta(minutes=10)) is Requeue.ON_CHANGE
    assert stored(api)["metadata"]["finalizers"] == ["others"]
    ((_, reason, message),) = api.announced()
    assert reason == Reason.CLEANUP_ABANDONED
    assert "failed since 2026-01-01T00:00:00Z: no connection" in message
    assert message.endswith("r and d are retained at the broker, if they exist")


async def test_operator_outage_does_not_count_for_deadline(policy: MakeBody) -> None:
    body = deleted(policy(deletionPolicy="Delete"))
    api, table = storing(body), Cache([body])
    began = timedelta(hours=1)
    almost = began + timedelta(minutes=9, seconds=59)
    assert await look(api, table, almost, began=began) is Requeue.BACKOFF
    message = ready_condition(api)["message"]
    assert message.startswith("being deleted since 2026-01-01T00:00:00Z: ")
    assert "at 2026-01-01T01:10:00Z the policy is deleted anyway" in message
    over = began + timedelta(minutes=10)
    assert await look(api, table, over, began=began) is Requeue.ON_CHANGE


async def test_internal_error_past_deadline_releases_policy(
    policy: MakeBody, caplog: pytest.LogCaptureFixture
) -> None:
    body = deleted(policy(deletionPolicy="Delete"))
    api, table = storing(body), Cache([body])
    faulty = Gone(KeyError("partitions"))
    with pytest.raises(KeyError):
        await look(api, table, timedelta(minutes=9, seconds=59), faulty)
    assert FINALIZER in stored(api)["metadata"]["finalizers"]
    assert await look(api, table, timedelta(minutes=10), faulty) is Requeue.ON_CHANGE
    assert stored(api)["metadata"]["finalizers"] == ["others"]
    ((_, reason, message),) = api.announced()
    assert reason == Reason.CLEANUP_ABANDONED
    assert "2026-01-01T00:00:00Z: KeyError, see the operator's log; r and d" in message
    assert "KeyError: 'partitions'" in caplog.text


async def test_skip_cleanup_annotation_releases_policy_at_once(policy: MakeBody) -> None:
    body = deleted(policy(deletionPolicy="Delete"), **{"skip-cleanup": "true"})
    api, table = storing(body), Cache([body])
    assert SKIP_CLEANUP in body["metadata"]["annotations"]
    assert await look(api, table) is Requeue.ON_CHANGE
    assert stored(api)["metadata"]["finalizers"] == ["others"]
    assert [reason for _, reason, _ in api.announced()] == [Reason.CLEANUP_ABANDONED]


async def test_paused_deletion_keeps_topics_and_releases_policy(policy: MakeBody) -> None:
    body = deleted(policy(deletionPolicy="Delete"), paused="true")
    api, table = storing(body), Cache([body])
    assert await look(api, table, brokers=Gone(AssertionError())) is Requeue.ON_CHANGE
    assert stored(api)["metadata"]["finalizers"] == ["others"]
    ((_, reason, message),) = api.announced()
    assert reason == Reason.RETAINED
    assert "it was paused, so nothing was changed" in message


async def test_deletion_of_a_replaced_policy_touches_no_topic(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    body = policy(deletionPolicy="Delete")
    here = reconcile_harness(connection, body, FakeKubernetes())
    await here.reconcile()
    topics, writes = here.topics, len(here.broker.writes)
    successor = stored(here.kubernetes)
    here.ctx.policies.put(deleted(copy.deepcopy(successor)))
    successor["metadata"]["uid"] = "another"
    here.now += LATE_WRITES
    assert await here.reconcile() is Requeue.ON_CHANGE
    assert (here.topics, len(here.broker.writes)) == (topics, writes)
    assert here.ctx.policies.get(KEY) is None
    assert here.kubernetes.announced()[-1][1] != Reason.CLEANUP_ABANDONED


async def test_abandoned_cleanup_is_announced_once_over_retries(policy: MakeBody) -> None:
    body = deleted(policy(), **{"skip-cleanup": "true"})
    api, table = storing(body), Cache([body])
    attempts = itertools.count(1)

    def modify(verb: str, _resource: Resource, _key: Key) -> None:
        if verb == "patch" and next(attempts) <= 2:
            raise ConflictError("the object has been modified", remedy="try again")

    api.before = modify
    for _ in range(2):
        with pytest.raises(ConflictError):
            await look(api, table)
    for _ in range(2):
        await look(api, table)
    assert [reason for _, reason, _ in api.announced()] == [Reason.CLEANUP_ABANDONED]
    assert stored(api)["metadata"]["finalizers"] == ["others"]


async def test_concurrent_status_write_repeats_no_cleanup(policy: MakeBody) -> None:
    body = deleted(policy(), **{"skip-cleanup": "true"})
    body["metadata"]["finalizers"] = [FINALIZER]
    api, table = storing(body), Cache([body])
    await api.patch_status(resources.POLICIES, Key.of(body), {"backlog": {"retry": 1}})
    assert await look(api, table) is Requeue.ON_CHANGE
    assert api.objects[resources.POLICIES] == {}


async def test_deletion_probes_broker_of_deleted_connection(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    async def silent() -> None:
        raise BrokerUnreachableError("no answer", remedy="start it")

    body = deleted(policy(deletionPolicy="Delete"))
    api, table = storing(body), Cache([body])
    now = [BEGAN]
    breaker = Breaker("http://pulsar:8080", lambda: now[-1], lambda: None)
    broker = FakeBroker()
    admin = broker.admin(breaker=breaker)
    last = Connection(Key("shop", "main"), BrokerConnectionSpec(**connection), admin)
    broker.tenants = {"shop": []}
    broker.namespaces = {"shop/prod": Namespace()}
    for probe in (*[None] * FAILURES, timedelta()):  # the last is that of another policy
        with pytest.raises(BrokerUnreachableError):
            await breaker.guard(silent, probe)
    assert breaker.is_open
    assert await look(api, table, LATE_WRITES, Remembered(last)) is Requeue.BACKOFF
    assert not broker.calls
    now.append(BEGAN + timedelta(seconds=5))
    await look(api, table, LATE_WRITES, Remembered(last))
    assert not breaker.is_open
    assert stored(api)["metadata"]["finalizers"] == ["others"]
    assert Reason.CLEANUP_ABANDONED not in [reason for _, reason, _ in api.announced()]


@pytest.mark.parametrize(
    ("choice", "held"),
    [
        (DeletionPolicy.RETAIN, False),
        (DeletionPolicy.DELETE, True),
        (DeletionPolicy.DELETE_IF_EMPTY, True),
    ],
)
@pytest.mark.parametrize("before", [[], ["others"], ["others", FINALIZER]])
async def test_cleanup_finalizer_depends_on_deletion_policy(
    policy: MakeBody, before: list[str], choice: DeletionPolicy, *, held: bool
) -> None:
    body = policy()
    body["metadata"]["finalizers"] = before
    api = storing(body)
    after = await ensure_cleanup_finalizer(body, choice, out_of(api, Cache([body])))
    assert (FINALIZER in after["metadata"]["finalizers"]) is held
    assert ("others" in after["metadata"]["finalizers"]) is ("others" in before)


async def test_finalizer_of_a_recreated_policy_is_not_added(policy: MakeBody) -> None:
    """The policy was deleted, and created again by its name, while the finalizer was added."""
    body = policy()
    recreated = {**body, "metadata": {**body["metadata"], "uid": "another"}}
    out = out_of(storing(body), Cache([recreated]))
    with pytest.raises(NotFoundError):
        await ensure_cleanup_finalizer(body, DeletionPolicy.DELETE, out)


async def test_deletion_without_finalizer_announces_kept_topics(policy: MakeBody) -> None:
    body = policy() | {"status": {"retryTopic": "r", "deadLetterTopic": "d"}}
    table = Cache([body, policy("unmade"), deleted(policy("told"))])
    api = storing(body)
    events = DeletionEvents(out_of(api, table))
    for deleted_body in table:
        table.drop(deleted_body)
    await events.idle()
    ((_, reason, message),) = api.announced()
    assert reason == Reason.RETAINED
    assert message.startswith("r and d are retained at the broker")


OURS = Owner("here", Key("shop", "orders"), "uid-1", "orders/fulfilment")
RETRY = TopicName("shop", "prod", "orders-fulfilment-RETRY")
DEAD_LETTER = TopicName("shop", "prod", "orders-fulfilment-DLQ")
WANTED = [DeletionPolicy.DELETE, DeletionPolicy.DELETE_IF_EMPTY]


def stats(backlog: int = 0, consumers: int = 0) -> SubscriptionStats:
    return SubscriptionStats(backlog, 0, consumers, durable=True, ack_holes=0, oldest=None)


subscriptions = st.dictionaries(
    st.sampled_from(["fulfilment", "others"]),
    st.builds(stats, st.integers(0, 2), st.integers(0, 1)),
)
roles = st.sampled_from(["a", "b"])
granted = st.dictionaries(roles, st.frozensets(st.sampled_from(["produce", "consume"]), min_size=1))
topics = st.builds(
    RemainingTopic,
    name=st.sampled_from([RETRY, DEAD_LETTER]),
    subscription=st.sampled_from(["fulfilment", "redrive"]),
    partitioned=st.booleans(),
    properties=st.builds(
        OwnershipRecord,
        owner=st.just(str(OURS))
        | st.sampled_from(["", str(OURS), "there/shop/orders", "here/shop/other"]),
        uid=st.sampled_from(["", "uid-1", "uid-0"]),
        source=st.sampled_from(["", "orders/fulfilment", "payroll/fulfilment"]),
        created=st.booleans(),
        granted=granted,
        subscription=st.sampled_from(["", "fulfilment"]),
    ).map(OwnershipRecord.to_properties),
    usage=st.builds(TopicUsage, subscriptions, st.integers(0, 1), st.integers(0, 3)),
    permissions=granted,
    successor=st.none() | st.just(Key("shop", "successor")),
    is_of_scheme=st.booleans(),
    is_of_others=st.booleans(),
)
left_topics = st.lists(topics, max_size=2, unique_by=lambda topic: topic.name)


def planned(policy: DeletionPolicy, topics: list[RemainingTopic]) -> Removal:
    """Return the removal that is planned once all clients have disconnected."""
    try:
        return removal(OURS, policy, topics)
    except RedriveError as error:
        if error.reason is not Reason.IN_USE:
            raise
        return removal(OURS, policy, [without_clients(topic) for topic in topics])


def without_clients(topic: RemainingTopic) -> RemainingTopic:
    gone = {name: replace(s, consumers=0) for name, s in topic.usage.subscriptions.items()}
    return replace(topic, usage=replace(topic.usage, subscriptions=gone, producers=0))


def touched(plan: Removal) -> set[TopicName]:
    topics = set()
    for action in plan.actions:
        if isinstance(action, actions.ChangeRights):
            topics |= {change.topic for change in action.changes}
        else:
            assert isinstance(
                action, actions.DeleteTopic | actions.DeleteSubscription | actions.Mark
            )
            topics.add(action.topic)
    return topics


@given(st.sampled_from(WANTED), left_topics)
def test_removal_touches_only_own_unneeded_topics(
    policy: DeletionPolicy, topics: list[RemainingTopic]
) -> None:
    ours = {
        topic.name
        for topic in topics
        if OwnershipRecord.of(topic.properties).is_of(OURS) and topic.successor is None
    }
    assert touched(planned(policy, topics)) <= ours


@given(st.sampled_from(WANTED), left_topics)
def test_removal_deletes_only_topics_created_by_redrive(
    policy: DeletionPolicy, topics: list[RemainingTopic]
) -> None:
    made = {
        topic.name
        for topic in topics
        if OwnershipRecord.of(topic.properties).created
        and topic.is_of_scheme
        and not topic.is_of_others
    }
    for action in planned(policy, topics).actions:
        assert not isinstance(action, actions.DeleteTopic) or action.topic in made


@given(left_topics)
def test_only_delete_policy_removes_stored_messages(topics: list[RemainingTopic]) -> None:
    by_name = {topic.name: topic.usage for topic in topics}
    for action in planned(DeletionPolicy.DELETE_IF_EMPTY, topics).actions:
        match action:
            case actions.DeleteTopic(topic, _):
                assert not any(s.backlog for s in by_name[topic].subscriptions.values())
                assert not by_name[topic].uncounted
            case actions.DeleteSubscription(topic, name):
                assert not by_name[topic].subscriptions[name].backlog


@given(st.sampled_from(WANTED), left_topics)
def test_removal_deletes_only_recorded_subscriptions(
    policy: DeletionPolicy, topics: list[RemainingTopic]
) -> None:
    recorded = {topic.name: OwnershipRecord.of(topic.properties).subscription for topic in topics}
    for action in planned(policy, topics).actions:
        assert not isinstance(action, actions.DeleteSubscription) or (
            recorded[action.topic] == action.subscription
        )


@given(st.sampled_from(WANTED), left_topics)
def test_removal_revokes_only_recorded_rights(
    policy: DeletionPolicy, topics: list[RemainingTopic]
) -> None:
    by_name = {topic.name: topic for topic in topics}
    for action in planned(policy, topics).actions:
        for change in action.changes if isinstance(action, actions.ChangeRights) else ():
            have = by_name[change.topic].permissions.get(change.role, frozenset())
            ours = OwnershipRecord.of(by_name[change.topic].properties).granted[change.role]
            assert change.on(have) == have - ours


@given(st.sampled_from(WANTED), left_topics)
def test_removal_waits_for_connected_clients(
    policy: DeletionPolicy, topics: list[RemainingTopic]
) -> None:
    try:
        plan = removal(OURS, policy, topics)
    except RedriveError as error:
        if error.reason is not Reason.IN_USE:
            raise
        assert topics != [without_clients(topic) for topic in topics]
        return
    for action in plan.actions:
        for topic in topics:
            if isinstance(action, actions.DeleteTopic) and topic.name == action.topic:
                assert topic == without_clients(topic)


@given(st.sampled_from(WANTED), left_topics)
def test_removal_names_every_topic_that_stays(
    policy: DeletionPolicy, topics: list[RemainingTopic]
) -> None:
    plan = planned(policy, topics)
    gone = {action.topic for action in plan.actions if isinstance(action, actions.DeleteTopic)}
    for topic in topics:
        assert (topic.name in gone) != any(str(topic.name) in reason for reason in plan.stays)


def dead_letters_left(backlog: int, consumers: int = 0, uncounted: int = 0) -> RemainingTopic:
    """A dead-letter topic that redrive made."""
    usage = TopicUsage({"redrive": stats(backlog, consumers)}, producers=0, uncounted=uncounted)
    marks = OwnershipRecord(str(OURS), created=True).to_properties()
    return RemainingTopic(DEAD_LETTER, "redrive", False, marks, usage, {}, None)  # noqa: FBT003 - not partitioned


def test_removal_gives_reason_for_topics_that_stay() -> None:
    kept = removal(OURS, DeletionPolicy.DELETE_IF_EMPTY, [dead_letters_left(41)])
    assert kept == Removal((), (f"{DEAD_LETTER} holds messages (41 for redrive)",))
    assert removal(OURS, DeletionPolicy.DELETE, [dead_letters_left(41)]).stays == ()
    kept = removal(OURS, DeletionPolicy.DELETE_IF_EMPTY, [dead_letters_left(0, uncounted=9)])
    assert kept == Removal((), (f"{DEAD_LETTER} holds 9 bytes and has no subscription redrive",))
    assert removal(OURS, DeletionPolicy.DELETE, [dead_letters_left(0, uncounted=9)]).stays == ()
    successor = replace(dead_letters_left(0), successor=Key("shop", "next"))
    assert removal(OURS, DeletionPolicy.DELETE, [successor]).stays == (
        f"{DEAD_LETTER} is needed by RetryPolicy shop/next",
    )


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"properties": OwnershipRecord(str(OURS)).to_properties()}, "existed before"),
        ({"may_delete": False}, "may not be deleted: its BrokerConnection does not allow it"),
        (
            {"is_of_scheme": False},
            "has a name of spec.naming, not of its scheme, and is never deleted",
        ),
        (
            {"is_of_others": True},
            "also belongs, by its name, to a subscription of another source topic",
        ),
    ],
)
def test_protected_topic_is_not_deleted(fields: dict[str, Any], reason: str) -> None:
    topic = replace(dead_letters_left(0), **fields)
    plan = removal(OURS, DeletionPolicy.DELETE, [topic])
    assert not any(isinstance(action, actions.DeleteTopic) for action in plan.actions)
    assert plan.stays == (f"{DEAD_LETTER} {reason}",)


def test_added_subscription_with_messages_is_kept_if_asked() -> None:
    record = OwnershipRecord(str(OURS), subscription="redrive")
    topic = replace(dead_letters_left(3), properties=record.to_properties())
    deletion = actions.DeleteSubscription(DEAD_LETTER, "redrive")
    plan = removal(OURS, DeletionPolicy.DELETE_IF_EMPTY, [topic])
    assert deletion not in plan.actions
    assert plan.stays == (
        f"{DEAD_LETTER} existed before",
        f"subscription redrive on {DEAD_LETTER} holds 3 messages",
    )
    assert deletion in removal(OURS, DeletionPolicy.DELETE, [topic]).actions


def test_revocation_keeps_grants_that_a_successor_needs() -> None:
    consumes = {"a": frozenset({"consume"})}
    record = OwnershipRecord(str(OURS), created=True, granted=consumes)
    topic = replace(dead_letters_left(0), properties=record.to_properties(), permissions=consumes)
    rights, _mark = removal(OURS, DeletionPolicy.REVOKE_GRANTS, [topic]).actions
    assert isinstance(rights, actions.ChangeRights)
    needed = replace(topic, successor=Key("shop", "next"))
    assert removal(OURS, DeletionPolicy.REVOKE_GRANTS, [needed]).actions == ()


@pytest.mark.parametrize("policy", WANTED)
def test_topic_with_subscription_of_others_is_retained(policy: DeletionPolicy) -> None:
    topic = dead_letters_left(0)
    shared = replace(topic, usage=with_subscriptions(topic, audit=stats()))
    plan = removal(OURS, policy, [shared])
    assert not any(isinstance(action, actions.DeleteTopic) for action in plan.actions)
    assert plan.stays == (f"{DEAD_LETTER} has other subscriptions (audit)",)
    short_lived = replace(stats(), durable=False)
    own = replace(topic, usage=with_subscriptions(topic, reader=short_lived, __compaction=stats()))
    assert removal(OURS, policy, [own]) == Removal((actions.DeleteTopic(DEAD_LETTER, False),), ())  # noqa: FBT003


def with_subscriptions(topic: RemainingTopic, **more: SubscriptionStats) -> TopicUsage:
    return replace(topic.usage, subscriptions={**topic.usage.subscriptions, **more})


async def delete_provisioned(harness: ReconcileHarness) -> None:
    """Delete the only policy, and reconcile it once late writes have passed."""
    (stored,) = harness.kubernetes.objects[resources.POLICIES].values()
    going = copy.deepcopy(dict(stored))
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    harness.kubernetes.objects[resources.POLICIES][KEY] = going
    harness.ctx.policies.put(going)
    harness.now += LATE_WRITES
    await harness.reconcile()


async def test_topic_of_another_with_pre_empted_name_is_retained(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    """A tenant names a future topic of another as its retry topic, and deletes its policy later."""
    naming = {
        "retryTopic": f"{PREFIX}/payments",
        "deadLetterTopic": f"{PREFIX}/orders-fulfilment-DLQ",
    }
    body = policy(naming=naming, consumerRoles=["fulfilment"], deletionPolicy="Delete")
    harness = reconcile_harness(connection, body, FakeKubernetes())
    await harness.reconcile()
    namespace = harness.broker.namespaces["shop/prod"]
    assert f"{PREFIX}/payments" in namespace.grants
    assert harness.topics >= {"payments", "orders-fulfilment-DLQ"}
    await delete_provisioned(harness)
    assert harness.topics == {"orders", "payments"}
    assert namespace.topics["payments"].subscriptions == ["fulfilment"]
    assert not namespace.grants.get(f"{PREFIX}/payments")
    assert not any(namespace.topics["payments"].properties.values())
    (shown,) = (m for _, reason, m in harness.kubernetes.announced() if reason == Reason.RETAINED)
    reason = "has a name of spec.naming, not of its scheme, and is never deleted"
    assert shown == f"retained at the broker: {PREFIX}/payments {reason}"


@pytest.mark.parametrize("subscriptions", [["eu-fulfilment"], ["another"], []])
async def test_topic_whose_name_others_derive_too_is_retained(
    connection: dict[str, Any], policy: MakeBody, subscriptions: list[str]
) -> None:
    """Java consumers of another topic use the same names, and dead letters have no subscription."""
    body = policy(subscription="eu-fulfilment", deletionPolicy="Delete")
    harness = reconcile_harness(connection, body, FakeKubernetes())
    await harness.reconcile()
    rival = Topic(0, {}, {"": [name.removeprefix("eu-") for name in subscriptions]})
    harness.broker.namespaces["shop/prod"].topics["orders-eu"] = rival
    await delete_provisioned(harness)
    remaining = harness.topics - {"orders", "orders-eu"}
    if "eu-fulfilment" in subscriptions:
        assert remaining >= {f"orders-eu-fulfilment-{end}" for end in ("RETRY", "DLQ")}
    else:
        assert remaining == set()


def test_removal_error_names_connected_clients() -> None:
    with raises(
        Reason.IN_USE, match=f"{DEAD_LETTER}: 2 consumers, 0 producers'; stop these clients"
    ):
        removal(OURS, DeletionPolicy.DELETE, [dead_letters_left(0, consumers=2)])


PREFIX = "persistent://shop/prod"
SYSTEM = "__transaction_buffer_snapshot"


def refused_policy(policy: MakeBody, **metadata: object) -> dict[str, Any]:
    """Return a policy that was Ready with a system topic before this release."""
    body = policy(
        naming={"retryTopic": f"{PREFIX}/{SYSTEM}"},
        consumerRoles=["fulfilment"],
        deletionPolicy="Delete",
    )
    body["status"] = {
        "retryTopic": f"{PREFIX}/{SYSTEM}",
        "deadLetterTopic": f"{PREFIX}/orders-fulfilment-DLQ",
    }
    body["metadata"] |= {"finalizers": [FINALIZER], **metadata}
    return body


def owned(body: dict[str, Any], actions: list[str]) -> Topic:
    """Return a topic of *body* on which redrive granted *actions*."""
    properties = {
        TOPIC_OWNER: f"this-cluster/{KEY}",
        OWNER_UID: body["metadata"]["uid"],
        GRANTED: json.dumps({"fulfilment": actions}),
    }
    return Topic(0, properties)


@pytest.mark.parametrize("local", [SYSTEM, "__change_events-partition-0", "%5F_change_events"])
def test_system_topic_rights_are_revoked_and_never_granted(local: str) -> None:
    topic = TopicName("shop", "prod", local)
    RightsChange(topic, "fulfilment", take=frozenset({"produce"}))
    with pytest.raises(InvalidSpecError, match="a system topic of Pulsar"):
        RightsChange(topic, "fulfilment", give=frozenset({"produce"}))


async def test_policy_with_system_topic_is_invalid_without_grants(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    body = refused_policy(policy)
    harness = reconcile_harness(connection, body, FakeKubernetes())
    namespace = harness.broker.namespaces["shop/prod"]
    namespace.topics[SYSTEM] = Topic(0, {})
    await harness.reconcile()
    (stored,) = harness.kubernetes.objects[resources.POLICIES].values()
    ready = next(c for c in stored["status"]["conditions"] if c["type"] == "Ready")
    assert ready["reason"] == "InvalidSpec"
    assert "a system topic of Pulsar" in ready["message"]
    assert namespace.grants == {}
    assert harness.broker.writes == []


@pytest.mark.parametrize("deletion", ["Delete", "DeleteIfEmpty", "RevokeGrants"])
async def test_deletion_with_system_topic_revokes_its_grants(
    connection: dict[str, Any], policy: MakeBody, deletion: str
) -> None:
    body = refused_policy(policy, deletionTimestamp="2026-01-01T00:00:00Z")
    body["spec"]["deletionPolicy"] = deletion
    dead_letters = "orders-fulfilment-DLQ"
    harness = reconcile_harness(connection, body, FakeKubernetes())
    namespace = harness.broker.namespaces["shop/prod"]
    namespace.topics[SYSTEM] = owned(body, ["consume", "produce"])
    namespace.topics[dead_letters] = owned(body, ["produce"])
    namespace.grants = {
        f"{PREFIX}/{SYSTEM}": {"fulfilment": ["consume", "produce"], "broker": ["produce"]},
        f"{PREFIX}/{dead_letters}": {"fulfilment": ["consume", "produce"]},
    }
    harness.now += LATE_WRITES
    await harness.reconcile()
    assert namespace.grants == {
        f"{PREFIX}/{SYSTEM}": {"broker": ["produce"]},
        f"{PREFIX}/{dead_letters}": {"fulfilment": ["consume"]},
    }
    assert harness.topics == {"orders", SYSTEM, dead_letters}
    assert not any(
        map(has_cleanup_finalizer, harness.kubernetes.objects[resources.POLICIES].values())
    )


@pytest.mark.parametrize("deletion", ["Retain", "Delete"])
async def test_system_topic_rights_of_invalid_policy_are_revoked(
    connection: dict[str, Any], policy: MakeBody, deletion: str
) -> None:
    """Whoever has them can stop all producers of the namespace."""
    body = refused_policy(policy)
    body["spec"]["deletionPolicy"] = deletion
    dead_letters = f"{PREFIX}/orders-fulfilment-DLQ"
    harness = reconcile_harness(connection, body, FakeKubernetes())
    namespace = harness.broker.namespaces["shop/prod"]
    namespace.topics[SYSTEM] = owned(body, ["consume", "produce"])
    namespace.topics["orders-fulfilment-DLQ"] = owned(body, ["produce"])
    namespace.grants = {
        f"{PREFIX}/{SYSTEM}": {"fulfilment": ["consume", "produce"], "broker": ["produce"]},
        dead_letters: {"fulfilment": ["produce"]},
    }
    await harness.reconcile()
    assert namespace.grants == {
        f"{PREFIX}/{SYSTEM}": {"broker": ["produce"]},
        dead_letters: {"fulfilment": ["produce"]},
    }
    writes = len(harness.broker.writes)
    await harness.reconcile()
    assert len(harness.broker.writes) == writes

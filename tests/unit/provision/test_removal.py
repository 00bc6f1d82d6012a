from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.admin.model import SubscriptionStats, TopicUsage
from redrive.api.policy_defaults import DeletionPolicy
from redrive.errors import InUseError
from redrive.kube.resources import Key
from redrive.policy.naming import TopicName
from redrive.provision import actions
from redrive.provision.finalize import Left, Removal, removal
from redrive.provision.ownership import Owner, OwnershipRecord

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
    Left,
    name=st.sampled_from([RETRY, DEAD_LETTER]),
    subscription=st.sampled_from(["fulfilment", "redrive"]),
    partitioned=st.booleans(),
    properties=st.builds(
        OwnershipRecord,
        owner=st.sampled_from(["", str(OURS), "there/shop/orders", "here/shop/other"]),
        uid=st.sampled_from(["", "uid-1", "uid-0"]),
        source=st.sampled_from(["", "orders/fulfilment", "payroll/fulfilment"]),
        created=st.booleans(),
        granted=granted,
        subscription=st.sampled_from(["", "fulfilment"]),
    ).map(OwnershipRecord.to_properties),
    usage=st.builds(TopicUsage, subscriptions, st.integers(0, 1), st.integers(0, 3)),
    permissions=granted,
    heir=st.none() | st.just(Key("shop", "heir")),
)
left = st.lists(topics, max_size=2, unique_by=lambda topic: topic.name)


def planned(policy: DeletionPolicy, found: list[Left]) -> Removal:
    """What is planned once all clients are gone."""
    try:
        return removal(OURS, policy, found)
    except InUseError:
        return removal(OURS, policy, [without_clients(topic) for topic in found])


def without_clients(topic: Left) -> Left:
    gone = {name: replace(s, consumers=0) for name, s in topic.usage.subscriptions.items()}
    return replace(topic, usage=replace(topic.usage, subscriptions=gone, producers=0))


def touched(plan: Removal) -> set[TopicName]:
    found = set()
    for action in plan.actions:
        if isinstance(action, actions.ChangeRights):
            found |= {change.topic for change in action.changes}
        else:
            assert isinstance(
                action, actions.DeleteTopic | actions.DeleteSubscription | actions.Mark
            )
            found.add(action.topic)
    return found


@given(st.sampled_from(WANTED), left)
def test_a_topic_is_touched_only_if_it_is_marked_as_ours_and_nobody_needs_it(
    policy: DeletionPolicy, found: list[Left]
) -> None:
    ours = {
        topic.name
        for topic in found
        if OwnershipRecord.of(topic.properties).is_of(OURS) and topic.heir is None
    }
    assert touched(planned(policy, found)) <= ours


@given(st.sampled_from(WANTED), left)
def test_a_topic_is_deleted_only_if_redrive_made_it(
    policy: DeletionPolicy, found: list[Left]
) -> None:
    made = {topic.name for topic in found if OwnershipRecord.of(topic.properties).created}
    for action in planned(policy, found).actions:
        assert not isinstance(action, actions.DeleteTopic) or action.topic in made


@given(left)
def test_what_holds_messages_is_deleted_by_delete_alone(found: list[Left]) -> None:
    by_name = {topic.name: topic.usage for topic in found}
    for action in planned(DeletionPolicy.DELETE_IF_EMPTY, found).actions:
        match action:
            case actions.DeleteTopic(topic, _):
                assert not any(s.backlog for s in by_name[topic].subscriptions.values())
                assert not by_name[topic].uncounted
            case actions.DeleteSubscription(topic, name):
                assert not by_name[topic].subscriptions[name].backlog


@given(st.sampled_from(WANTED), left)
def test_only_a_subscription_that_is_on_record_is_deleted_alone(
    policy: DeletionPolicy, found: list[Left]
) -> None:
    recorded = {topic.name: OwnershipRecord.of(topic.properties).subscription for topic in found}
    for action in planned(policy, found).actions:
        assert not isinstance(action, actions.DeleteSubscription) or (
            recorded[action.topic] == action.subscription
        )


@given(st.sampled_from(WANTED), left)
def test_only_rights_that_are_on_record_are_taken_back(
    policy: DeletionPolicy, found: list[Left]
) -> None:
    by_name = {topic.name: topic for topic in found}
    for action in planned(policy, found).actions:
        for change in action.changes if isinstance(action, actions.ChangeRights) else ():
            have = by_name[change.topic].permissions.get(change.role, frozenset())
            ours = OwnershipRecord.of(by_name[change.topic].properties).granted[change.role]
            assert change.on(have) == have - ours


@given(st.sampled_from(WANTED), left)
def test_nothing_is_done_while_clients_use_what_would_go(
    policy: DeletionPolicy, found: list[Left]
) -> None:
    try:
        plan = removal(OURS, policy, found)
    except InUseError:
        assert found != [without_clients(topic) for topic in found]
        return
    for action in plan.actions:
        for topic in found:
            if isinstance(action, actions.DeleteTopic) and topic.name == action.topic:
                assert topic == without_clients(topic)


@given(st.sampled_from(WANTED), left)
def test_every_topic_that_stays_is_named(policy: DeletionPolicy, found: list[Left]) -> None:
    plan = planned(policy, found)
    gone = {action.topic for action in plan.actions if isinstance(action, actions.DeleteTopic)}
    for topic in found:
        assert (topic.name in gone) != any(str(topic.name) in said for said in plan.stays)


def made(backlog: int, consumers: int = 0, uncounted: int = 0) -> Left:
    """A dead-letter topic that redrive made."""
    usage = TopicUsage({"redrive": stats(backlog, consumers)}, producers=0, uncounted=uncounted)
    marks = OwnershipRecord(str(OURS), created=True).to_properties()
    return Left(DEAD_LETTER, "redrive", False, marks, usage, {}, None)  # noqa: FBT003 - not partitioned


def test_what_stays_says_why() -> None:
    kept = removal(OURS, DeletionPolicy.DELETE_IF_EMPTY, [made(41)])
    assert kept == Removal((), (f"{DEAD_LETTER} holds messages (41 for redrive)",))
    assert removal(OURS, DeletionPolicy.DELETE, [made(41)]).stays == ()
    kept = removal(OURS, DeletionPolicy.DELETE_IF_EMPTY, [made(0, uncounted=9)])
    assert kept == Removal((), (f"{DEAD_LETTER} holds 9 bytes without a subscription redrive",))
    assert removal(OURS, DeletionPolicy.DELETE, [made(0, uncounted=9)]).stays == ()
    heir = replace(made(0), heir=Key("shop", "next"))
    assert removal(OURS, DeletionPolicy.DELETE, [heir]).stays == (
        f"{DEAD_LETTER} is needed by RetryPolicy shop/next",
    )


def test_clients_are_named() -> None:
    with pytest.raises(InUseError, match=f"{DEAD_LETTER}: 2 consumers, 0 producers'; stop them"):
        removal(OURS, DeletionPolicy.DELETE, [made(0, consumers=2)])

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.admin.model import Grant, NamespaceState, RightsChange, Schema, TopicSubscriptions
from redrive.admin.policies import (
    Deduplicates,
    Holds,
    KeepsBacklog,
    LimitsBacklog,
    TopicPolicy,
    Ttl,
    Write,
)
from redrive.api import Body
from redrive.kube import resources
from redrive.kube.resources import Key
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.provision import actions
from redrive.provision.desired import Desired, DesiredTopic, Observed, TopicRole, TopicState
from redrive.provision.diff import config_map_actions, diff
from redrive.provision.ownership import Owner, OwnershipRecord

POLICY = Policy(TopicName("shop", "prod", "orders"), "fulfilment")
RETRY, DEAD_LETTER = POLICY.retry_topic, POLICY.dead_letter_topic
LABELS = dict([resources.MANAGED])
CONFIG_MAP: Body = {
    "metadata": {"name": "orders-redrive", "labels": LABELS},
    "data": {"policy.json": "{}"},
}

STAYS = Holds("inactiveTopicPolicies", (("deleteWhileInactive", False),))
KEEPS = KeepsBacklog()
RETAINS, LIMITS = Holds("retention", (("minutes", 5),)), LimitsBacklog(9)
ASKED: tuple[TopicPolicy, ...] = (RETAINS, LIMITS)
"""Policies that a field of the spec asks for."""
roles = st.sampled_from(["a", "b", "c"])
rights = st.frozensets(st.sampled_from(["produce", "consume", "functions"]), min_size=1)
names = st.frozensets(st.sampled_from(["fulfilment", "redrive", "other"]))
NO_POLICIES: Mapping[str, Any] = {}
NO_NAMES: frozenset[str] = frozenset()
DEDUPLICATES, TTL = Deduplicates(), Ttl(0)
QUOTA = {"destination_storage": {"limitSize": 5, "policy": "consumer_backlog_eviction"}}
own_policies: dict[str, st.SearchStrategy[Any]] = {
    DEDUPLICATES.read: st.sampled_from([None, True, False]),
    TTL.read: st.sampled_from([None, 0, 60]),
    KEEPS.read: st.sampled_from([{}, QUOTA]),
}
policies_in_force: dict[str, st.SearchStrategy[Any]] = {
    STAYS.read: st.sampled_from([None, {"deleteWhileInactive": True, "x": 1}]),
    RETAINS.read: st.sampled_from([None, {"minutes": 1}]),
}
policies = st.fixed_dictionaries(own_policies | policies_in_force)
of_namespace = st.fixed_dictionaries(own_policies, optional=policies_in_force)
OF_BROKER = {STAYS.read: {"deleteWhileInactive": True, "x": 3}, RETAINS.read: {"minutes": 0}}
SCHEMA = Schema("JSON", '{"type": "record"}', {"a": "b"})
OWNER = Owner("here", Key("shop", "orders"), "uid-1", "orders/fulfilment")
recorded = st.dictionaries(roles, rights, max_size=2)
records = st.builds(
    OwnershipRecord,
    owner=st.sampled_from(["", str(OWNER), "here/shop/gone"]),
    uid=st.sampled_from(["", "uid-1", "uid-0"]),
    source=st.sampled_from(["", "orders/fulfilment", "payroll/fulfilment"]),
    created=st.booleans(),
    granted=recorded,
    subscription=st.sampled_from(["", "fulfilment"]),
    replaced=st.fixed_dictionaries(
        {},
        optional={
            RETAINS.name: st.sampled_from([None, {"minutes": 1}]),
            LIMITS.name: st.sampled_from([None, {}, QUOTA]),
        },
    ),
)
properties = st.builds(
    lambda r, own: r.to_properties() | own,
    records,
    st.sampled_from([{}, {"x": "y", "redrive.io/schema": SCHEMA.fingerprint}]),
)


def with_partitions(count: int) -> st.SearchStrategy[TopicState]:
    parts = st.tuples(*[st.none() | names] * count) if count else st.tuples(names)
    return st.builds(
        TopicState, st.just(count), parts.map(TopicSubscriptions), policies, properties
    )


def retry_topic(partitions: int | None) -> DesiredTopic:
    policies = (DEDUPLICATES, TTL, STAYS, KEEPS)
    return DesiredTopic(TopicRole.RETRY, RETRY, "fulfilment", partitions, policies)


def dead_letter_topic(partitions: int, asked: tuple[TopicPolicy, ...]) -> DesiredTopic:
    policies: tuple[TopicPolicy, ...] = (TTL, STAYS, KEEPS, *asked)
    return DesiredTopic(TopicRole.DEAD_LETTER, DEAD_LETTER, "redrive", partitions, policies)


states = st.none() | st.integers(0, 4).flatmap(with_partitions)


def existing(
    retry: TopicState | None, dead_letter: TopicState | None
) -> dict[TopicRole, TopicState]:
    both = {TopicRole.RETRY: retry, TopicRole.DEAD_LETTER: dead_letter}
    return {role: state for role, state in both.items() if state is not None}


wanted = st.builds(
    lambda grants, partitions, asked, schema_topics: Desired(
        policy=POLICY,
        owner=OWNER,
        topics=(retry_topic(None), dead_letter_topic(partitions, asked)),
        grants=tuple(Grant(topic, role, may) for (topic, role), may in grants.items()),
        config_map=CONFIG_MAP,
        schema_topics=schema_topics,
    ),
    st.dictionaries(st.tuples(st.sampled_from([RETRY, DEAD_LETTER]), roles), rights, max_size=4),
    st.sampled_from([0, 3]),
    st.sampled_from([(), (RETAINS,), (LIMITS,), ASKED]),
    st.frozensets(st.sampled_from([RETRY, DEAD_LETTER])),
)
permissions = st.dictionaries(
    st.sampled_from([str(RETRY), str(DEAD_LETTER), "persistent://shop/prod/foreign"]),
    st.dictionaries(roles, rights),
)
found_data = st.sampled_from(
    [{}, {"data": None}]
    + [
        {"data": ours | theirs}
        for ours in ({}, {"policy.json": "old"}, {"policy.json": "{}"})
        for theirs in ({}, {"note": "by another"})
    ]
)
found_labels = st.sampled_from([{}, {"labels": {"team": "a"}}, {"labels": LABELS}])
config_maps = st.none() | st.builds(
    lambda data, labels: {"metadata": {"name": "orders-redrive", **labels}, **data},
    found_data,
    found_labels,
)
observed = st.builds(
    Observed,
    source_partitions=st.integers(0, 4),
    source_schema=st.sampled_from([None, SCHEMA, Schema("STRING", "", {})]),
    topics=st.builds(existing, retry=states, dead_letter=states),
    namespace=st.builds(NamespaceState, permissions=permissions),
    inherited=of_namespace,
    config_map=config_maps,
)


def properties_of(state: TopicState) -> Mapping[str, str]:
    assert state.properties is not None
    return state.properties


def subscriptions_of(state: TopicState) -> TopicSubscriptions:
    assert state.subscriptions is not None
    return state.subscriptions


def done(  # noqa: C901 - a case for each action
    planned: Iterable[actions.Action], before: Observed
) -> Observed:
    """Return the state after a broker and an API server have applied *planned*."""
    topics = {
        RETRY: before.topics.get(TopicRole.RETRY),
        DEAD_LETTER: before.topics.get(TopicRole.DEAD_LETTER),
    }
    granted: dict[str, dict[str, frozenset[str]]] = {
        topic: dict(by_role) for topic, by_role in before.namespace.permissions.items()
    }
    config_map = before.config_map
    for action in planned:
        match action:
            case actions.CreateTopic(topic, partitions, marks):
                assert topics[topic] is None
                parts = (NO_NAMES,) * max(partitions, 1)
                in_force = {**OF_BROKER, **before.inherited}
                topics[topic] = TopicState(partitions, TopicSubscriptions(parts), in_force, marks)
            case actions.Mark(topic, marks):
                state = topics[topic]
                assert state is not None
                topics[topic] = change(state, properties={**properties_of(state), **marks})
            case (
                actions.AddPartitions(topic)
                | actions.RestorePartitions(topic)
                | actions.CreateSubscription(topic)
            ):
                state = topics[topic]
                assert state is not None
                topics[topic] = repartitioned(state, action)
            case actions.CopySchema(topic, _, schema):
                state = topics[topic]
                noted = {"redrive.io/schema": schema.fingerprint}
                assert state is not None
                assert properties_of(state).get("redrive.io/schema") != schema.fingerprint
                topics[topic] = change(state, properties={**properties_of(state), **noted})
            case actions.SetTopicPolicy(topic):
                topics[topic] = tuned(topics[topic], action)
            case actions.RestoreTopicPolicy(topic, name, write):
                state = topics[topic]
                assert state is not None
                read = next(asked.read for asked in ASKED if asked.name == name)
                inherits = {**OF_BROKER, **before.inherited} if write.method == "DELETE" else {}
                policies_after = written(state.policies or {}, write, read, inherits)
                topics[topic] = change(state, policies=policies_after)
            case actions.ChangeRights(changes):
                for right in changes:
                    assert topics[right.topic] is not None
                    by_role = granted.setdefault(str(right.topic), {})
                    by_role[right.role] = right.on(by_role.get(right.role, frozenset()))
                    if not by_role[right.role]:
                        del by_role[right.role]
            case actions.CreateConfigMap(body):
                assert config_map is None
                config_map = body
            case actions.PatchConfigMap(body):
                assert config_map is not None
                merged = {**(config_map.get("data") or {}), **body["data"]}
                labels = {**(config_map["metadata"].get("labels") or {}), **LABELS}
                metadata = {**config_map["metadata"], "labels": labels}
                config_map = {**config_map, "metadata": metadata, "data": merged}
    return dataclasses.replace(
        before,
        topics=existing(topics[RETRY], topics[DEAD_LETTER]),
        namespace=NamespaceState(permissions=granted),
        config_map=config_map,
    )


def repartitioned(
    state: TopicState,
    action: actions.AddPartitions | actions.RestorePartitions | actions.CreateSubscription,
) -> TopicState:
    """Return a topic after an action on its partitions or subscriptions."""
    parts, after = subscriptions_of(state).parts, subscriptions_of(state).parts
    match action:
        case actions.RestorePartitions(_, missing):
            assert missing == subscriptions_of(state).missing
            after = tuple(names or NO_NAMES for names in parts)
        case actions.AddPartitions(_, partitions):
            assert 0 < state.partitions < partitions
            everywhere = NO_NAMES.union(*(names for names in parts if names is not None))
            after = (*parts, *[everywhere] * (partitions - len(parts)))
            state = change(state, partitions=partitions)
        case actions.CreateSubscription(_, name):
            assert not subscriptions_of(state).has(name)
            after = tuple((names or NO_NAMES) | {name} for names in parts)
    if not isinstance(action, actions.RestorePartitions):
        assert None not in parts
    return change(state, subscriptions=TopicSubscriptions(after))


def tuned(state: TopicState | None, action: actions.SetTopicPolicy) -> TopicState:
    """Make the write of *action*, or those that follow from the policies in force."""
    assert state is not None
    has, read = state.policies or {}, action.policy.read
    writes = action.policy.writes(has[read]) if action.write is None else [action.write]
    for write in writes:
        has = written(has, write, read)
    return change(state, policies=has)


def written(
    before: Mapping[str, Any], write: Write, read: str, inherited: Mapping[str, Any] = NO_POLICIES
) -> dict[str, Any]:
    """Return the policies of a topic after *write*; a deletion restores those *inherited*."""
    path, _, query = write.path.partition("?")
    value: Any = int(query.removeprefix("messageTTL=")) if path == "messageTTL" else write.body
    if write.method == "DELETE":
        value = inherited.get(read)
    if path == "backlogQuota":
        kind = query.removeprefix("backlogQuotaType=")
        quota = (value or {}).get(kind) if write.method == "DELETE" else write.body
        rest = {
            name: quota_of_kind
            for name, quota_of_kind in (before[read] or {}).items()
            if name != kind
        }
        value = rest if quota is None else {**rest, kind: quota}
    return {**before, read: value}


def change(state: TopicState | None, **fields: Any) -> TopicState:  # noqa: ANN401 - any of its fields
    assert state is not None
    return dataclasses.replace(state, **fields)


@given(wanted, observed)
def test_partly_read_topic_needs_no_action(desired: Desired, before: Observed) -> None:
    states = {role: TopicState(state.partitions) for role, state in before.topics.items()}
    partial = dataclasses.replace(before, topics=states, source_schema=None)
    present = {topic.name for topic in desired.topics if topic.role in states}
    for action in diff(desired, partial):
        if isinstance(
            action,
            (
                actions.CreateTopic,
                actions.Mark,
                actions.RestorePartitions,
                actions.SetTopicPolicy,
                actions.CreateSubscription,
            ),
        ):
            assert action.topic not in present


@given(wanted, observed)
def test_applied_actions_leave_no_diff(desired: Desired, before: Observed) -> None:
    assert diff(desired, done(diff(desired, before), before)) == ()


@given(wanted, observed)
def test_foreign_data_in_config_map_is_kept(desired: Desired, before: Observed) -> None:
    after = done(diff(desired, before), before).config_map
    assert after is not None
    kept = dict((before.config_map or {}).get("data") or {})
    assert after["data"] == kept | CONFIG_MAP["data"]


@pytest.mark.parametrize("labels", [{}, {"labels": {"team": "a"}}])
def test_config_map_without_its_labels_is_patched(labels: Body) -> None:
    have = {"metadata": {"name": "orders-redrive", **labels}, "data": CONFIG_MAP["data"]}
    [action] = config_map_actions(CONFIG_MAP, have)
    assert isinstance(action, actions.PatchConfigMap)
    assert action.body["metadata"]["labels"] == LABELS


@given(wanted, observed)
def test_only_recorded_rights_are_revoked(desired: Desired, before: Observed) -> None:
    lost = flat(before.namespace.permissions) - flat(
        done(diff(desired, before), before).namespace.permissions
    )
    ours = {
        (str(topic.name), role, action)
        for topic, state in desired.pairs(before)
        if state is not None and OwnershipRecord.of(properties_of(state)).is_of(OWNER)
        for role, may in OwnershipRecord.of(properties_of(state)).granted.items()
        for action in may
    }
    assert lost <= ours


@given(wanted, wanted, observed)
def test_grants_taken_back_restore_original_rights(
    first: Desired, second: Desired, before: Observed
) -> None:
    fresh = unmarked_topics(before)
    state = fresh
    for desired in (first, second, dataclasses.replace(first, grants=())):
        state = done(diff(desired, state), state)
    assert flat(state.namespace.permissions) == flat(fresh.namespace.permissions)


@given(wanted, observed)
def test_removed_field_restores_original_policy(desired: Desired, before: Observed) -> None:
    def asking(asked: tuple[TopicPolicy, ...]) -> Desired:
        topic = desired.topic(TopicRole.DEAD_LETTER)
        assert topic is not None
        topic = dead_letter_topic(topic.partitions or 0, asked)
        return dataclasses.replace(desired, topics=(desired.retry, topic))

    state = new = dataclasses.replace(
        before, topics=existing(before.topics.get(TopicRole.RETRY), None)
    )
    for asked in (ASKED, ()):
        state = done(diff(asking(asked), state), state)
    expected = done(diff(asking(()), new), new).topics[TopicRole.DEAD_LETTER]
    after = state.topics[TopicRole.DEAD_LETTER]
    assert after.policies == expected.policies
    record, expected_record = (OwnershipRecord.of(properties_of(s)) for s in (after, expected))
    assert record == expected_record


@given(wanted, observed, st.data())
def test_crash_between_actions_restores_original_rights(
    desired: Desired, before: Observed, data: st.DataObject
) -> None:
    fresh = unmarked_topics(before)
    state = fresh
    for wish in (desired, desired, dataclasses.replace(desired, grants=())):
        planned = diff(wish, state)
        state = done(planned[: data.draw(st.integers(0, len(planned)))], state)
        state = done(diff(wish, state), state)
    assert flat(state.namespace.permissions) == flat(fresh.namespace.permissions)


@given(wanted, observed)
def test_topic_record_has_owner_and_created_mark(desired: Desired, before: Observed) -> None:
    after = done(diff(desired, before), before)
    for role in (TopicRole.RETRY, TopicRole.DEAD_LETTER):
        was, now = before.topics.get(role), after.topics[role]
        record = OwnershipRecord.of(properties_of(now))
        assert (record.owner, record.uid, record.source) == (
            str(OWNER),
            OWNER.uid,
            OWNER.source,
        )
        assert record.created == (was is None or OwnershipRecord.of(properties_of(was)).created)


@given(wanted, observed)
def test_subscription_is_recorded_only_if_redrive_added_it(
    desired: Desired, before: Observed
) -> None:
    after = done(diff(desired, before), before)
    for role, name in ((TopicRole.RETRY, "fulfilment"), (TopicRole.DEAD_LETTER, "redrive")):
        was, now = before.topics.get(role), after.topics[role]
        record = OwnershipRecord() if was is None else OwnershipRecord.of(properties_of(was))
        added = (
            was is not None and not subscriptions_of(was).has_some_of(name) and not record.created
        )
        assert OwnershipRecord.of(properties_of(now)).subscription == (
            name if added else record.subscription
        )


@given(wanted, observed)
def test_schema_of_source_is_copied_to_topics(desired: Desired, before: Observed) -> None:
    copies = [s for s in diff(desired, before) if isinstance(s, actions.CopySchema)]
    assert {copy.topic for copy in copies} <= desired.schema_topics
    if before.source_schema is None:
        assert copies == []
        return
    assert all(copy.schema == before.source_schema for copy in copies)
    after = done(diff(desired, before), before)
    for topic, state in desired.pairs(after):
        assert state is not None
        if topic.name in desired.schema_topics:
            assert properties_of(state)["redrive.io/schema"] == before.source_schema.fingerprint


@given(wanted, observed)
def test_foreign_properties_are_kept(desired: Desired, before: Observed) -> None:
    after = done(diff(desired, before), before)
    for role in (TopicRole.RETRY, TopicRole.DEAD_LETTER):
        was, now = before.topics.get(role), after.topics[role]
        assert was is None or properties_of(now).get("x") == properties_of(was).get("x")


@given(wanted, observed)
def test_only_needed_rights_are_added(desired: Desired, before: Observed) -> None:
    after = done(diff(desired, before), before)
    needed = {
        (str(grant.topic), grant.role, action)
        for grant in desired.grants
        for action in grant.actions
    }
    assert flat(after.namespace.permissions) - flat(before.namespace.permissions) <= needed


@given(wanted, observed)
def test_actions_are_planned_in_dependency_order(desired: Desired, before: Observed) -> None:
    order = {
        actions.CreateTopic: 0,
        actions.Mark: 0,
        actions.RestorePartitions: 1,
        actions.AddPartitions: 1.5,
        actions.ChangeRights: 2,
        actions.CreateSubscription: 3,
        actions.RestoreTopicPolicy: 3.2,
        actions.SetTopicPolicy: 4,
        actions.CopySchema: 5,
        actions.CreateConfigMap: 6,
        actions.PatchConfigMap: 6,
    }
    planned = diff(desired, before)
    places = [order[type(action)] for action in planned]
    marks_again = [
        place
        for place, action in enumerate(planned)
        if isinstance(action, actions.Mark) and place and max(places[:place])
    ]
    for place in marks_again:  # removed and added values are recorded after the fact
        places[place] = 3.5
    assert places == sorted(places)


@given(wanted, observed)
def test_rights_of_namespace_are_one_action(desired: Desired, before: Observed) -> None:
    planned = diff(desired, before)
    assert sum(isinstance(action, actions.ChangeRights) for action in planned) <= 1


@given(wanted, observed.filter(lambda before: TopicRole.RETRY not in before.topics))
def test_new_retry_topic_has_partitions_of_its_source(desired: Desired, before: Observed) -> None:
    assert created(diff(desired, before))[RETRY] == before.source_partitions
    other = with_retry_partitions(desired, 7)
    assert created(diff(other, before))[RETRY] == 7


@given(wanted, observed, st.none() | st.integers(1, 5))
def test_partitions_are_added_and_never_removed(
    desired: Desired, before: Observed, asked: int | None
) -> None:
    desired = with_retry_partitions(desired, asked)
    after = done(diff(desired, before), before)
    retry, retry_before = after.topics[TopicRole.RETRY], before.topics.get(TopicRole.RETRY)
    if retry_before is not None and retry_before.partitions:
        enough = before.source_partitions if asked is None else asked
        assert retry.partitions == max(retry_before.partitions, enough)
    elif retry_before is not None:
        assert retry.partitions == 0


def with_retry_partitions(desired: Desired, count: int | None) -> Desired:
    return dataclasses.replace(desired, topics=(retry_topic(count), *desired.topics[1:]))


def test_actions_are_described_in_one_line() -> None:
    line = actions.in_words(
        (
            actions.CreateTopic(RETRY, 0, {}),
            actions.Mark(RETRY, {"redrive.io/owner": "here/shop/orders"}),
            actions.Mark(RETRY, {"redrive.io/granted": "{}"}),
            actions.RestorePartitions(RETRY, (0, 2)),
            actions.AddPartitions(RETRY, 4),
            actions.SetTopicPolicy(RETRY, DEDUPLICATES, Write("deduplicationEnabled", body=True)),
            actions.CopySchema(RETRY, POLICY.topic, SCHEMA),
            actions.ChangeRights(
                (
                    RightsChange(RETRY, "a", give=frozenset({"produce", "consume"})),
                    RightsChange(RETRY, "b", take=frozenset({"produce"})),
                )
            ),
            actions.CreateSubscription(RETRY, "fulfilment"),
            actions.CreateConfigMap(CONFIG_MAP),
            actions.PatchConfigMap(CONFIG_MAP),
        )
    )
    assert line == (
        f"created {RETRY} with no partitions; recorded here/shop/orders as owner of {RETRY}; "
        "recorded on orders-fulfilment-RETRY the additions of redrive; "
        f"recreated missing partitions of {RETRY}: 0, 2; "
        f"added partitions to {RETRY}: 4 in total; "
        "set deduplication on orders-fulfilment-RETRY; "
        "copied the source topic's JSON schema to orders-fulfilment-RETRY; "
        "granted consume+produce on orders-fulfilment-RETRY to a, "
        "revoked produce on orders-fulfilment-RETRY from b; "
        "created subscription fulfilment on orders-fulfilment-RETRY; "
        "created ConfigMap orders-redrive; updated ConfigMap orders-redrive"
    )


def unmarked_topics(before: Observed) -> Observed:
    topics = {role: change(state, properties={}) for role, state in before.topics.items()}
    return dataclasses.replace(before, topics=topics)


def created(planned: Iterable[actions.Action]) -> dict[TopicName, int]:
    return {s.topic: s.partitions for s in planned if isinstance(s, actions.CreateTopic)}


def flat(
    granted: Mapping[str, Mapping[str, frozenset[str]]],
) -> set[tuple[str, str, str]]:
    return {
        (topic, role, action)
        for topic, by_role in granted.items()
        for role, may in by_role.items()
        for action in may
    }

"""Difference between desired and observed state, as actions; pure.

The order follows the broker:

1. Create topics. A grant on a missing topic is refused.
2. Change all grants at once, then create subscriptions.
3. Withdraw topic policies that a field of the spec no longer requires, then their record.
4. Set topic policies: a policy that a broker refuses must not cost messages.
5. Copy schemas, and write the ConfigMap.

A grant is recorded before it is made, and the record is cleared after the grant is revoked. A
subscription is recorded after it was created, so a recorded subscription was never created by
others.

A value that was not read (None in `TopicState`) needs no action. So one function serves reconciles,
which read everything, and the poll of namespace facts, which reads only lists.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from redrive.admin.model import Schema, TopicSubscriptions
from redrive.admin.policies import withdrawing
from redrive.api import Body
from redrive.kube.resources import retained_config_map
from redrive.provision import ownership
from redrive.provision.actions import (
    Action,
    AddPartitions,
    ChangeRights,
    CopySchema,
    CreateConfigMap,
    CreateSubscription,
    CreateTopic,
    Mark,
    PatchConfigMap,
    RestorePartitions,
    RestoreTopicPolicy,
    SetTopicPolicy,
)
from redrive.provision.desired import (
    POLICIES_OF_FIELDS,
    Desired,
    DesiredTopic,
    Observed,
    TopicState,
)
from redrive.provision.ownership import NOTHING, Granted, Owner, OwnershipRecord, Rights


@dataclass(frozen=True)
class _Pair:
    """One topic: desired state, observed state, and the change of its grants."""

    want: DesiredTopic
    have: TopicState | None
    owner: Owner
    rights: Rights
    about_to_create: bool

    @property
    def subscriptions(self) -> TopicSubscriptions | None:
        """Return the topic's subscriptions; None if it does not exist or they were not read."""
        return None if self.have is None else self.have.subscriptions

    @property
    def lacks_subscription(self) -> bool:
        """Return True if any partition can receive messages before the subscription exists."""
        held = self.subscriptions
        return self.have is None or (held is not None and not held.has(self.want.subscription))

    @property
    def properties(self) -> Mapping[str, str]:
        """Return the topic's properties; empty if it does not exist or they were not read."""
        return {} if self.have is None else self.have.properties or {}

    @property
    def has_record(self) -> bool:
        """Return True if the recorded ownership is known."""
        return self.have is None or self.have.properties is not None

    @cached_property
    def record(self) -> OwnershipRecord:
        """Return the recorded ownership; of a missing topic, the one it will be created with."""
        if self.have is None:
            return OwnershipRecord(created=True).owned_by(self.owner)
        record = OwnershipRecord.of(self.properties)
        names = frozenset[str]() if self.subscriptions is None else self.subscriptions.names
        if ownership.created_unmarked(self.properties, names, about_to=self.about_to_create):
            return dataclasses.replace(record, created=True)
        return record

    @cached_property
    def record_before(self) -> OwnershipRecord:
        """Return the record that must exist before grants or topic policies change."""
        replaced = {**self._originals, **self.record.replaced}
        return dataclasses.replace(
            self.record, granted=self.rights.before, replaced=replaced
        ).owned_by(self.owner)

    @property
    def record_after(self) -> OwnershipRecord:
        """Return the record after all actions."""
        held, subscription = self.subscriptions, self.want.subscription
        is_first = held is None or not held.has_some_of(subscription)
        adds = is_first and not self.record.created
        return dataclasses.replace(
            self.record_before,
            granted=self.rights.after,
            subscription=subscription if adds else self.record.subscription,
            replaced={
                name: before
                for name, before in self.record_before.replaced.items()
                if name not in self.withdrawn
            },
        )

    @cached_property
    def withdrawn(self) -> Mapping[str, Any]:
        """Return the policies that fields of the spec no longer require, with their old values."""
        unasked = POLICIES_OF_FIELDS.difference(policy.name for policy in self.want.policies)
        replaced = self.record.replaced.items()
        return {name: before for name, before in replaced if name in unasked}

    @property
    def _originals(self) -> Mapping[str, Any]:
        """Return the values to record; on a topic of redrive only those of fields in the spec."""
        originals = {} if self.have is None else self.have.originals
        if not self.record.created:
            return originals
        asked = POLICIES_OF_FIELDS.intersection(policy.name for policy in self.want.policies)
        return {name: originals.get(name) or None for name in asked}  # {} means no quotas


def diff(desired: Desired, observed: Observed) -> tuple[Action, ...]:
    """Return the missing actions in order; empty if the observed state is as desired."""
    pairs, unused = tuple(_pairs(desired, observed)), _unused(desired, observed)
    return (
        *_topics(pairs, observed),
        *_rights(pairs, unused),
        *(
            CreateSubscription(pair.want.name, pair.want.subscription)
            for pair in pairs
            if pair.lacks_subscription
        ),
        *(action for pair in pairs for action in _withdrawals(pair, observed)),
        *_marks_after(pairs),
        *_mark_unused(desired, observed, unused),
        *(action for pair in pairs for action in _topic_policies(pair, observed)),
        *_schemas(pairs, desired, observed.source_schema),
        *config_map_actions(desired.config_map, observed.config_map),
    )


def _pairs(desired: Desired, observed: Observed) -> Iterator[_Pair]:
    for want, have in desired.pairs(observed):
        needed = {g.role: g.actions for g in desired.grants if g.topic == want.name}
        recorded = {} if have is None else _inherited(have, needed, desired.owner)
        may = observed.namespace.permissions.get(str(want.name), {})
        rights = ownership.rights(want.name, needed, may, recorded)
        yield _Pair(want, have, desired.owner, rights, str(want.name) in desired.creating)


def _inherited(have: TopicState, needed: Granted, owner: Owner) -> Granted:
    """Return the recorded grants that this policy may revoke.

    Grants of a former owner that this policy does not need are kept: the former owner's consumers
    may still run. The same holds if a user removed the owner to give the topic to this policy.
    """
    record = OwnershipRecord.of(have.properties or {})
    if record.is_of(owner):
        return record.granted
    return {role: may & needed.get(role, NOTHING) for role, may in record.granted.items()}


def _topics(
    pairs: Sequence[_Pair], observed: Observed
) -> Iterator[CreateTopic | Mark | RestorePartitions | AddPartitions]:
    source = observed.source_partitions
    for pair in pairs:
        if pair.have is None:
            count = pair.want.count_partitions(source)
            yield CreateTopic(pair.want.name, count, pair.record_before.to_properties())
        elif pair.has_record and (changes := pair.record_before.changes(pair.properties)):
            yield Mark(pair.want.name, changes)
    for pair in pairs:
        if pair.subscriptions is not None and pair.subscriptions.missing:
            yield RestorePartitions(pair.want.name, pair.subscriptions.missing)
    for pair in pairs:
        count = pair.want.count_partitions(source)
        if pair.have is not None and 0 < pair.have.partitions < count:
            yield AddPartitions(pair.want.name, count)


def _topic_policies(pair: _Pair, observed: Observed) -> Iterator[SetTopicPolicy]:
    policies = observed.inherited if pair.have is None else pair.have.policies
    if policies is None:
        return
    for policy in pair.want.policies:
        if pair.have is None and policy.read not in {policy.own, *policies}:
            yield SetTopicPolicy(pair.want.name, policy, None)
            continue
        for write in policy.writes(policies.get(policy.read)):
            yield SetTopicPolicy(pair.want.name, policy, write)


def _withdrawals(pair: _Pair, observed: Observed) -> Iterator[RestoreTopicPolicy]:
    for name, before in pair.withdrawn.items():
        for write in withdrawing(name, before, observed.inherited):
            yield RestoreTopicPolicy(pair.want.name, name, write)


def _schemas(
    pairs: Sequence[_Pair], desired: Desired, schema: Schema | None
) -> Iterator[CopySchema]:
    if schema is None:
        return
    for pair in pairs:
        is_stored = pair.properties.get(ownership.SCHEMA) == schema.fingerprint
        if pair.want.name in desired.schema_topics and not is_stored:
            yield CopySchema(pair.want.name, desired.policy.topic, schema)


def _rights(pairs: Sequence[_Pair], unused: Rights) -> Iterator[ChangeRights]:
    changes = (*(change for pair in pairs for change in pair.rights.changes), *unused.changes)
    if changes:
        yield ChangeRights(changes)


def _unused(desired: Desired, observed: Observed) -> Rights:
    """Return the change of grants on the dead-letter topic of a policy that discards.

    Consumers may still run with the previous policy. So grants of roles that the policy names are
    kept, and no grant is added.
    """
    have, topic = observed.unused, desired.unused
    record = OwnershipRecord.of({} if have is None else have.properties or {})
    if topic is None or not record.is_of(desired.owner):
        return Rights((), {}, {})
    may = observed.namespace.permissions.get(str(topic), {})
    named = {grant.role: grant.actions for grant in desired.tolerated}
    kept = {
        role: actions & named.get(role, NOTHING) & may.get(role, NOTHING)
        for role, actions in record.granted.items()
    }
    return ownership.rights(topic, kept, may, record.granted)


def _mark_unused(desired: Desired, observed: Observed, rights: Rights) -> Iterator[Mark]:
    if rights.changes and desired.unused is not None and observed.unused is not None:
        properties = observed.unused.properties or {}
        after = dataclasses.replace(OwnershipRecord.of(properties), granted=rights.after)
        yield Mark(desired.unused, after.changes(properties))


def _marks_after(pairs: Sequence[_Pair]) -> Iterator[Mark]:
    for pair in pairs:
        if pair.has_record and (
            changes := pair.record_after.changes(pair.record_before.to_properties())
        ):
            yield Mark(pair.want.name, changes)


def config_map_actions(want: Body, have: Body | None) -> Iterator[CreateConfigMap | PatchConfigMap]:
    """Yield the action that the ConfigMap of consumers needs; keys of others are kept."""
    if have is None:
        yield CreateConfigMap(want)
        return
    needed, existing = retained_config_map(want), retained_config_map(have)
    as_labelled = needed["metadata"]["labels"] == existing["metadata"].get("labels")
    if not as_labelled or needed["data"] != existing.get("data"):
        yield PatchConfigMap(want)

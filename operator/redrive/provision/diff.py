"""What is wanted, what is there → the actions between them; pure.

The order is the broker's: a grant on a missing topic is refused, and it costs least when topics
are made first, then all rights are granted at once, then subscriptions are made. All this comes
before what tunes the topics: a topic policy that a broker refuses must not cost messages. A topic
policy that a field of the spec asked for, and does no more, goes before its record. What redrive
adds to the rights of roles is on record before it is granted, and off the record after it
is taken back; a subscription is on record after it was made, so that none on record was made by
others.

What was not read (None in `TopicState`) needs no action. So the same function serves a reconcile,
with all facts, and a resync, with those that lists of a Pulsar namespace show.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from redrive.admin.model import Schema
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
    partitions_of_retry,
)
from redrive.provision.ownership import NOTHING, Granted, Owner, OwnershipRecord, Rights


@dataclass(frozen=True)
class _Pair:
    """One topic: as it should be, as it is, and what becomes of the rights on it."""

    want: DesiredTopic
    have: TopicState | None
    owner: Owner
    rights: Rights
    about_to_create: bool

    @property
    def lacks_subscription(self) -> bool:
        """Whether a message may come that is not kept for it; on one partition is enough."""
        if self.have is None:
            return True
        found = self.have.subscriptions
        return found is not None and not found.has(self.want.subscription)

    @property
    def is_first_to_subscribe(self) -> bool:
        """Whether the subscription is nowhere: one that is on some partitions has an owner."""
        found = None if self.have is None else self.have.subscriptions
        return found is None or not found.has_some_of(self.want.subscription)

    @property
    def properties(self) -> Mapping[str, str]:
        """Return the topic's properties; none of one that is not there, or was not read."""
        return {} if self.have is None else self.have.properties or {}

    @property
    def has_record(self) -> bool:
        """Whether it is known what is on record."""
        return self.have is None or self.have.properties is not None

    @cached_property
    def record(self) -> OwnershipRecord:
        """Return what the topic's properties say; of one that will be created, what they will."""
        if self.have is None:
            return OwnershipRecord(created=True).owned_by(self.owner)
        record = OwnershipRecord.of(self.properties)
        found = None if self.have is None else self.have.subscriptions
        names = frozenset[str]() if found is None else found.names
        if ownership.created_unmarked(self.properties, names, about_to=self.about_to_create):
            return dataclasses.replace(record, created=True)
        return record

    @cached_property
    def record_before(self) -> OwnershipRecord:
        """Return what has to be on record before any right is granted, or policy changed."""
        replaced = {**self._originals, **self.record.replaced}
        return dataclasses.replace(
            self.record, granted=self.rights.before, replaced=replaced
        ).owned_by(self.owner)

    @property
    def record_after(self) -> OwnershipRecord:
        """Return what is on record once all is done."""
        adds = self.is_first_to_subscribe and not self.record.created
        return dataclasses.replace(
            self.record_before,
            granted=self.rights.after,
            subscription=self.want.subscription if adds else self.record.subscription,
            replaced={
                name: before
                for name, before in self.record_before.replaced.items()
                if name not in self.withdrawn
            },
        )

    @cached_property
    def withdrawn(self) -> Mapping[str, Any]:
        """Return what fields of the spec asked for, and do no more, with what was there before."""
        unasked = POLICIES_OF_FIELDS.difference(policy.name for policy in self.want.policies)
        replaced = self.record.replaced.items()
        return {name: before for name, before in replaced if name in unasked}

    @property
    def _originals(self) -> Mapping[str, Any]:
        """Return what is replaced: on a topic of redrive's, only what fields ask for counts."""
        found = {} if self.have is None else self.have.originals
        if not self.record.created:
            return found
        asked = POLICIES_OF_FIELDS.intersection(policy.name for policy in self.want.policies)
        return {name: found.get(name) or None for name in asked}  # no quotas are {}


def diff(desired: Desired, observed: Observed) -> tuple[Action, ...]:
    """Return what has to be done, in order; nothing where all is as it should be."""
    pairs, unused = tuple(_pairs(desired, observed)), _unused(desired, observed)
    return (
        *_topics(pairs, desired, observed),
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
        *(
            action
            for pair in pairs
            if pair.want.name in desired.schema_topics
            for action in _schema(pair, desired, observed.source_schema)
        ),
        *config_map_actions(desired.config_map, observed.config_map),
    )


def _pairs(desired: Desired, observed: Observed) -> Iterator[_Pair]:
    for want, have in desired.pairs(observed):
        needed = {g.role: g.actions for g in desired.grants if g.topic == want.name}
        recorded = {} if have is None else _inherited(have, needed, desired.owner)
        may = observed.permissions.get(str(want.name), {})
        rights = ownership.rights(want.name, needed, may, recorded)
        yield _Pair(want, have, desired.owner, rights, str(want.name) in desired.creating)


def _inherited(have: TopicState, needed: Granted, owner: Owner) -> Granted:
    """Return which of the rights on record are this policy's to take back.

    What a policy granted that is gone, and its successor does not need, stays: its consumers may
    still run. So may those of a policy whose mark was taken off, to give the topic to this one.
    """
    record = OwnershipRecord.of(have.properties or {})
    if record.is_of(owner):
        return record.granted
    return {role: may & needed.get(role, NOTHING) for role, may in record.granted.items()}


def _topics(
    pairs: Sequence[_Pair], desired: Desired, observed: Observed
) -> Iterator[CreateTopic | Mark | RestorePartitions | AddPartitions]:
    partitions = partitions_of_retry(desired, observed.source_partitions)
    for pair in pairs:
        if pair.have is None:
            count = _partitions(pair, desired, partitions)
            yield CreateTopic(pair.want.name, count, pair.record_before.to_properties())
        elif pair.has_record and (changes := pair.record_before.changes(pair.properties)):
            yield Mark(pair.want.name, changes)
    for pair in pairs:
        found = None if pair.have is None else pair.have.subscriptions
        if found is not None and found.missing:
            yield RestorePartitions(pair.want.name, found.missing)
    for pair in pairs:
        count = _partitions(pair, desired, partitions)
        if pair.have is not None and 0 < pair.have.partitions < count:
            yield AddPartitions(pair.want.name, count)


def _partitions(pair: _Pair, desired: Desired, retry: int) -> int:
    """Return how many partitions a topic should have: one of records none, for their order."""
    if pair.want is desired.retry:
        return retry
    return 0 if pair.want in desired.records else desired.dead_letter_partitions


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


def _schema(pair: _Pair, desired: Desired, schema: Schema | None) -> Iterator[CopySchema]:
    if schema is not None and pair.properties.get(ownership.SCHEMA) != schema.fingerprint:
        yield CopySchema(pair.want.name, desired.policy.topic, schema)


def _rights(pairs: Sequence[_Pair], unused: Rights) -> Iterator[ChangeRights]:
    changes = (*(each for pair in pairs for each in pair.rights.changes), *unused.changes)
    if changes:
        yield ChangeRights(changes)


def _unused(desired: Desired, observed: Observed) -> Rights:
    """Return how the rights are changed on the dead-letter topic of a policy that discards.

    Its consumers may still run with the policy before, so nothing is taken from a role that the
    policy names, and nothing is given either.
    """
    have, topic = observed.unused, desired.unused
    record = OwnershipRecord.of({} if have is None else have.properties or {})
    if topic is None or not record.is_of(desired.owner):
        return Rights((), {}, {})
    may = observed.permissions.get(str(topic), {})
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
    """Yield what makes the ConfigMap for consumers as it should be; other keys are not ours."""
    if have is None:
        yield CreateConfigMap(want)
        return
    needed, found = retained_config_map(want), retained_config_map(have)
    as_labelled = needed["metadata"]["labels"] == found["metadata"].get("labels")
    if not as_labelled or needed["data"] != found.get("data"):
        yield PatchConfigMap(want)

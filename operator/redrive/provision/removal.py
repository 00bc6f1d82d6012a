"""What a deleted policy leaves → the actions that take it away, and what stays and why; pure.

Called by `finalize`. Only what is marked as this policy's is looked at. A topic that redrive made
is deleted as a whole; from one that was there before goes what redrive added to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from redrive.admin.model import RightsChange, TopicUsage
from redrive.admin.policies import (
    DELAYED_DELIVERY,
    DelaysWithin,
    KeepsBacklog,
    LimitsBacklog,
    restoring,
)
from redrive.api.choices import DeletionPolicy
from redrive.kube.resources import Key
from redrive.policy.naming import LEDGER_SUBSCRIPTION, TopicName
from redrive.provision import ownership
from redrive.provision.actions import (
    Action,
    ChangeRights,
    DeleteSubscription,
    DeleteTopic,
    Mark,
    RestoreTopicPolicy,
)
from redrive.provision.errors import InUseError
from redrive.provision.ownership import Granted, Owner, OwnershipRecord, Rights


@dataclass(frozen=True)
class Left:
    """A topic that a deleted policy leaves.

    Attributes:
        subscription: the policy's own on it, which keeps what has not been consumed.
        permissions: who may do what on it.
        may_delete: whether the connection allows to delete it.
        about_to_create: whether redrive was about to create it, and may have lost its mark.
        heir: a policy of the same namespace that needs it now, if there is one.
        follows: a topic with which it stays: a ledger says what of the dead letters is moved.
    """

    name: TopicName
    subscription: str
    partitioned: bool
    properties: Mapping[str, str]
    usage: TopicUsage
    permissions: Granted
    heir: Key | None
    may_delete: bool = True
    about_to_create: bool = False
    follows: TopicName | None = None

    def record(self, owner: Owner) -> OwnershipRecord:
        """Return what is on record; of a topic that *owner* created unmarked, what should be."""
        names = self.usage.subscriptions
        if ownership.created_unmarked(self.properties, names, about_to=self.about_to_create):
            return OwnershipRecord(created=True).owned_by(owner)
        return OwnershipRecord.of(self.properties)


@dataclass(frozen=True)
class Removal:
    """What is to be done, in order, and a sentence for each thing that stays."""

    actions: tuple[Action, ...]
    stays: tuple[str, ...]


def removal(owner: Owner, policy: DeletionPolicy, left: Sequence[Left]) -> Removal:
    """Plan the removal of what a policy leaves.

    Args:
        owner: the policy that is deleted.
        policy: any but `Retain`.
        left: its topics, as far as they are there; what follows another comes behind it.

    Raises:
        InUseError: clients are connected to what would be deleted.
    """
    if policy is DeletionPolicy.REVOKE_GRANTS:
        return _revocation(owner, left)
    whole, parts, stays = [], [], []
    kept: set[TopicName] = set()
    for topic in left:
        follows = topic.follows if topic.follows in kept else None
        why = f"belongs to {follows}" if follows else _stays(topic, owner, policy)
        if why:
            kept.add(topic.name)
            stays.append(f"{topic.name} {why}")
        elif topic.record(owner).created:
            whole.append(topic)
        else:
            kept.add(topic.name)
            parts.append(_Part.of(topic, policy))
            stays.append(f"{topic.name} was there before")
    stays += [part.stays for part in parts if part.stays]
    _refuse_against_clients([*map(_clients, whole), *(part.clients for part in parts)])
    changes = tuple(change for part in parts for change in part.rights.changes)
    return Removal(
        actions=(
            *(DeleteTopic(topic.name, topic.partitioned) for topic in whole),
            *([ChangeRights(changes)] if changes else []),
            *(action for part in parts for action in part.actions),
        ),
        stays=tuple(stays),
    )


def _revocation(owner: Owner, left: Sequence[Left]) -> Removal:
    """Plan to take back the rights that redrive granted, and to leave all else."""
    changes: list[RightsChange] = []
    marks: list[Mark] = []
    for topic in left:
        record = topic.record(owner)
        if record.is_of(owner) and topic.heir is None and record.granted:
            granted = ownership.rights(topic.name, {}, topic.permissions, record.granted)
            changes += granted.changes
            marks.append(Mark(topic.name, replace(record, granted={}).changes(topic.properties)))
    return Removal(
        actions=(*([ChangeRights(tuple(changes))] if changes else []), *marks),
        stays=tuple(str(topic.name) for topic in left),
    )


def _refuse_against_clients(clients: Sequence[str]) -> None:
    if any(clients):
        raise InUseError(
            "clients are connected to what is to be deleted: they would lose messages, or create a "
            "deleted topic again where topics are created by themselves",
            got="; ".join(filter(None, clients)),
            remedy="stop them",
        )


def _stays(topic: Left, owner: Owner, policy: DeletionPolicy) -> str:
    """Say why a topic stays exactly as it is; nothing where it does not."""
    record = topic.record(owner)
    if not record.is_of(owner):
        return f"is kept by {record.owner}" if record.owner else "has no mark of this policy"
    if topic.heir is not None:
        return f"is needed by RetryPolicy {topic.heir}"
    if record.created and not topic.may_delete:
        return "may not be deleted by what its PulsarConnection allows"
    if policy is DeletionPolicy.DELETE_IF_EMPTY and record.created:
        return _holds(topic)
    return ""


def _holds(topic: Left) -> str:
    found = topic.usage.subscriptions.items()
    waiting = {
        name: stands.backlog
        for name, stands in found
        if stands.backlog and name != LEDGER_SUBSCRIPTION
    }
    if waiting:
        counts = ", ".join(f"{count} for {name}" for name, count in sorted(waiting.items()))
        return f"holds messages ({counts})"
    if topic.usage.uncounted:
        return f"holds {topic.usage.uncounted} bytes without a subscription {topic.subscription}"
    return ""


@dataclass(frozen=True)
class _Part:
    """What redrive added to a topic that was there before.

    Attributes:
        rights: what is left of the rights once redrive's are taken back.
        actions: the rest of what is to be done.
        clients: who is connected to what goes.
        stays: why something stays after all.
    """

    rights: Rights
    actions: tuple[Action, ...]
    clients: str
    stays: str

    @classmethod
    def of(cls, topic: Left, policy: DeletionPolicy) -> _Part:
        record = OwnershipRecord.of(topic.properties)
        rights = ownership.rights(topic.name, {}, topic.permissions, record.granted)
        mark = Mark(topic.name, OwnershipRecord().changes(topic.properties))
        found = topic.usage.subscriptions.get(record.subscription)
        restore: Iterator[Action] = (
            RestoreTopicPolicy(topic.name, policy, write)
            for policy, before in _as_before(record).items()
            for write in restoring(policy, before)
        )
        back: tuple[Action, ...] = (*restore, mark)
        if found is None:
            return cls(rights, back, "", "")
        name = f"subscription {record.subscription} on {topic.name}"
        if found.backlog and policy is DeletionPolicy.DELETE_IF_EMPTY:
            # What waits there would be dropped by the time to live that the topic had before.
            kept = Mark(
                topic.name, OwnershipRecord(replaced=record.replaced).changes(topic.properties)
            )
            return cls(rights, (kept,), "", f"{name} holds {found.backlog} messages")
        clients = f"{name}: {found.consumers} consumers" if found.consumers else ""
        return cls(
            rights, (DeleteSubscription(topic.name, record.subscription), *back), clients, ""
        )


def _as_before(record: OwnershipRecord) -> Mapping[str, Any]:
    """Return what a topic had; of two records of one policy that which is of all of it."""
    parts = {part for part, whole in _PARTS.items() if whole in record.replaced}
    return {name: before for name, before in record.replaced.items() if name not in parts}


_PARTS = {LimitsBacklog.name: KeepsBacklog.name, DelaysWithin.name: DELAYED_DELIVERY}


def _clients(topic: Left) -> str:
    """Say who is connected to a topic; empty if there is none."""
    consumers = sum(found.consumers for found in topic.usage.subscriptions.values())
    producers = topic.usage.producers
    if not consumers and not producers:
        return ""
    return f"{topic.name}: {consumers} consumers, {producers} producers"

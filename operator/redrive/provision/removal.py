"""What a deleted policy leaves → the actions that take it away, and what stays and why; pure.

Called by `finalize`. Only what is marked as this policy's is looked at. A topic that redrive made
is deleted as a whole; from one that was there before goes what redrive added to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from redrive.admin.model import TopicUsage
from redrive.api.choices import DeletionPolicy
from redrive.kube.resources import Key
from redrive.policy.naming import LEDGER_SUBSCRIPTION, TopicName
from redrive.provision import ownership
from redrive.provision.actions import Action, ChangeRights, DeleteSubscription, DeleteTopic, Mark
from redrive.provision.errors import InUseError
from redrive.provision.ownership import Granted, Owner, OwnershipRecord, Rights


@dataclass(frozen=True)
class Left:
    """A topic that a deleted policy leaves.

    Attributes:
        subscription: the policy's own on it, which keeps what has not been consumed.
        permissions: who may do what on it.
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
    follows: TopicName | None = None


@dataclass(frozen=True)
class Removal:
    """What is to be done, in order, and a sentence for each thing that stays."""

    actions: tuple[Action, ...]
    stays: tuple[str, ...]


def removal(owner: Owner, policy: DeletionPolicy, left: Sequence[Left]) -> Removal:
    """Plan the removal of what a policy leaves.

    Args:
        owner: the policy that is deleted.
        policy: `Delete` or `DeleteIfEmpty`.
        left: its topics, as far as they are there; what follows another comes behind it.

    Raises:
        InUseError: clients are connected to what would be deleted.
    """
    whole, parts, stays = [], [], []
    kept: set[TopicName] = set()
    for topic in left:
        follows = topic.follows if topic.follows in kept else None
        why = f"belongs to {follows}" if follows else _stays(topic, owner, policy)
        if why:
            kept.add(topic.name)
            stays.append(f"{topic.name} {why}")
        elif OwnershipRecord.of(topic.properties).created:
            whole.append(topic)
        else:
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
    record = OwnershipRecord.of(topic.properties)
    if not record.is_of(owner):
        return f"is kept by {record.owner}" if record.owner else "has no mark of this policy"
    if topic.heir is not None:
        return f"is needed by RetryPolicy {topic.heir}"
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
        if found is None:
            return cls(rights, (mark,), "", "")
        name = f"subscription {record.subscription} on {topic.name}"
        if found.backlog and policy is DeletionPolicy.DELETE_IF_EMPTY:
            return cls(rights, (mark,), "", f"{name} holds {found.backlog} messages")
        clients = f"{name}: {found.consumers} consumers" if found.consumers else ""
        return cls(rights, (DeleteSubscription(topic.name, record.subscription), mark), clients, "")


def _clients(topic: Left) -> str:
    """Say who is connected to a topic; empty if there is none."""
    consumers = sum(found.consumers for found in topic.usage.subscriptions.values())
    producers = topic.usage.producers
    if not consumers and not producers:
        return ""
    return f"{topic.name}: {consumers} consumers, {producers} producers"

"""Deletion of a policy, and the handover of its topics to a successor.

The end of a policy: what it made at the broker stays, or goes, as its `deletionPolicy` says.

Called by `reconcile`. Only a policy whose deletion has work to do at the broker has a finalizer,
for at most `CLEANUP_DEADLINE`. All others go at once, whether redrive runs or not; an Event of
`deletion_events` says what stays of them.

What a deleted policy leaves → the actions that take it away, and what stays and why; pure.

Called by `finalize`. Only what is marked as this policy's is looked at. A topic that redrive made
is deleted as a whole if its name is that of the scheme and others have no subscription there; from
any other, and from one that was there before, goes what redrive added to it.

A policy that gives its topics to the one of its name in another cluster, as for blue and green.

Called by `reconcile` for a policy with the annotation. Only the owner can do that: a policy in
another cluster can't take topics by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from redrive.admin.client import Admin
from redrive.admin.errors import AdminNotFoundError as TopicGoneError
from redrive.admin.model import NamespaceState, RightsChange, TopicUsage
from redrive.admin.policies import (
    DELAYED_DELIVERY,
    DelaysWithin,
    KeepsBacklog,
    LimitsBacklog,
    restoring,
)
from redrive.api import Body
from redrive.api.conditions import (
    READY,
    STALLED,
    ConditionStatus,
    ObjectEvent,
    StatusWarning,
    find,
    paused,
    waiting,
    warning,
)
from redrive.api.policy_defaults import DeletionPolicy
from redrive.api.retrypolicy import ConnectionRef
from redrive.errors import InvalidSpecError, RedriveError, Requeue
from redrive.kube.client import ConnectionNotFoundError, SecretKeyNotFoundError, SecretNotFoundError
from redrive.kube.connections import Connection, connection_of, shown_to, spec_of
from redrive.kube.context import Context
from redrive.kube.resources import HAND_OVER_TO, SKIP_CLEANUP, Key
from redrive.policy import naming
from redrive.policy.naming import LEDGER_SUBSCRIPTION, TopicName
from redrive.provision import ownership
from redrive.provision.actions import (
    Action,
    ChangeRights,
    DeleteSubscription,
    DeleteTopic,
    Mark,
    RestoreTopicPolicy,
    in_words,
)
from redrive.provision.apply import apply
from redrive.provision.checks import ADMISSION, own_topic_is_not_allowed
from redrive.provision.claims import Conflicts, resolve_through, rivals
from redrive.provision.desired import owner_of
from redrive.provision.outcome import Outcome, has_cleanup_finalizer, is_paused
from redrive.provision.ownership import (
    Granted,
    Owner,
    OwnershipRecord,
    Rights,
    creating,
    shown_owner,
)
from redrive.provision.request import Request
from redrive.reasons import Reason

LATE_WRITES = timedelta(seconds=30)
"""How long a broker may still do what it was sent before a deletion: as long as a call waits."""
CLEANUP_DEADLINE = timedelta(minutes=10)
"""A cleanup that has not succeeded after so long is abandoned: the policy goes, all else stays."""


_TOPIC_FIELDS = ("retryTopic", "deadLetterTopic", "ledgerTopic", "sequencesTopic")
"""Fields of a policy's status that name its topics."""

logger = logging.getLogger(__name__)


async def finalize(body: Body, ctx: Context, conflicts: Conflicts) -> Outcome:
    """Do what the deletion of a policy asks for at the broker, then have its finalizer removed.

    A failure is tried again until `CLEANUP_DEADLINE` is over, one of redrive itself too: no
    deletion waits for ever. Time in which no operator runs does not count. A crash leaves less to
    do.
    """
    if not has_cleanup_finalizer(body):
        return Outcome()
    if (body["metadata"].get("annotations") or {}).get(SKIP_CLEANUP) == "true":
        return _abandoned(f"the annotation {SKIP_CLEANUP} has it go; {_rest(body)}")
    if is_paused(body):
        return _retained(f"it was paused, and nothing was touched; {_rest(body)}")
    try:
        done = await _clean_up(body, ctx, conflicts)
    except Exception as failure:
        error = shown_to(body, failure) if isinstance(failure, RedriveError) else failure
        deleted_at = datetime.fromisoformat(body["metadata"]["deletionTimestamp"])
        since = max(deleted_at, ctx.began)
        if ctx.clock() - since >= CLEANUP_DEADLINE:
            return _given_up(body, error, since)
        if not isinstance(error, RedriveError):
            raise
        message = _waits(error, deleted_at, since + CLEANUP_DEADLINE)
        return Outcome(waiting(error, message), requeue=Requeue.BACKOFF)
    return _cleaned_up(done, _late_writes(body, ctx.clock()))


def _cleaned_up(done: Removal, late: RedriveError | None) -> Outcome:
    deleted = (ObjectEvent(Reason.DELETED, in_words(done.actions)),) if done.actions else ()
    if late is not None:
        return Outcome(waiting(late), events=deleted, requeue=Requeue.BACKOFF)
    stays = "; ".join(done.stays)
    outcome = _retained(f"at the broker stays: {stays}" if stays else "")
    return replace(outcome, events=deleted)


def _late_writes(body: Body, now: datetime) -> RedriveError | None:
    """Say why a cleanup that has found nothing more to do is repeated, if it is.

    An operator that was killed, or whose call had no answer, may have sent the creation of a topic
    that the broker does only after the cleanup. What is Ready was answered, and what is Stalled was
    refused before anything was sent.
    """
    ready = find(body, READY)
    answered = ready is not None and ready.status is ConditionStatus.TRUE
    until = datetime.fromisoformat(body["metadata"]["deletionTimestamp"]) + LATE_WRITES
    if answered or find(body, STALLED) is not None or now >= until:
        return None
    return Reason.LATE_WRITES.error(
        "the policy was deleted while it was provisioned, and the broker may still create a topic",
        remedy=f"none is needed: its topics are looked at again, and the policy goes after "
        f"{_at(until)}",
    )


async def _clean_up(body: Body, ctx: Context, conflicts: Conflicts) -> Removal:
    """Take away what redrive made for the policy, as far as its deletionPolicy wants that.

    Raises:
        RedriveError: not now; what was done by then is done.
    """
    try:
        ref = spec_of(body, ctx.policies).connection_ref
    except InvalidSpecError:
        return await _revoke_recorded(body, _recorded_topics(body), ctx)
    connection = await _connection(ref, Key.of(body).namespace, ctx)
    request = resolve_through(body, connection.spec, ctx)
    if request.deletion is DeletionPolicy.RETAIN:
        return Removal((), (made(body),) if made(body) else ())
    refusal = own_topic_is_not_allowed(request)
    if refusal is not None:
        raise refusal
    others = rivals(request.key, ctx, conflicts)
    with connection.admin.granting(request.policy.topic.namespace_name) as grant:
        left = await _left(request, creating(body), others, connection.admin)
        planned = removal(owner_of(request, ctx.settings.cluster_id), request.deletion, left)
        await apply(planned.actions, connection.admin, grant, ctx.kubernetes)
    former = (body.get("status") or {}).get("connection")
    if former not in {None, str(request.through)} and not planned.actions:
        elsewhere = f"{made(body)} where BrokerConnection {former} leads"
        planned = replace(planned, stays=(*planned.stays, elsewhere))
    if planned.actions:
        logger.info("RetryPolicy %s, deleted: %s", request.key, in_words(planned.actions))
    return planned


async def revoke_on_system_topics(body: Body, ctx: Context) -> None:
    """Take back what redrive granted for a policy on topics of Pulsar's own.

    Such a policy is older than the rule that refuses it.

    Raises:
        RedriveError: not now; what was done by then is done.
    """
    topics = [topic for topic in _recorded_topics(body) if topic.is_system]
    await _revoke_recorded(body, topics, ctx)


def _recorded_topics(body: Body) -> list[TopicName]:
    """Return the topics that the status of a policy names."""
    recorded = body.get("status") or {}
    return [TopicName.parse(recorded[field]) for field in _TOPIC_FIELDS if field in recorded]


async def _revoke_recorded(body: Body, topics: Sequence[TopicName], ctx: Context) -> Removal:
    """Take back the rights that redrive granted for a policy that this release does not accept.

    Only what the record of each of *topics* names is taken back; all else stays.

    Raises:
        RedriveError: as for `_clean_up`.
    """
    if not topics:
        return Removal((), ())
    key, through = Key.of(body), connection_of(body)
    ref = ConnectionRef(name=through.name, namespace=through.namespace)
    connection = await _connection(ref, key.namespace, ctx)
    spec = body["spec"]
    source = f"{spec['topic']}/{spec['subscription']}"
    owner = Owner(ctx.settings.cluster_id, key, body["metadata"]["uid"], source)
    namespace_name = topics[0].namespace_name
    with connection.admin.granting(namespace_name) as grant:
        namespace = await connection.admin.namespace(namespace_name)
        left = [
            Left(
                name=topic,
                subscription="",
                partitioned=(partitioned := str(topic) in namespace.partitioned),
                properties=(
                    await connection.admin.metadata(topic, partitioned=partitioned)
                ).properties,
                usage=TopicUsage({}, 0, 0),
                permissions=namespace.permissions.get(str(topic), {}),
                heir=None,
            )
            for topic in topics
            if namespace.exists(topic)
        ]
        planned = removal(owner, DeletionPolicy.REVOKE_GRANTS, left)
        await apply(planned.actions, connection.admin, grant, ctx.kubernetes)
    return planned


async def _connection(ref: ConnectionRef, namespace: str, ctx: Context) -> Connection:
    try:
        return await ctx.brokers.resolve(ref, namespace)
    except (ConnectionNotFoundError, SecretNotFoundError, SecretKeyNotFoundError):
        remembered = ctx.brokers.remembered(ref, namespace)
        if remembered is None:
            raise
        # Without this, the broker of a connection that is gone is never probed, if it was down.
        await remembered.admin.clusters()
        return remembered


async def _left(
    request: Request, about_to_create: frozenset[str], others: Sequence[Request], admin: Admin
) -> list[Left]:
    """Read what is there of a policy's topics, of one that it has switched off too."""
    try:
        namespace = await admin.namespace(request.policy.topic.namespace_name)
    except TopicGoneError:
        return []
    found = []
    retry, dead_letter, *records = request.spec.all_topics
    subscriptions = {
        retry: request.policy.subscription,
        dead_letter: request.policy.dead_letter_subscription,
        **dict.fromkeys(records, naming.LEDGER_SUBSCRIPTION),
    }
    # No topic passes to another namespace, and none there keeps this one's from being deleted.
    heirs = [each for each in others if each.key.namespace == request.key.namespace]
    for name, subscription in subscriptions.items():
        if not namespace.exists(name):
            continue
        partitioned = str(name) in namespace.partitioned
        needed = dead_letter if name in records else name
        found.append(
            Left(
                name=name,
                subscription=subscription,
                partitioned=partitioned,
                properties=(await admin.metadata(name, partitioned=partitioned)).properties,
                usage=await admin.usage(name, partitioned=partitioned, subscription=subscription),
                permissions=namespace.permissions.get(str(name), {}),
                follows=dead_letter if name in records else None,
                heir=next((each.key for each in heirs if needed in each.spec.own_topics), None),
                may_delete=request.permissions.allows_deletion(needed),
                about_to_create=str(name) in about_to_create,
                is_of_scheme=needed in request.spec.scheme_topics,
                is_of_others=await _is_of_others(needed, request.policy.topic, namespace, admin),
            )
        )
    return found


async def _is_of_others(
    name: TopicName, source: TopicName, namespace: NamespaceState, admin: Admin
) -> bool:
    """Return True if a subscription of another source topic leads to *name*, too.

    Topic `orders-eu` with subscription `billing` and `orders` with `eu-billing` have one name. What
    consumers of the former have sent there would be deleted with a policy for the latter.
    """
    for topic, subscription in naming.origins(name):
        if topic != source and namespace.exists(topic):
            partitioned = str(topic) in namespace.partitioned
            subscriptions = await admin.subscriptions(topic, partitioned=partitioned)
            if subscription in subscriptions.names:
                return True
    return False


def _retained(message: str) -> Outcome:
    event = ObjectEvent(Reason.RETAINED, message) if message else None
    return Outcome(finalized=True, last_event=event)


def _abandoned(message: str) -> Outcome:
    event = ObjectEvent(Reason.CLEANUP_ABANDONED, message, is_warning=True)
    return Outcome(finalized=True, last_event=event)


def _given_up(body: Body, error: Exception, since: datetime) -> Outcome:
    expected = isinstance(error, RedriveError)
    logger.warning(
        "RetryPolicy %s: cleanup abandoned", Key.of(body), exc_info=None if expected else error
    )
    why = error if expected else f"{type(error).__name__}, see the operator's log"
    return _abandoned(f"waited since {_at(since)}: {why}; {_rest(body)}")


def _waits(error: RedriveError, since: datetime, until: datetime) -> str:
    return (
        f"being deleted since {_at(since)}: {error}; at {_at(until)} the policy "
        "goes all the same, and leaves what is there; with the annotation "
        f"{SKIP_CLEANUP}=true it goes now"
    )


def _rest(body: Body) -> str:
    return f"what there is of {made(body) or 'its topics'} stays at the broker"


def _at(moment: datetime) -> str:
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}"


def made(body: Body) -> str:
    """Name the topics that a policy has made or adopted; empty for none."""
    made = body.get("status") or {}
    return " and ".join(made[field] for field in ("retryTopic", "deadLetterTopic") if field in made)


@dataclass(frozen=True)
class Left:
    """A topic that a deleted policy leaves.

    Attributes:
        subscription: the policy's own on it, which keeps what has not been consumed.
        permissions: who may do what on it.
        may_delete: whether the connection allows to delete it.
        about_to_create: whether redrive was about to create it, and may have lost its mark.
        is_of_scheme: False if `spec.naming` gives it a name other than that of its scheme. Such a
            name may be that of a topic which others use, or will create.
        is_of_others: whether a subscription of another source topic leads to its name, too.
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
    is_of_scheme: bool = True
    is_of_others: bool = False
    follows: TopicName | None = None

    @property
    def subscriptions_of_others(self) -> list[str]:
        """Return the durable subscriptions that are neither the policy's nor Pulsar's own."""
        return sorted(
            name
            for name, subscription in self.usage.subscriptions.items()
            if subscription.durable
            and name != self.subscription
            and not name.startswith(naming.SYSTEM_PREFIX)
        )

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
        InUse: clients are connected to what would be deleted.
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
        elif reason := _is_not_deleted(topic, owner):
            kept.add(topic.name)
            parts.append(_Part.of(topic, policy))
            stays.append(f"{topic.name} {reason}")
        else:
            whole.append(topic)
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
        raise Reason.IN_USE.error(
            "clients are connected to what is to be deleted: they would lose messages, or create a "
            "deleted topic again where topics are created by themselves",
            got="; ".join(filter(None, clients)),
            remedy="stop them",
        )


def _stays(topic: Left, owner: Owner, policy: DeletionPolicy) -> str:
    """Say why a topic stays exactly as it is; nothing where it does not."""
    record = topic.record(owner)
    if not record.is_of(owner):
        if not record.owner:
            return "has no mark of this policy"
        return f"is kept by {shown_owner(record.owner, owner.key.namespace)}"
    if topic.heir is not None:
        return f"is needed by RetryPolicy {topic.heir}"
    if record.created and not topic.may_delete:
        return "may not be deleted by what its BrokerConnection allows"
    if policy is DeletionPolicy.DELETE_IF_EMPTY and record.created:
        return _holds(topic)
    return ""


def _is_not_deleted(topic: Left, owner: Owner) -> str:
    """Return why a topic stays without what redrive added to it; empty if it is deleted."""
    if not topic.record(owner).created:
        return "was there before"
    if not topic.is_of_scheme:
        return "has a name of spec.naming, not of its scheme, and is never deleted"
    if topic.is_of_others:
        return "has the name of a topic of another source topic's subscription, too"
    if topic.subscriptions_of_others:
        return f"has subscriptions of others ({', '.join(topic.subscriptions_of_others)})"
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
    """Additions of redrive to a topic that stays.

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


def receiver_of(body: Body, own: str) -> str:
    """Return the id of the cluster that a RetryPolicy hands its topics over to; empty for none.

    Args:
        body: the RetryPolicy.
        own: the id of this cluster.
    """
    named: str = (body["metadata"].get("annotations") or {}).get(HAND_OVER_TO, "").strip()
    return "" if named == own else named


async def hand_over(cluster: str, request: Request, ctx: Context) -> Outcome:
    """Make what belongs to a policy the topics of its namesake in another cluster.

    A crash in between leaves fewer topics for the next call.

    Raises:
        RedriveError: not now, or its connection does not allow it.
    """
    ADMISSION.check(request)
    owner = owner_of(request, ctx.settings.cluster_id)
    # Its uid is for that cluster to write; it is known by its name and what it retries.
    receiver = replace(owner, cluster=cluster, uid="")
    connection = await ctx.brokers.resolve(request.spec.connection_ref, request.key.namespace)
    namespace = await connection.admin.namespace(request.policy.topic.namespace_name)
    marks = []
    for topic in request.spec.all_topics:
        if not namespace.exists(topic):
            continue
        partitioned = str(topic) in namespace.partitioned
        found = (await connection.admin.metadata(topic, partitioned=partitioned)).properties
        record = OwnershipRecord.of(found)
        if record.is_of(owner):
            marks.append(Mark(topic, record.owned_by(receiver).changes(found)))
    with connection.admin.granting(request.policy.topic.namespace_name) as grant:
        await apply(marks, connection.admin, grant, ctx.kubernetes)
    if marks:
        logger.info("RetryPolicy %s: %s", request.key, in_words(marks))
    told = (
        f"by the annotation {HAND_OVER_TO} its topics belong to RetryPolicy {receiver}, and "
        "nothing is done for it here; delete it once that one is Ready"
    )
    return Outcome(
        (*paused(Reason.HANDED_OVER, told)[:1], warning(StatusWarning(Reason.HANDED_OVER, told)))
    )

"""Deletion of a policy: its effects at the broker, and the order of its steps.

The `deletionPolicy` decides what happens to the topics of a deleted policy. Only a policy whose
deletion has work at the broker has a finalizer, for at most `CLEANUP_DEADLINE`. Other policies are
deleted at once, even if the operator does not run; `DeletionEvents` reports their retained topics.

`removal` plans the deletion from the observed topics; it is pure. It considers only topics that are
marked as this policy's. With `Delete` or `DeleteIfEmpty` the operator deletes a topic that redrive
created if its name comes from the naming scheme, no other subscription and no connected client uses
it, and a rule of the connection has `deletion: Allowed`. Other topics of the policy lose redrive's
additions, except those in `_why_unchanged`, which are not changed. Only this module deletes topics
of Pulsar; `provision.rocketmq` deletes topics of RocketMQ.

`reconciler.hand_over` passes the topics of a policy to the policy of the same name in another
cluster, as in blue-green deployments. Only the cluster that owns the topics can hand them over.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from redrive.admin.client import Admin
from redrive.admin.errors import AdminNotFoundError as TopicGoneError
from redrive.admin.guards import PROBE_PAUSE
from redrive.admin.model import NamespaceState, RightsChange, TopicUsage
from redrive.admin.policies import (
    DELAYED_DELIVERY,
    DelaysWithin,
    KeepsBacklog,
    LimitsBacklog,
    restoring,
)
from redrive.api import Body
from redrive.api.conditions import READY, STALLED, ConditionStatus, ObjectEvent, find, waiting
from redrive.api.policy_defaults import DeletionPolicy
from redrive.api.retrypolicy import ConnectionRef
from redrive.errors import InvalidSpecError, RedriveError, Requeue
from redrive.kube.client import ReferenceNotFoundError
from redrive.kube.connections import Connection, connection_of, shown_to, spec_of
from redrive.kube.context import Context
from redrive.kube.resources import SKIP_CLEANUP, Key, is_paused
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
    Targets,
    apply,
    in_words,
)
from redrive.provision.checks import own_topic_is_not_allowed
from redrive.provision.claims import Conflicts, resolve_through, rivals
from redrive.provision.desired import TopicRole, owner_of
from redrive.provision.outcome import Outcome, has_cleanup_finalizer
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
"""Time for which a broker may still execute calls sent before a deletion: the call time-out."""
CLEANUP_DEADLINE = timedelta(minutes=10)
"""A cleanup is abandoned after this time: the policy is deleted, its topics are retained."""


logger = logging.getLogger(__name__)


Cleanup = tuple[Sequence[object], Sequence[str]]
"""Result of a cleanup: performed actions, and a sentence about each retained object."""


async def finalize(body: Body, ctx: Context, conflicts: Conflicts) -> Outcome:
    """Clean up the topics of a deleted RetryPolicy; see `finish`."""
    return await finish(body, ctx, lambda: _clean_up(body, ctx, conflicts))


async def finish(body: Body, ctx: Context, clean_up: Callable[[], Awaitable[Cleanup]]) -> Outcome:
    """Clean up after a deleted policy at the broker, then let its finalizer be removed.

    Failures, including unexpected exceptions, are retried until `CLEANUP_DEADLINE`, so no deletion
    is blocked permanently. Time without a running operator does not count. After a crash the next
    call performs the remaining actions.
    """
    if not has_cleanup_finalizer(body):
        return Outcome()
    if (body["metadata"].get("annotations") or {}).get(SKIP_CLEANUP) == "true":
        return _abandoned(f"annotation {SKIP_CLEANUP} skips the cleanup; {_retained_topics(body)}")
    if is_paused(body):
        return _retained(f"it was paused, so nothing was changed; {_retained_topics(body)}")
    try:
        done = await clean_up()
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


def _cleaned_up(done: Cleanup, late: RedriveError | None) -> Outcome:
    actions, stays = done
    deleted = (ObjectEvent(Reason.DELETED, in_words(actions)),) if actions else ()
    if late is not None:
        return Outcome(waiting(late), events=deleted, requeue=Requeue.BACKOFF)
    outcome = _retained(f"retained at the broker: {'; '.join(stays)}" if stays else "")
    return replace(outcome, events=deleted)


def _late_writes(body: Body, now: datetime) -> RedriveError | None:
    """Return the reason to repeat a cleanup that found nothing more to remove, if any.

    An operator that was killed, or whose call was not answered, may have sent the creation of a
    topic that the broker executes after the cleanup. A policy that is Ready has all answers, and
    for a policy that is Stalled nothing was sent.
    """
    ready = find(body, READY)
    answered = ready is not None and ready.status is ConditionStatus.TRUE
    until = datetime.fromisoformat(body["metadata"]["deletionTimestamp"]) + LATE_WRITES
    if answered or find(body, STALLED) is not None or now >= until:
        return None
    return Reason.LATE_WRITES.error(
        "the policy was deleted while it was provisioned, and the broker may still create a topic",
        remedy="No action needed: the operator checks its topics again, and the policy is deleted "
        f"after {_at(until)}",
    )


async def _clean_up(body: Body, ctx: Context, conflicts: Conflicts) -> Removal:
    """Remove redrive's additions for the policy, according to its deletionPolicy.

    Raises:
        RedriveError: the cleanup failed; actions before the failure are performed.
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
        remaining = await _remaining(request, creating(body), others, connection.admin)
        planned = removal(owner_of(request, ctx.settings.cluster_id), request.deletion, remaining)
        await apply(planned.actions, Targets(connection.admin, grant, ctx.kubernetes))
    former = (body.get("status") or {}).get("connection")
    if former not in {None, str(request.through)} and not planned.actions:
        elsewhere = f"{made(body)} at the broker of BrokerConnection {former}"
        planned = planned._replace(stays=(*planned.stays, elsewhere))
    if planned.actions:
        logger.info("RetryPolicy %s, deleted: %s", request.key, in_words(planned.actions))
    return planned


async def revoke_on_system_topics(body: Body, ctx: Context) -> None:
    """Revoke grants that redrive made for a policy on system topics of Pulsar.

    Such a policy is older than the validation that refuses it.

    Raises:
        RedriveError: the cleanup failed; actions before the failure are performed.
    """
    topics = [topic for topic in _recorded_topics(body) if topic.is_system]
    await _revoke_recorded(body, topics, ctx)


def _recorded_topics(body: Body) -> list[TopicName]:
    """Return the topics that the status of a policy names."""
    recorded = body.get("status") or {}
    fields = (role.status_field for role in TopicRole)
    return [TopicName.parse(recorded[field]) for field in fields if field in recorded]


async def _revoke_recorded(body: Body, topics: Sequence[TopicName], ctx: Context) -> Removal:
    """Revoke the grants of a policy that this release does not accept.

    Only grants on record of *topics* are revoked; everything else is retained.

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
        remaining = [
            RemainingTopic(
                name=topic,
                subscription="",
                partitioned=(partitioned := str(topic) in namespace.partitioned),
                properties=(
                    await connection.admin.metadata(topic, partitioned=partitioned)
                ).properties,
                usage=TopicUsage({}, 0, 0),
                permissions=namespace.permissions.get(str(topic), {}),
                successor=None,
            )
            for topic in topics
            if namespace.exists(topic)
        ]
        planned = removal(owner, DeletionPolicy.REVOKE_GRANTS, remaining)
        await apply(planned.actions, Targets(connection.admin, grant, ctx.kubernetes))
    return planned


async def _connection(ref: ConnectionRef, namespace: str, ctx: Context) -> Connection:
    try:
        return await ctx.brokers.resolve(ref, namespace)
    except ReferenceNotFoundError:
        remembered = ctx.brokers.remembered(ref, namespace)
        if remembered is None:
            raise
        # A broker that was down is probed by this call; the connection has no reconcile any more,
        # and all its policies share the probes.
        await remembered.admin.clusters(pause=PROBE_PAUSE)
        return remembered


async def _remaining(
    request: Request, about_to_create: frozenset[str], others: Sequence[Request], admin: Admin
) -> list[RemainingTopic]:
    """Read the topics of a policy that exist, including those that it no longer uses."""
    try:
        namespace = await admin.namespace(request.policy.topic.namespace_name)
    except TopicGoneError:
        return []
    topics = []
    retry, dead_letter, *records = request.spec.all_topics
    subscriptions = {
        retry: request.policy.subscription,
        dead_letter: request.policy.dead_letter_subscription,
        **dict.fromkeys(records, naming.LEDGER_SUBSCRIPTION),
    }
    # Topics never pass to another namespace, so a policy there does not block the deletion.
    rivals_here = [other for other in others if other.key.namespace == request.key.namespace]
    for name, subscription in subscriptions.items():
        if not namespace.exists(name):
            continue
        partitioned = str(name) in namespace.partitioned
        needed = dead_letter if name in records else name
        topics.append(
            RemainingTopic(
                name=name,
                subscription=subscription,
                partitioned=partitioned,
                properties=(await admin.metadata(name, partitioned=partitioned)).properties,
                usage=await admin.usage(name, partitioned=partitioned, subscription=subscription),
                permissions=namespace.permissions.get(str(name), {}),
                follows=dead_letter if name in records else None,
                successor=next((r.key for r in rivals_here if needed in r.spec.own_topics), None),
                may_delete=request.permissions.allows_deletion(needed),
                about_to_create=str(name) in about_to_create,
                is_of_scheme=needed in request.spec.scheme_topics,
                is_of_others=await _is_of_others(needed, request.policy.topic, namespace, admin),
            )
        )
    return topics


async def _is_of_others(
    name: TopicName, source: TopicName, namespace: NamespaceState, admin: Admin
) -> bool:
    """Return True if *name* also belongs to a subscription of another source topic.

    Topic `orders-eu` with subscription `billing` and `orders` with `eu-billing` share one name.
    Deleting the policy of the latter would delete messages of the former's consumers.
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
    cause = error if expected else f"{type(error).__name__}, see the operator's log"
    return _abandoned(f"failed since {_at(since)}: {cause}; {_retained_topics(body)}")


def _waits(error: RedriveError, since: datetime, until: datetime) -> str:
    return (
        f"being deleted since {_at(since)}: {error}; at {_at(until)} the policy is deleted anyway "
        "and its topics are retained; to delete it now, set the annotation "
        f"{SKIP_CLEANUP}=true"
    )


def _retained_topics(body: Body) -> str:
    return f"{made(body) or 'its topics'} are retained at the broker, if they exist"


def _at(moment: datetime) -> str:
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}"


def made(body: Body) -> str:
    """Return the topics that a policy created or adopted, as text; empty if there are none."""
    made = body.get("status") or {}
    return " and ".join(made[field] for field in ("retryTopic", "deadLetterTopic") if field in made)


@dataclass(frozen=True)
class RemainingTopic:
    """A topic of a deleted policy.

    Attributes:
        subscription: subscription of the policy, which holds unprocessed messages.
        permissions: grants on the topic.
        may_delete: True if the connection allows deletion of the topic.
        about_to_create: True if its creation was recorded, so its owner may be lost.
        is_of_scheme: False if `spec.naming` sets the name. Others may use, or create, a topic of
            such a name.
        is_of_others: True if the name also belongs to a subscription of another source topic.
        successor: a policy of the same namespace that needs the topic now.
        follows: a topic with which this one is retained. A ledger records which dead letters of its
            topic were moved.
    """

    name: TopicName
    subscription: str
    partitioned: bool
    properties: Mapping[str, str]
    usage: TopicUsage
    permissions: Granted
    successor: Key | None
    may_delete: bool = True
    about_to_create: bool = False
    is_of_scheme: bool = True
    is_of_others: bool = False
    follows: TopicName | None = None

    @property
    def subscriptions_of_others(self) -> list[str]:
        """Return durable subscriptions other than the policy's and the system's."""
        return sorted(
            name
            for name, subscription in self.usage.subscriptions.items()
            if subscription.durable
            and name != self.subscription
            and not name.startswith(naming.SYSTEM_PREFIX)
        )

    def record(self, owner: Owner) -> OwnershipRecord:
        """Return the recorded ownership; if *owner* created the topic unmarked, the missing one."""
        names = self.usage.subscriptions
        if ownership.created_unmarked(self.properties, names, about_to=self.about_to_create):
            return OwnershipRecord(created=True).owned_by(owner)
        return OwnershipRecord.of(self.properties)


class Removal(NamedTuple):
    """Planned actions in order, and a sentence about each retained object."""

    actions: tuple[Action, ...]
    stays: tuple[str, ...]


def removal(owner: Owner, policy: DeletionPolicy, topics: Sequence[RemainingTopic]) -> Removal:
    """Plan the removal of the topics of a deleted policy.

    Args:
        owner: the deleted policy.
        policy: any deletion policy but `Retain`.
        topics: its existing topics; a topic that follows another comes after it.

    Raises:
        InUse: clients are connected to a topic that would be deleted.
    """
    if policy is DeletionPolicy.REVOKE_GRANTS:
        return _revocation(owner, topics)
    whole, parts, stays = [], [], []
    kept: set[TopicName] = set()
    for topic in topics:
        follows = topic.follows if topic.follows in kept else None
        reason = f"belongs to {follows}" if follows else _why_unchanged(topic, owner, policy)
        if reason:
            kept.add(topic.name)
            stays.append(f"{topic.name} {reason}")
        elif reason := _why_not_deleted(topic, owner):
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


def _revocation(owner: Owner, topics: Sequence[RemainingTopic]) -> Removal:
    """Plan to revoke redrive's grants, and to retain everything else."""
    changes: list[RightsChange] = []
    marks: list[Mark] = []
    for topic in topics:
        record = topic.record(owner)
        if record.is_of(owner) and topic.successor is None and record.granted:
            granted = ownership.rights(topic.name, {}, topic.permissions, record.granted)
            changes += granted.changes
            marks.append(Mark(topic.name, replace(record, granted={}).changes(topic.properties)))
    return Removal(
        actions=(*([ChangeRights(tuple(changes))] if changes else []), *marks),
        stays=tuple(str(topic.name) for topic in topics),
    )


def _refuse_against_clients(clients: Sequence[str]) -> None:
    if any(clients):
        raise Reason.IN_USE.error(
            "topic still has connected clients; deleting it would lose messages, or a client would "
            "recreate it automatically",
            got="; ".join(filter(None, clients)),
            remedy="stop these clients",
        )


def _why_unchanged(topic: RemainingTopic, owner: Owner, policy: DeletionPolicy) -> str:
    """Return why a topic is retained unchanged; empty if it is not."""
    record = topic.record(owner)
    if not record.is_of(owner):
        if not record.owner:
            return "is not marked as a topic of this policy"
        return f"belongs to {shown_owner(record.owner, owner.key.namespace)}"
    if topic.successor is not None:
        return f"is needed by RetryPolicy {topic.successor}"
    if record.created and not topic.may_delete:
        return "may not be deleted: its BrokerConnection does not allow it"
    if policy is DeletionPolicy.DELETE_IF_EMPTY and record.created:
        return _holds(topic)
    return ""


def _why_not_deleted(topic: RemainingTopic, owner: Owner) -> str:
    """Return why a topic is retained without redrive's additions; empty if it is deleted."""
    if not topic.record(owner).created:
        return "existed before"
    if not topic.is_of_scheme:
        return "has a name of spec.naming, not of its scheme, and is never deleted"
    if topic.is_of_others:
        return "also belongs, by its name, to a subscription of another source topic"
    if topic.subscriptions_of_others:
        return f"has other subscriptions ({', '.join(topic.subscriptions_of_others)})"
    return ""


def _holds(topic: RemainingTopic) -> str:
    waiting = {
        name: subscription.backlog
        for name, subscription in topic.usage.subscriptions.items()
        if subscription.backlog and name != LEDGER_SUBSCRIPTION
    }
    if waiting:
        counts = ", ".join(f"{count} for {name}" for name, count in sorted(waiting.items()))
        return f"holds messages ({counts})"
    if topic.usage.uncounted:
        return f"holds {topic.usage.uncounted} bytes and has no subscription {topic.subscription}"
    return ""


@dataclass(frozen=True)
class _Part:
    """Removal of redrive's additions from a retained topic.

    Attributes:
        rights: the change of grants.
        actions: the other actions.
        clients: connected consumers of the subscription that is deleted.
        stays: reason why an addition is retained.
    """

    rights: Rights
    actions: tuple[Action, ...]
    clients: str
    stays: str

    @classmethod
    def of(cls, topic: RemainingTopic, policy: DeletionPolicy) -> _Part:
        record = OwnershipRecord.of(topic.properties)
        rights = ownership.rights(topic.name, {}, topic.permissions, record.granted)
        mark = Mark(topic.name, OwnershipRecord().changes(topic.properties))
        subscription = topic.usage.subscriptions.get(record.subscription)
        restore: Iterator[Action] = (
            RestoreTopicPolicy(topic.name, policy, write)
            for policy, before in _as_before(record).items()
            for write in restoring(policy, before)
        )
        back: tuple[Action, ...] = (*restore, mark)
        if subscription is None:
            return cls(rights, back, "", "")
        name = f"subscription {record.subscription} on {topic.name}"
        if subscription.backlog and policy is DeletionPolicy.DELETE_IF_EMPTY:
            # The original time to live of the topic would delete the waiting messages.
            kept = Mark(
                topic.name, OwnershipRecord(replaced=record.replaced).changes(topic.properties)
            )
            return cls(rights, (kept,), "", f"{name} holds {subscription.backlog} messages")
        consumers = subscription.consumers
        clients = f"{name}: {consumers} consumers" if consumers else ""
        return cls(
            rights, (DeleteSubscription(topic.name, record.subscription), *back), clients, ""
        )


def _as_before(record: OwnershipRecord) -> Mapping[str, Any]:
    """Return the original topic policies; a record of a whole policy replaces one of its part."""
    parts = {part for part, whole in _PARTS.items() if whole in record.replaced}
    return {name: before for name, before in record.replaced.items() if name not in parts}


_PARTS = {LimitsBacklog.name: KeepsBacklog.name, DelaysWithin.name: DELAYED_DELIVERY}


def _clients(topic: RemainingTopic) -> str:
    """Describe the clients that are connected to a topic; empty if there are none."""
    consumers = sum(stats.consumers for stats in topic.usage.subscriptions.values())
    producers = topic.usage.producers
    if not consumers and not producers:
        return ""
    return f"{topic.name}: {consumers} consumers, {producers} producers"

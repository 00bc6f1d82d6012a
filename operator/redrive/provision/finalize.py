"""The end of a policy: what it made at the broker stays, or goes, as its `deletionPolicy` says.

Called by `reconcile`. Only a policy whose deletion has work to do at the broker has a finalizer,
for at most `CLEANUP_DEADLINE`. All others go at once, whether redrive runs or not; an Event of
`deletion_events` says what stays of them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from redrive.admin.client import Admin
from redrive.admin.errors import AdminNotFoundError as TopicGoneError
from redrive.admin.model import TopicUsage
from redrive.api.choices import DeletionPolicy
from redrive.api.conditions import READY, STALLED, ConditionStatus
from redrive.api.retrypolicy import ConnectionRef
from redrive.errors import InvalidSpecError, RedriveError, Requeue
from redrive.kube import status
from redrive.kube.connections import Connection, connection_of, shown_to
from redrive.kube.context import Context
from redrive.kube.errors import (
    ConnectionNotFoundError,
    SecretKeyNotFoundError,
    SecretNotFoundError,
)
from redrive.kube.policies import spec_of
from redrive.kube.resources import Body, Key
from redrive.kube.status import ObjectEvent
from redrive.policy import naming
from redrive.policy.naming import TopicName
from redrive.provision import pause
from redrive.provision.actions import in_words
from redrive.provision.admission_checks import own_topic_is_not_allowed
from redrive.provision.apply import apply
from redrive.provision.conflicts import Conflicts
from redrive.provision.desired import owner_of
from redrive.provision.errors import LateWritesError
from redrive.provision.facts import Request
from redrive.provision.finalizer import has_finalizer
from redrive.provision.outcome import Outcome
from redrive.provision.ownership import Owner, creating
from redrive.provision.removal import Left, Removal, removal
from redrive.provision.resolve import resolve_through, rivals

LATE_WRITES = timedelta(seconds=30)
"""How long a broker may still do what it was sent before a deletion: as long as a call waits."""
CLEANUP_DEADLINE = timedelta(minutes=10)
"""A cleanup that has not succeeded after so long is abandoned: the policy goes, all else stays."""
SKIP_CLEANUP = "redrive.io/skip-cleanup"
"""An annotation: with `true` a deleted policy goes at once, without cleanup."""

RETAINED = "Retained"
"""Reason of an Event: the policy is gone, and of what it made at the broker this stays."""
DELETED = "Deleted"
"""Reason of an Event: what a deleted policy had made at the broker is gone."""
CLEANUP_ABANDONED = "CleanupAbandoned"
"""Reason of an Event: the policy is gone, and its deletion could not do its work at the broker."""

_TOPIC_FIELDS = ("retryTopic", "deadLetterTopic", "ledgerTopic", "sequencesTopic")
"""Fields of a policy's status that name its topics."""

logger = logging.getLogger(__name__)


async def finalize(body: Body, ctx: Context, conflicts: Conflicts) -> Outcome:
    """Do what the deletion of a policy asks for at the broker, then have its finalizer removed.

    A failure is tried again until `CLEANUP_DEADLINE` is over, one of redrive itself too: no
    deletion waits for ever. Time in which no operator runs does not count. A crash leaves less to
    do.
    """
    if not has_finalizer(body):
        return Outcome()
    if (body["metadata"].get("annotations") or {}).get(SKIP_CLEANUP) == "true":
        return _abandoned(f"the annotation {SKIP_CLEANUP} has it go; {_rest(body)}")
    if pause.is_paused(body):
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
        return Outcome(status.waiting(error, message), requeue=Requeue.BACKOFF)
    return _cleaned_up(done, _late_writes(body, ctx.clock()))


def _cleaned_up(done: Removal, late: LateWritesError | None) -> Outcome:
    deleted = (ObjectEvent(DELETED, in_words(done.actions)),) if done.actions else ()
    if late is not None:
        return Outcome(status.waiting(late), events=deleted, requeue=Requeue.BACKOFF)
    stays = "; ".join(done.stays)
    outcome = _retained(f"at the broker stays: {stays}" if stays else "")
    return replace(outcome, events=deleted)


def _late_writes(body: Body, now: datetime) -> LateWritesError | None:
    """Say why a cleanup that has found nothing more to do is repeated, if it is.

    An operator that was killed, or whose call had no answer, may have sent the creation of a topic
    that the broker does only after the cleanup. What is Ready was answered, and what is Stalled was
    refused before anything was sent.
    """
    ready = status.find(body, READY)
    answered = ready is not None and ready.status is ConditionStatus.TRUE
    until = datetime.fromisoformat(body["metadata"]["deletionTimestamp"]) + LATE_WRITES
    if answered or status.find(body, STALLED) is not None or now >= until:
        return None
    return LateWritesError(
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
        elsewhere = f"{made(body)} where PulsarConnection {former} leads"
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
            )
        )
    return found


def _retained(message: str) -> Outcome:
    event = ObjectEvent(RETAINED, message) if message else None
    return Outcome(finalized=True, last_event=event)


def _abandoned(message: str) -> Outcome:
    event = ObjectEvent(CLEANUP_ABANDONED, message, is_warning=True)
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

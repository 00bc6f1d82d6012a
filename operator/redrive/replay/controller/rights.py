"""Rights of the replay role at targets: granted for a Replay, and revoked at its end.

The operator records missing rights in the status of the BrokerConnection before it grants them. A
finalizer keeps the Replay until they are revoked, even if the operator did not run meanwhile. A
right that another Replay or a policy needs stays until the last of them ends. A right that others
have granted to the role is never revoked.

Two connections may name one broker by different URLs. So a Replay also joins the records of others
for the same topic and role in the status of other connections: none of them is revoked under it,
and each is revoked at its own broker by the last of its Replays. If the broker is another one, a
right there may stay longer than it is needed.

Only the operator can write this record: jobs may write the status of Replays, and authors their
metadata.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from weakref import WeakValueDictionary

from redrive.admin.client import Admin
from redrive.admin.errors import AdminNotFoundError
from redrive.admin.model import RightsChange
from redrive.api import Body
from redrive.api.conditions import ObjectEvent
from redrive.api.connection import MAX_TARGET_RIGHTS, TargetRights
from redrive.api.retrypolicy import ConnectionRef
from redrive.errors import RedriveError, Requeue
from redrive.kube import connections, resources
from redrive.kube.client import NotFoundError, ReferenceNotFoundError
from redrive.kube.connections import Connection
from redrive.kube.context import Context
from redrive.kube.resources import TOPIC_OWNER, Key, PolicyKey
from redrive.kube.status import Publisher, add_finalizer, has_finalizer, remove_finalizer
from redrive.policy.naming import TopicName
from redrive.reasons import Reason
from redrive.replay.controller.spark_operators import find_application, find_running, was_launched

FINALIZER = "redrive.io/target-rights"
"""Finalizer that keeps a deleted Replay until its rights are revoked."""
DRAIN = timedelta(minutes=1)
"""Time for which the job of a deleted Replay keeps its rights, to settle in-flight messages."""
ABANDON = timedelta(minutes=10)
"""Time after the deletion of a Replay from which it is removed even if its rights could not be
revoked."""

NEEDED = frozenset({"produce", "consume"})
"""Rights to send to a target and to search it for messages that were sent before."""
READ = frozenset({"consume"})
"""Rights of an audit, which only reads its targets."""
OF_POLICY = {"retryTopic": NEEDED, "deadLetterTopic": READ, "ledgerTopic": NEEDED}
"""Rights of the replay role that a policy grants at its topics, by the fields of its status."""

MAX_OF_NAMESPACE = 128
"""Maximum number of records that the Replays of one Kubernetes namespace have in the status of a
connection. The status is shared by all namespaces, and the API server bounds its size."""
MAX_STORED = 1_000
"""Number of records in the status of a connection above which those of missing Replays are
forgotten. Such a Replay lost its finalizer."""

logger = logging.getLogger(__name__)

_locks: WeakValueDictionary[TopicName, asyncio.Lock] = WeakValueDictionary()
"""Locks for changes of rights at a target, so that each Replay reads the records of others."""


async def grant(  # noqa: PLR0913, PLR0917  parts of one right
    replay: Body,
    topic: TopicName,
    role: str,
    connection: Connection,
    ctx: Context,
    actions: frozenset[str] = NEEDED,
) -> None:
    """Give *role* rights at *topic*, for as long as *replay* needs them.

    Args:
        replay: the Replay, which is not deleted.
        topic: its target, or one that an earlier Replay may have left messages in.
        role: the replay role.
        connection: the one of the policy.
        ctx: caches and clients.
        actions: the rights.

    Raises:
        AdminNotFoundError: the topic is gone.
        LimitExceeded: the Replays of the namespace have too many records.
        RedriveError: the right can't be recorded, or not be granted.
    """
    async with _locks.setdefault(topic, asyncio.Lock()):
        namespace = await connection.admin.namespace(topic.namespace_name)
        if not namespace.exists(topic):
            raise AdminNotFoundError(
                f"the topic {topic} does not exist", remedy="create it, or correct the name"
            )
        missing = actions - namespace.permissions.get(str(topic), {}).get(role, frozenset())
        record = TargetRights(topic=str(topic), role=role, actions=tuple(sorted(missing)))
        for key in [Key.of(body) for body in ctx.connections]:
            recorded = {
                action
                for own in _records_of(replay, key, ctx)
                if (own.topic, own.role) == (record.topic, record.role)
                for action in own.actions
            }
            shared = actions & _actions_of_others(replay, record, key, ctx)
            granted = missing if key == connection.key else frozenset[str]()
            if added := granted | shared | recorded:
                own = record.model_copy(update={"actions": tuple(sorted(added))})
                await _record(replay, own, key, ctx)
        if missing:
            with connection.admin.granting(topic.namespace_name) as change:
                await change([RightsChange(topic, role, give=actions)])


async def _record(replay: Body, record: TargetRights, connection: Key, ctx: Context) -> None:
    records = _records_of(replay, connection, ctx)
    current = ctx.replays.get(Key.of(replay)) or replay
    if record in records and has_finalizer(current, FINALIZER):
        return
    replaced = record.topic, record.role
    others = [other for other in records if (other.topic, other.role) != replaced]
    _check_number(replay, len(others) + 1, connection, ctx)
    await add_finalizer(current, FINALIZER, publisher(ctx))
    await _write(replay, [*others, record], connection, ctx, _missing(replay, connection, ctx))


def _check_number(replay: Body, count: int, connection: Key, ctx: Context) -> None:
    """Check that *replay* may have *count* records.

    Raises:
        LimitExceeded: with them, it or the Replays of its namespace have too many.
    """
    namespace, uid = Key.of(replay).namespace, replay["metadata"]["uid"]
    of_others = sum(
        len(records)
        for other, records in _stored(connection, ctx).items()
        if other != uid
        and any(Key.of(holder).namespace == namespace for holder in _with_uid(other, ctx))
    )
    if count > MAX_TARGET_RIGHTS or of_others + count > MAX_OF_NAMESPACE:
        raise Reason.LIMIT_EXCEEDED.error(
            f"the replay role would need rights for this Replay at more than {MAX_TARGET_RIGHTS} "
            f"targets, or for all Replays of namespace {namespace} at more than "
            f"{MAX_OF_NAMESPACE}",
            got=f"{count}, and {of_others} for other Replays",
            remedy="wait for other Replays to end, or delete ended Replays to targets that are no "
            "longer used; this Replay starts automatically then",
        )


def _missing(replay: Body, connection: Key, ctx: Context) -> list[str]:
    """Return the uids of recorded Replays that do not exist, if there are many records.

    An author may remove the finalizer, so these records could fill the status.
    """
    stored = _stored(connection, ctx)
    if sum(map(len, stored.values())) < MAX_STORED and len(stored) < MAX_STORED // 2:
        return []
    own = replay["metadata"]["uid"]
    missing = [uid for uid in stored if uid != own and not _with_uid(uid, ctx)]
    for uid in missing:
        logger.warning(
            "the rights of a Replay that was deleted without its finalizer are forgotten, revoke "
            "them at the broker: %s",
            stored[uid],
        )
    return missing


def _records_of(replay: Body, connection: Key, ctx: Context) -> tuple[TargetRights, ...]:
    """Return the records of *replay* in the status of one connection."""
    own = _stored(connection, ctx).get(replay["metadata"]["uid"], ())
    return tuple(map(TargetRights.model_validate, own))


def _stored(connection: Key, ctx: Context) -> Mapping[str, Sequence[Body]]:
    """Return the records in the status of a connection, by the uid of their Replay."""
    status = (ctx.connections.get(connection) or {}).get("status") or {}
    return status.get("targetRights") or {}


def _with_uid(uid: str, ctx: Context) -> tuple[Body, ...]:
    return ctx.replays.index(_uid).get(uid)


def _uid(replay: Body) -> str:
    return str(replay["metadata"]["uid"])


async def _write(
    replay: Body,
    records: Iterable[TargetRights],
    connection: Key,
    ctx: Context,
    forgotten: Iterable[str] = (),
) -> None:
    """Replace the records of *replay* in the status of a connection.

    Those of others stay, except of the Replays with the uids *forgotten*.
    """
    written = [record.to_manifest() for record in records] or None
    fields = {"targetRights": {**dict.fromkeys(forgotten), replay["metadata"]["uid"]: written}}
    after = await ctx.kubernetes.patch_status(resources.CONNECTIONS, connection, fields)
    ctx.connections.renew(after)


async def release(replay: Body, ctx: Context) -> None:
    """Revoke the rights of an ended Replay, and remove its finalizer.

    Raises:
        RedriveError: a broker or the API server does not answer; a repetition continues.
    """
    if not has_finalizer(replay, FINALIZER):
        return
    failures: list[RedriveError] = []
    for connection in [Key.of(body) for body in ctx.connections]:
        for record in _records_of(replay, connection, ctx):
            try:
                await _revoke(replay, record, connection, ctx)
            except RedriveError as error:  # the broker of another tenant must not delay the others
                failures.append(error if _is_own(connection, replay, ctx) else _elsewhere())
    if failures:
        raise failures[0]
    replay = ctx.replays.get(Key.of(replay)) or replay
    await remove_finalizer(replay, FINALIZER, publisher(ctx))


def _is_own(connection: Key, replay: Body, ctx: Context) -> bool:
    policy = PolicyKey.of(replay)
    body = ctx.policies.get(Key(policy.namespace, policy.name))
    through = None if body is None else connections.connection_of(body)
    return connection == through or connection.namespace == policy.namespace


def _elsewhere() -> RedriveError:
    """Return an error without that of the connection, which may be of another tenant."""
    return RedriveError(
        "a right that another connection also has on record for the same target and role could "
        "not be revoked",
        remedy="no action needed: the operator tries again for ten minutes after a deletion",
    )


async def release_waiting(replay: Body, ctx: Context) -> bool:
    """Call `release` for a Replay that does not block others, unless it was launched.

    Returns:
        False if it has to be repeated.
    """
    if was_launched(replay) or find_application(replay, ctx) is not None:
        return True
    try:
        await release(replay, ctx)
    except RedriveError as error:
        logger.warning("rights of a waiting Replay could not be revoked, retrying: %s", error)
        return False
    return True


async def release_deleted(replay: Body, ctx: Context) -> Requeue:
    """Call `release` for a Replay that is being deleted, once its job has ended.

    The job observes the deletion, and settles its in-flight messages first. A broker that does not
    answer delays the deletion by `ABANDON` at most.

    Raises:
        KubernetesError: the finalizer can't be removed.
    """
    if not has_finalizer(replay, FINALIZER):
        return Requeue.ON_CHANGE
    since = ctx.clock() - datetime.fromisoformat(replay["metadata"]["deletionTimestamp"])
    if since < DRAIN and find_running(replay, ctx) is not None:
        return Requeue.BACKOFF
    try:
        await release(replay, ctx)
    except NotFoundError:
        return Requeue.ON_CHANGE
    except RedriveError as error:
        if since < ABANDON:
            logger.warning(
                "the rights of a deleted Replay are not revoked yet, retrying: %s", error
            )
            return Requeue.BACKOFF
        shown = ObjectEvent(
            Reason.TARGET_RIGHTS_ABANDONED, f"{error}; revoke them at the broker", is_warning=True
        )
        await publisher(ctx).emit(replay, shown)
        await remove_finalizer(replay, FINALIZER, publisher(ctx))
    return Requeue.ON_CHANGE


async def _revoke(replay: Body, record: TargetRights, connection: Key, ctx: Context) -> None:
    """Revoke the actions of one record that are not needed anymore, and forget the record."""
    topic = TopicName.parse(record.topic)
    opened = await _opened(connection, Key.of(replay).namespace, ctx)
    async with _locks.setdefault(topic, asyncio.Lock()):
        kept = _actions_of_others(replay, record, connection, ctx)
        taken = NEEDED.intersection(record.actions) - kept
        with suppress(AdminNotFoundError):  # the topic is gone, and the right with it
            if taken:
                taken -= await _actions_of_owner(topic, record.role, opened.admin, ctx)
            if taken:
                with opened.admin.granting(topic.namespace_name) as change:
                    await change([RightsChange(topic, record.role, take=taken)])
                actions = f"{', '.join(sorted(taken))} of {record.role} on {record.topic}"
                logger.info("Replay %s: rights revoked: %s", Key.of(replay), actions)
        # Within the lock: of two Replays that end at once, the second has to see none of the first.
        records = _records_of(replay, connection, ctx)
        others = [other for other in records if other != record]
        await _write(replay, others, connection, ctx)


async def _opened(connection: Key, namespace: str, ctx: Context) -> Connection:
    """Return the connection, even if its rules have changed, or it or its Secret was deleted."""
    try:
        return await ctx.brokers.open(connection)
    except ReferenceNotFoundError:
        ref = ConnectionRef(name=connection.name, namespace=connection.namespace)
        remembered = ctx.brokers.remembered(ref, namespace)
        if remembered is None:
            raise
        return remembered


def _actions_of_others(
    replay: Body, record: TargetRights, connection: Key, ctx: Context
) -> frozenset[str]:
    """Return the actions that other Replays have on record in one connection, for topic and role.

    Records of Replays without the finalizer are ignored, because they are never revoked.
    """
    uid = replay["metadata"]["uid"]
    return frozenset(
        action
        for holder, records in _stored(connection, ctx).items()
        if holder != uid
        for other in records
        if (other["topic"], other["role"]) == (record.topic, record.role)
        and any(has_finalizer(body, FINALIZER) for body in _with_uid(holder, ctx))
        for action in other["actions"]
    )


async def _actions_of_owner(
    topic: TopicName, role: str, admin: Admin, ctx: Context
) -> frozenset[str]:
    """Return the actions that the policy that owns a topic grants *role* there.

    The broker records the owner, so policies that only name the topic do not count.
    """
    metadata = await admin.metadata(topic, partitioned=await admin.partitions(topic) > 0)
    owner = metadata.properties.get(TOPIC_OWNER)
    for policy in ctx.policies:
        if f"{ctx.settings.cluster_id}/{Key.of(policy)}" == owner:
            through = ctx.connections.get(connections.connection_of(policy)) or {}
            replays = (through.get("spec") or {}).get("replay") or {}
            names = policy.get("status") or {}
            fields = [field for field in OF_POLICY if names.get(field) == str(topic)]
            # No Replay reads a policy that discards its dead letters.
            if replays.get("role") == role and fields and "deadLetterTopic" in names:
                return OF_POLICY[fields[0]]
    return frozenset()


def publisher(ctx: Context) -> Publisher:
    """Return the publisher of the status of Replays."""
    return Publisher(ctx.kubernetes, resources.REPLAYS, ctx.replays, ctx.clock)

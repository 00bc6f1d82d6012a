"""Rights of the replay role at targets: granted for a Replay, and revoked at its end.

The operator records missing rights in the status of the BrokerConnection before it grants them. A
finalizer keeps the Replay until they are revoked, even if the operator did not run meanwhile. A
right that another Replay or a policy needs stays until the last of them ends. A right that others
have granted to the role is never revoked.

Only the operator can write this record: jobs may write the status of Replays, and authors their
metadata.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from weakref import WeakValueDictionary

from redrive.admin.errors import AdminNotFoundError
from redrive.admin.model import RightsChange
from redrive.api import Body
from redrive.api.conditions import ObjectEvent
from redrive.api.connection import BrokerConnectionStatus, TargetRights
from redrive.api.replay_status import FINAL
from redrive.api.retrypolicy import ConnectionRef
from redrive.errors import RedriveError, Requeue
from redrive.kube import connections, resources
from redrive.kube.client import NotFoundError, ReferenceNotFoundError
from redrive.kube.connections import Connection, effective_spec
from redrive.kube.context import Context
from redrive.kube.resources import Key
from redrive.kube.status import Publisher, add_finalizer, has_finalizer, remove_finalizer
from redrive.policy.naming import TopicName
from redrive.reasons import Reason
from redrive.replay.controller.spark_operators import find_application

FINALIZER = "redrive.io/target-rights"
"""Finalizer that keeps a deleted Replay until its rights are revoked."""
DRAIN = timedelta(minutes=1)
"""Time for which the job of a deleted Replay keeps its rights, to settle in-flight messages."""
ABANDON = timedelta(minutes=10)
"""Time after the deletion of a Replay from which it is removed even if its rights could not be
revoked."""

NEEDED = frozenset({"produce", "consume"})
"""Rights to send to a target and to search it for messages that were sent before."""

logger = logging.getLogger(__name__)

_locks: WeakValueDictionary[TopicName, asyncio.Lock] = WeakValueDictionary()
"""Locks for changes of rights at a target, so that each Replay reads the records of others."""


async def grant(
    replay: Body, topic: TopicName, role: str, connection: Connection, ctx: Context
) -> None:
    """Let *role* send to *topic* and read there, for as long as *replay* needs it.

    Args:
        replay: the Replay, which is not deleted.
        topic: its target, or one that an earlier Replay may have left messages in.
        role: the replay role.
        connection: the one of the policy.
        ctx: caches and clients.

    Raises:
        AdminNotFoundError: the topic is gone.
        RedriveError: the right can't be recorded, or not be granted.
    """
    async with _locks.setdefault(topic, asyncio.Lock()):
        namespace = await connection.admin.namespace(topic.namespace_name)
        missing = NEEDED - namespace.permissions.get(str(topic), {}).get(role, frozenset())
        record = TargetRights(topic=str(topic), role=role, actions=tuple(sorted(missing)))
        added = missing.union(*_actions_of_others(replay, record, connection.key, ctx))
        if added:
            record = record.model_copy(update={"actions": tuple(sorted(added))})
            await _record(replay, record, connection.key, ctx)
        if missing:
            with connection.admin.granting(topic.namespace_name) as change:
                await change([RightsChange(topic, role, give=NEEDED)])


async def _record(replay: Body, record: TargetRights, connection: Key, ctx: Context) -> None:
    records = _records_of(replay, connection, ctx)
    current = ctx.replays.get(Key.of(replay)) or replay
    if record in records and has_finalizer(current, FINALIZER):
        return
    await add_finalizer(current, FINALIZER, _publisher(ctx))
    others = [other for other in records if other.topic != record.topic]
    await _write(replay, [*others, record], connection, ctx)


def _records_of(replay: Body, connection: Key, ctx: Context) -> tuple[TargetRights, ...]:
    """Return the records of *replay* in the status of one connection."""
    body = ctx.connections.get(connection)
    return () if body is None else _all_records(body).get(replay["metadata"]["uid"], ())


def _all_records(connection: Body) -> Mapping[str, tuple[TargetRights, ...]]:
    """Return the records in the status of a connection, by the uid of their Replay."""
    rights = (connection.get("status") or {}).get("targetRights")
    status = BrokerConnectionStatus.model_validate({"targetRights": rights})
    return status.target_rights or {}


async def _write(
    replay: Body, records: Iterable[TargetRights], connection: Key, ctx: Context
) -> None:
    """Replace the records of *replay* in the status of a connection; those of others stay."""
    written = [record.to_manifest() for record in records] or None
    fields = {"targetRights": {replay["metadata"]["uid"]: written}}
    after = await ctx.kubernetes.patch_status(resources.CONNECTIONS, connection, fields)
    ctx.connections.renew(after)


async def release(replay: Body, ctx: Context) -> None:
    """Revoke the rights of an ended Replay, and remove its finalizer.

    Raises:
        RedriveError: the broker or the API server does not answer; a repetition continues.
    """
    if not has_finalizer(replay, FINALIZER):
        return
    for connection in [Key.of(body) for body in ctx.connections]:
        for record in _records_of(replay, connection, ctx):
            await _take_back(replay, record, connection, ctx)
    replay = ctx.replays.get(Key.of(replay)) or replay
    await remove_finalizer(replay, FINALIZER, _publisher(ctx))


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
    if since < DRAIN and _is_running(replay, ctx):
        return Requeue.BACKOFF
    try:
        await release(replay, ctx)
    except NotFoundError:
        return Requeue.ON_CHANGE
    except RedriveError as error:
        if since < ABANDON:
            logger.warning("the rights of a deleted Replay are not taken back yet: %s", error)
            return Requeue.BACKOFF
        shown = ObjectEvent(
            Reason.TARGET_RIGHTS_ABANDONED, f"{error}; take them back", is_warning=True
        )
        await _publisher(ctx).emit(replay, shown)
        await remove_finalizer(replay, FINALIZER, _publisher(ctx))
    return Requeue.ON_CHANGE


def _is_running(replay: Body, ctx: Context) -> bool:
    launched = find_application(replay, ctx)
    if launched is None or not resources.is_owned_by(launched.application, replay):
        return False
    return launched.launcher.run(launched.application).phase not in FINAL


async def _take_back(replay: Body, record: TargetRights, connection: Key, ctx: Context) -> None:
    """Take back one right, unless it is still needed, and forget it."""
    topic = TopicName.parse(record.topic)
    opened = await _opened(connection, Key.of(replay).namespace, ctx)
    async with _locks.setdefault(topic, asyncio.Lock()):
        if not (_actions_of_others(replay, record, connection, ctx) or _is_of_policy(topic, ctx)):
            with (
                opened.admin.granting(topic.namespace_name) as change,
                suppress(
                    AdminNotFoundError  # the topic is gone, and the right with it
                ),
            ):
                taken = NEEDED.intersection(record.actions)
                await change([RightsChange(topic, record.role, take=taken)])
            actions = f"{', '.join(record.actions)} of {record.role} on {record.topic}"
            logger.info("Replay %s: rights taken back: %s", Key.of(replay), actions)
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
) -> list[tuple[str, ...]]:
    """Return the recorded rights of other Replays at the topic, for the same role.

    Records of Replays without the finalizer are ignored, because they are never revoked.
    """
    uid, broker = replay["metadata"]["uid"], _broker(connection, ctx)
    holders = {
        other["metadata"]["uid"] for other in ctx.replays if has_finalizer(other, FINALIZER)
    } - {uid}
    return [
        other.actions
        for body in ctx.connections
        if _broker(Key.of(body), ctx) == broker
        for holder, records in _all_records(body).items()
        if holder in holders
        for other in records
        if (other.topic, other.role) == (record.topic, record.role)
    ]


def _broker(connection: Key, ctx: Context) -> str:
    return connections.broker_of(connection, ctx.connections) or str(connection)


def _is_of_policy(topic: TopicName, ctx: Context) -> bool:
    """Return True if a policy has *topic* as one of its own, and grants rights there itself."""
    for body in ctx.policies:
        through = connections.connection_of(body)
        defaults = connections.defaults_of(through, ctx.connections)
        try:
            spec = effective_spec(body, ctx.policies, defaults)
        except RedriveError:
            continue
        if topic in spec.all_topics:
            return True
    return False


def _publisher(ctx: Context) -> Publisher:
    return Publisher(ctx.kubernetes, resources.REPLAYS, ctx.replays, ctx.clock)

"""Rights of the replay role at targets: granted for a Replay, and taken back at its end.

What was granted is recorded in the status of the Replay before it is granted, and a finalizer keeps
the Replay until it is taken back: whatever its end, and whether the operator ran meanwhile. A right
that another Replay or a policy still needs stays, and the last of them takes it back. A right that
the role had before, from others, is never taken.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from weakref import WeakValueDictionary

from redrive.admin.errors import AdminNotFoundError
from redrive.admin.model import RightsChange
from redrive.api import Body
from redrive.api.conditions import ObjectEvent
from redrive.api.replay import FINAL, ReplayStatus, TargetRights
from redrive.api.retrypolicy import ConnectionRef
from redrive.errors import RedriveError, Requeue
from redrive.kube import connections, resources
from redrive.kube.client import (
    ConnectionNotFoundError,
    NotFoundError,
    SecretKeyNotFoundError,
    SecretNotFoundError,
)
from redrive.kube.connections import Connection, effective_spec
from redrive.kube.context import Context
from redrive.kube.resources import Key
from redrive.kube.status import Publisher, add_finalizer, has_finalizer, remove_finalizer
from redrive.policy.naming import TopicName
from redrive.replay.controller.spark_operators import find_application

FINALIZER = "redrive.io/target-rights"
"""Keeps a Replay that is deleted until the rights granted for it are taken back."""
DRAIN = timedelta(minutes=1)
"""The longest time for which the job of a deleted Replay keeps its rights, to settle messages."""
ABANDON = timedelta(minutes=10)
"""A Replay whose rights could not be taken back for so long after its deletion goes without."""
RIGHTS_ABANDONED = "TargetRightsAbandoned"
"""Reason of an Event: the Replay is gone, and the rights of the replay role at its target stay."""

NEEDED = frozenset({"produce", "consume"})
"""To send to a target, and to find there what was sent before."""

logger = logging.getLogger(__name__)

_locks: WeakValueDictionary[TopicName, asyncio.Lock] = WeakValueDictionary()
"""Held while the rights at a target change: one of two Replays has to see the other's record."""


async def grant(
    replay: Body, topic: TopicName, role: str, connection: Connection, ctx: Context
) -> None:
    """Let *role* send to *topic* and read there, for as long as *replay* needs it.

    Args:
        replay: the Replay, which is not deleted.
        topic: its target, or one that an earlier Replay may have left messages in.
        role: the replay role.
        connection: the one of the policy.
        ctx: what the watches have shown.

    Raises:
        AdminNotFoundError: the topic is gone.
        RedriveError: the right can't be recorded, or not be granted.
    """
    async with _locks.setdefault(topic, asyncio.Lock()):
        namespace = await connection.admin.namespace(topic.namespace_name)
        missing = NEEDED - namespace.permissions.get(str(topic), {}).get(role, frozenset())
        record = TargetRights(
            connection=str(connection.key),
            topic=str(topic),
            role=role,
            actions=tuple(sorted(missing)),
        )
        held = [each for other in ctx.replays for each in _same(other, record, ctx)]
        added = missing.union(*(each.actions for each in held))
        if added:
            record = record.model_copy(update={"actions": tuple(sorted(added))})
            await _record(ctx.replays.get(Key.of(replay)) or replay, record, ctx)
        if missing:
            with connection.admin.granting(topic.namespace_name) as change:
                await change([RightsChange(topic, role, give=NEEDED)])


async def _record(replay: Body, record: TargetRights, ctx: Context) -> None:
    recorded = ReplayStatus.of(replay).target_rights or ()
    if record in recorded and has_finalizer(replay, FINALIZER):
        return
    await add_finalizer(replay, FINALIZER, _publisher(ctx))
    others = [each for each in recorded if each.topic != record.topic]
    fields = {"targetRights": [each.to_manifest() for each in (*others, record)]}
    after = await ctx.kubernetes.patch_status(resources.REPLAYS, Key.of(replay), fields)
    ctx.replays.renew(after)


async def release(replay: Body, ctx: Context) -> None:
    """Take back what was granted for a Replay that has ended, and let go of it.

    Raises:
        RedriveError: not now; what was done by then is done.
    """
    if not has_finalizer(replay, FINALIZER):
        return
    for record in ReplayStatus.of(replay).target_rights or ():
        await _take_back(replay, record, ctx)
    replay = ctx.replays.get(Key.of(replay)) or replay
    await remove_finalizer(replay, FINALIZER, _publisher(ctx))


async def release_deleted(replay: Body, ctx: Context) -> Requeue:
    """Do what `release` does for a Replay that is being deleted, once its job has ended.

    The job sees the deletion, and settles what is in flight first. A broker that does not answer
    holds up no deletion for longer than `ABANDON`.

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
        shown = ObjectEvent(RIGHTS_ABANDONED, f"{error}; take them back", is_warning=True)
        await _publisher(ctx).emit(replay, shown)
        await remove_finalizer(replay, FINALIZER, _publisher(ctx))
    return Requeue.ON_CHANGE


def _is_running(replay: Body, ctx: Context) -> bool:
    launched = find_application(replay, ctx)
    if launched is None or not resources.is_owned_by(launched.application, replay):
        return False
    return launched.launcher.run(launched.application).phase not in FINAL


async def _take_back(replay: Body, record: TargetRights, ctx: Context) -> None:
    """Take back one right, unless it is still needed, and forget it.

    Who may write the status of a Replay, as its job may, has no other right taken back than one of
    the replay role, on a topic that the connection allows to the namespace.
    """
    topic, namespace = TopicName.parse(record.topic), Key.of(replay).namespace
    connection = await _connection(record, namespace, ctx)
    allowed = connections.permissions(connection.spec, connection.key, namespace, ctx.namespaces)
    identity = connection.spec.replay
    is_ours = identity is not None and identity.role == record.role and allowed.allows_topic(topic)
    async with _locks.setdefault(topic, asyncio.Lock()):
        if not is_ours:
            logger.warning("Replay %s: no rule allows to take back: %s", *_of(replay, record))
        elif not (_is_needed(replay, record, ctx) or _is_of_policy(topic, ctx)):
            with (
                connection.admin.granting(topic.namespace_name) as change,
                suppress(
                    AdminNotFoundError  # the topic is gone, and the right with it
                ),
            ):
                taken = NEEDED.intersection(record.actions)
                await change([RightsChange(topic, record.role, take=taken)])
            logger.info("Replay %s: rights taken back: %s", *_of(replay, record))
        # Within the lock: of two Replays that end at once, the second has to see none of the first.
        await _forget(replay, record, ctx)


async def _forget(replay: Body, record: TargetRights, ctx: Context) -> None:
    known = ReplayStatus.of(ctx.replays.get(Key.of(replay)) or replay).target_rights or ()
    others = [each.to_manifest() for each in known if each != record]
    fields = {"targetRights": others or None}
    after = await ctx.kubernetes.patch_status(resources.REPLAYS, Key.of(replay), fields)
    ctx.replays.renew(after)


def _of(replay: Body, record: TargetRights) -> tuple[Key, str]:
    return Key.of(replay), f"{', '.join(record.actions)} of {record.role} on {record.topic}"


async def _connection(record: TargetRights, namespace: str, ctx: Context) -> Connection:
    through = Key(*record.connection.split("/", 1))
    ref = ConnectionRef(name=through.name, namespace=through.namespace)
    try:
        return await ctx.brokers.resolve(ref, namespace)
    except (ConnectionNotFoundError, SecretNotFoundError, SecretKeyNotFoundError):
        remembered = ctx.brokers.remembered(ref, namespace)
        if remembered is None:
            raise
        return remembered


def _is_needed(replay: Body, record: TargetRights, ctx: Context) -> bool:
    """Return True if another Replay has the right on record too: the last of them takes it back."""
    others = (each for each in ctx.replays if Key.of(each) != Key.of(replay))
    return any(list(_same(other, record, ctx)) for other in others)


def _same(replay: Body, record: TargetRights, ctx: Context) -> Iterator[TargetRights]:
    """Yield the records of *replay* about the same role on the same topic of the same broker.

    A record counts only beside the finalizer, without which it is never taken back.
    """
    if not has_finalizer(replay, FINALIZER):
        return
    for each in ReplayStatus.of(replay).target_rights or ():
        if (each.topic, each.role) == (record.topic, record.role) and _broker(each, ctx) == _broker(
            record, ctx
        ):
            yield each


def _broker(record: TargetRights, ctx: Context) -> str:
    through = Key(*record.connection.split("/", 1))
    return connections.broker_of(through, ctx.connections) or record.connection


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

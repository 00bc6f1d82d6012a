"""A PulsarConnection → whether its Secret, its broker and its rights are as policies need them.

Called by the `Controller` of connections: once for each change, in each of the `rounds`, and again
while something is amiss. Policies do not wait for it: each finds out for itself.
"""

from __future__ import annotations

from redrive.admin.errors import BrokerDownError
from redrive.errors import RedriveError, Requeue
from redrive.kube import logs, resources, status
from redrive.kube.connections import Connection
from redrive.kube.context import Context
from redrive.kube.errors import NotFoundError
from redrive.kube.resources import Body, Key
from redrive.kube.status import Publisher
from redrive.provision import errors

CONNECTED = "Connected"
"""Reason: the broker accepts the token, and its role administers the tenants concerned."""


async def reconcile(key: Key, ctx: Context) -> Requeue:
    """Look at one PulsarConnection, if it is still there."""
    body = ctx.connections.get(key)
    if body is None:
        return Requeue.NEVER
    logs.identify(body)
    try:
        return await _look(body, ctx)
    except NotFoundError:
        ctx.connections.drop(body)  # it went unseen by the watch
        return Requeue.NEVER


async def _look(body: Body, ctx: Context) -> Requeue:
    """Ask the broker, and publish how the connection stands."""
    out = Publisher(ctx.kubernetes, resources.CONNECTIONS, ctx.connections, ctx.clock)
    if status.is_new(body):
        body = await out.publish(body, status.progressing("asking the broker"))
    try:
        await check(await ctx.brokers.open(Key.of(body)))
    except RedriveError as error:
        await out.publish(body, status.failed(error))
        # This reconcile is the probe of a broker that is down.
        return Requeue.BACKOFF if isinstance(error, BrokerDownError) else error.requeue
    await out.publish(body, status.ready(CONNECTED, "the broker answers; the token has rights"))
    return Requeue.ON_CHANGE


async def check(connection: Connection) -> None:
    """Ask the broker whether it takes the token, and the rights in each tenant that is named.

    Raises:
        AdminError: it does not answer, or refuses.
        TenantNotFoundError: a tenant of allowedTopics does not exist.
    """
    await connection.admin.clusters()
    tenants = {pattern.split("/")[2] for pattern in connection.spec.allowed_topics}
    for tenant in sorted(tenant for tenant in tenants if "*" not in tenant):
        if not await connection.admin.tenant_exists(tenant):
            raise errors.TenantNotFoundError(
                "a tenant of spec.allowedTopics does not exist",
                got=tenant,
                remedy="create it, or remove the pattern",
            )

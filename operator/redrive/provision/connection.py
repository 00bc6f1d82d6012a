"""A PulsarConnection → whether its Secret, its broker and its rights are as policies need them.

Called by the `Controller` of connections: after each change, by `resync`, and again while something
is wrong. Policies do not wait for it: each of their reconciles finds out for itself.
"""

from __future__ import annotations

from dataclasses import replace

from redrive.admin.errors import BrokerDownError
from redrive.api.conditions import Reason
from redrive.api.connection import PulsarConnectionSpec
from redrive.errors import RedriveError, Requeue
from redrive.kube import logs, resources, status
from redrive.kube.connections import Connection
from redrive.kube.context import Context
from redrive.kube.errors import NotFoundError
from redrive.kube.resources import Key
from redrive.kube.status import Publisher, StatusWarning
from redrive.provision import errors, in_use
from redrive.provision.outcome import Outcome, publish
from redrive.provision.status_warnings import deprecated_fields

CONNECTED = Reason("Connected")
"""Reason: the broker accepts the token, and its role administers the tenants concerned."""
BROKER_NOT_SUPPORTED = Reason("BrokerNotSupported")
"""The broker's release is of a line that redrive is not tested with."""
OLDEST_BROKER, NEWEST_BROKER = (4, 0), (4, 2)
"""The lines of Pulsar, first and last, of the support matrix."""


async def reconcile(key: Key, ctx: Context) -> Requeue:
    """Check one PulsarConnection; its status and Events are written last."""
    body = ctx.connections.get(key)
    if body is None:
        return Requeue.ON_CHANGE
    logs.identify(body)
    out = Publisher(ctx.kubernetes, resources.CONNECTIONS, ctx.connections, ctx.clock)
    try:
        used = in_use.users_of(body, ctx)
        protected = await in_use.protect(body, used, out)
        if protected is None:
            return Requeue.ON_CHANGE
        body = protected
        if status.is_new(body):
            body = await out.publish(body, status.progressing("asking the broker"))
        outcome = await connect(key, ctx)
        outcome = replace(outcome, fields={**outcome.fields, "policies": len(used)})
        blocked = in_use.blocked(body, used)
        if blocked is not None:
            conditions = (*outcome.conditions, status.warning(blocked))
            outcome = replace(outcome, conditions=conditions)
        await publish(body, outcome, out)
    except NotFoundError:
        ctx.connections.drop(body)  # no watch has shown that it is gone
        return Requeue.ON_CHANGE
    return outcome.requeue


async def connect(key: Key, ctx: Context) -> Outcome:
    """Ask the broker of one PulsarConnection; return what to write about it."""
    try:
        connection = await ctx.brokers.open(key)
        await check(connection)
        version = await connection.admin.version()
    except BrokerDownError as error:
        # For policies this reconcile is the probe, so nothing else shows that the broker is back.
        return replace(Outcome.failed(error), requeue=Requeue.BACKOFF)
    except RedriveError as error:
        return Outcome.failed(error)
    message = "the broker answers; the token has rights"
    conditions = status.ready(CONNECTED, message, warnings(connection.spec, version))
    return Outcome(conditions, {"brokerVersion": ".".join(map(str, version)) or None})


def warnings(
    spec: PulsarConnectionSpec, version: tuple[int, ...] = ()
) -> tuple[StatusWarning, ...]:
    """Say which fields others have replaced, and whether the broker's release is supported.

    Args:
        spec: of the connection.
        version: the broker's release; empty where it is not known.
    """
    found = (deprecated_fields(spec.edits), unsupported(version))
    return tuple(each for each in found if each is not None)


def unsupported(version: tuple[int, ...]) -> StatusWarning | None:
    """Find a release that redrive is not tested with; patches do not count."""
    if not version or OLDEST_BROKER <= version[:2] <= NEWEST_BROKER:
        return None
    oldest, newest = (".".join(map(str, line)) for line in (OLDEST_BROKER, NEWEST_BROKER))
    return StatusWarning(
        BROKER_NOT_SUPPORTED,
        f"redrive is tested with Pulsar {oldest} to {newest}, and the broker is of another line; "
        f"got {'.'.join(map(str, version))}; use a supported release, or test yours",
    )


async def check(connection: Connection) -> None:
    """Check that the broker accepts the token, with rights in each tenant that is named.

    Raises:
        AdminError: it does not answer, or refuses the call.
        TenantNotFoundError: a tenant of spec.allow does not exist.
    """
    await connection.admin.clusters()
    patterns = (pattern for rule in connection.spec.rules for pattern in rule.topics)
    tenants = {pattern.split("/")[2] for pattern in patterns}
    for tenant in sorted(tenant for tenant in tenants if "*" not in tenant):
        if not await connection.admin.tenant_exists(tenant):
            raise errors.TenantNotFoundError(
                "a tenant of the topics in spec.allow does not exist",
                got=tenant,
                remedy="create it, or remove the pattern",
            )

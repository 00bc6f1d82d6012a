"""Reconciliation of a connection, and its protection while policies use it.

A BrokerConnection → whether its Secret, its broker and its rights are as policies need them.

Called by the `Controller` of connections: after each change, by `resync`, and again while something
is wrong. Policies do not wait for it: each of their reconciles finds out for itself.

A BrokerConnection is not deleted before the policies that use it, because their deletion may need
it, and not before the rights that its status records are taken back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from redrive import __version__
from redrive.admin.errors import BrokerDownError
from redrive.api import Body
from redrive.api.conditions import StatusWarning, is_new, progressing, ready, warning
from redrive.api.job import MAX_TEMPLATES, AvailableTemplate, ConnectionJobs
from redrive.api.permissions import NAMESPACE
from redrive.errors import RedriveError, Requeue
from redrive.kube import connections, logs, resources
from redrive.kube.client import NotFoundError
from redrive.kube.connections import Connection, may_use, rules_for, users
from redrive.kube.context import Context
from redrive.kube.job_templates import executor_bound
from redrive.kube.resources import Key
from redrive.kube.status import Publisher, add_finalizer, has_finalizer, remove_finalizer
from redrive.provision.outcome import Outcome, publish
from redrive.reasons import Reason

OLDEST_BROKER, NEWEST_BROKER = (4, 0), (4, 2)
"""The lines of Pulsar, first and last, of the support matrix."""


async def reconcile(key: Key, ctx: Context) -> Requeue:
    """Check one BrokerConnection; its status and Events are written last."""
    body = ctx.connections.get(key)
    if body is None:
        return Requeue.ON_CHANGE
    logs.identify(body)
    out = Publisher(ctx.kubernetes, resources.CONNECTIONS, ctx.connections, ctx.clock)
    try:
        used = users_of(body, ctx)
        protected = await protect_connection(body, out, used=bool(used))
        if protected is None:
            return Requeue.ON_CHANGE
        body = protected
        if is_new(body):
            body = await out.publish(body, progressing("asking the broker"))
        outcome = await connect(key, ctx)
        templates, problems = job_templates(key, ctx)
        fields = {
            "operatorVersion": __version__,
            **outcome.fields,
            **usage(body, used, ctx),
            "jobTemplates": templates,
        }
        conditions = (*outcome.conditions, *map(warning, problems))
        outcome = replace(outcome, conditions=conditions, fields=fields)
        blocked = deletion_blocked(body, used)
        if blocked is not None:
            conditions = (*outcome.conditions, warning(blocked))
            outcome = replace(outcome, conditions=conditions)
        await publish(body, outcome, out)
    except NotFoundError:
        ctx.connections.drop(body)  # no watch has shown that it is gone
        return Requeue.ON_CHANGE
    return outcome.requeue


def usage(connection: Body, used: Sequence[Body], ctx: Context) -> dict[str, Any]:
    """Return the fields of the status with the numbers of policies.

    Args:
        connection: the BrokerConnection.
        used: the policies that use it.
        ctx: what the watches have shown.
    """
    by_namespace = Counter(Key.of(body).namespace for body in used)
    by_rule = {rule["name"]: Counter[str]() for rule in connection["spec"].get("allow") or ()}
    for namespace, count in by_namespace.items():
        for rule in rules_for(Key.of(connection), namespace, ctx.connections, ctx.namespaces):
            by_rule[rule.name][namespace] = count
    allow = [
        {"name": name, "namespaces": len(counts), "policies": counts.total()}
        for name, counts in by_rule.items()
    ]
    return {"policies": len(used), "allow": allow}


def job_templates(
    key: Key, ctx: Context
) -> tuple[list[dict[str, Any]] | None, tuple[StatusWarning, ...]]:
    """Return the job templates of a connection as its status shows them, and their problems.

    Templates are None where the operator runs no Replays, and where the spec is invalid.
    """
    if ctx.settings.replay_template is None:
        return None, ()
    try:
        jobs = connections.spec_at(key, ctx.connections).jobs or ConnectionJobs()
    except RedriveError:
        return None, ()
    store, operator = ctx.job_templates, ctx.settings.max_executors
    names = jobs.templates or store.names
    valid = [(name, form) for name in names if (form := store.get(name)) is not None]
    shown = [
        AvailableTemplate(name=name, max_executors=executor_bound(form, jobs, operator))
        for name, form in valid[:MAX_TEMPLATES]
    ]
    problems = (store.problem(name) for name in names)
    first = next((problem for problem in problems if problem is not None), None)
    return [template.to_manifest() for template in shown], () if first is None else (first,)


async def connect(key: Key, ctx: Context) -> Outcome:
    """Ask the broker of one BrokerConnection; return what to write about it."""
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
    warning = unsupported(version)
    warnings = () if warning is None else (warning,)
    conditions = ready(Reason.CONNECTED, message, warnings)
    return Outcome(conditions, {"brokerVersion": ".".join(map(str, version)) or None})


def unsupported(version: tuple[int, ...]) -> StatusWarning | None:
    """Find a release that redrive is not tested with; patches do not count.

    Args:
        version: the broker's release; empty where it is not known.
    """
    if not version or OLDEST_BROKER <= version[:2] <= NEWEST_BROKER:
        return None
    oldest, newest = (".".join(map(str, line)) for line in (OLDEST_BROKER, NEWEST_BROKER))
    return StatusWarning(
        Reason.BROKER_NOT_SUPPORTED,
        f"redrive is tested with Pulsar {oldest} to {newest}, and the broker is of another line; "
        f"got {'.'.join(map(str, version))}; use a supported release, or test yours",
    )


async def check(connection: Connection) -> None:
    """Check that the broker accepts the token, with rights in each tenant that is named.

    Raises:
        AdminError: it does not answer, or refuses the call.
        TenantNotFound: a tenant of spec.allow does not exist.
    """
    await connection.admin.clusters()
    patterns = (pattern for rule in connection.spec.allow for pattern in rule.topics)
    tenants = {pattern.split("/")[2] for pattern in patterns}
    for tenant in sorted(t for t in tenants if "*" not in t and NAMESPACE not in t):
        if not await connection.admin.tenant_exists(tenant):
            raise Reason.TENANT_NOT_FOUND.error(
                "a tenant of the topics in spec.allow does not exist",
                got=tenant,
                remedy="create it, or remove the pattern",
            )


IN_USE = "redrive.io/in-use"
"""The finalizer of a connection that policies use, and of no other."""
_SHOWN = 5


def users_of(connection: Body, ctx: Context) -> tuple[Body, ...]:
    """Return the policies that use *connection*, of all namespaces.

    One of a namespace that it is not for does not count: anyone could name it, to keep it.
    """
    key = Key.of(connection)
    found = users(key, ctx.policies)
    namespaces = {Key.of(body).namespace for body in found}
    allowed = {ns for ns in namespaces if may_use(key, ns, ctx.connections, ctx.namespaces)}
    return tuple(body for body in found if Key.of(body).namespace in allowed)


def is_protection_due(connection: Body, *, used: bool) -> bool:
    """Whether the finalizer of a connection, or what it says, has to change.

    Args:
        connection: as it is.
        used: whether any policy names it.
    """
    is_needed = used or has_target_rights(connection)
    return _is_deleted(connection) or has_finalizer(connection, IN_USE) is not is_needed


def has_target_rights(connection: Body) -> bool:
    """Return True if the rights of a Replay at its target have to be taken back."""
    return bool((connection.get("status") or {}).get("targetRights"))


async def protect_connection(connection: Body, out: Publisher, *, used: bool) -> Body | None:
    """Have the finalizer on a connection that policies or Replays need, and on no other.

    A crash before that leaves it for the next reconcile. The API server takes no new finalizer for
    an object that is being deleted; that without ours is gone in a moment.

    Args:
        connection: as it is.
        out: writes it.
        used: whether any policy uses it.

    Returns:
        The connection as it is then; None where nothing keeps it from being deleted.

    Raises:
        ConflictError: it was changed meanwhile.
        NotFoundError: it is gone.
    """
    if not (used or has_target_rights(connection)):
        after = await remove_finalizer(connection, IN_USE, out)
        return None if _is_deleted(after) else after
    if _is_deleted(connection):
        return connection
    return await add_finalizer(connection, IN_USE, out)


def deletion_blocked(connection: Body, used: Sequence[Body]) -> StatusWarning | None:
    """Say what a deletion waits for; the names of other namespaces' policies are not shown."""
    if not _is_deleted(connection):
        return None
    if not used:
        return StatusWarning(
            Reason.DELETION_BLOCKED,
            "the connection is being deleted, and goes once the rights of Replays at their targets "
            "are taken back; wait for their end, or delete these Replays",
        )
    namespace = Key.of(connection).namespace
    own = sorted(name for ns, name in map(Key.of, used) if ns == namespace)
    more = len(used) - len(own)
    named = [f"RetryPolicy {name}" for name in own[:_SHOWN]]
    named += [f"{len(own) - _SHOWN} more"] if len(own) > _SHOWN else []
    named += [f"{more} of other namespaces"] if more else []
    return StatusWarning(
        Reason.DELETION_BLOCKED,
        "the connection is being deleted, and goes once no policy uses it: their deletion may need "
        f"it; got {', '.join(named)}; delete them, or have them use another connection",
    )


def _is_deleted(body: Body) -> bool:
    return "deletionTimestamp" in body["metadata"]

"""Reconciliation of a connection, and its protection while policies use it.

A reconcile checks the Secret, the broker and the rights of a BrokerConnection. The `Controller` of
connections calls it after each change, periodically, and after a back-off. Policies do not wait for
it: each of their reconciles reports problems of the connection, too.

A BrokerConnection is deleted after the policies that use it, because their deletion may need it,
and after the grants in its status were revoked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from redrive import __version__
from redrive.admin.errors import BrokerDownError
from redrive.admin.model import Supported
from redrive.api import Body
from redrive.api.conditions import StatusWarning, first_of, is_new, progressing, ready, warning
from redrive.api.job import MAX_TEMPLATES, AvailableTemplate, ConnectionJobs
from redrive.errors import RedriveError, Requeue
from redrive.kube import connections, logs, resources
from redrive.kube.client import NotFoundError
from redrive.kube.connections import rules_for, users, written_rules
from redrive.kube.context import Context
from redrive.kube.job_templates import executor_bound
from redrive.kube.resources import Key
from redrive.kube.status import Publisher, add_finalizer, has_finalizer, remove_finalizer
from redrive.provision.outcome import Outcome, publish
from redrive.reasons import Reason


async def reconcile(key: Key, ctx: Context) -> Requeue:
    """Check one BrokerConnection, and publish the result."""
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
            body = await out.publish(body, progressing("connecting to the broker"))
        outcome = await connect(key, ctx)
        templates, problems = job_templates(key, ctx)
        fields = {
            "operatorVersion": __version__,
            **outcome.fields,
            **usage(body, used, ctx),
            "jobTemplates": templates,
        }
        notices = (*problems, deletion_blocked(body, used))
        conditions = (*outcome.conditions, *map(warning, filter(None, notices)))
        outcome = replace(outcome, conditions=conditions, fields=fields)
        await publish(body, outcome, out)
    except NotFoundError:
        ctx.connections.drop(body)  # the watch has not reported the deletion yet
        return Requeue.ON_CHANGE
    return outcome.requeue


def usage(connection: Body, used: Sequence[Body], ctx: Context) -> dict[str, Any]:
    """Return the status fields with the numbers of policies.

    Args:
        connection: the BrokerConnection.
        used: the policies that use it.
        ctx: caches and clients of the operator.
    """
    by_namespace = Counter(Key.of(body).namespace for body in used)
    by_rule = {rule["name"]: Counter[str]() for rule in written_rules(connection)}
    for namespace, count in by_namespace.items():
        rules = rules_for(Key.of(connection), namespace, ctx.connections, ctx.namespaces)
        for rule in rules or ():
            by_rule[rule.name][namespace] = count
    allow = [
        {"name": name, "namespaces": len(counts), "policies": counts.total()}
        for name, counts in by_rule.items()
    ]
    return {"policies": len(used), "allow": allow}


def job_templates(
    key: Key, ctx: Context
) -> tuple[list[dict[str, Any]] | None, tuple[StatusWarning, ...]]:
    """Return the job templates of a connection for its status, and their problems.

    Templates are None if the operator runs no Replays, and if the spec is invalid.
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
    """Connect to the broker of one BrokerConnection, and return the result."""
    try:
        connection = await ctx.brokers.open_any(key)
        version = await connection.probe()
    except BrokerDownError as error:
        # This reconcile probes the broker for all policies, so it must be repeated.
        return replace(Outcome.failed(error), requeue=Requeue.BACKOFF)
    except RedriveError as error:
        return Outcome.failed(error)
    message = "the broker accepts the credentials"
    warning = unsupported(version, connection.supported)
    warnings = () if warning is None else (warning,)
    conditions = ready(Reason.CONNECTED, message, warnings)
    return Outcome(conditions, {"brokerVersion": ".".join(map(str, version)) or None})


def unsupported(version: tuple[int, ...], supported: Supported) -> StatusWarning | None:
    """Return a warning about a release line that redrive is not tested with.

    Args:
        version: release of the broker; empty if unknown.
        supported: release lines of its kind.
    """
    if not version or supported.oldest <= version[:2] <= supported.newest:
        return None
    oldest, newest = (".".join(map(str, line)) for line in supported[1:])
    return StatusWarning(
        Reason.BROKER_NOT_SUPPORTED,
        f"redrive is tested with {supported.name} {oldest} to {newest}, and this broker has "
        f"another release; got {'.'.join(map(str, version))}; use a supported release, or "
        "test yours",
    )


IN_USE = "redrive.io/in-use"
"""Finalizer of a connection that is in use."""


def users_of(connection: Body, ctx: Context) -> tuple[Body, ...]:
    """Return the policies of all namespaces that use *connection*.

    Policies of namespaces without access do not count: otherwise any user could block the deletion.
    """
    key = Key.of(connection)
    policies = (*users(key, ctx.policies), *users(key, ctx.rocketmq_policies))
    rules = {
        namespace: rules_for(key, namespace, ctx.connections, ctx.namespaces)
        for namespace in {Key.of(body).namespace for body in policies}
    }
    return tuple(body for body in policies if rules[Key.of(body).namespace] != ())


def is_protection_due(connection: Body, *, used: bool) -> bool:
    """Return True if a reconcile must change the finalizer or the deletion warning.

    Args:
        connection: the BrokerConnection.
        used: True if a policy refers to it.
    """
    is_needed = used or has_target_rights(connection)
    return _is_deleted(connection) or has_finalizer(connection, IN_USE) is not is_needed


def has_target_rights(connection: Body) -> bool:
    """Return True if grants of a Replay at its target must be revoked."""
    return bool((connection.get("status") or {}).get("targetRights"))


async def protect_connection(connection: Body, out: Publisher, *, used: bool) -> Body | None:
    """Ensure that a connection in use has the finalizer, and no other connection.

    A crash leaves this to the next reconcile. The API server accepts no new finalizer on an object
    that is being deleted. Without the finalizer of redrive such an object disappears at once.

    Args:
        connection: the BrokerConnection.
        out: writes it.
        used: True if a policy uses it.

    Returns:
        The connection after the write; None if its deletion is not blocked.

    Raises:
        ConflictError: the connection changed meanwhile.
        NotFoundError: the connection is gone.
    """
    if not (used or has_target_rights(connection)):
        after = await remove_finalizer(connection, IN_USE, out)
        return None if _is_deleted(after) else after
    if _is_deleted(connection):
        return connection
    return await add_finalizer(connection, IN_USE, out)


def deletion_blocked(connection: Body, used: Sequence[Body]) -> StatusWarning | None:
    """Return a warning that the deletion waits; policies of other namespaces are only counted."""
    if not _is_deleted(connection):
        return None
    if not used:
        return StatusWarning(
            Reason.DELETION_BLOCKED,
            "the deletion of the connection waits until the grants of Replays at their targets are "
            "revoked; wait until these Replays end, or delete them",
        )
    namespace = Key.of(connection).namespace
    own = sorted(
        f"{body.get('kind', 'RetryPolicy')} {Key.of(body).name}"
        for body in used
        if Key.of(body).namespace == namespace
    )
    more = len(used) - len(own)
    named = first_of(own)
    named += [f"{more} of other namespaces"] if more else []
    return StatusWarning(
        Reason.DELETION_BLOCKED,
        "the deletion of the connection waits until no policy uses it, because their deletion may "
        f"need it; got {', '.join(named)}; delete them, or let them use another connection",
    )


def _is_deleted(body: Body) -> bool:
    return "deletionTimestamp" in body["metadata"]

"""Observe, diff, apply: what a reconcile does at the broker for one RetryPolicy."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, replace

from redrive.admin.client import Admin
from redrive.admin.errors import AdminError, AdminNotFoundError
from redrive.admin.paths import broker_at
from redrive.kube import resources, status
from redrive.kube.context import Context
from redrive.kube.resources import Body
from redrive.kube.status import Publisher, StatusWarning
from redrive.provision import errors, intent
from redrive.provision.actions import Action, in_words, is_refusable
from redrive.provision.apply import apply
from redrive.provision.conflicts import Conflicts
from redrive.provision.desired import Desired, desired
from redrive.provision.diff import diff
from redrive.provision.facts import Observed, Request
from redrive.provision.finalizer import ensure_finalizer
from redrive.provision.observe import AWAITED_SECONDS, around, observe
from redrive.provision.preflight_checks import PREFLIGHT, PreflightFacts
from redrive.provision.resolve import admit
from redrive.provision.status_warnings import Seen, warnings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Converged:
    """What is there, what was done for it, and what should be fixed all the same.

    Attributes:
        request: what the policy asks for.
        broker: which one answered, as `broker_at` names it.
        planned_changes: what was not done, because the policy only observes.
    """

    desired: Desired
    request: Request
    broker: str
    actions: tuple[Action, ...]
    planned_changes: tuple[Action, ...]
    warnings: tuple[StatusWarning, ...]


async def converge(request: Request, body: Body, ctx: Context, conflicts: Conflicts) -> Converged:
    """Bring the broker to what *body*, a policy, asks for; return what is there then.

    Every check comes before the first write, so a policy that is refused changes nothing. After a
    crash the next call does what is left.

    Raises:
        RedriveError: the policy can't be obeyed, or not now; its reason says why.
    """
    admit(request, ctx, conflicts)
    connection = await ctx.brokers.resolve(request.spec.connection_ref, request.key.namespace)
    release = await connection.admin.version()
    want = desired(request, body, ctx.settings.cluster_id, release)
    with connection.admin.granting(request.policy.topic.namespace_name) as grant:
        have = await _observe(request, body, want, connection.admin, ctx)
        PREFLIGHT.check(PreflightFacts(body, want, have, request))
        rivals = admit(request, ctx, conflicts)  # again: one may have been provisioned meanwhile
        out = Publisher(ctx.kubernetes, resources.POLICIES, ctx.policies, ctx.clock)
        body = await ensure_finalizer(body, request.deletion, out)
        planned = diff(want, have)
        actions, planned_changes = ((), planned) if request.only_observes else (planned, ())
        body = await intent.record(actions, request.spec.scheme, body, ctx)
        try:
            applied = await apply(actions, connection.admin, grant, ctx.kubernetes)
        except AdminError as error:
            await intent.clear(error, body, ctx)
            raise
    if applied.done:
        logger.info("RetryPolicy %s: %s", request.key, in_words(applied.done))
    have = replace(have, inherited={**have.inherited, **applied.in_force})
    # Its status may not say yet that it is.
    seen = Seen(replace(request, is_proven=True), rivals, want, have, tuple(applied.refused))
    broker = broker_at(connection.spec.admin_url)  # it may have changed since the request was read
    return Converged(want, request, broker, tuple(applied.done), planned_changes, warnings(seen))


async def _observe(
    request: Request, body: Body, want: Desired, admin: Admin, ctx: Context
) -> Observed:
    """Read what is there; only once where cached reads show that there is nothing to do.

    A schema is copied only after both topics were read without a cache. A schema that the broker
    refuses is tried by each reconcile, and must not cost a second read each time. A policy that
    waits for its source topic first uses what was read for others.
    """
    if status.is_settled(body):
        # The policy was ready: what a cached read finds missing may be there again.
        with suppress(AdminNotFoundError, errors.SubscriptionExpiryError, errors.AwaitedError):
            have = await observe(want, admin, ctx, recent=True)
            actions = diff(want, have)
            if request.only_observes or all(map(is_refusable, actions)):
                return have
    elif _awaits_source(body):
        await around(want.policy.topic, admin, max_age=AWAITED_SECONDS)
    return await observe(want, admin, ctx)


def _awaits_source(body: Body) -> bool:
    """Whether the source topic, or what it lies in, was missing at the last reconcile."""
    awaited = {error.reason for error in errors.AwaitedError.__subclasses__()}
    return status.reason(body) in awaited and not status.is_new(body)

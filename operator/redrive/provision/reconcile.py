"""The spine of provisioning: bring the broker to what one RetryPolicy asks, and say how far it is.

Called by the `Controller` of policies, once for each change, in each of the `rounds`, and again
while a policy is not ready for a reason that no watch would tell.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from redrive.admin.client import Admin
from redrive.admin.errors import NotFoundError
from redrive.api.conditions import Condition
from redrive.errors import RedriveError
from redrive.kube import logs, resources, status
from redrive.kube.context import Context
from redrive.kube.controller import Requeue
from redrive.kube.errors import NotFoundError as ObjectNotFoundError
from redrive.kube.resources import Body, Key
from redrive.kube.status import Publisher, StatusWarning
from redrive.provision import conditions, errors, metrics, restraint
from redrive.provision.apply import apply
from redrive.provision.cautions import Seen, cautions
from redrive.provision.claims import Claims
from redrive.provision.desired import Desired, desired
from redrive.provision.facts import Asked, Observed
from redrive.provision.gather import gather, gather_admissible
from redrive.provision.health.watch import Health
from redrive.provision.observe import AWAITED_SECONDS, around, observe
from redrive.provision.plan import plan
from redrive.provision.retire import hold, retire
from redrive.provision.steps import CopySchema, Step, in_words

logger = logging.getLogger(__name__)

PROVISIONED = "Provisioned"
"""Reason: topics, subscriptions, grants and ConfigMap are as the policy asks."""
REPAIRED = "Repaired"
"""Reason of an Event: what was ready had changed, and is again as policy and connection ask."""


async def mark_progressing(key: Key, ctx: Context) -> None:
    """Say in the status of a RetryPolicy that its spec was seen, if nothing is said of it yet.

    Before its turn comes: with many policies that may take minutes, and a status without conditions
    reads as if all were done.

    Raises:
        KubernetesError: it could not be written.
    """
    body = ctx.policies.get(key)
    if body is None or "deletionTimestamp" in body["metadata"] or restraint.is_paused(body):
        return
    if status.is_new(body):
        out = Publisher(ctx.kubernetes, resources.POLICIES, ctx.policies, ctx.clock)
        with suppress(ObjectNotFoundError):  # for the reconcile to find
            await out.publish(body, status.progressing("looking at the policy"))


async def reconcile(key: Key, ctx: Context, claims: Claims, health: Health) -> Requeue:
    """Look at one RetryPolicy, if it is still there."""
    body = ctx.policies.get(key)
    if body is None:
        return Requeue.NEVER
    logs.identify(body)
    try:
        return await _look(body, ctx, claims, health)
    except ObjectNotFoundError:
        ctx.policies.drop(body)  # it went unseen by the watch
        return Requeue.NEVER


async def _look(body: Body, ctx: Context, claims: Claims, health: Health) -> Requeue:
    """Hold a policy, provision it or let it go, and publish how it stands."""
    out = Publisher(ctx.kubernetes, resources.POLICIES, ctx.policies, ctx.clock)
    if "deletionTimestamp" in body["metadata"]:
        return await retire(body, ctx, claims, out)
    if restraint.is_paused(body):
        await out.publish(body, restraint.paused(body))
        return Requeue.ON_CHANGE
    try:
        asked = gather(body, ctx)
    except RedriveError as error:
        return await _unready(body, error, out)
    body = await hold(body, asked.deletion, out)
    try:
        made = await provision(asked, body, ctx, claims)
    except RedriveError as error:
        return await _unready(body, error, out)
    unwell = health.warnings(body)
    if asked.only_observes:
        seen = restraint.observed(made.planned_changes, (*made.cautions, *unwell))
        await out.publish(
            body, seen, {"plannedChanges": restraint.shown(made.planned_changes) or None}
        )
        return Requeue.ON_CHANGE
    after = await out.publish(body, _ready(made, unwell), _fields(made.desired))
    if made.steps and status.is_settled(body):
        for step in made.steps:
            metrics.REPAIRS.labels(type(step).__name__).inc()
        await out.tell(after, REPAIRED, in_words(made.steps))
    return Requeue.ON_CHANGE


async def _unready(body: Body, error: RedriveError, out: Publisher) -> Requeue:
    stalls = isinstance(error, errors.STALLS)
    await out.publish(body, status.stalled(error) if stalls else status.waiting(error))
    return Requeue.ON_CHANGE if isinstance(error, errors.TOLD) else Requeue.BACKOFF


@dataclass(frozen=True)
class Provisioned:
    """What is there, what was done for it, and what should be seen to all the same.

    Attributes:
        planned_changes: what was not done, because the policy only observes.
    """

    desired: Desired
    steps: tuple[Step, ...]
    planned_changes: tuple[Step, ...]
    cautions: tuple[StatusWarning, ...]


async def provision(asked: Asked, body: Body, ctx: Context, claims: Claims) -> Provisioned:
    """Bring the broker to what *body*, a policy, asks for; return what is there then.

    Every check comes before the first write, so a policy that is refused changes nothing. A crash
    on the way is made up for by the next call.

    Raises:
        RedriveError: the policy can't be obeyed, or not now; its reason says why.
    """
    _refuse(conditions.first_violation(conditions.ADMISSIBLE, asked))
    rivals = tuple(gather_admissible(claims.rivals(asked.key), ctx))
    _refuse(conditions.older_rival(asked, rivals))

    wanted = desired(asked, body, ctx.settings.cluster_id)
    connection = await ctx.brokers.resolve(asked.spec.connection_ref, asked.key.namespace)
    with connection.admin.granting(asked.policy.topic.namespace_name) as grant:
        observed = await _observe(asked, body, wanted, connection.admin, ctx)
        older = frozenset(rival.key for rival in rivals if rival.age < asked.age)
        served = ctx.settings.namespaces
        facts = conditions.Buildable(body, wanted, observed, older, served)
        _refuse(conditions.first_violation(conditions.BUILDABLE, facts))

        planned = plan(wanted, observed)
        steps, planned_changes = ((), planned) if asked.only_observes else (planned, ())
        refused = await apply(steps, connection.admin, grant, ctx.kubernetes)
    steps = tuple(step for step in steps if not any(step is each.step for each in refused))
    if steps:
        logger.info("RetryPolicy %s: %s", asked.key, in_words(steps))
    found = cautions(Seen(asked, rivals, wanted, observed, refused))
    return Provisioned(wanted, steps, planned_changes, found)


async def _observe(
    asked: Asked, body: Body, wanted: Desired, admin: Admin, ctx: Context
) -> Observed:
    """Read what is there; where nothing has to be done with what was read lately, only once.

    A schema is copied by what was read just now of both topics. One that the broker refuses is
    tried again with each look, and must not cost a second read each time. What waits for its source
    topic first looks at what others have read meanwhile.
    """
    if status.is_settled(body):
        # Lately all was well: what says that it is not may be over.
        with suppress(NotFoundError, errors.SubscriptionExpiryError, *errors.AWAITED):
            observed = await observe(wanted, admin, ctx, recent=True)
            planned = plan(wanted, observed)
            if asked.only_observes or all(isinstance(step, CopySchema) for step in planned):
                return observed
    elif _awaits_source(body):
        await around(wanted.policy.topic, admin, max_age=AWAITED_SECONDS)
    return await observe(wanted, admin, ctx)


def _awaits_source(body: Body) -> bool:
    """Whether the source topic, or what it lies in, was missing at the last look."""
    awaited = {error.reason for error in errors.AWAITED}
    return status.reason(body) in awaited and not status.is_new(body)


def _refuse(violation: RedriveError | None) -> None:
    if violation is not None:
        raise violation


def _ready(made: Provisioned, unwell: Iterable[StatusWarning]) -> tuple[Condition, ...]:
    wanted = made.desired
    if wanted.dead_letter is None:
        topics = f"{wanted.retry.name} is ready, and dead letters are discarded"
    else:
        topics = f"{wanted.retry.name} and {wanted.dead_letter.name} are ready"
    config_map = wanted.config_map["metadata"]["name"]
    message = f"{topics}; consumers find their policy in ConfigMap {config_map}"
    return status.ready(PROVISIONED, message, (*made.cautions, *unwell))


def _fields(wanted: Desired) -> dict[str, Any]:
    return {
        "maxRetries": wanted.policy.max_retries,
        "plannedChanges": None,
        "retryTopic": str(wanted.retry.name),
        # In a merge patch None takes away what stood there.
        "deadLetterTopic": None if wanted.dead_letter is None else str(wanted.dead_letter.name),
        "configMap": wanted.config_map["metadata"]["name"],
    }

"""The spine of provisioning: bring the broker to what one RetryPolicy asks, and write its status.

Called by the `Controller` of policies: after each change, by `resync`, and again while a policy is
not ready for a reason that no watch shows the end of.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from redrive.api.conditions import Reason
from redrive.api.naming import NAMING_SCHEME
from redrive.errors import InvalidSpecError, RedriveError, Requeue
from redrive.kube import logs, resources, status
from redrive.kube.connections import shown_to
from redrive.kube.context import Context
from redrive.kube.errors import NotFoundError
from redrive.kube.resources import Body, Key
from redrive.kube.status import ObjectEvent, Publisher, StatusWarning
from redrive.provision import metrics, pause
from redrive.provision.actions import in_words
from redrive.provision.conflicts import Conflicts
from redrive.provision.converge import Converged, converge
from redrive.provision.facts import Request
from redrive.provision.finalize import finalize, revoke_on_system_topics
from redrive.provision.finalizer import ensure_finalizer, has_finalizer
from redrive.provision.handover import hand_over, receiver_of
from redrive.provision.health.watch import Health
from redrive.provision.lost import LostPolicies
from redrive.provision.outcome import Outcome, publish
from redrive.provision.resolve import resolve
from redrive.provision.standing import BROKER_DIGEST, digest_of

PROVISIONED = Reason("Provisioned")
"""Reason: topics, subscriptions, grants and ConfigMap are as the policy asks."""
REPAIRED = "Repaired"
"""Reason of an Event: what was ready had changed, and is again as policy and connection ask."""


async def mark_progressing(key: Key, ctx: Context) -> None:
    """Show in the status of a RetryPolicy that its spec was seen, if the status is of another.

    Before its turn comes: with many policies that may take minutes, and a status without conditions
    reads as if all were done.

    Raises:
        KubernetesError: it could not be written.
    """
    body = ctx.policies.get(key)
    if body is None or "deletionTimestamp" in body["metadata"] or pause.is_paused(body):
        return
    if status.is_new(body):
        with suppress(NotFoundError):  # for the reconcile to find
            await _publisher(ctx).publish(body, status.progressing("looking at the policy"))


async def reconcile(  # noqa: PLR0913  what a reconcile reads
    key: Key,
    ctx: Context,
    conflicts: Conflicts,
    health: Health,
    lost: LostPolicies,
    *,
    failures: int = 0,
) -> Requeue:
    """Bring the broker to what one RetryPolicy asks; its status and Events are written last.

    A settled policy stays Ready at the first failure that may pass by itself: the next try, a
    second later, tells whether it has.

    Args:
        key: the policy.
        ctx: what the watches have shown.
        conflicts: which policies claim the same names.
        health: finds warnings about its topics.
        lost: policies that went while they were provisioned.
        failures: how often in a row this has failed.
    """
    body = ctx.policies.get(key)
    if body is None:
        return await _clean_up_after(key, ctx, conflicts, lost)
    lost.forget(key)
    logs.identify(body)
    try:
        if "deletionTimestamp" in body["metadata"]:
            await _ensure_there(body, ctx)
            outcome = await finalize(body, ctx, conflicts)
        else:
            outcome = await provision(body, ctx, conflicts, health)
            if not failures and status.is_settled(body):
                outcome = outcome.unless_it_passes()
        await publish(body, outcome, _publisher(ctx))
    except NotFoundError:
        ctx.policies.drop(body)  # no watch has shown that it is gone
        return Requeue.ON_CHANGE
    return outcome.requeue


async def _ensure_there(body: Body, ctx: Context) -> None:
    """Make sure that a policy which the cache shows as being deleted is not gone already.

    A cleanup can't be undone, and a new policy of the name has the same topics.

    Raises:
        NotFoundError: it is gone.
        KubernetesError: it can't be found out whether it is.
    """
    if not has_finalizer(body):
        return
    there = await ctx.kubernetes.get(resources.POLICIES, Key.of(body))
    if there["metadata"]["uid"] != body["metadata"]["uid"]:
        raise NotFoundError(
            f"RetryPolicy {Key.of(body)} is gone, and another has its name",
            remedy="none is needed: the other one is reconciled",
        )


async def _clean_up_after(
    key: Key, ctx: Context, conflicts: Conflicts, lost: LostPolicies
) -> Requeue:
    """Do what the deletion of a policy asks for that went without its cleanup, if it did.

    Raises:
        KubernetesError: it can't be found out whether it is gone.
    """
    body = lost.get(key)
    if body is None:
        return Requeue.ON_CHANGE
    logs.identify(body)
    # From a list: an API server that starts finds no object of a kind that it does not serve yet.
    for listed in await ctx.kubernetes.list(resources.POLICIES, key.namespace):
        if Key.of(listed) == key:  # the same, or a new one that has its topics
            lost.forget(key)
            ctx.policies.put(listed)
            return Requeue.ON_CHANGE
    outcome = await finalize(body, ctx, conflicts)
    await publish(body, outcome.of_gone(), _publisher(ctx))
    if not outcome.finalized:
        return outcome.requeue
    lost.forget(key)
    return Requeue.ON_CHANGE


async def provision(body: Body, ctx: Context, conflicts: Conflicts, health: Health) -> Outcome:
    """Provision one RetryPolicy, unless it is paused; return what to write about it.

    Raises:
        NotFoundError: the policy is gone.
        KubernetesError: the finalizer could not be set; nothing is created without it.
    """
    if pause.is_paused(body):
        return Outcome(pause.paused(body))
    try:
        request = await _resolve(body, ctx)
    except RedriveError as error:
        return Outcome.failed(shown_to(body, error))
    if "retryTopic" in (body.get("status") or {}):  # else once it is not refused
        body = await ensure_finalizer(body, request.deletion, _publisher(ctx))
    try:
        if (cluster := receiver_of(body, ctx.settings.cluster_id)) and not request.only_observes:
            return await hand_over(cluster, request, ctx)
        made = await converge(request, body, ctx, conflicts)
    except NotFoundError:
        raise  # the policy went meanwhile, and another may have its name
    except RedriveError as error:
        return Outcome.failed(shown_to(body, error))
    warnings = (*made.warnings, *health.warnings(body))
    return _observed(made, warnings) if request.only_observes else _ready(body, made, warnings)


async def _resolve(body: Body, ctx: Context) -> Request:
    """Read what a policy asks for; take back rights on topics that it may not have any more.

    Raises:
        RedriveError: it can't be obeyed, or the rights can't be taken back now.
    """
    try:
        return resolve(body, ctx)
    except InvalidSpecError:
        await revoke_on_system_topics(body, ctx)
        raise


def _observed(made: Converged, warnings: Sequence[StatusWarning]) -> Outcome:
    changes = made.planned_changes
    shown = pause.shown(changes) or None
    return Outcome(pause.observed(changes, warnings), {"plannedChanges": shown, "blockedBy": None})


def _ready(body: Body, made: Converged, warnings: Sequence[StatusWarning]) -> Outcome:
    wanted = made.desired
    if wanted.dead_letter is None:
        topics = f"{wanted.retry.name} is ready, and dead letters are discarded"
    else:
        topics = f"{wanted.retry.name} and {wanted.dead_letter.name} are ready"
    config_map = wanted.config_map["metadata"]["name"]
    message = f"{topics}; consumers find their policy in ConfigMap {config_map}"
    conditions = status.ready(PROVISIONED, message, warnings)
    return Outcome(conditions, _fields(made), events=_repaired(body, made))


def _repaired(body: Body, made: Converged) -> tuple[ObjectEvent, ...]:
    """Count what was repaired of a policy that was ready; return the Event about it."""
    if not (made.actions and status.is_settled(body)):
        return ()
    for action in made.actions:
        metrics.REPAIRS.labels(type(action).__name__).inc()
    return (ObjectEvent(REPAIRED, in_words(made.actions)),)


def _fields(made: Converged) -> dict[str, Any]:
    wanted = made.desired
    return {
        NAMING_SCHEME: str(made.request.spec.scheme),
        "deletionPolicy": str(made.request.deletion),
        "maxRetries": wanted.policy.max_retries,
        "blockedBy": None,
        "connection": str(made.request.through),
        BROKER_DIGEST: digest_of(made.broker),
        "creating": None,
        "plannedChanges": None,
        "retryTopic": str(wanted.retry.name),
        # In a merge patch None removes the field.
        "deadLetterTopic": None if wanted.dead_letter is None else str(wanted.dead_letter.name),
        "ledgerTopic": None if wanted.ledger is None else str(wanted.ledger.name),
        "sequencesTopic": None if wanted.sequences is None else str(wanted.sequences.name),
        "configMap": wanted.config_map["metadata"]["name"],
    }


def _publisher(ctx: Context) -> Publisher:
    return Publisher(ctx.kubernetes, resources.POLICIES, ctx.policies, ctx.clock)

"""Reconciliation of a RetryPolicy: the spine of provisioning.

The spine of provisioning: bring the broker to what one RetryPolicy asks, and write its status.

Called by the `Controller` of policies: after each change, by `resync`, and again while a policy is
not ready for a reason that no watch shows the end of.

Observe, diff, apply: what a reconcile does at the broker for one RetryPolicy.

What redrive was about to create, and how it is named: in the status before it is done.

A topic is created with the properties that tell whose it is, in one call. A broker that is killed
during that call may keep a topic without partitions and lose its properties, and no answer comes.
Then the record tells the topic from one that was there before.

The naming scheme is on record before anything is done, because a connection may say another one at
the next look.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from redrive.admin.client import Admin
from redrive.admin.errors import AdminError
from redrive.admin.model import broker_at
from redrive.api import Body
from redrive.api.conditions import (
    ObjectEvent,
    StatusWarning,
    is_new,
    is_settled,
    moment_of,
    progressing,
    ready,
    reason,
    written,
)
from redrive.errors import InvalidSpecError, OwnerConflictError, RedriveError, Requeue
from redrive.kube import logs, resources
from redrive.kube.client import NotFoundError
from redrive.kube.connections import shown_to
from redrive.kube.context import Context
from redrive.kube.resources import Key
from redrive.kube.status import Publisher
from redrive.policy.naming import TopicName
from redrive.provision.actions import Action, CreateTopic, in_words, is_refusable
from redrive.provision.apply import apply
from redrive.provision.checks import PREFLIGHT, PreflightFacts
from redrive.provision.claims import Conflicts, admit, resolve
from redrive.provision.desired import Desired, Observed, desired
from redrive.provision.diff import diff
from redrive.provision.finalize import finalize, hand_over, receiver_of, revoke_on_system_topics
from redrive.provision.health import Health
from redrive.provision.metrics import REPAIRS
from redrive.provision.observe import AWAITED_SECONDS, around, observe
from redrive.provision.orphans import LostPolicies
from redrive.provision.outcome import (
    Outcome,
    describe_changes,
    ensure_cleanup_finalizer,
    has_cleanup_finalizer,
    has_override,
    is_paused,
    observed_conditions,
    paused_conditions,
    publish,
)
from redrive.provision.ownership import CREATING, INTERNAL, creating
from redrive.provision.request import BROKER_DIGEST, Request, digest_of
from redrive.provision.warnings import Seen, warnings
from redrive.reasons import Reason


async def mark_progressing(key: Key, ctx: Context) -> None:
    """Show in the status of a RetryPolicy that its spec was seen, if the status is of another.

    Before its turn comes: with many policies that may take minutes, and a status without conditions
    reads as if all were done.

    Raises:
        KubernetesError: it could not be written.
    """
    body = ctx.policies.get(key)
    if body is None or "deletionTimestamp" in body["metadata"] or is_paused(body):
        return
    if is_new(body):
        with suppress(NotFoundError):  # for the reconcile to find
            await _publisher(ctx).publish(body, progressing("looking at the policy"))


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
            if not failures and is_settled(body):
                outcome = outcome.unless_it_passes()
        await publish(body, outcome, _publisher(ctx))
    except NotFoundError:
        ctx.policies.drop(body)  # no watch has shown that it is gone
        return Requeue.ON_CHANGE
    if outcome.requeue is Requeue.ON_CHANGE and has_override(body, ctx.clock()):
        return Requeue.SLOW_BACKOFF  # no watch shows its end
    return outcome.requeue


async def _ensure_there(body: Body, ctx: Context) -> None:
    """Make sure that a policy which the cache shows as being deleted is not gone already.

    A cleanup can't be undone, and a new policy of the name has the same topics.

    Raises:
        NotFoundError: it is gone.
        KubernetesError: it can't be found out whether it is.
    """
    if not has_cleanup_finalizer(body):
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
    if is_paused(body):
        return Outcome(paused_conditions(body))
    try:
        request = await _resolve(body, ctx)
    except RedriveError as error:
        return Outcome.failed(shown_to(body, error))
    if "retryTopic" in (body.get("status") or {}):  # else once it is not refused
        body = await ensure_cleanup_finalizer(body, request.deletion, _publisher(ctx))
    try:
        if (cluster := receiver_of(body, ctx.settings.cluster_id)) and not request.only_observes:
            return await hand_over(cluster, request, ctx)
        made = await converge(request, body, ctx, conflicts)
    except NotFoundError:
        raise  # the policy went meanwhile, and another may have its name
    except OwnerConflictError as error:
        logger.info("RetryPolicy %s: its topics are of %s", Key.of(body), error.owner)
        return Outcome.failed(error)
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
    shown = describe_changes(changes) or None
    return Outcome(
        observed_conditions(changes, warnings), {"plannedChanges": shown, "blockedBy": None}
    )


def _ready(body: Body, made: Converged, warnings: Sequence[StatusWarning]) -> Outcome:
    wanted = made.desired
    if wanted.dead_letter is None:
        topics = f"{wanted.retry.name} is ready, and dead letters are discarded"
    else:
        topics = f"{wanted.retry.name} and {wanted.dead_letter.name} are ready"
    config_map = wanted.config_map["metadata"]["name"]
    message = f"{topics}; consumers find their policy in ConfigMap {config_map}"
    conditions = ready(Reason.PROVISIONED, message, warnings)
    return Outcome(conditions, _fields(made), events=_repaired(body, made))


def _repaired(body: Body, made: Converged) -> tuple[ObjectEvent, ...]:
    """Count what was repaired of a policy that was ready; return the Event about it."""
    if not (made.actions and is_settled(body)):
        return ()
    for action in made.actions:
        REPAIRS.labels(type(action).__name__).inc()
    return (ObjectEvent(Reason.REPAIRED, in_words(made.actions)),)


def _fields(made: Converged) -> dict[str, Any]:
    wanted = made.desired
    return {
        "effective": {
            "maxRetries": wanted.policy.max_retries,
            "deletionPolicy": str(made.request.deletion),
        },
        "blockedBy": None,
        "connection": str(made.request.through),
        INTERNAL: {BROKER_DIGEST: digest_of(made.broker), CREATING: None},
        "plannedChanges": None,
        "topic": wanted.policy.topic.local,
        "retryTopic": str(wanted.retry.name),
        # In a merge patch None removes the field.
        "deadLetterTopic": None if wanted.dead_letter is None else str(wanted.dead_letter.name),
        "ledgerTopic": None if wanted.ledger is None else str(wanted.ledger.name),
        "sequencesTopic": None if wanted.sequences is None else str(wanted.sequences.name),
        "configMap": wanted.config_map["metadata"]["name"],
        **({} if made.unload is None else {"unload": made.unload}),
    }


def _publisher(ctx: Context) -> Publisher:
    return Publisher(ctx.kubernetes, resources.POLICIES, ctx.policies, ctx.clock)


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Converged:
    """What is there, what was done for it, and what should be fixed all the same.

    Attributes:
        request: what the policy asks for.
        broker: which one answered, as `broker_at` names it.
        planned_changes: what was not done, because the policy only observes.
        unload: result of a requested unload of the retry topic, for the status.
    """

    desired: Desired
    request: Request
    broker: str
    actions: tuple[Action, ...]
    planned_changes: tuple[Action, ...]
    warnings: tuple[StatusWarning, ...]
    unload: Body | None = None


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
        body = await ensure_cleanup_finalizer(body, request.deletion, out)
        planned = diff(want, have)
        actions, planned_changes = ((), planned) if request.only_observes else (planned, ())
        body = await record_intent(actions, body, ctx)
        try:
            applied = await apply(actions, connection.admin, grant, ctx.kubernetes)
        except AdminError as error:
            await clear_intent(error, body, ctx)
            raise
    if applied.done:
        logger.info("RetryPolicy %s: %s", request.key, in_words(applied.done))
    have = replace(have, inherited={**have.inherited, **applied.in_force})
    # Its status may not say yet that it is.
    seen = Seen(replace(request, is_proven=True), rivals, want, have, tuple(applied.refused))
    # It may have changed since the request was read.
    broker = broker_at(connection.spec.pulsar.admin_url)
    unload = None
    if not request.only_observes:
        unload = await unload_on_request(body, want.retry.name, connection.admin, ctx.clock())
    done = tuple(applied.done)
    return Converged(want, request, broker, done, planned_changes, warnings(seen), unload)


async def unload_on_request(
    body: Body, topic: TopicName, admin: Admin, now: datetime
) -> Body | None:
    """Unload the retry topic if an annotation of the policy asks for it; return the result.

    Each value of the annotation is obeyed once, within `UNLOAD_WITHIN`: a policy that is restored
    from a backup asks for nothing. A refusal does not fail the policy.
    """
    annotations = body["metadata"].get("annotations") or {}
    request_time = moment_of(annotations.get(resources.UNLOAD_REQUESTED_AT))
    before = ((body.get("status") or {}).get("unload") or {}).get("requestTime")
    if request_time is None or abs(now - request_time) > UNLOAD_WITHIN:
        return None
    if before == written(request_time):
        return None
    error = None
    try:
        await admin.unload(topic)
        logger.info("RetryPolicy %s: unloaded %s on request", Key.of(body), topic)
    except AdminError as refusal:
        logger.warning("RetryPolicy %s: %s", Key.of(body), refusal)
        error = str(shown_to(body, refusal))[:MAX_UNLOAD_ERROR]
    return {"requestTime": written(request_time), "error": error}


UNLOAD_WITHIN = timedelta(hours=1)
"""Age at which a request to unload a topic has no effect any more."""
MAX_UNLOAD_ERROR = 1_024

_AWAITED = frozenset({Reason.TENANT_NOT_FOUND, Reason.NAMESPACE_NOT_FOUND, Reason.TOPIC_NOT_FOUND})
"""Reasons that pass when the source topic is created; a thousand policies may wait for theirs."""


async def _observe(
    request: Request, body: Body, want: Desired, admin: Admin, ctx: Context
) -> Observed:
    """Read what is there; only once where cached reads show that there is nothing to do.

    A schema is copied only after both topics were read without a cache. A schema that the broker
    refuses is tried by each reconcile, and must not cost a second read each time. A policy that
    waits for its source topic first uses what was read for others.
    """
    if is_settled(body):
        # The policy was ready: what a cached read finds missing may be there again.
        try:
            have = await observe(want, admin, ctx, recent=True)
            actions = diff(want, have)
            if request.only_observes or all(map(is_refusable, actions)):
                return have
        except RedriveError as error:
            if error.reason not in {Reason.NOT_FOUND, Reason.SUBSCRIPTION_EXPIRY, *_AWAITED}:
                raise
    elif _awaits_source(body):
        await around(want.policy.topic, admin, max_age=AWAITED_SECONDS)
    return await observe(want, admin, ctx)


def _awaits_source(body: Body) -> bool:
    """Whether the source topic, or what it lies in, was missing at the last reconcile."""
    return reason(body) in _AWAITED and not is_new(body)


async def record_intent(planned: Sequence[Action], body: Body, ctx: Context) -> Body:
    """Record which topics of *planned* are about to be created, as far as that can be lost.

    Args:
        planned: what is about to be done.
        body: the RetryPolicy.
        ctx: what the watches have shown.

    Returns:
        The RetryPolicy as it is then.

    Raises:
        KubernetesError: it could not be recorded; nothing may be created then.
    """
    topics = [str(a.topic) for a in planned if isinstance(a, CreateTopic) and not a.partitions]
    if creating(body).issuperset(topics):
        return body
    return await _write_intent({INTERNAL: {CREATING: topics}}, body, ctx)


async def clear_intent(error: AdminError, body: Body, ctx: Context) -> None:
    """Forget what was recorded, if *error* says that nothing of it is still under way.

    A topic of that name may be created by others from then on.

    Raises:
        KubernetesError: it could not be written.
    """
    if creating(body) and not error.may_be_done:
        await _write_intent({INTERNAL: {CREATING: None}}, body, ctx)


async def _write_intent(fields: Mapping[str, Any], body: Body, ctx: Context) -> Body:
    after = await ctx.kubernetes.patch_status(resources.POLICIES, Key.of(body), fields)
    ctx.policies.renew(after)
    return after

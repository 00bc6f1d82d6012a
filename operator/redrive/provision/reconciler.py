"""Reconciliation of a RetryPolicy at Pulsar; `redrive.provision.spine` calls it.

A reconcile observes the broker, computes the difference to the desired state, and applies it. One
fact is written before: the names of the topics that are about to be created. A topic is created
together with its owner properties, in one call. A broker that is killed during that call may keep
the topic without partitions and properties. The record then distinguishes this topic from one that
others created.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from redrive.admin.client import Admin
from redrive.admin.errors import AdminError
from redrive.admin.model import broker_at
from redrive.api import Body
from redrive.api.conditions import (
    StatusWarning,
    is_new,
    is_settled,
    moment_of,
    paused,
    ready,
    reason,
    warning,
    written,
)
from redrive.errors import InvalidSpecError, OwnerConflictError, RedriveError
from redrive.kube import resources
from redrive.kube.client import NotFoundError
from redrive.kube.connections import shown_to
from redrive.kube.context import Context
from redrive.kube.resources import Key
from redrive.kube.status import Publisher
from redrive.policy.naming import TopicName
from redrive.provision.actions import Action, CreateTopic, Mark, Targets, apply, in_words
from redrive.provision.checks import ADMISSION, PREFLIGHT, Evidence
from redrive.provision.claims import Conflicts, admit, resolve
from redrive.provision.desired import Desired, Observed, TopicRole, desired, owner_of
from redrive.provision.diff import diff
from redrive.provision.finalize import finalize, revoke_on_system_topics
from redrive.provision.health import Health
from redrive.provision.observe import AWAITED_SECONDS, around, observe
from redrive.provision.outcome import (
    Outcome,
    describe_changes,
    ensure_cleanup_finalizer,
    observed_conditions,
)
from redrive.provision.ownership import CREATING, INTERNAL, OwnershipRecord, creating
from redrive.provision.request import BROKER_DIGEST, Request, digest_of
from redrive.provision.spine import OrphanedPolicies, Reconciler, repaired
from redrive.provision.warnings import warnings
from redrive.reasons import Reason


class PolicyReconciler(Reconciler):
    """Reconciles RetryPolicies.

    Args:
        ctx: caches and clients of the operator.
        conflicts: index of the names that policies claim.
        health: warnings about the topics of policies.
        orphans: policies that were deleted without their cleanup.
    """

    def __init__(
        self, ctx: Context, conflicts: Conflicts, health: Health, orphans: OrphanedPolicies
    ) -> None:
        super().__init__(ctx, resources.POLICIES, ctx.policies, orphans)
        self._conflicts = conflicts
        self._health = health

    async def _finalize(self, body: Body) -> Outcome:
        return await finalize(body, self._ctx, self._conflicts)

    async def _provision(self, body: Body) -> Outcome:
        try:
            request = await _resolve(body, self._ctx)
        except RedriveError as error:
            return Outcome.failed(shown_to(body, error))
        if "retryTopic" in (body.get("status") or {}):  # a new policy gets it after all checks
            body = await ensure_cleanup_finalizer(body, request.deletion, _publisher(self._ctx))
        try:
            if (
                cluster := _receiver_of(body, self._ctx.settings.cluster_id)
            ) and not request.only_observes:
                return await hand_over(cluster, request, self._ctx)
            made = await converge(request, body, self._ctx, self._conflicts)
        except NotFoundError:
            raise  # the policy was deleted, and another may have its name
        except OwnerConflictError as error:
            logger.info("RetryPolicy %s: its topics belong to %s", Key.of(body), error.owner)
            return Outcome.failed(error)
        except RedriveError as error:
            return Outcome.failed(shown_to(body, error))
        warnings = (*made.warnings, *self._health.warnings(body))
        return _observed(made, warnings) if request.only_observes else _ready(body, made, warnings)


def _receiver_of(body: Body, own: str) -> str:
    """Return the id of the cluster that a RetryPolicy hands its topics over to; empty for none.

    Args:
        body: the RetryPolicy.
        own: the id of this cluster.
    """
    named: str = (body["metadata"].get("annotations") or {}).get(resources.HAND_OVER_TO, "").strip()
    return "" if named == own else named


async def hand_over(cluster: str, request: Request, ctx: Context) -> Outcome:
    """Record the policy of the same name in another cluster as owner of a policy's topics.

    After a crash the next call marks the remaining topics.

    Raises:
        RedriveError: a call failed, or the connection does not allow the policy.
    """
    ADMISSION.check(request)
    owner = owner_of(request, ctx.settings.cluster_id)
    # The other cluster adds its uid. Until then name and source identify the policy.
    receiver = replace(owner, cluster=cluster, uid="")
    connection = await ctx.brokers.resolve(request.spec.connection_ref, request.key.namespace)
    namespace = await connection.admin.namespace(request.policy.topic.namespace_name)
    marks = []
    for topic in request.spec.all_topics:
        if not namespace.exists(topic):
            continue
        partitioned = str(topic) in namespace.partitioned
        properties = (await connection.admin.metadata(topic, partitioned=partitioned)).properties
        record = OwnershipRecord.of(properties)
        if record.is_of(owner):
            marks.append(Mark(topic, record.owned_by(receiver).changes(properties)))
    with connection.admin.granting(request.policy.topic.namespace_name) as grant:
        await apply(marks, Targets(connection.admin, grant, ctx.kubernetes))
    if marks:
        logger.info("RetryPolicy %s: %s", request.key, in_words(marks))
    message = (
        f"the annotation {resources.HAND_OVER_TO} gives its topics to RetryPolicy {receiver}, and "
        "the policy is not reconciled here; delete it once the other policy is Ready"
    )
    condition = warning(StatusWarning(Reason.HANDED_OVER, message))
    return Outcome((*paused(Reason.HANDED_OVER, message)[:1], condition))


async def _resolve(body: Body, ctx: Context) -> Request:
    """Resolve the request of a policy; revoke its grants on topics that it may no longer use.

    Raises:
        RedriveError: the spec is invalid, or the grants could not be revoked.
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
    dead_letter = wanted.topic(TopicRole.DEAD_LETTER)
    if dead_letter is None:
        topics = f"{wanted.retry.name} is ready, and dead letters are discarded"
    else:
        topics = f"{wanted.retry.name} and {dead_letter.name} are ready"
    config_map = wanted.config_map["metadata"]["name"]
    message = f"{topics}; consumers find their policy in ConfigMap {config_map}"
    conditions = ready(Reason.PROVISIONED, message, warnings)
    return Outcome(conditions, _fields(made), events=repaired(body, made.actions))


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
        # In a merge patch None removes the field.
        **dict.fromkeys((role.status_field for role in TopicRole), None),
        **{topic.role.status_field: str(topic.name) for topic in wanted.topics},
        "configMap": wanted.config_map["metadata"]["name"],
        **({} if made.unload is None else {"unload": made.unload}),
    }


def _publisher(ctx: Context) -> Publisher:
    return Publisher(ctx.kubernetes, resources.POLICIES, ctx.policies, ctx.clock)


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Converged:
    """Result of applying a policy: the actions performed, and the remaining warnings.

    Attributes:
        request: the resolved policy.
        broker: the broker that was changed, as `broker_at` names it.
        planned_changes: actions that were only planned, because the policy observes.
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
    """Bring the broker to the state that *body*, a policy, requests.

    All checks precede the first write: a policy that is refused changes nothing. After a crash the
    next call performs the remaining actions.

    Raises:
        RedriveError: the policy is refused, or a call failed.
    """
    admit(request, ctx, conflicts)
    connection = await ctx.brokers.resolve(request.spec.connection_ref, request.key.namespace)
    release = await connection.admin.version()
    want = desired(request, body, ctx.settings.cluster_id, release)
    with connection.admin.granting(request.policy.topic.namespace_name) as grant:
        have = await _observe(request, body, want, connection.admin, ctx)
        PREFLIGHT.check(Evidence(body, want, have, request))
        # Again: a rival may have been provisioned meanwhile.
        rivals = admit(request, ctx, conflicts)
        body = await ensure_cleanup_finalizer(body, request.deletion, _publisher(ctx))
        planned = diff(want, have)
        actions, planned_changes = ((), planned) if request.only_observes else (planned, ())
        body = await record_intent(actions, body, ctx)
        try:
            applied = await apply(actions, Targets(connection.admin, grant, ctx.kubernetes))
        except AdminError as error:
            await clear_intent(error, body, ctx)
            raise
    if applied.done:
        logger.info("RetryPolicy %s: %s", request.key, in_words(applied.done))
    have = replace(have, inherited={**have.inherited, **applied.in_force})
    # The cached status may not contain the proof yet.
    proven = replace(request, is_proven=True)
    evidence = Evidence(body, want, have, proven, rivals, tuple(applied.refused))
    # The connection may have changed since the request was resolved.
    broker = broker_at(connection.spec.pulsar.admin_url)
    unload = None
    if not request.only_observes:
        unload = await unload_on_request(body, want.retry.name, connection.admin, ctx.clock())
    done = tuple(applied.done)
    return Converged(want, request, broker, done, planned_changes, warnings(evidence), unload)


async def unload_on_request(
    body: Body, topic: TopicName, admin: Admin, now: datetime
) -> Body | None:
    """Unload the retry topic if an annotation of the policy requests it; return the result.

    Each value of the annotation has an effect once, within `UNLOAD_WITHIN`: that of a policy that
    is restored from a backup has none. A refusal does not fail the policy.
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
"""Age from which a request to unload a topic has no effect."""
MAX_UNLOAD_ERROR = 1_024

_AWAITED = frozenset({Reason.TENANT_NOT_FOUND, Reason.NAMESPACE_NOT_FOUND, Reason.TOPIC_NOT_FOUND})
"""Reasons that end when the source topic is created. A thousand policies may wait for theirs."""


async def _observe(
    request: Request, body: Body, want: Desired, admin: Admin, ctx: Context
) -> Observed:
    """Read the observed state; return the cached state if it needs no action.

    A schema is copied only after both topics were read without a cache. A schema that the broker
    refuses is tried by each reconcile, which must not cost a second read each time. A policy that
    waits for its source topic first uses namespace facts that were read for other policies.
    """
    if is_settled(body):
        # The policy was ready. A cached read may miss a topic that exists again.
        try:
            have = await observe(want, admin, ctx, recent=True)
            actions = diff(want, have)
            if request.only_observes or all(action.is_refusable for action in actions):
                return have
        except RedriveError as error:
            if error.reason not in {Reason.NOT_FOUND, Reason.SUBSCRIPTION_EXPIRY, *_AWAITED}:
                raise
    elif _awaits_source(body):
        await around(want.policy.topic, admin, max_age=AWAITED_SECONDS)
    return await observe(want, admin, ctx)


def _awaits_source(body: Body) -> bool:
    """Return True if the source topic, its namespace or its tenant was missing before."""
    return reason(body) in _AWAITED and not is_new(body)


async def record_intent(planned: Sequence[Action], body: Body, ctx: Context) -> Body:
    """Record the topics that are about to be created and whose owner properties may be lost.

    Args:
        planned: the actions that follow.
        body: the RetryPolicy.
        ctx: caches and clients of the operator.

    Returns:
        The RetryPolicy after the write.

    Raises:
        KubernetesError: the status could not be written; nothing may be created then.
    """
    topics = [str(a.topic) for a in planned if isinstance(a, CreateTopic) and not a.partitions]
    if creating(body).issuperset(topics):
        return body
    return await _write_intent({INTERNAL: {CREATING: topics}}, body, ctx)


async def clear_intent(error: AdminError, body: Body, ctx: Context) -> None:
    """Clear the record unless the broker may still execute the failed call.

    From then on others may create a topic of that name.

    Raises:
        KubernetesError: the status could not be written.
    """
    if creating(body) and not error.may_be_done:
        await _write_intent({INTERNAL: {CREATING: None}}, body, ctx)


async def _write_intent(fields: Mapping[str, Any], body: Body, ctx: Context) -> Body:
    after = await ctx.kubernetes.patch_status(resources.POLICIES, Key.of(body), fields)
    ctx.policies.renew(after)
    return after

"""Reconciliation of a policy: the spine of provisioning.

The `Controller` of policies calls `Reconciler.reconcile` after each change, after a poll of the
broker that found drift, and after a back-off. A subclass for each kind of policy has the middle
part: it observes the broker, computes the difference to the desired state, and applies it. Status
and Events are written last.

`PolicyReconciler` is for RetryPolicies. One fact is written before: the names of the topics that
are about to be created. A topic is created together with its owner properties, in one call. A
broker that is killed during that call may keep the topic without partitions and properties. The
record then distinguishes this topic from one that others created.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
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
    paused,
    progressing,
    ready,
    reason,
    warning,
    written,
)
from redrive.errors import InvalidSpecError, OwnerConflictError, RedriveError, Requeue
from redrive.kube import logs, resources
from redrive.kube.cache import Cache
from redrive.kube.client import NotFoundError
from redrive.kube.connections import shown_to
from redrive.kube.context import Context
from redrive.kube.resources import Key, Resource, is_paused
from redrive.kube.status import Publisher
from redrive.policy.naming import TopicName
from redrive.provision.actions import Action, CreateTopic, Mark, Targets, apply, in_words
from redrive.provision.checks import ADMISSION, PREFLIGHT, Evidence
from redrive.provision.claims import Conflicts, admit, resolve
from redrive.provision.desired import Desired, Observed, TopicRole, desired, owner_of
from redrive.provision.diff import diff
from redrive.provision.finalize import finalize, revoke_on_system_topics
from redrive.provision.health import Health
from redrive.provision.metrics import REPAIRS
from redrive.provision.observe import AWAITED_SECONDS, around, observe
from redrive.provision.outcome import (
    Outcome,
    describe_changes,
    ensure_cleanup_finalizer,
    has_cleanup_finalizer,
    observed_conditions,
    overrides,
    paused_conditions,
    publish,
)
from redrive.provision.ownership import CREATING, INTERNAL, OwnershipRecord, creating
from redrive.provision.request import BROKER_DIGEST, Request, digest_of
from redrive.provision.warnings import warnings
from redrive.reasons import Reason

REQUEST = timedelta(seconds=60)
"""Maximum duration of an API request: the default `--request-timeout` of the API server.

A policy that disappears later without `deletionTimestamp` was not deleted by such a request. For
example, a restored etcd forgets policies whose topics hold messages.
"""


class OrphanedPolicies:
    """Policies that were deleted without their cleanup soon after their finalizer was added.

    The API server reads the finalizers of an object when a DELETE request begins. A finalizer that
    is added before that request ends is deleted together with the object. The operator has the
    answer that its finalizer was added, and creates topics for a policy that is gone.

    They are held in memory only: if the operator ends before their cleanup, their topics are
    retained.

    Args:
        policies: all RetryPolicies.
        clock: time at which a finalizer is first seen.
    """

    def __init__(self, policies: Cache, clock: Callable[[], datetime]) -> None:
        self._clock = clock
        self._since: dict[Key, datetime] = {}
        self._orphans: dict[Key, Body] = {}
        for body in policies:
            self._note(Key.of(body), None, body)
        policies.listen(self._note)

    def get(self, key: Key) -> Body | None:
        """Return an orphaned policy with the deletionTimestamp at which it disappeared."""
        return self._orphans.get(key)

    def forget(self, key: Key) -> None:
        """Drop an orphaned policy: its cleanup is done, or a new policy has its name and topics."""
        self._orphans.pop(key, None)

    def _note(self, key: Key, before: Body | None, after: Body | None) -> None:
        now = self._clock()
        if after is None:
            since = self._since.pop(key, None)
            is_recent = since is not None and now - since <= REQUEST
            if before and is_recent and "deletionTimestamp" not in before["metadata"]:
                metadata = {**before["metadata"], "deletionTimestamp": now.isoformat()}
                self._orphans[key] = {**before, "metadata": metadata}
        elif not has_cleanup_finalizer(after):
            self._since.pop(key, None)
        elif before is None or before["metadata"]["uid"] != after["metadata"]["uid"]:
            # A policy that is listed with the finalizer may have it since its creation.
            self._since[key] = datetime.fromisoformat(after["metadata"]["creationTimestamp"])
        else:
            self._since.setdefault(key, now)


class Reconciler(ABC):
    """Reconciles the policies of one kind.

    Args:
        ctx: caches and clients of the operator.
        resource: the kind.
        table: all policies of the kind.
        orphans: policies that were deleted without their cleanup.
    """

    def __init__(
        self, ctx: Context, resource: Resource, table: Cache, orphans: OrphanedPolicies
    ) -> None:
        self._ctx = ctx
        self._resource = resource
        self._table = table
        self._orphans = orphans

    @abstractmethod
    async def _provision(self, body: Body) -> Outcome:
        """Provision one policy that is not paused, and return the result.

        Raises:
            NotFoundError: the policy is gone.
            KubernetesError: the finalizer could not be set, so nothing was created.
        """

    @abstractmethod
    async def _finalize(self, body: Body) -> Outcome:
        """Clean up at the broker after a policy was deleted."""

    def _publisher(self) -> Publisher:
        return Publisher(self._ctx.kubernetes, self._resource, self._table, self._ctx.clock)

    async def mark_progressing(self, key: Key) -> None:
        """Set the Progressing condition of a policy whose current spec has no status yet.

        With many policies the first reconcile may begin minutes later. Tools such as kstatus read a
        status without conditions as ready.

        Raises:
            KubernetesError: the status could not be written.
        """
        body = self._table.get(key)
        if body is None or "deletionTimestamp" in body["metadata"] or is_paused(body):
            return
        if is_new(body):
            with suppress(NotFoundError):  # the reconcile handles a deleted policy
                await self._publisher().publish(body, progressing("reconciling the policy"))

    async def reconcile(self, key: Key, *, failures: int = 0) -> Requeue:
        """Bring the broker to the state that one policy requests, and publish the result.

        A settled policy stays Ready after the first failure that may be transient. The next
        attempt, one second later, decides.

        Args:
            key: the policy.
            failures: consecutive failed reconciles of this policy.
        """
        body = self._table.get(key)
        if body is None:
            return await self._clean_up_orphan(key)
        self._orphans.forget(key)
        logs.identify(body)
        try:
            if "deletionTimestamp" in body["metadata"]:
                await self._ensure_exists(body)
                outcome = await self._finalize(body)
            else:
                paused = is_paused(body)
                outcome = (
                    Outcome(paused_conditions(body)) if paused else await self._provision(body)
                )
                if not failures and is_settled(body):
                    outcome = outcome.unless_transient()
            await publish(body, outcome, self._publisher())
        except NotFoundError:
            self._table.drop(body)  # the watch has not reported the deletion yet
            return Requeue.ON_CHANGE
        if outcome.requeue is Requeue.ON_CHANGE and any(overrides(body, self._ctx.clock())):
            return Requeue.SLOW_BACKOFF  # no watch reports when the annotation expires
        return outcome.requeue

    async def _ensure_exists(self, body: Body) -> None:
        """Raise an error if a policy that the cache shows as being deleted no longer exists.

        A cleanup cannot be undone, and a new policy of the same name uses the same topics.

        Raises:
            NotFoundError: the policy is gone.
            KubernetesError: the API server could not be read.
        """
        if not has_cleanup_finalizer(body):
            return
        current = await self._ctx.kubernetes.get(self._resource, Key.of(body))
        if current["metadata"]["uid"] != body["metadata"]["uid"]:
            raise NotFoundError(
                f"{self._resource.kind} {Key.of(body)} is gone, and another policy has its name",
                remedy="No action needed: the other policy is reconciled",
            )

    async def _clean_up_orphan(self, key: Key) -> Requeue:
        """Run the cleanup of a policy that was deleted without it; do nothing for any other.

        Raises:
            KubernetesError: the API server could not be read.
        """
        body = self._orphans.get(key)
        if body is None:
            return Requeue.ON_CHANGE
        logs.identify(body)
        # A list, not a get: an API server that starts answers 404 for kinds that it does not serve
        # yet.
        for listed in await self._ctx.kubernetes.list(self._resource, key.namespace):
            if Key.of(listed) == key:  # the same policy, or a new one with the same topics
                self._orphans.forget(key)
                self._table.put(listed)
                return Requeue.ON_CHANGE
        outcome = await self._finalize(body)
        await publish(body, outcome.of_gone(), self._publisher())
        if not outcome.finalized:
            return outcome.requeue
        self._orphans.forget(key)
        return Requeue.ON_CHANGE


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
            body = await ensure_cleanup_finalizer(body, request.deletion, self._publisher())
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
        if not request.only_observes:
            return _ready(body, made, warnings)
        fields = {"plannedChanges": describe_changes(made.planned_changes) or None}
        conditions = observed_conditions(made.planned_changes, warnings)
        return Outcome(conditions, {**fields, "blockedBy": None})


def repaired(body: Body, actions: Sequence[object]) -> tuple[ObjectEvent, ...]:
    """Count the repairs of a policy that was ready, and return the Event about them."""
    if not (actions and is_settled(body)):
        return ()
    for action in actions:
        REPAIRS.labels(type(action).__name__).inc()
    return (ObjectEvent(Reason.REPAIRED, in_words(actions)),)


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


def _ready(body: Body, made: Converged, warnings: Sequence[StatusWarning]) -> Outcome:
    wanted = made.desired
    dead_letter = wanted.topic(TopicRole.DEAD_LETTER)
    if dead_letter is None:
        topics = f"{wanted.retry.name} is ready, and dead letters are discarded"
    else:
        topics = f"{wanted.retry.name} and {dead_letter.name} are ready"
    config_map = wanted.config_map["metadata"]["name"]
    message = f"{topics}; consumers find their policy in ConfigMap {config_map}"
    fields = {
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
        "configMap": config_map,
        **({} if made.unload is None else {"unload": made.unload}),
    }
    conditions = ready(Reason.PROVISIONED, message, warnings)
    return Outcome(conditions, fields, events=repaired(body, made.actions))


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
        out = Publisher(ctx.kubernetes, resources.POLICIES, ctx.policies, ctx.clock)
        body = await ensure_cleanup_finalizer(body, request.deletion, out)
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
    elif reason(body) in _AWAITED and not is_new(body):
        await around(want.policy.topic, admin, max_age=AWAITED_SECONDS)
    return await observe(want, admin, ctx)


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

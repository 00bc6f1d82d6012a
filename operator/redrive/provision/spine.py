"""The spine of provisioning: the reconcile of one policy, whatever its broker is.

The `Controller` of policies calls `Reconciler.reconcile` after each change, after a poll of the
broker that found drift, and after a back-off. A subclass for each kind of policy has the middle
part: it observes the broker, computes the difference to the desired state, and applies it. Status
and Events are written last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta

from redrive.api import Body
from redrive.api.conditions import ObjectEvent, is_new, is_settled, progressing
from redrive.errors import Requeue
from redrive.kube import logs
from redrive.kube.cache import Cache
from redrive.kube.client import NotFoundError
from redrive.kube.context import Context
from redrive.kube.resources import Key, Resource, is_paused
from redrive.kube.status import Publisher
from redrive.provision.actions import in_words
from redrive.provision.metrics import REPAIRS
from redrive.provision.outcome import (
    Outcome,
    has_cleanup_finalizer,
    has_override,
    paused_conditions,
    publish,
)
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
            if before is not None and since is not None and now - since <= REQUEST:
                self._keep(key, before, now)
        elif not has_cleanup_finalizer(after):
            self._since.pop(key, None)
        elif before is None or before["metadata"]["uid"] != after["metadata"]["uid"]:
            # A policy that is listed with the finalizer may have it since its creation.
            self._since[key] = datetime.fromisoformat(after["metadata"]["creationTimestamp"])
        else:
            self._since.setdefault(key, now)

    def _keep(self, key: Key, body: Body, now: datetime) -> None:
        if "deletionTimestamp" not in body["metadata"]:
            metadata = {**body["metadata"], "deletionTimestamp": now.isoformat()}
            self._orphans[key] = {**body, "metadata": metadata}


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
        if outcome.requeue is Requeue.ON_CHANGE and has_override(body, self._ctx.clock()):
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


def repaired(body: Body, actions: Sequence[object]) -> tuple[ObjectEvent, ...]:
    """Count the repairs of a policy that was ready, and return the Event about them."""
    if not (actions and is_settled(body)):
        return ()
    for action in actions:
        REPAIRS.labels(type(action).__name__).inc()
    return (ObjectEvent(Reason.REPAIRED, in_words(actions)),)

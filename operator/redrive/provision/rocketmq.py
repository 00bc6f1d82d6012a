"""Reconciliation and deletion of a RocketMQRetryPolicy, and its work queue.

The steps are those of a RetryPolicy: desired → observe → diff → apply, at each master. A master
that does not answer, or is no longer listed, fails the policy after the others are provisioned.
There is no circuit breaker: while a broker is down, for ten minutes as well, each policy shows
`BrokerUnreachable` and is reconciled again at most 15 s apart.

Who may delete a topic or a group: a policy with `deletionPolicy: Delete` and a rule of the
connection with `deletion: Allowed`, if redrive created it. No consumer may be connected, and a
topic with messages is retained.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

from redrive.admin.errors import AdminError, BrokerUnreachableError
from redrive.admin.rocketmq import Master, RocketMQSession
from redrive.api import Body
from redrive.api.conditions import (
    STALLED,
    StatusWarning,
    find,
    is_progressing,
    is_ready,
    is_settled,
    ready,
)
from redrive.api.model import parse_spec
from redrive.api.policy_defaults import DeletionPolicy
from redrive.api.retrypolicy import ManagementPolicy
from redrive.api.rocketmq import ClientKind, GroupDeletion, RocketMQRetryPolicySpec
from redrive.errors import RedriveError
from redrive.kube import resources
from redrive.kube.cache import needs_reconcile
from redrive.kube.client import NotFoundError
from redrive.kube.connections import connection_at, connection_of, shown_to, users
from redrive.kube.context import Context
from redrive.kube.controller import Controller
from redrive.kube.resources import Key
from redrive.kube.rocketmq import RocketMQConnection
from redrive.provision import groups
from redrive.provision.actions import in_words
from redrive.provision.checks import group_is_not_allowed, most_policies, too_many_policies
from redrive.provision.claims import excess
from redrive.provision.connection import is_protection_due
from redrive.provision.finalize import Cleanup, finish
from redrive.provision.outcome import (
    Outcome,
    describe_changes,
    ensure_cleanup_finalizer,
    observed_conditions,
)
from redrive.provision.ownership import INTERNAL, internal
from redrive.provision.poller import PollOrder, pause, repeat
from redrive.provision.reconciler import OrphanedPolicies, Reconciler, repaired
from redrive.provision.request import BROKER_DIGEST, digest_of
from redrive.reasons import Reason

CALLS_PER_RECONCILE = 8
"""Calls of a reconcile without actions, with one master."""
CREATED = "created"
"""Field of `INTERNAL`: names of the group and the topics that redrive created."""

logger = logging.getLogger(__name__)


@dataclass
class _Converged:
    """Result of provisioning all masters that answer."""

    states: list[groups.MasterState] = field(default_factory=list)
    planned: list[groups.GroupAction] = field(default_factory=list)
    done: list[groups.GroupAction] = field(default_factory=list)
    failures: list[AdminError] = field(default_factory=list)
    retention: timedelta | None = None
    dead_letters: int = 0


class RocketMQReconciler(Reconciler):
    """Reconciles RocketMQRetryPolicies."""

    def __init__(self, ctx: Context, claims: groups.GroupClaims, orphans: OrphanedPolicies) -> None:
        super().__init__(ctx, resources.ROCKETMQ_POLICIES, ctx.rocketmq_policies, orphans)
        self._claims = claims

    async def _provision(self, body: Body) -> Outcome:
        try:
            spec = self._table.derive(_parsed, body)
            connection = await self._connection(spec, body)
            self._check_number(body, connection)
            self._claims.admit(body)
            return await self._converge(spec, body, connection)
        except NotFoundError:
            raise
        except RedriveError as error:
            return Outcome.failed(shown_to(body, error))

    async def _connection(self, spec: RocketMQRetryPolicySpec, body: Body) -> RocketMQConnection:
        """Return the connection, if one of its rules permits the policy.

        Raises:
            RedriveError: it does not, or the connection cannot be used.
        """
        namespace = Key.of(body).namespace
        connection = await self._ctx.brokers.rocketmq(connection_of(body), namespace)
        if error := group_is_not_allowed(spec, namespace, connection.rules):
            raise error
        return connection

    def _check_number(self, body: Body, connection: RocketMQConnection) -> None:
        """Check that the namespace has no more policies than the connection allows.

        Raises:
            LimitExceeded: others come first.
        """
        most = most_policies(connection.rules)
        if count := excess(body, self._table, most):
            raise too_many_policies(Key.of(body).namespace, connection.key, most, count)

    async def _converge(
        self, spec: RocketMQRetryPolicySpec, body: Body, connection: RocketMQConnection
    ) -> Outcome:
        """Bring each master that answers to the desired state.

        Raises:
            RedriveError: the policy is refused, or a call failed.
        """
        want = groups.desired_group(spec, replays=connection.has_replays)
        observes, converged = _observes(spec), _Converged()
        async with connection.admin.session() as session:
            masters = await session.masters(self._masters(body))
            await self._observe(spec, want, masters, session, converged)
            converged.planned = [
                a for state in converged.states for a in groups.diff_group(want, state)
            ]
            deletion = DeletionPolicy.RETAIN if observes else DeletionPolicy(spec.deletion_policy)
            body = await ensure_cleanup_finalizer(body, deletion, self._publisher())
            if not observes:
                body = await self._record_intent(want, body, converged)
                for action in converged.planned:
                    await action.perform(session)
                    converged.done.append(action)
        if converged.done:
            logger.info("RocketMQRetryPolicy %s: %s", Key.of(body), in_words(converged.done))
        if converged.failures:
            raise converged.failures[0]
        warnings = tuple(groups.group_warnings(spec, converged.retention))
        if observes:
            shown = describe_changes(converged.planned) or None
            fields = {
                "plannedChanges": shown,
                "blockedBy": None,
                "deadLetters": converged.dead_letters,
            }
            return Outcome(observed_conditions(converged.planned, warnings), fields)
        own = {BROKER_DIGEST: self._broker(body), CREATED: sorted(self._recorded(body)) or None}
        return _provisioned(spec, body, converged, warnings, own)

    def _broker(self, body: Body) -> str:
        return digest_of(self._claims.broker_of(body))

    def _is_recorded(self, body: Body) -> bool:
        """Return True if the status of a policy is about its present cluster."""
        return internal(body).get(BROKER_DIGEST) == self._broker(body)

    def _recorded(self, body: Body) -> set[str]:
        """Return the names that redrive created at the present cluster of a policy."""
        return set(internal(body).get(CREATED) or ()) if self._is_recorded(body) else set()

    def _masters(self, body: Body) -> Sequence[str]:
        """Return the masters of its present cluster at which a policy was provisioned."""
        masters: Sequence[str] = body.get("status", {}).get("masters") or ()
        return masters if self._is_recorded(body) else ()

    async def _observe(
        self,
        spec: RocketMQRetryPolicySpec,
        want: groups.DesiredGroup,
        masters: Sequence[Master],
        session: RocketMQSession,
        converged: _Converged,
    ) -> None:
        """Read the state of each master that answers.

        Raises:
            RedriveError: the source topic does not exist, or a call was refused.
        """
        has_source = False
        for master in masters:
            try:
                has_source |= await session.topic(master, spec.topic) is not None
                state = await groups.observe_group(want, master, session)
                if queues := state.topics[spec.dead_letter_topic]:
                    converged.dead_letters += await session.count(
                        master, spec.dead_letter_topic, queues.read
                    )
                retention = await session.retention(master)
            except BrokerUnreachableError as error:
                converged.failures.append(error)
                continue
            converged.states.append(state)
            kept = [time for time in (converged.retention, retention) if time is not None]
            converged.retention = min(kept, default=None)
        if not has_source and not converged.failures:
            raise Reason.TOPIC_NOT_FOUND.error(
                "the source topic does not exist", got=spec.topic, remedy="create it"
            )

    async def _record_intent(
        self, want: groups.DesiredGroup, body: Body, converged: _Converged
    ) -> Body:
        """Record the names that are about to be created, and where, and return the policy.

        Raises:
            KubernetesError: the write failed; nothing may be created then.
        """
        recorded = self._recorded(body)
        names = (want.name, *want.topics)
        missing = {n for n in names if not any(state.has(n) for state in converged.states)}
        if converged.failures or missing <= recorded:  # the other masters may have them
            return body
        own = {CREATED: sorted(recorded | missing), BROKER_DIGEST: self._broker(body)}
        fields = {INTERNAL: own, "masters": [state.master.name for state in converged.states]}
        after = await self._ctx.kubernetes.patch_status(self._resource, Key.of(body), fields)
        self._table.renew(after)
        return after

    async def _finalize(self, body: Body) -> Outcome:
        return await finish(body, self._ctx, lambda: self._clean_up(body))

    async def _clean_up(self, body: Body) -> Cleanup:
        """Delete the recorded objects of a policy, but no topic that holds messages.

        Raises:
            RedriveError: the cleanup failed; actions before the failure are performed.
        """
        spec = self._table.derive(_parsed, body)
        recorded = self._recorded(body)
        names = [spec.group, spec.retry_topic, spec.dead_letter_topic]
        names += [spec.ledger_topic] if spec.ledger_topic in recorded else []
        is_kept = spec.deletion_policy is GroupDeletion.RETAIN or _observes(spec)
        if is_kept or self._claims.holders(body):
            return (), names
        connection = await self._connection(spec, body)
        created = [name for name in names if name in recorded]
        stays = [f"{name}, which redrive did not create" for name in names if name not in recorded]
        done: list[groups.GroupAction] = []
        async with connection.admin.session() as session:
            masters = await session.masters(self._masters(body))
            await _check_unused(spec.group, masters, session)
            for name in created:
                # The records of a ledger are about the dead letters, which are deleted before.
                holder = spec.dead_letter_topic if name == spec.ledger_topic else name
                is_group = name == spec.group
                counts = () if is_group else [await session.messages(m, holder) for m in masters]
                if kept := sum(counts):
                    stays.append(f"{name} holds {kept} messages")
                    continue
                for master in masters:
                    done.append(groups.DeleteName(master, name, is_group=is_group))
                    await done[-1].perform(session)
        return done, stays


def _provisioned(
    spec: RocketMQRetryPolicySpec,
    body: Body,
    converged: _Converged,
    warnings: Sequence[StatusWarning],
    own: Body,
) -> Outcome:
    """Return the result of a policy that is ready.

    Args:
        own: fields of `INTERNAL` to write; None as `CREATED` removes the names of another cluster.
    """
    masters = [state.master.name for state in converged.states]
    message = (
        f"group {spec.group}, {spec.retry_topic} and {spec.dead_letter_topic} are ready at "
        f"{len(masters)} master{'s' if len(masters) > 1 else ''}"
    )
    fields = {
        "retryTopic": spec.retry_topic,
        "deadLetterTopic": spec.dead_letter_topic,
        "masters": masters,
        "deadLetters": converged.dead_letters,
        "maxRetries": spec.retries if spec.clients is ClientKind.GRPC else None,
        "blockedBy": None,
        "connection": str(connection_of(body)),
        INTERNAL: own,
        "plannedChanges": None,
    }
    events = repaired(body, converged.done)
    return Outcome(ready(Reason.PROVISIONED, message, warnings), fields, events=events)


async def _check_unused(group: str, masters: Sequence[Master], session: RocketMQSession) -> None:
    """Check that no consumer of a group is connected.

    Raises:
        AdminError: one is connected, or a call failed.
    """
    for master in masters:
        if await session.has_consumers(master, group):
            raise Reason.IN_USE.error(
                "consumers of the group are connected, and would lose their offsets",
                got=f"group {group} at {master.name}",
                remedy="stop them",
            )


def _parsed(body: Body) -> RocketMQRetryPolicySpec:
    return parse_spec(RocketMQRetryPolicySpec, body)


def _observes(spec: RocketMQRetryPolicySpec) -> bool:
    return spec.management_policy is ManagementPolicy.OBSERVE


def _is_polled(body: Body) -> bool:
    """Return True if a policy is ready, or stalled for a cause that no watch reports."""
    return is_settled(body) or find(body, STALLED) is not None


class RocketMQQueue:
    """Work queue of RocketMQRetryPolicies, and the listeners and the rotation that fill it.

    Requires a running event loop.

    Args:
        ctx: caches and clients of the operator.
        claims: priority of policies.
        enqueue_connection: enqueues a reconcile of a connection.
    """

    def __init__(
        self, ctx: Context, claims: groups.GroupClaims, enqueue_connection: Callable[[Key], None]
    ) -> None:
        self._ctx = ctx
        self._table = ctx.rocketmq_policies
        self._enqueue_connection = enqueue_connection
        self._claims = claims
        orphans = OrphanedPolicies(self._table, ctx.clock)
        reconciler = RocketMQReconciler(ctx, self._claims, orphans)
        self._controller = Controller(
            "RocketMQRetryPolicy",
            lambda key: reconciler.reconcile(key, failures=self._controller.failures(key)),
            mark_progressing=reconciler.mark_progressing,
            partition_key=partial(connection_at, objects=self._table),
        )
        self._table.listen(self._policy_changed)
        ctx.connections.listen(self._connection_changed)
        ctx.namespaces.listen(self._labels_changed)
        for body in self._table:
            if not is_settled(body):
                self._controller.enqueue(Key.of(body))
        name = "rotation of RocketMQ"
        self._rotation = asyncio.create_task(repeat(name, self._rotate), name=name)

    async def stop(self) -> None:
        """Cancel all tasks, and wait for their end."""
        self._rotation.cancel()
        await asyncio.gather(self._rotation, return_exceptions=True)
        await self._controller.stop()

    def _policy_changed(self, key: Key, before: Body | None, after: Body | None) -> None:
        if needs_reconcile(before, after):
            self._controller.enqueue(key)
        for rival in self._claims.affected(before, after):
            self._controller.enqueue(Key.of(rival))
        for connection in {connection_of(body) for body in (before, after) if body is not None}:
            body = self._ctx.connections.get(connection)
            used = bool(users(connection, self._table))
            if body is not None and is_protection_due(body, used=used):
                self._enqueue_connection(connection)

    def _connection_changed(self, key: Key, before: Body | None, after: Body | None) -> None:
        is_changed = needs_reconcile(before, after)
        is_healed = after is not None and is_ready(after) and not is_ready(before or {})
        for body in users(key, self._table):
            if is_changed or (is_healed and not is_ready(body) and not is_progressing(body)):
                self._controller.enqueue(Key.of(body))

    def _labels_changed(self, namespace: str) -> None:
        for body in self._table:
            if Key.of(body).namespace == namespace:
                self._controller.enqueue(Key.of(body))

    async def _rotate(self) -> AsyncGenerator[float]:
        """Reconcile ready and stalled policies one by one, because a broker has no watch."""
        order, polled = PollOrder(), self._table.index(_is_polled)
        while True:
            keys = polled.keys(True)  # noqa: FBT003  the value of the index
            key = order.next(keys)
            yield pause(len(keys), CALLS_PER_RECONCILE, total=len(keys))
            if key is not None:
                self._controller.enqueue(key)

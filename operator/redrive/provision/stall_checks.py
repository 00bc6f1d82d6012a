"""Whether what stalls a policy is over, where it ends at a broker or in an object nobody watches.

A broker tells nobody of a change, and a look at a policy takes many calls to find all as it was.
Here only the one thing is read that the policy is stalled by, in two calls to the broker at most
beside those for its Pulsar namespace, which policies share. Request by `rounds`, about one policy
after the other; what is found here is a reason for a look and no more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from redrive.admin.client import Admin
from redrive.admin.errors import NotFoundError
from redrive.admin.model import NamespaceState
from redrive.errors import RedriveError
from redrive.kube import status
from redrive.kube.connections import connection_of
from redrive.kube.context import Context
from redrive.kube.resources import Body, Key, is_owned_by
from redrive.provision import drift, errors, observe, ownership
from redrive.provision.conflicts import Conflicts
from redrive.provision.desired import Desired, desired
from redrive.provision.facts import Request
from redrive.provision.ownership import OwnershipRecord
from redrive.provision.resolve import resolve, rivals

LISTED_SECONDS = 15.0
"""How old what is known of a Pulsar namespace may be: it is read for all of its policies."""

_REASONS = frozenset(
    error.reason
    for error in (
        errors.OwnerConflictError,
        errors.SubscriptionExpiryError,
        errors.PartitionsDifferError,
        errors.ConfigMapNotOursError,
    )
)


def is_standing(body: Body) -> bool:
    """Whether a policy is stalled by something that only this module finds the end of."""
    return status.reason(body) in _REASONS and "deletionTimestamp" not in body["metadata"]


@dataclass(frozen=True)
class StallChecks:
    """Asks about policies that are stalled, each by the one thing that its status names.

    Attributes:
        conflicts: who has a claim on whose topics.
    """

    ctx: Context
    conflicts: Conflicts

    async def is_over(self, body: Body) -> bool:
        """Whether a policy for which `is_standing` holds needs a look.

        What else keeps it from being ready, a broker that fails too, is for the look to tell.
        """
        ask = self._by_reason[status.reason(body)]
        try:
            request = resolve(body, self.ctx)
            wanted = desired(request, body, self.ctx.settings.cluster_id)
            return not await ask(request, wanted, body)
        except RedriveError:
            return True

    @property
    def _by_reason(self) -> Mapping[str, Callable[[Request, Desired, Body], Awaitable[bool]]]:
        return {
            errors.OwnerConflictError.reason: self._has_another_owner,
            errors.PartitionsDifferError.reason: self._is_of_the_other_kind,
            errors.SubscriptionExpiryError.reason: self._expires_subscriptions,
            errors.ConfigMapNotOursError.reason: self._has_no_room_for_config_map,
        }

    async def _has_another_owner(self, request: Request, wanted: Desired, body: Body) -> bool:
        others = rivals(request.key, self.ctx, self.conflicts)
        older = frozenset(rival.key for rival in others if rival.age < request.age)
        served, admin = self.ctx.settings.namespaces, await self._admin(body)
        for topic in request.spec.own_topics:
            try:
                mark = OwnershipRecord.of(await admin.properties(topic)).owner
            except NotFoundError:
                continue
            if not ownership.may_take_over(mark, wanted.owner, older, served):
                return True
        return False

    async def _is_of_the_other_kind(self, _: Request, wanted: Desired, body: Body) -> bool:
        return drift.is_of_the_other_kind(wanted, await self._namespace(wanted, body))

    async def _expires_subscriptions(self, _: Request, wanted: Desired, body: Body) -> bool:
        return (await self._namespace(wanted, body)).subscription_expiry_minutes > 0

    async def _has_no_room_for_config_map(self, _: Request, wanted: Desired, body: Body) -> bool:
        found = await observe.config_map(Key.of(wanted.config_map), self.ctx, recent=True)
        return found is not None and not is_owned_by(found, body)

    async def _namespace(self, wanted: Desired, body: Body) -> NamespaceState:
        admin = await self._admin(body)
        return await admin.namespace(wanted.policy.topic.namespace_name, max_age=LISTED_SECONDS)

    async def _admin(self, body: Body) -> Admin:
        return (await self.ctx.brokers.open(connection_of(body))).admin

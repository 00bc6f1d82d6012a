"""Whether what stalls a policy is over, where it ends at a broker or in an object without a watch.

A broker shows no changes, and a reconcile takes many calls to find all as it was. Here only the one
thing is read that the policy is stalled by, in three calls to the broker at most, beside those for
its Pulsar namespace, which policies share. Called by `resync`, for one policy after the other; a
policy for which it is over is reconciled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from redrive.admin.client import Admin
from redrive.admin.errors import AdminNotFoundError
from redrive.errors import RedriveError
from redrive.kube import status
from redrive.kube.connections import connection_of
from redrive.kube.context import Context
from redrive.kube.resources import Body, Key
from redrive.policy.naming import TopicName
from redrive.provision import errors, observe, preflight_checks
from redrive.provision.checks import Checks
from redrive.provision.desired import Desired, DesiredTopic, desired
from redrive.provision.facts import Observed, TopicState
from redrive.provision.preflight_checks import PreflightFacts
from redrive.provision.resolve import resolve

LISTED_SECONDS = 15.0
"""How old what is known of a Pulsar namespace may be: it is read for all of its policies."""

Read = Callable[[Desired, Body, Context], Awaitable[Observed]]


async def _owners(want: Desired, body: Body, ctx: Context) -> Observed:
    admin = await _admin(body, ctx)

    async def marked(topic: DesiredTopic | None) -> TopicState | None:
        return None if topic is None else await _marked(topic.name, admin)

    return Observed(
        retry=await marked(want.retry),
        dead_letter=await marked(want.dead_letter),
        ledger=await marked(want.ledger),
        sequences=await marked(want.sequences),
    )


async def _source(want: Desired, body: Body, ctx: Context) -> Observed:
    found = await _marked(want.policy.topic, await _admin(body, ctx))
    return Observed(source_properties=None if found is None else found.properties)


async def _marked(topic: TopicName, admin: Admin) -> TopicState | None:
    try:
        found = await admin.metadata(topic, partitioned=False)
    except AdminNotFoundError:
        return None
    return TopicState(0, properties=found.properties)


async def _listed(want: Desired, body: Body, ctx: Context) -> Observed:
    admin, name = await _admin(body, ctx), want.policy.topic.namespace_name
    namespace = await admin.namespace(name, max_age=LISTED_SECONDS)
    return observe.in_namespace(want, namespace, None)


async def _config_map(want: Desired, _: Body, ctx: Context) -> Observed:
    key = Key.of(want.config_map)
    return Observed(config_map=await observe.config_map(key, ctx, recent=True))


async def _admin(body: Body, ctx: Context) -> Admin:
    return (await ctx.brokers.open(connection_of(body))).admin


CHECKS: Mapping[str, tuple[Read, Checks[PreflightFacts]]] = {
    errors.OwnerConflictError.reason: (_owners, Checks(preflight_checks.topic_has_another_owner)),
    errors.BrokerChangedError.reason: (_owners, Checks(preflight_checks.topics_are_elsewhere)),
    errors.ChainedPolicyError.reason: (_source, Checks(preflight_checks.source_is_of_redrive)),
    errors.TopicExistsError.reason: (_owners, Checks(preflight_checks.topic_is_not_redrives)),
    errors.AdoptionNotAllowedError.reason: (
        _owners,
        Checks(preflight_checks.topic_is_not_redrives),
    ),
    errors.PartitionsDifferError.reason: (
        _listed,
        Checks(
            preflight_checks.retry_topic_is_of_the_other_kind,
            preflight_checks.dead_letter_topic_lacks_partitions,
        ),
    ),
    errors.SubscriptionExpiryError.reason: (_listed, Checks()),
    errors.ConfigMapNotOursError.reason: (
        _config_map,
        Checks(preflight_checks.config_map_is_not_ours),
    ),
}
"""Reason of a stalled policy → how what it is about is read, and checked by what it needs."""


def is_checked(body: Body) -> bool:
    """Whether a policy is stalled by something that only this module finds the end of."""
    return status.reason(body) in CHECKS and "deletionTimestamp" not in body["metadata"]


@dataclass(frozen=True)
class StallChecks:
    """Checks stalled policies, each for the one thing that its status names."""

    ctx: Context

    async def is_over(self, body: Body) -> bool:
        """Whether a policy for which `is_checked` holds has to be reconciled.

        So it is too where something else now keeps it from being ready.
        """
        reason = status.reason(body)
        read, checks = CHECKS[reason]
        try:
            request = resolve(body, self.ctx)
            want = desired(request, body, self.ctx.settings.cluster_id)
            have = await read(want, body, self.ctx)
            checks.check(PreflightFacts(body, want, have, request))
        except RedriveError as error:
            return error.reason != reason
        return True

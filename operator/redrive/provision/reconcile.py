"""The spine of provisioning: bring the broker to what one RetryPolicy asks, and say how far it is.

Called by the `Keeper` of policies, once for each change and again while a policy is not ready for
a reason that no watch would tell.
"""

from __future__ import annotations

import logging

from redrive.api.conditions import Condition
from redrive.cluster import resources, status
from redrive.cluster.errors import NotFoundError
from redrive.cluster.keeper import Again
from redrive.cluster.resources import Body, Key
from redrive.cluster.status import Publisher
from redrive.cluster.world import World
from redrive.errors import RedriveError
from redrive.provision import conditions, errors
from redrive.provision.apply import apply, in_words
from redrive.provision.claims import Claims
from redrive.provision.desired import Desired, desired
from redrive.provision.gather import gather, gather_admissible
from redrive.provision.observe import observe
from redrive.provision.plan import plan
from redrive.provision.retire import hold, retire

logger = logging.getLogger(__name__)

PROVISIONED = "Provisioned"
"""Reason: topics, subscriptions, grants and ConfigMap are as the policy asks."""
LADDER_DESCENDS = "LadderDescends"
"""Reason of a Warning event: some retry waits a shorter time than the one before it."""
_DESCENT = (
    "the delay ladder descends: a later retry waits a shorter time than one before it; "
    "sort the delays unless that is meant"
)


async def reconcile(key: Key, world: World, claims: Claims) -> Again:
    """Look at one RetryPolicy, if it is still there."""
    body = world.policies.get(key)
    if body is None:
        return Again.NEVER
    try:
        return await _look(body, world, claims)
    except NotFoundError:
        world.policies.drop(body)  # it went unseen by the watch
        return Again.NEVER


async def _look(body: Body, world: World, claims: Claims) -> Again:
    """Hold a policy, provision it or let it go, and publish how it stands."""
    out = Publisher(world.kubernetes, resources.POLICIES, world.policies, world.clock)
    if "deletionTimestamp" in body["metadata"]:
        await retire(body, out)
        return Again.WHEN_WOKEN
    body = await hold(body, out)
    if status.is_new(body):
        body = await out.publish(body, status.progressing("looking at the policy"))
    try:
        wanted = await provision(body, world, claims)
    except RedriveError as error:
        stalls = isinstance(error, errors.STALLS)
        await out.publish(body, status.stalled(error) if stalls else status.waiting(error))
        return Again.WHEN_WOKEN if isinstance(error, errors.WATCHED) else Again.SOON
    published = await out.publish(body, _ready(wanted), _fields(wanted))
    if published is not body and wanted.policy.ladder.descends:
        await out.warn(published, LADDER_DESCENDS, _DESCENT)
    return Again.WHEN_WOKEN


async def provision(body: Body, world: World, claims: Claims) -> Desired:
    """Bring the broker to what the policy asks for; return what is there then.

    Every check comes before the first write, so a policy that is refused changes nothing. A crash
    on the way is made up for by the next call.

    Raises:
        RedriveError: the policy can't be obeyed, or not now; its reason says why.
    """
    asked = gather(body, world)
    _refuse(conditions.first_violation(conditions.ADMISSIBLE, asked))
    rivals = gather_admissible(claims.rivals(asked.key), world)
    _refuse(conditions.older_rival(asked, rivals))

    wanted = desired(asked, body)
    connection = await world.brokers.resolve(asked.spec.connection_ref, asked.key.namespace)
    with connection.admin.granting(asked.policy.topic.namespace_name) as grant:
        observed = await observe(wanted, connection.admin, world.kubernetes)
        facts = conditions.Buildable(body, wanted, observed)
        _refuse(conditions.first_violation(conditions.BUILDABLE, facts))

        steps = plan(wanted, observed)
        await apply(steps, connection.admin, grant, world.kubernetes)
    if steps:
        logger.info("RetryPolicy %s: %s", asked.key, in_words(steps))
    return wanted


def _refuse(violation: RedriveError | None) -> None:
    if violation is not None:
        raise violation


def _ready(wanted: Desired) -> tuple[Condition, ...]:
    return status.ready(
        PROVISIONED,
        f"{wanted.retry.name} and {wanted.dead_letter.name} are ready; "
        f"consumers find their policy in ConfigMap {wanted.config_map['metadata']['name']}",
    )


def _fields(wanted: Desired) -> dict[str, str]:
    return {
        "retryTopic": str(wanted.retry.name),
        "deadLetterTopic": str(wanted.dead_letter.name),
        "configMap": wanted.config_map["metadata"]["name"],
    }

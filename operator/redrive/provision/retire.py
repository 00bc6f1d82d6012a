"""The end of a policy: what it made at the broker stays, or goes, as its `deletionPolicy` says.

Called by `reconcile`. Only a policy whose deletion has work to do at the broker holds the API
server up, by a finalizer, and at most for `PATIENCE`. All others go at once, whether redrive runs
or not; `farewell` tells of them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime, timedelta

from redrive.admin.client import Admin
from redrive.admin.errors import NotFoundError as TopicGoneError
from redrive.api.choices import DeletionPolicy
from redrive.api.parsing import parse_spec
from redrive.api.retrypolicy import RetryPolicySpec
from redrive.errors import RedriveError, Requeue
from redrive.kube import resources, status
from redrive.kube.connections import Connection, ConnectionRef
from redrive.kube.context import Context
from redrive.kube.errors import (
    ConnectionNotFoundError,
    NotFoundError,
    SecretKeyNotFoundError,
    SecretNotFoundError,
)
from redrive.kube.resources import Body, Key
from redrive.kube.status import Publisher
from redrive.policy import naming
from redrive.provision import conditions, restraint
from redrive.provision.apply import apply
from redrive.provision.claims import Claims
from redrive.provision.facts import Asked
from redrive.provision.gather import gather_admissible, gather_from
from redrive.provision.ownership import Owner
from redrive.provision.removal import Left, Removal, removal
from redrive.provision.steps import in_words

FINALIZER = "redrive.io/cleanup"
PATIENCE = timedelta(minutes=10)
"""A deletion that can't do its work for so long lets go of the policy, and all stays."""
SKIP_CLEANUP = "redrive.io/skip-cleanup"
"""An annotation: `true` has a deletion let go of the policy at once."""

RETAINED = "Retained"
"""Reason of an Event: the policy is gone, and of what it made at the broker this stays."""
DELETED = "Deleted"
"""Reason of an Event: what a deleted policy had made at the broker is gone."""
CLEANUP_ABANDONED = "CleanupAbandoned"
"""Reason of an Event: the policy is gone, and its deletion could not do its work at the broker."""

logger = logging.getLogger(__name__)


async def hold(body: Body, policy: DeletionPolicy, out: Publisher) -> Body:
    """Have the API server wait for `retire`, if that has work to do; return the policy then.

    Raises:
        ConflictError: somebody else has changed it meanwhile.
    """
    finalizers = body["metadata"].get("finalizers", [])
    needed = [] if policy is DeletionPolicy.RETAIN else [FINALIZER]
    if [name for name in finalizers if name == FINALIZER] == needed:
        return body
    others = [name for name in finalizers if name != FINALIZER]
    return await _set_finalizers(body, [*others, *needed], out)


async def retire(body: Body, ctx: Context, claims: Claims, out: Publisher) -> Requeue:
    """Do what the deletion of a policy asks for at the broker, then let it go.

    What can't be done, for whatever reason, is tried again until `PATIENCE` is over: a fault of our
    own holds up no deletion for ever either. A crash leaves less to do.

    Raises:
        ConflictError: somebody else has changed the policy meanwhile.
    """
    if FINALIZER not in body["metadata"].get("finalizers", []):
        return Requeue.ON_CHANGE
    if (body["metadata"].get("annotations") or {}).get(SKIP_CLEANUP) == "true":
        await _let_go(
            body, out, CLEANUP_ABANDONED, f"the annotation {SKIP_CLEANUP} has it go; {_rest(body)}"
        )
        return Requeue.ON_CHANGE
    if restraint.is_paused(body):
        await _let_go(body, out, RETAINED, f"it was paused, and nothing was touched; {_rest(body)}")
        return Requeue.ON_CHANGE
    since = datetime.fromisoformat(body["metadata"]["deletionTimestamp"])
    try:
        done = await _remove(body, ctx, claims)
    except Exception as error:
        expected = isinstance(error, RedriveError)
        if ctx.clock() - since >= PATIENCE:
            logger.warning("RetryPolicy %s: given up", Key.of(body), exc_info=not expected)
            why = error if expected else f"{type(error).__name__}, told in the operator's log"
            await _let_go(
                body, out, CLEANUP_ABANDONED, f"waited since {_at(since)}: {why}; {_rest(body)}"
            )
            return Requeue.ON_CHANGE
        if not isinstance(error, RedriveError):
            raise
        await out.publish(body, status.waiting(error, _waits(error, since)))
        return Requeue.BACKOFF
    if done.steps:
        await out.tell(body, DELETED, in_words(done.steps))
    stays = "; ".join(done.stays)
    await _let_go(body, out, RETAINED, f"at the broker stays: {stays}" if stays else "")
    return Requeue.ON_CHANGE


async def _remove(body: Body, ctx: Context, claims: Claims) -> Removal:
    """Take away what redrive made for the policy, as far as its deletionPolicy wants that.

    Raises:
        RedriveError: not now; what was done by then is done.
    """
    ref = parse_spec(RetryPolicySpec, body).connection_ref
    connection = await _connection(ref, Key.of(body).namespace, ctx)
    asked = gather_from(body, connection.spec)
    if asked.deletion is DeletionPolicy.RETAIN:
        return Removal((), (made(body),) if made(body) else ())
    refusal = conditions.own_topic_is_not_allowed(asked)
    if refusal is not None:
        raise refusal
    rivals = tuple(gather_admissible(claims.rivals(asked.key), ctx))
    with connection.admin.granting(asked.policy.topic.namespace_name) as grant:
        left = await _left(asked, rivals, connection.admin)
        planned = removal(Owner(ctx.settings.cluster_id, asked.key), asked.deletion, left)
        await apply(planned.steps, connection.admin, grant, ctx.kubernetes)
    if planned.steps:
        logger.info("RetryPolicy %s, deleted: %s", asked.key, in_words(planned.steps))
    return planned


async def _connection(ref: ConnectionRef, namespace: str, ctx: Context) -> Connection:
    try:
        return await ctx.brokers.resolve(ref, namespace)
    except (ConnectionNotFoundError, SecretNotFoundError, SecretKeyNotFoundError):
        remembered = ctx.brokers.remembered(ref, namespace)
        if remembered is None:
            raise
        # Nobody else probes the broker of a connection that is gone, were it silent before.
        await remembered.admin.clusters()
        return remembered


async def _left(asked: Asked, rivals: Sequence[Asked], admin: Admin) -> list[Left]:
    """Read what is there of a policy's topics, of one that it has switched off too."""
    try:
        namespace = await admin.namespace(asked.policy.topic.namespace_name)
    except TopicGoneError:
        return []
    found = []
    subscriptions = {
        asked.spec.retry_topic: asked.policy.subscription,
        asked.spec.dead_letter_topic: naming.DEAD_LETTER_SUBSCRIPTION,
    }
    for name, subscription in subscriptions.items():
        if not namespace.exists(name):
            continue
        partitioned = str(name) in namespace.partitioned
        found.append(
            Left(
                name=name,
                subscription=subscription,
                partitioned=partitioned,
                properties=(await admin.metadata(name, partitioned=partitioned)).properties,
                usage=await admin.usage(name, partitioned=partitioned, subscription=subscription),
                permissions=namespace.permissions.get(str(name), {}),
                heir=next((each.key for each in rivals if name in each.spec.own_topics), None),
            )
        )
    return found


async def _let_go(body: Body, out: Publisher, reason: str, message: str) -> None:
    """Take the finalizer off, and tell once it is true.

    A conflict would tell it again with every attempt. A crash in between tells it never.
    """
    others = [name for name in body["metadata"]["finalizers"] if name != FINALIZER]
    try:
        await _set_finalizers(body, others, out)
    except NotFoundError:
        return  # somebody else has let it go
    if message:
        say = out.warn if reason == CLEANUP_ABANDONED else out.tell
        await say(body, reason, message)


async def _set_finalizers(body: Body, names: list[str], out: Publisher) -> Body:
    # The list is replaced as a whole: only if nobody has changed the object since it was read.
    version = body["metadata"]["resourceVersion"]
    patch = {"metadata": {"finalizers": names, "resourceVersion": version}}
    after = await out.kubernetes.patch(resources.POLICIES, Key.of(body), patch)
    out.table.renew(after)
    return after


def _waits(error: RedriveError, since: datetime) -> str:
    return (
        f"being deleted since {_at(since)}: {error}; at {_at(since + PATIENCE)} the policy goes "
        f"all the same, and leaves what is there; with the annotation {SKIP_CLEANUP}=true it goes "
        "now"
    )


def _rest(body: Body) -> str:
    return f"what there is of {made(body) or 'its topics'} stays at the broker"


def _at(moment: datetime) -> str:
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}"


def made(body: Body) -> str:
    """Name the topics that a policy has made or adopted; empty for none."""
    made = body.get("status") or {}
    return " and ".join(made[field] for field in ("retryTopic", "deadLetterTopic") if field in made)

"""May messages be moved to a topic that is not the policy's own? What only the broker can tell.

Called by `reconcile` right before a launch; `admission` has asked the rules of the connection.
"""

from __future__ import annotations

from redrive.admin.client import Admin
from redrive.admin.errors import AdminNotFoundError
from redrive.admin.model import RightsChange
from redrive.api.replay import Target
from redrive.kube.context import Context
from redrive.kube.resources import TOPIC_OWNER, Body
from redrive.policy.naming import TopicName
from redrive.replay.controller import launchers
from redrive.replay.controller.admission import admit
from redrive.replay.controller.errors import (
    TargetDeduplicationError,
    TargetNotAllowedError,
    TargetNotFoundError,
    TargetNotSubscribedError,
)

_RIGHTS = frozenset({"produce", "consume"})
"""To send there, and to find there what was sent before."""


async def prepare(replay: Body, ctx: Context) -> None:
    """Check the target of a Replay that was not launched, and grant the replay role what it needs.

    Rights stay after the run: a later Replay needs them to find what this one has stored.

    Raises:
        TargetNotFoundError: there is no such topic.
        TargetNotAllowedError: it belongs to a RetryPolicy.
        TargetNotSubscribedError: messages would be lost there.
        TargetDeduplicationError: what is asked for can't be kept there.
        RedriveError: the Replay can't be launched now, or the broker does not tell.
    """
    if launchers.was_launched(replay) or replay["spec"].get("target", Target.RETRY) == Target.RETRY:
        return
    admitted = admit(replay, ctx)
    job, topic = admitted.job, admitted.job.target
    if topic is None:
        return
    connection = await ctx.brokers.resolve(admitted.connection_ref, job.namespace)
    await _check_topic(topic, connection.admin)
    if job.exactly_once and not await connection.admin.deduplicates(topic):
        raise TargetDeduplicationError(
            f"{topic} does not deduplicate: what a client sends again when it reconnects would be "
            "stored twice",
            got="guarantee: ExactlyOnce, also where it is left out",
            remedy="have it deduplicate (`pulsar-admin topicPolicies set-deduplication-status "
            f"--enable {topic}`), and this Replay starts by itself; or delete it and make another "
            "one with guarantee: AtLeastOnce",
        )
    if admitted.may_grant and not job.dry_run:
        with connection.admin.granting(topic.namespace_name) as grant:
            await grant([RightsChange(topic, admitted.identity.role, give=_RIGHTS)])


async def _check_topic(topic: TopicName, admin: Admin) -> None:
    try:
        partitioned = await admin.partitions(topic) > 0
        found = await admin.metadata(topic, partitioned=partitioned)
        subscriptions = await admin.subscriptions(topic, partitioned=partitioned)
    except AdminNotFoundError:
        raise TargetNotFoundError(
            "the topic that this Replay is to move messages to does not exist",
            got=str(topic),
            remedy="create it; this Replay starts by itself then",
        ) from None
    if found.properties.get(TOPIC_OWNER):
        raise TargetNotAllowedError(
            "the topic that this Replay is to move messages to is a retry, dead-letter or other "
            "topic that redrive keeps for a RetryPolicy",
            got=str(topic),
            remedy="delete this Replay and make another one, with a target that is no such topic",
        )
    if not all(subscriptions.parts):
        raise TargetNotSubscribedError(
            f"{topic}, or one of its partitions, has no subscription, so what is moved there would "
            "be lost",
            got=sorted(subscriptions.names),
            remedy="create one (`pulsar-admin topics create-subscription --subscription NAME "
            f"{topic}`); this Replay starts by itself then",
        )

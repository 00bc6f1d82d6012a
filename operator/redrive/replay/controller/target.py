"""Checks of a topic that is not the policy's own, before messages are moved there, at the broker.

Called by `reconcile` right before a launch; `admission` has asked the rules of the connection. A
message that is moved is acknowledged in the dead-letter topic, so a target has to keep it until
consumers have it: a durable subscription on each partition, no backlog quota that evicts, and a
TTL that leaves them time.
"""

from __future__ import annotations

import math
from datetime import timedelta

from redrive.admin.client import Admin
from redrive.admin.errors import AdminNotFoundError
from redrive.admin.policies import evicting
from redrive.api.replay import ReplayStatus, Target
from redrive.kube.context import Context
from redrive.kube.resources import TOPIC_OWNER, Body
from redrive.kube.status import ObjectEvent
from redrive.policy import durations
from redrive.policy.naming import TopicName
from redrive.replay.controller import launchers, rights
from redrive.replay.controller.admission import admit, former_targets
from redrive.replay.controller.errors import (
    TargetDeduplicationError,
    TargetEvictsError,
    TargetExpiresError,
    TargetNotAllowedError,
    TargetNotFoundError,
    TargetNotSubscribedError,
)
from redrive.replay.spec import MESSAGES_PER_SECOND, ReplayJob

SHORTEST_TTL = timedelta(hours=1)
"""Messages that expire sooner are refused a way to the target: consumers pause for as long."""
SHORT_TTL = timedelta(days=10)
"""A shorter TTL is a warning Event: a consumer may ask for a retry as late as that."""

_NONE = TopicName("none", "none", "none")
"""Stands for a source topic, where its name does not matter."""


async def prepare(replay: Body, ctx: Context) -> tuple[ObjectEvent, ...]:
    """Check the target of a Replay that was not launched, and grant the replay role what it needs.

    So is that of a run that waits for a subscription: a topic that was deleted, and made again, has
    lost its rights.

    Returns:
        What to tell about the target when the Replay is launched.

    Raises:
        TargetNotFoundError: there is no such topic.
        TargetNotAllowedError: it belongs to a RetryPolicy.
        TargetNotSubscribedError, TargetEvictsError, TargetExpiresError: messages would be lost
            there.
        TargetDeduplicationError: what is asked for can't be kept there.
        RedriveError: the Replay can't be launched now, or the broker does not tell.
    """
    is_launched = launchers.was_launched(replay)
    if is_launched and not ReplayStatus.of(replay).unsubscribed_topic:
        return ()
    to_retry = replay["spec"].get("target", Target.RETRY) == Target.RETRY
    if to_retry and not any(former_targets(replay, ctx, _NONE)):
        return ()
    admitted = admit(replay, ctx)
    job, topic = admitted.job, admitted.job.target
    if topic is None and not admitted.grants:
        return ()
    connection = await ctx.brokers.resolve(admitted.connection_ref, job.namespace)
    try:
        events = () if topic is None else await _check(job, topic, connection.admin)
    except (TargetNotFoundError, TargetNotSubscribedError):
        if is_launched:  # its job waits for that
            return ()
        raise
    for needed in () if job.dry_run else admitted.grants:
        try:
            await rights.grant(replay, needed, admitted.identity.role, connection, ctx)
        except AdminNotFoundError:
            if needed == topic:
                raise
    return events


async def _check(job: ReplayJob, topic: TopicName, admin: Admin) -> tuple[ObjectEvent, ...]:
    await _check_topic(topic, admin)
    await _check_quota(topic, admin)
    events = await _check_ttl(job, topic, admin)
    if job.exactly_once and not await admin.deduplicates(topic):
        raise TargetDeduplicationError(
            f"{topic} does not deduplicate: what a client sends again when it reconnects would be "
            "stored twice",
            got="guarantee: ExactlyOnce, also where it is left out",
            remedy="have it deduplicate (`pulsar-admin topicPolicies set-deduplication-status "
            f"--enable {topic}`), and this Replay starts by itself; or delete it and make another "
            "one with guarantee: AtLeastOnce",
        )
    return events


async def _check_topic(topic: TopicName, admin: Admin) -> None:
    """Check the owner and the subscriptions of a topic.

    Raises:
        TargetNotFoundError, TargetNotAllowedError, TargetNotSubscribedError: as for `prepare`.
    """
    try:
        partitioned = await admin.partitions(topic) > 0
        found = await admin.metadata(topic, partitioned=partitioned)
        receivers = await admin.receivers(topic, partitioned=partitioned)
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
    if not all(receivers.parts):
        raise TargetNotSubscribedError(
            f"{topic}, or one of its partitions, has no durable subscription of an application, so "
            "messages that are moved there would be lost; those of readers and Pulsar's own do not "
            "count",
            got=sorted(receivers.names),
            remedy="create one (`pulsar-admin topics create-subscription --subscription NAME "
            f"{topic}`); this Replay starts by itself then",
        )


async def _check_quota(topic: TopicName, admin: Admin) -> None:
    quotas = await admin.quotas_in_force(topic)
    if kind := evicting(quotas):
        raise TargetEvictsError(
            f"a backlog quota of {topic} drops messages unread once the topic is over it",
            got=f"{kind}: {dict(quotas[kind])}",
            remedy="have it refuse messages instead (`pulsar-admin topicPolicies set-backlog-quota "
            f"--type {kind} --policy producer_exception` with its limit, for {topic}); this Replay "
            "starts by itself then",
        )


async def _check_ttl(job: ReplayJob, topic: TopicName, admin: Admin) -> tuple[ObjectEvent, ...]:
    seconds = await admin.ttl_in_force(topic)
    ttl = timedelta(seconds=seconds) if seconds > 0 else timedelta.max
    if ttl >= SHORT_TTL:
        return ()
    estimate = await _estimate(job, admin)
    shortest = max(SHORTEST_TTL, estimate)
    if ttl < shortest:
        raise TargetExpiresError(
            f"messages of {topic} expire unread before consumers have time for them: a TTL is at "
            f"least {durations.text_of(SHORTEST_TTL)}, and as long as the run, which takes about "
            f"{durations.text_of(estimate)}",
            got=f"messageTTL of {seconds} s",
            remedy=f"raise it (`pulsar-admin topicPolicies set-message-ttl --ttl 0 {topic}` for no "
            "end), or select fewer messages; this Replay starts by itself then",
        )
    return (
        ObjectEvent(
            TargetExpiresError.reason,
            f"messages of {topic} expire unread {durations.text_of(ttl)} after they are moved; "
            f"that is less than the longest delay of a retry, {durations.text_of(SHORT_TTL)}",
            is_warning=True,
        ),
    )


async def _estimate(job: ReplayJob, admin: Admin) -> timedelta:
    """Return how long a run takes about: by the backlog, the limits of its choice and its rate."""
    topic, choice = job.policy.dead_letter_topic, job.choice
    partitioned = await admin.partitions(topic) > 0
    found = await admin.stats(topic, partitioned=partitioned)
    kept = found.get(job.policy.dead_letter_subscription)
    counts = [0 if kept is None else kept.backlog, choice.limit or math.inf]
    rate = min(job.rate_limit or math.inf, MESSAGES_PER_SECOND)
    return timedelta(seconds=math.ceil(min(counts) / rate))

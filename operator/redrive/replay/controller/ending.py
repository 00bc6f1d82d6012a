"""What has an end: a run that takes too long, and a Replay that ended long enough ago."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta

from redrive.api.conditions import written
from redrive.api.replay import FINAL, Phase, ReplayStatus
from redrive.errors import RedriveError, Requeue
from redrive.kube import resources
from redrive.kube.context import Context
from redrive.kube.errors import NotFoundError
from redrive.kube.resources import Body, Key
from redrive.policy import durations
from redrive.replay.controller.errors import DeadlineExceededError

GRACE = timedelta(minutes=2)
"""So long a job may take to drain after its deadline, before its Replay fails without its word."""

logger = logging.getLogger(__name__)


async def delete_if_over(replay: Body, ctx: Context) -> Requeue:
    """Delete a Replay that ended as long ago as its `ttlAfterFinished` says.

    What belongs to it, its SparkApplication and the pods of that, goes with it. One that was
    changed at that moment stays until the next look. One whose end has no time that can be has
    ended now: so it is neither deleted at once nor kept for ever.

    Raises:
        KubernetesError: it could not be deleted, or its status not be written; a ConflictError if
            it has changed meanwhile.
    """
    ttl = replay["spec"].get("ttlAfterFinished")
    ended, now = ReplayStatus.of(replay).completion_time, ctx.clock()
    try:
        if ended is None or ended > now:
            fields = {"completionTime": written(now)}
            after = await ctx.kubernetes.patch_status(
                resources.REPLAYS, Key.of(replay), fields, replay["metadata"]["resourceVersion"]
            )
            ctx.replays.renew(after)
            return requeue(replay, Phase.COMPLETED)
        if ttl is None:
            return Requeue.ON_CHANGE
        if now - ended < durations.parse(ttl):
            return Requeue.SLOW_BACKOFF
        await ctx.kubernetes.delete(resources.REPLAYS, replay)
    except NotFoundError:
        return Requeue.ON_CHANGE
    logger.info("Replay %s: deleted, %s after its end", Key.of(replay), ttl)
    return Requeue.ON_CHANGE


def requeue(replay: Body, phase: str, *, is_idle: bool = False) -> Requeue:
    """Return when to look at a Replay again that was launched, to see whether its time is over.

    Args:
        replay: the Replay.
        phase: how it stands.
        is_idle: whether its pods have to be looked at: their state is not watched.
    """
    if phase == Phase.SUBMITTED:
        return Requeue.BACKOFF  # the state of an application that is not run never changes
    timed = "ttlAfterFinished" if phase in FINAL else "deadline"
    return Requeue.SLOW_BACKOFF if is_idle or timed in replay["spec"] else Requeue.ON_CHANGE


def requeue_after(error: RedriveError, replay: Body, status: ReplayStatus) -> Requeue:
    """Return when to look again at a Replay that *error* keeps from going on."""
    if error.requeue is not Requeue.ON_CHANGE or status.start_time is None:
        return error.requeue
    return requeue(replay, Phase.RUNNING)  # its deadline counts, whether its job runs or not


def is_late(replay: Body, status: ReplayStatus, now: datetime) -> bool:
    """Whether a run was to end long ago.

    Its job ends by itself at the deadline. One that does not run, or hangs, does not.
    """
    return status.is_past(replay["spec"].get("deadline"), now - GRACE)


def check_deadline(replay: Body, status: ReplayStatus, phase: str, now: datetime) -> None:
    """Check that a run that was launched has not gone on for longer than it may.

    Raises:
        DeadlineExceededError: it has, and something is left.
    """
    if phase in FINAL or status.finished or not is_late(replay, status, now):
        return
    raise DeadlineExceededError(
        "the run has not come to its end within its deadline, and its job does not say why",
        got=replay["spec"]["deadline"],
        remedy="look at the SparkApplication and its pods, which go with this Replay; another "
        "Replay goes on from what was moved",
    )

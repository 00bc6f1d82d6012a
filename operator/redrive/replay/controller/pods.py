"""Whether the pods of a SparkApplication run, driver and executors, and what keeps them from it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from datetime import datetime, timedelta

from redrive.api.conditions import moment_of
from redrive.api.replay import Phase, ReplayStatus
from redrive.kube import resources
from redrive.kube.context import Context
from redrive.kube.errors import KubernetesError
from redrive.kube.resources import Body, is_owned_by
from redrive.replay.controller.errors import DriverNotStartedError, ExecutorsNotStartedError
from redrive.replay.controller.launcher import SparkRun

MAX_REASON = 500
"""Characters of what Kubernetes says that a message has room for."""

_START_TIME = timedelta(minutes=2)
"""Enough to fetch an image."""
_DRIVER, _EXECUTOR = "driver", "executor"
_IN_URLS = re.compile(r"(?<=://)[^/@\s]+@|\?[\w-]+=[^\s\"']*")
"""Where a registry's address may hold credentials: before the host, and in its query."""


def is_idle(reported: ReplayStatus) -> bool:
    """Whether a job has messages to move, and moves none as far as it says. Pure.

    So it is without executors, while it plans, and while a broker is away.
    """
    scanned = reported.preview is not None and reported.preview.estimated_seconds is not None
    is_over = reported.finished or scanned or reported.left == 0
    return not (is_over or reported.suspended or reported.rate)


async def check(run: SparkRun, reported: ReplayStatus, now: datetime, ctx: Context) -> None:
    """Check that the driver of an application, and then an executor, has begun to run in time.

    The message names a pod and why, where the operator may read that: the chart lets it do so in
    the namespaces that it prepares for Replays.

    Raises:
        DriverNotStartedError: the driver has not.
        ExecutorsNotStartedError: no executor has, and nothing is moved. It takes that right.
    """
    if run.submitted is not None and now - run.submitted > _START_TIME:
        await _check_driver(run, ctx)
    launched = reported.start_time or now
    if run.phase is Phase.RUNNING and is_idle(reported) and now - launched > _START_TIME:
        await _check_executors(run, now, ctx)


async def _check_driver(run: SparkRun, ctx: Context) -> None:
    pod, why = f"pod --selector {_selector(run, _DRIVER)}", ""
    try:
        found = _newest(await _pods(run, _DRIVER, ctx))
        if found is not None:
            pod, why = _named(found), await _reason(found, ctx)
    except KubernetesError:
        pass  # the command in the message tells it
    raise DriverNotStartedError(
        f"the driver of the SparkApplication {run.key.name} does not run, "
        f"{_START_TIME.total_seconds():.0f} s after it was submitted{why and f': {why}'}",
        got=pod,
        remedy=_remedy(run, f"describe {pod}"),
    )


async def _check_executors(run: SparkRun, now: datetime, ctx: Context) -> None:
    try:
        driver = _newest(await _pods(run, _DRIVER, ctx))
        if driver is None:
            return
        every = await _pods(run, _EXECUTOR, ctx)
    except KubernetesError:
        return  # whether one runs is not known
    made = [pod for pod in every if is_owned_by(pod, driver)]  # some may be an earlier driver's
    if not lacks_executors(driver, made, now):
        return
    newest = _newest(made)
    if newest is None:
        pod, why = _named(driver), "its driver has made none"
        command = f"logs {driver['metadata']['name']}"
    else:
        pod, why = _named(newest), await _reason(newest, ctx)
        command = f"describe {pod}"
    raise ExecutorsNotStartedError(
        f"no executor of the SparkApplication {run.key.name} runs, so nothing is moved"
        f"{why and f': {why}'}",
        got=pod,
        remedy=_remedy(run, command),
    )


def lacks_executors(driver: Body, executors: Collection[Body], now: datetime) -> bool:
    """Whether no executor of a *driver* runs that had the time to. Pure.

    A driver that runs makes one at least; its own time counts where it has made none.
    """
    ready, newest = _ready_since(driver), _newest(executors)
    since = ready if newest is None else moment_of(newest["metadata"]["creationTimestamp"])
    if ready is None or since is None or now - since <= _START_TIME:
        return False
    return all((pod.get("status") or {}).get("phase") != "Running" for pod in executors)


def _remedy(run: SparkRun, command: str) -> str:
    return (
        "provide the Secret, image, quota or room on a node that it lacks, see `kubectl "
        f"--namespace {run.key.namespace} {command}`; it starts by itself then. Delete the "
        "SparkApplication to have it made again from the operator's settings"
    )


def _selector(run: SparkRun, role: str) -> str:
    return f"{run.pods},spark-role={role}"


async def _pods(run: SparkRun, role: str, ctx: Context) -> list[Body]:
    of_role = replace(resources.PODS, selector=_selector(run, role))
    return await ctx.kubernetes.list(of_role, run.key.namespace)


def _newest(pods: Iterable[Body]) -> Body | None:
    return max(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]), default=None)


def _named(pod: Body) -> str:
    return f"pod {pod['metadata']['name']}"


def _ready_since(pod: Body) -> datetime | None:
    conditions = (pod.get("status") or {}).get("conditions", ())
    ready = (c for c in conditions if (c["type"], c["status"]) == ("Ready", "True"))
    return next((moment_of(c.get("lastTransitionTime")) for c in ready), None)


async def _reason(pod: Body, ctx: Context) -> str:
    metadata = pod["metadata"]
    said = awaited(pod)
    if not said:  # as while a volume is missing
        # Of each type: a large image is `Pulling` after warnings of mounts that have passed.
        of_pod = replace(resources.EVENTS, fields=f"involvedObject.uid={metadata['uid']}")
        try:
            said = last(await ctx.kubernetes.list(of_pod, metadata["namespace"]))
        except KubernetesError:
            return ""
    plain = _IN_URLS.sub("…", " ".join(said.split()))
    return plain if len(plain) <= MAX_REASON else f"{plain[: MAX_REASON - 1]}…"


def awaited(pod: Body) -> str:
    """Say what a pod waits for by its status; empty where that does not explain it. Pure."""
    status = pod.get("status") or {}
    conditions = status.get("conditions", ())
    containers = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
    said = (
        *(c for c in conditions if (c["type"], c["status"]) == ("PodScheduled", "False")),
        *(each.get("state", {}).get("waiting") or {} for each in containers),
    )
    return next((_line(each) for each in said if each.get("message")), "")


def last(events: Iterable[Body]) -> str:
    """Say what the last of *events* says; empty without any. Pure."""
    newest = max(events, key=_time, default=None)
    return "" if newest is None else _line(newest)


def _time(event: Body) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")


def _line(said: Body) -> str:
    return ": ".join(filter(None, map(said.get, ("reason", "message"))))
